"""The replicated directory: which rank holds which row.

Every rank applies the same commits in the same order, so every rank keeps the same ring of holders
and both ends of any transfer know it without asking. It costs one byte a row up to 256 ranks and
two above (200 MB at 100M rows); where a row lies on its holder is known to the holder alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conduit.errors import WorldError

__all__ = ["Directory"]


class Directory:
    """Holders of the live rows, the last ``capacity`` rows of the logical order.

    ``end`` is the next logical index, ``size`` the number of live rows, ``held`` (int64
    ``[ranks]``) how many of them each rank holds, ``commits`` counts commits, ``updates`` those
    that changed rows which were there already. A live row's
    *position* is its index modulo capacity, counted from the index at which the buffer was last
    empty.
    """

    def __init__(self, *, capacity: int, ranks: int) -> None:
        if ranks > 1 << 16:
            raise WorldError("too many ranks", expected=f"at most {1 << 16}", got=ranks)
        self.capacity, self.ranks = capacity, ranks
        self._ring: NDArray[np.unsignedinteger[Any]]
        self._ring = np.zeros(capacity, dtype=np.uint8 if ranks <= 256 else np.uint16)
        self._origin = 0
        self.end, self.size, self.commits, self.updates = 0, 0, 0, 0
        self.held = np.zeros(ranks, dtype=np.int64)

    @property
    def begin(self) -> int:
        """Logical index of the oldest live row."""
        return self.end - self.size

    def begin_after(self, arriving: int, *, skipped: int) -> int:
        """``begin`` when ``skipped`` indices are used up and ``arriving`` rows have come."""
        return self.end + skipped + arriving - min(self.size + arriving, self.capacity)

    def evicted(self, arriving: int) -> NDArray[np.int64]:
        """How many rows each rank will lose when ``arriving`` rows come: int64 ``[ranks]``."""
        lost = np.zeros(self.ranks, dtype=np.int64)
        leaving = min(max(self.size + arriving - self.capacity, 0), self.size)
        if leaving:
            for part in self._slices(self.begin, leaving):
                lost += np.bincount(self._ring[part], minlength=self.ranks)
        return lost

    def append(
        self, holders: NDArray[np.int64], counts: NDArray[np.int64], *, skipped: int,
        lost: NDArray[np.int64], arriving: NDArray[np.int64],
    ) -> None:
        """Gives the next logical indices to runs of ``counts`` rows held by ``holders``.

        ``skipped`` indices before them are used up by rows that were never stored; ``lost`` is
        what ``evicted`` said, ``arriving`` the sum of ``counts`` by holder.
        """
        self.commits += 1
        self.held += arriving
        self.held -= lost
        self.end += skipped
        runs = np.repeat(holders.astype(self._ring.dtype), counts)
        start = 0
        for part in self._slices(self.end, len(runs)):
            stop = start + part.stop - part.start
            self._ring[part] = runs[start:stop]
            start = stop
        self.end += len(runs)
        self.size = min(self.size + len(runs), self.capacity)

    def append_alone(self, rows: int) -> int:
        """``append`` of ``rows`` in a world of one; returns how many of them are skipped."""
        self.commits += 1
        self.end += rows
        self.size = min(self.size + rows, self.capacity)
        self.held[0] = self.size
        return max(rows - self.capacity, 0)

    def clear(self) -> None:
        """Forgets all rows; logical indices go on, so that old ones never come back."""
        self.size, self._origin = 0, self.end
        self.held[:] = 0

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Logical indices of the live rows at ``positions``."""
        head = (self.end - self._origin) % self.capacity
        cycle = self.end - head
        if self.size < self.capacity or head == 0:
            # Nothing has wrapped, or the ring begins at the oldest row: one run of positions.
            return positions + (cycle if self.size < self.capacity else self.begin)
        # Positions before the head were written in this cycle, the others in the one before. The
        # sign of the difference, shifted, is a mask of ones for the former.
        indices = positions - head
        indices >>= 63
        indices &= self.capacity
        indices += positions
        indices += cycle - self.capacity
        return indices

    def positions(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of the live rows at logical ``indices``."""
        return (indices - self._origin) % self.capacity

    def update(self, *, committed: bool) -> None:
        """Takes note that values of live rows have changed, in a commit of new rows or in one of
        its own."""
        self.updates += 1
        self.commits += not committed

    def holders(self, positions: NDArray[np.int64]) -> NDArray[np.unsignedinteger[Any]]:
        """Ranks that hold the live rows at ``positions``: uint8 or uint16."""
        return self._ring[positions]

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes

    def _slices(self, index: int, count: int) -> list[slice]:
        start = (index - self._origin) % self.capacity
        stop = start + count
        if stop <= self.capacity:
            return [slice(start, stop)]
        return [slice(start, self.capacity), slice(0, stop - self.capacity)]
