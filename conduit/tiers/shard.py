"""A rank's shard: the rows it holds, in a ring of slots in logical order.

[Note: staging, order and reuse]
Rows are staged where they will stay: ``stage`` packs them behind the newest row, and a commit only
makes them visible. Rows that go to other ranks are the last ones staged, so their slots are simply
used again; rows that come from others are written among the own rows so that slots are always in
logical order. Live rows then are one span of the ring, and the oldest leave at its end.

A slot freed by one commit is written again only after the next collective: until then other ranks'
lanes may still read the row that was there. The ring therefore has room for the quota, the staging
bound, and one commit of grace. A commit that needs more than the grace (every rank can tell, from
the same integers) first makes sure by one more control exchange that nobody reads: a *fence*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from conduit.errors import CapacityError
from conduit.schema import Records, RowLayout
from conduit.tiers.store import Store
from conduit.windows import BatchLayout

__all__ = ["AnyShard", "Runs", "Shard", "ring_rows"]

Index = NDArray[np.int64]


Rows = TypeVar("Rows", int, Index)
Arrivals: TypeAlias = Callable[[Callable[[Tensor, int], None]], None]


def ring_rows(quota_rows: Rows, staging_rows: int) -> Rows:
    """Slots of a ring for ``quota_rows`` rows (or of several rings, for an array of quotas)."""
    return quota_rows + 2 * staging_rows


class AnyShard(Protocol):
    """What a commit and a delivery need of a shard, whatever it is that it holds: see
    :class:`Shard`."""

    store: Store
    grace_rows: int
    """Rows beyond its quota that a commit may write before it is sure that nobody still reads
    those that left in the commit before."""

    @property
    def layout(self) -> BatchLayout: ...

    @property
    def staged(self) -> int: ...

    def commit(self, *, starts: Index, counts: Index, dropped: int, begin: int) -> None: ...

    def commit_own(self, *, start: int, dropped: int, begin: int) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...

    def slots(self, indices: Index) -> Index: ...

    def rows_at(self, slots: Index) -> Index:
        """Slots in the store of what lies at ``slots``: its own row, if it has several."""
        ...

    def gather(self, slots: Index, out: Records) -> None: ...


class Runs:
    """Maps logical indices to ordinals (places in the order in which rows were written).

    Keeps one (first index, ordinal - index) pair for every run of rows that are consecutive in
    both; a rank that holds all it produces in a world of one has a single run.
    """

    def __init__(self) -> None:
        self._starts = np.zeros(64, dtype=np.int64)
        self._offsets = np.zeros(64, dtype=np.int64)
        self._low = self._high = 0

    def append(self, index: int, ordinal: int) -> None:
        """Rows from ``index`` on lie at ``ordinal`` and following; indices only grow."""
        offset = ordinal - index
        if self._high > self._low and self._offsets[self._high - 1] == offset:
            return
        if self._high == len(self._starts):
            live = slice(self._low, self._high)
            length = max(2 * (self._high - self._low), 64)
            for name in ("_starts", "_offsets"):
                grown = np.empty(length, dtype=np.int64)
                grown[: self._high - self._low] = getattr(self, name)[live]
                setattr(self, name, grown)
            self._low, self._high = 0, self._high - self._low
        self._starts[self._high], self._offsets[self._high] = index, offset
        self._high += 1

    def forget_before(self, index: int) -> None:
        """Drops the runs that end before ``index``."""
        if self._high - self._low == 1:
            return
        live = self._starts[self._low : self._high]
        self._low += max(int(live.searchsorted(index, side="right")) - 1, 0)

    def clear(self) -> None:
        self._low = self._high = 0

    def oldest(self, index: int) -> int:
        """The ordinal of the first row from ``index`` on, after ``forget_before(index)``; if there
        is none, an ordinal beyond all rows."""
        if self._high == self._low:
            return 0
        ordinal = max(index, int(self._starts[self._low])) + int(self._offsets[self._low])
        if self._high - self._low > 1:
            following = self._low + 1
            ordinal = min(ordinal, int(self._starts[following] + self._offsets[following]))
        return ordinal

    def ordinals(self, indices: Index, *, turned: int = 0) -> Index:
        """Ordinals of live rows at logical ``indices``, less ``turned``. For other indices some
        number, and no error."""
        if self._high - self._low <= 1:
            return indices + (self._offsets[self._low] - turned)
        live = slice(self._low, self._high)
        run = self._starts[live].searchsorted(indices, side="right") - 1
        return indices + (self._offsets[live][run] - turned)

    def __len__(self) -> int:
        return self._high - self._low


class Shard:
    """The rows of one rank, in a ring of ``ring_rows`` slots."""

    def __init__(
        self, layout: RowLayout, store: Store, *, quota_rows: int, staging_rows: int
    ) -> None:
        self.layout, self.store = layout, store
        self.quota_rows, self.staging_rows = quota_rows, staging_rows
        self.ring_rows = ring_rows(quota_rows, staging_rows)
        self.grace_rows = staging_rows
        self.staged = 0
        self._runs = Runs()
        self._head = self._base = 0

    def stage(self, values: list[Tensor], rows: int) -> None:
        """Packs ``rows`` checked rows behind what is staged; CapacityError if they do not fit."""
        if self.staged + rows > self.staging_rows:
            raise CapacityError(
                "these rows cannot be staged",
                expected=f"at most {self.staging_rows - self.staged} more rows before the next "
                f"collective ({self.staged} of {self.staging_rows} are staged)",
                got=f"{rows} rows",
                cure="Call flush() or sample() more often, extend in smaller pieces, or pass "
                "ingestion=Ingestion(staging_rows=...)",
            )
        start = (self._head + self.staged) % self.ring_rows
        first = min(rows, self.ring_rows - start)
        if first == rows:
            self.store.pack(values, start, rows)
        else:
            self.store.pack([v[:first] for v in values], start, first)
            self.store.pack([v[first:] for v in values], 0, rows - first)
        self.staged += rows

    def copy_staged(self, first: int, out: Tensor) -> None:
        """Copies staged rows from number ``first`` on into ``out``, uint8 ``[rows, row_bytes]``.
        """
        self.store.gather(self._slots(self._head + first, len(out)), self.layout.records(out))

    def receive(
        self, *, counts: Index, own: NDArray[np.bool_], dropped: int, arrivals: Arrivals
    ) -> None:
        """Puts rows that come from other ranks among those staged here, before their ``commit``.

        ``counts`` are the rows of all runs that this rank gets, in logical order; ``own`` marks the
        run (at most one) of rows staged here. The others come by ``arrivals(take)``, which calls
        ``take(rows, start)`` with pieces of them, in the same order numbered from 0.
        """
        base = self._head + dropped
        kept = int(counts[own].sum())
        before = int(counts[: int(own.argmax())].sum()) if kept else 0
        if before and kept:
            rows = self.store.read(self._slots(base, kept))
            self.store.write(self._slots(base + before, kept), rows)
        places = np.concatenate([
            self._slots(base, before),
            self._slots(base + before + kept, int(counts.sum()) - kept - before),
        ])
        arrivals(lambda rows, start: self.store.write(places[start : start + len(rows)], rows))

    def commit(self, *, starts: Index, counts: Index, dropped: int, begin: int) -> None:
        """Makes rows visible: runs of ``counts`` rows at logical ``starts``, in logical order.

        They are the rows staged here and received, after ``dropped`` staged ones that are not kept.
        ``begin`` is the oldest live index.
        """
        base, ends = self._head + dropped, counts.cumsum()
        for start, end, count in zip(
            starts.tolist(), ends.tolist(), counts.tolist(), strict=True
        ):
            if count:
                self._runs.append(start, base + end - count)
        self._advance(base + (int(ends[-1]) if len(ends) else 0), begin)

    def commit_own(self, *, start: int, dropped: int, begin: int) -> None:
        """``commit`` where all that was staged stays here: one run at logical ``start``."""
        if self.staged > dropped:
            self._runs.append(start, self._head + dropped)
        self._advance(self._head + self.staged, begin)

    def _advance(self, head: int, begin: int) -> None:
        self._head, self.staged = head, 0
        self._base = head // self.ring_rows * self.ring_rows
        self._runs.forget_before(begin)

    def clear(self) -> None:
        """Forgets all rows, staged ones too."""
        self._runs.clear()
        self.staged = 0

    def close(self) -> None:
        """Gives the memory back."""
        self.store.close()

    def slots(self, indices: Index) -> Index:
        """Slots of rows held here, by logical index; for others some number, and no error."""
        slots = self._runs.ordinals(indices, turned=self._base)
        # Live rows span less than one turn of the ring, so all that can be needed is one turn back
        # for the negative ones (whose sign, shifted, is a mask of ones).
        slots += (slots >> 63) & self.ring_rows
        return slots

    def rows_at(self, slots: Index) -> Index:
        """The same: a row is all that there is at a slot."""
        return slots

    def gather(self, slots: Index, out: Records) -> None:
        """Copies the rows at ``slots`` into the block whose records ``out`` are, in that order."""
        self.store.gather(slots, out)

    def _slots(self, ordinal: int, rows: int) -> Index:
        return (ordinal + np.arange(rows)) % self.ring_rows
