"""Bytes from every rank to every other, in whole rows of the row exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives.exchange import RowExchange

__all__ = ["Letters"]

Bytes = NDArray[np.uint8]
Counts = NDArray[np.int64]


class Letters:
    """``swap`` is a collective call by which every rank tells every other one integer."""

    def __init__(self, exchange: RowExchange, swap: Callable[[Counts], Counts]) -> None:
        self._exchange, self._swap = exchange, swap

    def send(self, letters: Sequence[Bytes], *, what: str) -> list[Bytes]:
        """Collective. Sends ``letters[p]`` to rank p, nothing to itself. What every rank has sent
        here, with zeros at the end."""
        row_bytes = self._exchange.row_bytes
        counts = np.array([-(-len(letter) // row_bytes) for letter in letters])
        out_counts = self._swap(counts)
        outbox = self._exchange.outbox(int(counts.sum()), what=what)
        padded = [
            np.append(letter, np.zeros(count * row_bytes - len(letter), dtype=np.uint8))
            for letter, count in zip(letters, counts.tolist(), strict=True)
        ]
        outbox.copy_(torch.from_numpy(np.concatenate(padded)).view(-1, row_bytes))
        flight = self._exchange.begin(counts, out_counts, what=what)
        inbox = torch.empty(int(out_counts.sum()), row_bytes, dtype=torch.uint8, device="cpu")

        def take(rows: Tensor, start: int) -> None:
            inbox[start : start + len(rows)] = rows

        flight.wait(take)
        raw = inbox.numpy()
        return [
            raw[end - count : end].reshape(-1) for end, count in
            zip(out_counts.cumsum().tolist(), out_counts.tolist(), strict=True)
        ]
