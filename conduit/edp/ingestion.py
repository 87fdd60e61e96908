"""Ingestion: how a commit turns the ranks' staged rows into rows of the buffer.

A commit takes every rank's staged rows in rank order and gives them consecutive logical indices.
The oldest rows leave first. A rank keeps its own new rows up to its quota; the rest go to the ranks
with the most free quota. All of it is arithmetic on integers that every rank has seen in the
control exchange, so that all ranks come to the same result without asking anybody.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conduit.edp.directory import Directory
from conduit.errors import CapacityError

__all__ = ["Commit", "Ingestion", "plan_commit", "water_fill"]

Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingestion:
    """How experience comes in.

    ``staging_rows`` bounds the rows a rank may stage between two collectives; by default the
    larger of 1,024 and an eighth of the rank's equal share of the capacity.
    """

    staging_rows: int | None = None

    def rows(self, *, capacity: int, ranks: int) -> int:
        """Rows that each rank may stage."""
        if self.staging_rows is None:
            return max(1_024, -(-capacity // ranks) // 8)
        if self.staging_rows < 1:
            raise CapacityError(
                "staging_rows is too small", expected="at least 1", got=self.staging_rows
            )
        return self.staging_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What one commit does. Runs are in logical order: ``counts[i]`` rows staged by ``sources[i]``
    come to lie on ``holders[i]``.

    ``skipped`` rows at the front (``dropped`` by each rank) get an index but are never stored,
    because the commit is larger than the buffer. ``lost`` rows leave each rank.
    """

    sources: Counts
    holders: Counts
    counts: Counts
    skipped: int
    dropped: Counts
    lost: Counts

    @property
    def moves(self) -> bool:
        """Whether any row goes to another rank than the one that staged it."""
        return len(self.counts) > 0 and bool((self.sources != self.holders).any())

    def arriving(self, ranks: int) -> Counts:
        """Rows that come to lie on each rank."""
        return self._sums(self.holders, np.ones(len(self.counts), dtype=np.bool_), ranks)

    def kept_by(self, rank: int) -> int:
        """Rows that ``rank`` staged and keeps."""
        return int(self.counts[(self.sources == rank) & (self.holders == rank)].sum())

    def sent_by(self, rank: int, ranks: int) -> Counts:
        """Rows that ``rank`` sends to each other rank."""
        return self._sums(self.holders, (self.sources == rank) & (self.holders != rank), ranks)

    def received_by(self, rank: int, ranks: int) -> Counts:
        """Rows that ``rank`` gets from each other rank."""
        return self._sums(self.sources, (self.holders == rank) & (self.sources != rank), ranks)

    def _sums(self, by: Counts, which: NDArray[np.bool_], ranks: int) -> Counts:
        weights = np.bincount(by[which], weights=self.counts[which], minlength=ranks)
        return weights.astype(np.int64)


def plan_commit(staged: Counts, directory: Directory, quotas: Counts) -> Commit:
    """Plans the commit of ``staged`` rows a rank (int64 ``[ranks]``) under ``quotas``."""
    ranks = np.arange(len(staged))
    skipped = max(int(staged.sum()) - directory.capacity, 0)
    before = np.cumsum(staged) - staged
    dropped = np.clip(skipped - before, 0, staged)
    fresh = staged - dropped
    lost = directory.evicted(int(fresh.sum()))
    free = np.maximum(quotas - (directory.held - lost), 0)
    kept = np.minimum(fresh, free)
    surplus = fresh - kept
    if not surplus.any():
        some = kept > 0
        return Commit(
            sources=ranks[some], holders=ranks[some], counts=kept[some],
            skipped=skipped, dropped=dropped, lost=lost,
        )
    received = water_fill(free - kept, int(surplus.sum()))
    sources, holders, counts = match(surplus, received)
    some = kept > 0
    sources = np.concatenate([ranks[some], sources])
    holders = np.concatenate([ranks[some], holders])
    counts = np.concatenate([kept[some], counts])
    # A stable sort by source: a source's kept run first, then its surplus by receiver.
    order = np.argsort(sources, kind="stable")
    return Commit(
        sources=sources[order], holders=holders[order], counts=counts[order],
        skipped=skipped, dropped=dropped, lost=lost,
    )


def water_fill(free: Counts, rows: int) -> Counts:
    """Hands out ``rows`` one by one, each to the rank with the most ``free`` left, lowest first.

    Computed at once: the largest level at which the free rows above it still suffice, less what
    that overshoots, taken back from the highest ranks (which the one-by-one rule reaches last).
    """
    low, high = 0, int(free.max(initial=0))
    if int(free.sum()) < rows:
        raise CapacityError(
            "the quotas leave too little room for the committed rows",
            expected=f"{rows} free rows", got=int(free.sum()),
        )
    while low < high:
        level = (low + high + 1) // 2
        if int(np.maximum(free - level, 0).sum()) >= rows:
            low = level
        else:
            high = level - 1
    taken = np.maximum(free - low, 0)
    excess = int(taken.sum()) - rows
    if excess:
        taken[np.flatnonzero(taken)[-excess:]] -= 1
    return taken


def match(give: Counts, take: Counts) -> tuple[Counts, Counts, Counts]:
    """Pairs two partitions of one sum in rank order: givers, takers and rows of every run."""
    ends_give, ends_take = np.cumsum(give), np.cumsum(take)
    ends = np.union1d(ends_give[give > 0], ends_take[take > 0])
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    givers = np.searchsorted(ends_give, starts, side="right")
    takers = np.searchsorted(ends_take, starts, side="right")
    return givers, takers, ends - starts
