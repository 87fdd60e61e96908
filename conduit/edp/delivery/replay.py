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

__all__ = ["Ahead", "Delivery", "Replay"]

Index = NDArray[np.int64]


class Ahead(NamedTuple):
    """One rank's part in the batches from number ``first`` on, as long as nothing is committed.

    ``indices`` are the logical indices of its rows, int64 ``[batches, batch_rows]``; ``send`` those
    of the rows it sends, in the order of ``transfers.send``. In a world of one there are no
    transfers.
    """

    first: int
    end: int
    indices: Index
    send: Index | None = None
    transfers: Transfers | None = None
    learners: Ranks | None = None
    drawn: Index | None = None


class Delivery(NamedTuple):
    """A batch: row ``row`` of the batches in ``ahead``."""

    ahead: Ahead
    row: int


class Replay:
    """Deals the batches of one plane. ``batch`` numbers the next one."""

    def __init__(
        self, *, directory: Directory, draws: UniformDraws, routing: str, rank: int,
        hosts: NDArray[np.int64], batch_rows: int,
    ) -> None:
        self._directory, self._draws, self._routing = directory, draws, routing
        self._rank, self._hosts, self._batch_rows = rank, hosts, batch_rows
        self._delivered = False
        self._draft: Delivery | None = None
        self._ahead = Ahead(first=0, end=-1, indices=np.empty((0, batch_rows), dtype=np.int64))
        self.batch = 0
        self.late_rows = 0

    def draft(self) -> Delivery | None:
        """The draft of the next batch, if one was delivered before. To be called before a commit.

        It is what ``deal`` will return if nothing is committed until then.
        """
        if self._delivered and len(self._hosts) > 1:
            self._draft = self._known()
        self._delivered = False
        return self._draft

    def deal(self) -> Delivery:
        """The next batch, over the rows that the directory now holds (at least one)."""
        draft, self._draft = self._draft, None
        if draft is None or draft.ahead.end == self._directory.end:
            delivery = self._known()
        else:
            assert draft.ahead.learners is not None and draft.ahead.drawn is not None
            learners = draft.ahead.learners[draft.row : draft.row + 1]
            delivery = Delivery(self._plan(1, learners), 0)
            drawn, drafted = delivery.ahead.drawn, draft.ahead.drawn[draft.row]
            self.late_rows += int(np.count_nonzero(drawn != drafted))
        self._delivered = True
        self.batch += 1
        return delivery

    def clear(self) -> None:
        """Forgets the draft, because the rows it names are gone."""
        self._delivered, self._draft = False, None

    def _known(self) -> Delivery:
        """The next batch over the present rows. While nothing is committed, the longer the more
        batches are planned at once."""
        ahead = self._ahead
        row = self.batch - ahead.first
        if ahead.end != self._directory.end or row >= len(ahead.indices):
            same = ahead.end == self._directory.end
            ahead = self._ahead = self._plan(2 * len(ahead.indices) if same else 1)
            row = 0
        return Delivery(ahead, row)

    def _plan(self, most: int, learners: Ranks | None = None) -> Ahead:
        """Up to ``most`` batches from the next one on, routed unless ``learners`` are given."""
        directory = self._directory
        positions = self._draws.ahead(self.batch, directory.size)[:most]
        indices = directory.indices(positions)
        if len(self._hosts) == 1:
            return Ahead(self.batch, directory.end, indices)
        holders = directory.holders(positions)
        if learners is None:
            learners = route(self._routing, holders, self._hosts, self._batch_rows)
        moves = transfers(learners, holders, self._rank, len(self._hosts))
        drawn = indices.reshape(-1)
        return Ahead(
            self.batch, directory.end, drawn[moves.mine], drawn[moves.send], moves, learners,
            indices,
        )
