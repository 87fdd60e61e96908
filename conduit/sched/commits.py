"""A commit, stage by stage: plan, fence if need be, send home, write, make visible."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from conduit.edp.directory import Directory
from conduit.edp.ingestion import plan_commit
from conduit.metrics import Counters
from conduit.sched.homewards import Homewards
from conduit.sched.stages import COMMIT, SEND_HOME
from conduit.sched.timeline import CALL, Timeline
from conduit.tiers.shard import AnyShard

__all__ = ["Commits"]

Counts = NDArray[np.int64]


class Commits:
    """Applies commits to the directory, which all ranks share, and to this rank's shard."""

    def __init__(
        self, *, directory: Directory, shard: AnyShard, homewards: Homewards, quotas: Counts,
        rank: int, counters: Counters, timeline: Timeline,
    ) -> None:
        self._directory, self._shard, self._homewards = directory, shard, homewards
        self._quotas, self._rank = quotas, rank
        self._counters, self._timeline = counters, timeline

    def commit(self, staged: Counts, *, fence: Callable[[], object]) -> None:
        """Collective. Commits the rows that the ranks staged, int64 ``[ranks]``.

        ``fence`` is a collective call after which no rank reads rows that left in earlier commits.
        """
        directory, shard, rank = self._directory, self._shard, self._rank
        with self._timeline.span(COMMIT.name, CALL):
            plan = plan_commit(staged, directory, self._quotas)
        occupied = directory.held + plan.dropped + plan.arriving
        if np.count_nonzero(occupied > self._quotas + shard.grace_rows):
            fence()
            self._counters.fences += 1
        dropped, first = int(plan.dropped[rank]), directory.end + plan.skipped
        here = plan.holders == rank
        counts = plan.counts[here]
        if plan.moves:
            with self._timeline.span(SEND_HOME.name, CALL):
                self._homewards.move(plan, begin=directory.begin_after(int(plan.counts.sum()),
                                                                       skipped=plan.skipped))
        with self._timeline.span(COMMIT.name, CALL):
            directory.append(
                plan.holders, plan.counts, skipped=plan.skipped, lost=plan.lost,
                arriving=plan.arriving,
            )
            begin = directory.begin
            if plan.moves:
                starts = first + np.cumsum(plan.counts) - plan.counts
                shard.commit(starts=starts[here], counts=counts, dropped=dropped, begin=begin)
            else:
                start = first + int(plan.counts[:rank].sum())
                shard.commit_own(start=start, dropped=dropped, begin=begin)
        self._count(int(staged.sum()), plan.skipped)

    def commit_alone(self) -> None:
        """``commit`` in a world of one, without the arithmetic over ranks."""
        directory, staged = self._directory, self._shard.staged
        skipped = directory.append_alone(staged)
        self._shard.commit_own(
            start=directory.end - staged + skipped, dropped=skipped, begin=directory.begin
        )
        self._count(staged, skipped)

    def _count(self, staged: int, skipped: int) -> None:
        self._counters.commits += 1
        self._counters.rows_committed += staged
        self._counters.rows_skipped += skipped
