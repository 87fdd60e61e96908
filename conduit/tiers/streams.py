"""Streams of steps: which stored rows a drawable item is made of, found out as steps arrive.

[Note: windows]
An item is a step of a stream together with the rows that its window needs: the ``back`` rows before
it, for stacks of frames, and those up to the one that shows what came ``n_step`` steps later, or up
to the end of the episode if that comes first. It is complete when the last of them has arrived, and
then its window is known for good: a list of slots. So sampling looks nothing up but that list,
however many rows and episodes there are.

Before the beginning of an episode a window has its first row again and again, as in gymnasium's
``FrameStackObservation``. The observation after the last step of an episode, which no step shows,
is a row of its own behind it: the *final row*, part of windows but never an item.

With ``n_step=1`` the rows before and after a step overlap and are gathered once: a window is
``back + 2`` rows, of which all but the last show the observation, and all but the first the next
one. Otherwise the two parts lie one behind the other.

Of an open stream no more is kept than its *tail*, the rows that items still to be completed can
need. Everything here is arithmetic on whole arrays, because vector environments may well have
thousands of streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrived", "Streams", "Tails", "Window"]

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """``back`` rows before a step, and what follows within ``n_step`` steps, whose rewards are
    added up, each worth ``gamma`` of the one before. Unless ``padded``, steps with fewer rows
    before them are no items."""

    back: int = 0
    n_step: int = 1
    gamma: float = 1.0
    padded: bool = True

    @property
    def next(self) -> int:
        """The number of the row at which the next observation begins, with its ``back`` rows."""
        return 1 if self.n_step == 1 else self.back + 1

    @property
    def length(self) -> int:
        """Rows of a window."""
        return self.next + self.back + 1

    @property
    def tail(self) -> int:
        """Rows of an open stream that incomplete items can need."""
        return self.back + self.n_step


class Arrived(NamedTuple):
    """Items that were completed, in the order of stream and time.

    ``windows`` are the slots of their rows, ``[items, length]``; ``steps`` how many steps each
    spans; ``returns`` (``[items, rewards]``) the sums of their rewards. ``ended`` are the numbers
    of those whose episode ends within them though not with their first step, ``ends`` the number of
    the row, of those that arrived, with which it does.
    """

    windows: Numbers
    steps: Numbers
    returns: Floats
    ended: Numbers
    ends: Numbers


class Tails(NamedTuple):
    """Slots of rows that were in the tails of some streams, and of those that now are."""

    before: Numbers
    after: Numbers


class Streams:
    """The open streams of one rank. ``rewards`` is how many numbers a reward is."""

    def __init__(self, window: Window, *, rewards: int = 1) -> None:
        self.window, self._rewards = window, rewards
        self.clear()

    def clear(self) -> None:
        """Forgets all streams: steps that follow begin new ones."""
        tail = self.window.tail
        self._ids = np.empty(0, dtype=np.int64)
        self._lengths = np.empty(0, dtype=np.int64)
        self._slots = np.empty((0, tail), dtype=np.int64)
        self._sums = np.empty((0, tail, self._rewards), dtype=np.float64)

    @property
    def settled(self) -> Numbers:
        """The slots of the rows in tails to which nothing more is written: with ``n_step`` above 1
        the first steps of items are completed later."""
        waiting = self.window.n_step if self.window.n_step > 1 else 0
        return self._slots[np.arange(self.window.tail) < self._lengths[:, None] - waiting]

    @property
    def open(self) -> int:
        """Streams whose episode goes on."""
        return int(np.count_nonzero(self._lengths))

    def arrive(
        self, ids: Numbers, slots: Numbers, done: Mask, final_slots: Numbers, rewards: Floats
    ) -> tuple[Arrived, Tails]:
        """Takes note of rows, which of each stream are in the order of time.

        ``ids`` and ``slots`` say of each row to which stream it belongs and where it lies, ``done``
        (``[n]``) whether an episode ends with it, ``final_slots`` where the final rows lie, in the
        order of the rows that they follow, ``rewards`` (``[n, rewards]``) what each step brought.
        """
        window, tail = self.window, self.window.tail
        order = np.arange(len(ids))
        if (ids[1:] < ids[:-1]).any():
            order = ids.argsort(kind="stable")
        ids, ended = ids[order], done[order]
        first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
        counts = np.diff(np.append(first, len(ids)))
        where = self._find(ids[first])

        # Everything that is known of these streams, one behind the other: tail, new rows, and after
        # each that is done its final row.
        held = self._lengths[where]
        finals = np.add.reduceat(ended.astype(np.int64), first)
        stop = (held + counts + finals).cumsum()
        start = stop - held - counts - finals
        total = int(stop[-1])
        chain, sums = np.empty(total, np.int64), np.zeros((total, self._rewards))
        within = np.arange(tail) < held[:, None]
        at = (start[:, None] + np.arange(tail))[within]
        chain[at], sums[at] = self._slots[where][within], self._sums[where][within]
        earlier = ended.cumsum() - ended
        at = np.arange(len(ids)) + earlier
        at += np.repeat(start + held - first - earlier[first], counts)
        chain[at], sums[at] = slots[order], rewards[order]
        at_final = at[ended] + 1
        numbers = done.cumsum() - 1
        chain[at_final] = final_slots[numbers[order[ended]]]
        row_before = np.zeros(total, np.int64)
        row_before[at_final] = order[ended]

        # Of each place: where its episode begins (as far as is known), where its final row is.
        places = np.arange(total)
        is_final = np.zeros(total, np.bool_)
        is_final[at_final] = True
        begins = np.zeros(total, np.int64)
        begins[start] = start
        after = at_final[at_final < total - 1] + 1
        begins[after] = after
        np.maximum.accumulate(begins, out=begins)
        ends = np.full(total, total, np.int64)
        ends[at_final] = at_final
        ends = np.minimum.accumulate(ends[::-1])[::-1]

        # Complete are those whose last row is here, and was not before.
        last = np.minimum(places + window.n_step, ends)
        lengths = stop - start
        ready = (last < np.repeat(stop, lengths)) & (last >= np.repeat(start + held, lengths))
        ready &= ~is_final
        if not window.padded:
            ready &= places - begins >= window.back
        item = np.flatnonzero(ready)
        last = last[item]
        arrived = self._items(chain, sums, item, last, begins[item], is_final[last], row_before)
        before = self._slots[where][within]
        return arrived, Tails(before, self._keep(where, chain, sums, stop - 1, begins, is_final))

    def _items(
        self, chain: Numbers, sums: Floats, item: Numbers, last: Numbers, begins: Numbers,
        at_end: Mask, row_before: Numbers,
    ) -> Arrived:
        window, steps = self.window, last - item
        back = np.arange(-window.back, 1)
        places = np.empty((len(item), window.length), np.int64)
        places[:, : window.back + 1] = item[:, None] + back
        places[:, window.next :] = last[:, None] + back
        np.maximum(places, begins[:, None], out=places)
        returns = sums[item]
        for i in range(1, window.n_step):
            later = np.minimum(item + i, len(chain) - 1)
            returns += np.where((steps > i)[:, None], window.gamma**i * sums[later], 0.0)
        ended = np.flatnonzero(at_end & (steps > 1))
        return Arrived(chain[places], steps, returns, ended, row_before[last[ended]])

    def _keep(
        self, where: Numbers, chain: Numbers, sums: Floats, last: Numbers, begins: Numbers,
        is_final: Mask,
    ) -> Numbers:
        """Makes the last rows of each stream, of the episode that goes on, its tail. Their slots.
        """
        tail = self.window.tail
        first = np.maximum(begins[last], last - tail + 1)
        lengths = self._lengths[where] = np.where(is_final[last], 0, last - first + 1)
        places = np.minimum(first[:, None] + np.arange(tail), len(chain) - 1)
        slots = self._slots[where] = chain[places]
        self._sums[where] = sums[places]
        return slots[np.arange(tail) < lengths[:, None]]

    def _find(self, ids: Numbers) -> Numbers:
        """The numbers of the streams ``ids``, which are ascending; those not yet known are made."""
        where = self._ids.searchsorted(ids)
        known = where < len(self._ids)
        known[known] = self._ids[where[known]] == ids[known]
        if known.all():
            return where
        # Ids may be of episodes: whatever is closed is forgotten.
        kept = self._lengths > 0
        kept[where[known]] = True
        self._ids, self._lengths = self._ids[kept], self._lengths[kept]
        self._slots, self._sums = self._slots[kept], self._sums[kept]
        fresh = ids[~known]
        places = self._ids.searchsorted(fresh)
        self._ids = np.insert(self._ids, places, fresh)
        self._lengths = np.insert(self._lengths, places, 0)
        self._slots = np.insert(self._slots, places, 0, axis=0)
        self._sums = np.insert(self._sums, places, 0.0, axis=0)
        return self._ids.searchsorted(ids)
