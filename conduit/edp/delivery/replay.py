"""Uniform replay with replacement, and the rule that says which rank gets which row.

[Note: draft and late rows]
Batch t+1 is drawn and routed as soon as batch t is delivered, over what was committed then: this is
the *draft*, and it can be fetched while the learner works. What is committed later changes a few of
its draws (see ``draws.py``). The rows that those draws now name are the *late rows*: each goes to
the learner and the position of the draw that it displaces. So the rows of a batch are those of a
buffer without any staleness, while their way through the cluster was known beforehand.

Draft and routing thereby define the batch. This sampler computes the routing of the draft before
the first commit after a delivery, although everything is fetched afterwards; a plane that fetches
ahead delivers the same rows to the same ranks at the same positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conduit.edp.directory import Directory
from conduit.edp.draws import UniformDraws
from conduit.edp.routing import Ranks, Transfers, route, transfers

__all__ = ["Delivery", "Replay"]


class Delivery(NamedTuple):
    """One rank's batch: the logical ``indices`` of its rows, int64 ``[batch_rows]``.

    ``send`` are the logical indices of the rows that this rank sends, in the order of
    ``transfers.send``. In a world of one both are None: nothing is transferred, and ``indices``
    are row ``row`` of ``block``, the batches that are known as long as nothing is committed.
    """

    indices: NDArray[np.int64]
    block: NDArray[np.int64] | None = None
    row: int = 0
    send: NDArray[np.int64] | None = None
    transfers: Transfers | None = None


class _Draft(NamedTuple):
    learners: Ranks
    indices: NDArray[np.int64]
    end: int
    delivery: Delivery


class Replay:
    """Deals the batches of one plane. ``batch`` numbers the next one."""

    def __init__(
        self, *, directory: Directory, draws: UniformDraws, routing: str, rank: int,
        hosts: NDArray[np.int64], batch_rows: int,
    ) -> None:
        self._directory, self._draws, self._routing = directory, draws, routing
        self._rank, self._hosts, self._batch_rows = rank, hosts, batch_rows
        self._drafting = False
        self._draft: _Draft | None = None
        self._indices = np.empty((0, batch_rows), dtype=np.int64)
        self._first, self._end = 0, -1
        self.batch = 0
        self.late_rows = 0

    def draft(self) -> Delivery | None:
        """Drafts the next batch, if one was delivered before; to be called before a commit.

        The draft is what ``deal`` will return if nothing is committed.
        """
        if self._drafting and len(self._hosts) > 1:
            directory = self._directory
            positions = self._draws.positions(self.batch, directory.size)
            indices, holders = directory.indices(positions), directory.holders(positions)
            learners = route(self._routing, holders, self._hosts, self._batch_rows)
            delivery = self._delivery(indices, learners, holders)
            self._draft = _Draft(learners, indices, directory.end, delivery)
        self._drafting = False
        return self._draft.delivery if self._draft is not None else None

    def deal(self) -> Delivery:
        """The next batch, over the rows that the directory now holds (at least one)."""
        self._drafting = True
        if len(self._hosts) == 1:
            return self._deal_alone()
        directory, draft = self._directory, self._draft
        self._draft = None
        if draft is not None and draft.end == directory.end:
            self.batch += 1
            return draft.delivery
        positions = self._draws.positions(self.batch, directory.size)
        self.batch += 1
        indices, holders = directory.indices(positions), directory.holders(positions)
        if draft is None:
            learners = route(self._routing, holders, self._hosts, self._batch_rows)
        else:
            learners = draft.learners
            self.late_rows += int(np.count_nonzero(draft.indices != indices))
        return self._delivery(indices, learners, holders)

    def _delivery(self, indices: NDArray[np.int64], learners: Ranks, holders: Ranks) -> Delivery:
        moves = transfers(learners, holders, self._rank, len(self._hosts))
        return Delivery(
            indices=indices[moves.mine], send=indices[moves.send], transfers=moves
        )

    def _deal_alone(self) -> Delivery:
        """The next batch in a world of one. While nothing is committed, many are made at once."""
        directory = self._directory
        row = self.batch - self._first
        if directory.end != self._end or row >= len(self._indices):
            positions = self._draws.ahead(self.batch, directory.size)
            count = 2 * len(self._indices) if directory.end == self._end else 1
            self._indices = directory.indices(positions[:count])
            self._first, self._end, row = self.batch, directory.end, 0
        self.batch += 1
        return Delivery(self._indices[row], self._indices, row)

    def clear(self) -> None:
        """Forgets the draft, because the rows it names are gone."""
        self._drafting, self._draft = False, None
