"""Slots of stored rows that several windows may need: given out, counted, and taken back.

[Note: who needs a row]
A row of a step belongs to several items, so it cannot leave with one of them. Each slot counts how
often it is needed: by windows of items, by tails of open streams, by what is remembered of rows
that were sent or received. One that nobody needs any more rests until the next commit, and is then
given out again, the longest free first. So slots are mostly given out in runs, as a ring would.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conduit.errors import CapacityError

__all__ = ["Slots"]

Numbers = NDArray[np.int64]


class Slots:
    """``rows`` slots, all free at first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._needed = np.zeros(rows, dtype=np.int32)
        self._queue = np.arange(rows)
        self._first, self._free = 0, rows
        self._resting: list[Numbers] = []

    @property
    def free(self) -> int:
        """Slots that can be taken now."""
        return self._free + sum(map(len, self._resting))

    def take(self, rows: int) -> Numbers:
        """Slots for ``rows`` rows, which somebody is to ``need``. Raises CapacityError, and takes
        none then."""
        if rows > self._free:
            # Only this rank reads them, and it is not reading now: see ``sched/deliveries.py``.
            self.rested()
        if rows > self._free:
            raise CapacityError("no room for rows", expected=f"at most {self._free}", got=rows)
        taken = self._queue[(self._first + np.arange(rows)) % self.rows]
        self._first = (self._first + rows) % self.rows
        self._free -= rows
        return taken

    def need(self, slots: Numbers) -> None:
        """Each of ``slots`` (of any shape, and more than once) is needed once more."""
        np.add.at(self._needed, slots.reshape(-1), 1)

    def release(self, slots: Numbers) -> None:
        """Each of ``slots`` is needed once less."""
        slots = slots.reshape(-1)
        np.subtract.at(self._needed, slots, 1)
        unneeded = np.unique(slots[self._needed[slots] == 0])
        if len(unneeded):
            self._resting.append(unneeded)

    def rested(self) -> None:
        """Frees what has been released."""
        for slots in self._resting:
            self._queue[(self._first + self._free + np.arange(len(slots))) % self.rows] = slots
            self._free += len(slots)
        self._resting = []
