"""The floor: what it costs to touch the same bytes once, with nothing else to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from conduit.schema import RowLayout

__all__ = ["Floor", "packed"]

_DRAWS = 1 << 20


def packed(layout: RowLayout, rows: object) -> Tensor:
    """A TensorDict of rows as one block: uint8 ``[n, row_bytes]``."""
    n, values = layout.check(rows)  # type: ignore[arg-type]
    block = torch.zeros(n, layout.row_bytes, dtype=torch.uint8)
    layout.pack(values, block)
    return block


class Floor:
    """``rows`` packed rows in one plain tensor, filled from ``blocks`` in turn."""

    def __init__(self, *, rows: int, blocks: Sequence[Tensor]) -> None:
        self._storage = torch.empty(rows, blocks[0].shape[1], dtype=torch.uint8)
        sources, at = cycle(blocks), 0
        while at < rows:
            part = next(sources)[: rows - at]
            self._storage[at : at + len(part)] = part
            at += len(part)

    def gather(self, batch: int, *, seed: int) -> Callable[[], object]:
        """One ``index_select`` of ``batch`` random rows into a block that is there already.

        The draws are made beforehand, about a million of them, so that none comes again while its
        rows may still be in a cache.
        """
        rows, generator = len(self._storage), torch.Generator().manual_seed(seed)
        draws = torch.randint(rows, (max(_DRAWS // batch, 16), batch), generator=generator)
        indices = cycle(draws.unbind(0))
        out = self._storage.new_zeros(batch, self._storage.shape[1])
        storage = self._storage
        return lambda: torch.index_select(storage, 0, next(indices), out=out)

    def write(self, blocks: Sequence[Tensor]) -> Callable[[], object]:
        """One ``copy_`` of one of ``blocks`` (of equal length) to the next place in the storage."""
        length = len(blocks[0])
        starts = range(0, len(self._storage) - length + 1, length) or range(1)
        places = cycle([self._storage[start : start + length] for start in starts])
        sources = cycle([block[: len(self._storage)] for block in blocks])
        return lambda: next(places).copy_(next(sources))
