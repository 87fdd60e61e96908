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
        if not isinstance(self.staging_rows, (int, np.integer)) or self.staging_rows < 1:
            raise CapacityError(
                "staging_rows is out of range", expected="an integer of at least 1",
                got=repr(self.staging_rows),
            )
        return int(self.staging_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What one commit does. Runs are in logical order: ``counts[i]`` rows (0 is possible) staged
    by ``sources[i]`` come to lie on ``holders[i]``.

    ``skipped`` rows at the front (``dropped`` by each rank) get an index but are never stored,
    because the commit is larger than the buffer. ``lost`` rows leave each rank, ``arriving`` come.
    ``moves`` says whether any row goes to another rank than the one that staged it.
    """

    sources: Counts
    holders: Counts
    counts: Counts
    skipped: int
    dropped: Counts
    lost: Counts
    arriving: Counts
    moves: bool

    def kept_by(self, rank: int) -> int:
        """Rows that ``rank`` staged and keeps."""
        return int(self.counts[(self.sources == rank) & (self.holders == rank)].sum())

    def sent_by(self, rank: int) -> Counts:
        """Rows that ``rank`` sends to each other rank."""
        away = (self.sources == rank) & (self.holders != rank)
        return _sums(self.holders[away], self.counts[away], len(self.lost))

    def received_by(self, rank: int) -> Counts:
        """Rows that ``rank`` gets from each other rank."""
        away = (self.holders == rank) & (self.sources != rank)
        return _sums(self.sources[away], self.counts[away], len(self.lost))


def _sums(ranks: Counts, counts: Counts, length: int) -> Counts:
    return np.bincount(ranks, weights=counts, minlength=length).astype(np.int64)


def plan_commit(staged: Counts, directory: Directory, quotas: Counts) -> Commit:
    """Plans the commit of ``staged`` rows a rank (int64 ``[ranks]``) under ``quotas``."""
    ranks = np.arange(len(staged))
    total = int(staged.sum())
    skipped = max(total - directory.capacity, 0)
    if skipped:
        before = staged.cumsum() - staged
        dropped = np.minimum(np.maximum(skipped - before, 0), staged)
    else:
        dropped = np.zeros_like(staged)
    fresh = staged - dropped
    lost = directory.evicted(total - skipped)
    free = np.maximum(quotas - directory.held + lost, 0)
    kept = np.minimum(fresh, free)
    surplus = fresh - kept
    if np.count_nonzero(surplus) == 0:
        return Commit(
            sources=ranks, holders=ranks, counts=kept, skipped=skipped, dropped=dropped, lost=lost,
            arriving=kept, moves=False,
        )
    received = water_fill(free - kept, int(surplus.sum()))
    sources, holders, counts = match(surplus, received)
    sources = np.concatenate([ranks, sources])
    # A stable sort by source: a source's kept run first, then its surplus by receiver.
    order = sources.argsort(kind="stable")
    return Commit(
        sources=sources[order], holders=np.concatenate([ranks, holders])[order],
        counts=np.concatenate([kept, counts])[order], skipped=skipped, dropped=dropped, lost=lost,
        arriving=kept + received, moves=True,
    )


def water_fill(free: Counts, rows: int) -> Counts:
    """Hands out ``rows`` one by one, each to the rank with the most ``free`` left, lowest first.

    Computed at once: the largest level at which the free rows above it still suffice, less what
    that overshoots, taken back from the highest ranks (which the one-by-one rule reaches last).
    """
    if int(free.sum()) < rows:
        raise CapacityError(
            "the quotas leave too little room for the committed rows",
            expected=f"{rows} free rows", got=int(free.sum()),
        )
    # With the ranks by free rows, the level after emptying the k fullest down to it is the mean of
    # what they have beyond the rows handed out; the first k whose level the next rank does not
    # reach is the answer.
    fullest = np.sort(free)[::-1]
    levels = (fullest.cumsum() - rows) // np.arange(1, len(free) + 1)
    beyond = np.append(fullest[1:], -1)
    low = max(int(levels[(levels >= beyond).argmax()]), 0)
    taken = np.maximum(free - low, 0)
    excess = int(taken.sum()) - rows
    if excess:
        taken[taken.nonzero()[0][-excess:]] -= 1
    return taken


def match(give: Counts, take: Counts) -> tuple[Counts, Counts, Counts]:
    """Pairs two partitions of one sum in rank order: givers, takers and rows of every run."""
    ends_give, ends_take = give.cumsum(), take.cumsum()
    ends = np.concatenate([ends_give, ends_take])
    ends.sort()
    starts = np.concatenate([[0], ends[:-1]])
    counts = ends - starts
    some = counts > 0
    starts = starts[some]
    givers = ends_give.searchsorted(starts, side="right")
    takers = ends_take.searchsorted(starts, side="right")
    return givers, takers, counts[some]
