"""Applying late columns: each rank's updates go to the holders of their rows, and into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives.exchange import RowExchange
from conduit.edp.directory import Directory
from conduit.edp.updates import Update, Updates, decoded, encoded
from conduit.metrics import Counters
from conduit.tiers.shard import Shard

__all__ = ["LateColumns"]

Counts = NDArray[np.int64]

_WHAT = "sending late columns"


class LateColumns:
    """``swap`` is a collective call by which every rank tells every other one integer."""

    def __init__(
        self, *, updates: Updates, directory: Directory, shard: Shard, exchange: RowExchange,
        swap: Callable[[Counts], Counts], rank: int, counters: Counters,
    ) -> None:
        self._updates, self._directory, self._shard = updates, directory, shard
        self._exchange, self._swap, self._rank = exchange, swap, rank
        self._counters = counters

    def apply(self) -> None:
        """Collective. To be called after the new rows of the same commit have come."""
        live = [self._live(update) for update in self._updates.take()]
        if self._directory.ranks == 1:
            self._write(live)
            return
        holders = [
            self._directory.holders(self._directory.positions(update.indices)) for update in live
        ]
        for_rank = [
            [update.at((held == peer).nonzero()[0]) for update, held in
             zip(live, holders, strict=True) if (held == peer).any()]
            for peer in range(self._directory.ranks)
        ]
        # Every rank's in its turn, this rank's own too: who comes last, stays.
        for peer, data in enumerate(self._swapped(for_rank)):
            mine = peer == self._rank
            self._write(for_rank[peer] if mine else decoded(data, self._shard.layout))

    def _live(self, update: Update) -> Update:
        """Without rows that have left."""
        alive = (update.indices >= self._directory.begin).nonzero()[0]
        self._counters.rows_updated += len(alive)
        self._counters.updates_ignored += len(update.indices) - len(alive)
        return update.at(alive).last_of_each()

    def _swapped(self, for_rank: list[list[Update]]) -> list[NDArray[np.uint8]]:
        """Collective. What every rank sends this one, in whole rows of the exchange."""
        row_bytes = self._exchange.row_bytes
        data = [
            encoded(updates) if peer != self._rank else np.empty(0, dtype=np.uint8)
            for peer, updates in enumerate(for_rank)
        ]
        counts = np.array([-(-len(raw) // row_bytes) for raw in data])
        out_counts = self._swap(counts)
        outbox = self._exchange.outbox(int(counts.sum()), what=_WHAT)
        padded = [
            np.append(raw, np.zeros(count * row_bytes - len(raw), dtype=np.uint8))
            for raw, count in zip(data, counts.tolist(), strict=True)
        ]
        outbox.copy_(torch.from_numpy(np.concatenate(padded)).view(-1, row_bytes))
        flight = self._exchange.begin(counts, out_counts, what=_WHAT)
        inbox = torch.empty(int(out_counts.sum()), row_bytes, dtype=torch.uint8, device="cpu")

        def take(rows: Tensor, start: int) -> None:
            inbox[start : start + len(rows)] = rows

        flight.wait(take)
        ends = out_counts.cumsum()
        raw = inbox.numpy()
        return [
            raw[end - count : end].reshape(-1)
            for end, count in zip(ends.tolist(), out_counts.tolist(), strict=True)
        ]

    def _write(self, updates: Iterable[Update]) -> None:
        for update in updates:
            slots = self._shard.slots(update.indices)
            for column, values in zip(update.columns, update.values, strict=True):
                self._shard.store.overwrite(slots, column, values)
