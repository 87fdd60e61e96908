"""Uniform replay with replacement, and the rule that says which rank gets which row.

[Note: draft and late rows]
Batch t+1 is drawn and routed as soon as batch t is delivered, over what was committed then: this is
the *draft*, and it can be fetched while the learner works. What is committed later changes a few of
its draws (see ``draws.py``). The rows that those draws now name are the *late rows*: each goes to
the learner and the position of the draw that it displaces. So the rows of a batch are those of a
buffer without any staleness, while their way through the cluster was known beforehand.

Draft and routing thereby define the batch. The draft is dealt, and its fetch begins, before the
first commit after a delivery; how long before makes no difference to the batch.

Late columns change rows that are in the draft already. No rank knows which rows another one's
updates name, so a batch that may not ignore them is fetched anew.

A batch that may ignore the last k commits (``max_staleness``) is its draft, without late rows, as
long as no more than k commits came after it was drawn. That too depends on nothing but the calls
that all ranks make.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conduit.edp.directory import Directory
from conduit.edp.draws import UniformDraws
from conduit.edp.routing import Ranks, Transfers, route, transfers

__all__ = ["Ahead", "Delivery", "Late", "Replay"]

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


class Late(NamedTuple):
    """What a commit changed in a draft, as far as it concerns one rank.

    Its batch gets the rows at logical ``indices`` in its positions ``seats``, and it sends the rows
    at ``send``; the numbers in ``transfers`` (one batch of them, None in a world of one) are those
    of the changed draws.
    """

    seats: Index
    indices: Index
    send: Index
    transfers: Transfers | None


class Delivery(NamedTuple):
    """A batch: row ``row`` of the batches in ``ahead``, with ``late`` rows in place of some.

    It is to be fetched ``anew`` if values in its rows have changed since it was drafted.
    """

    ahead: Ahead
    row: int
    late: Late | None = None
    anew: bool = False


class Replay:
    """Deals the batches of one plane. ``batch`` numbers the next one."""

    def __init__(
        self, *, directory: Directory, draws: UniformDraws, routing: str, rank: int,
        hosts: NDArray[np.int64], batch_rows: int, max_staleness: int = 0,
    ) -> None:
        self._directory, self._draws, self._routing = directory, draws, routing
        self._rank, self._hosts, self._batch_rows = rank, hosts, batch_rows
        self._max_staleness = max_staleness
        self._delivered = False
        self._draft: Delivery | None = None
        self._drafted_at = self._drafted_updates = 0
        self._ahead = Ahead(first=0, end=-1, indices=np.empty((0, batch_rows), dtype=np.int64))
        self.batch = 0
        self.late_rows = 0

    def draft(self) -> Delivery | None:
        """The draft of the next batch, once after each delivery. To be called before a commit.

        It is what ``deal`` will return, but for late rows.
        """
        if not self._delivered:
            return None
        self._delivered = False
        self._draft, self._drafted_at = self._known(), self._directory.commits
        self._drafted_updates = self._directory.updates
        return self._draft

    def deal(self) -> Delivery:
        """The next batch, over the rows that the directory now holds (at least one)."""
        draft, self._draft = self._draft, None
        if draft is None:
            delivery = self._known()
        elif self._directory.commits - self._drafted_at <= self._max_staleness:
            delivery = draft
        else:
            anew = self._directory.updates > self._drafted_updates
            delivery = draft._replace(late=self._late(draft), anew=anew)
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

    def _late(self, draft: Delivery) -> Late | None:
        """What was committed since the draft changes in it; None if that is nothing."""
        directory, rank = self._directory, self._rank
        learners, drawn, moves = draft.ahead.learners, draft.ahead.drawn, draft.ahead.transfers
        drawn = draft.ahead.indices if drawn is None else drawn
        positions = self._draws.positions(self.batch, directory.size)
        indices = directory.indices(positions)
        changed = (indices != drawn[draft.row]).nonzero()[0]
        if len(changed) == 0:
            return None
        indices = indices[changed]
        if learners is None or moves is None:
            return Late(changed, indices, indices[:0], None)
        self.late_rows += len(changed)
        late = transfers(
            learners[draft.row, changed][None], directory.holders(positions[changed])[None],
            rank, len(self._hosts),
        )
        mine = late.mine[0]
        seats = moves.mine[draft.row].searchsorted(changed[mine] + draft.row * drawn.shape[1])
        return Late(seats, indices[mine], indices[late.send], late)

    def _plan(self, most: int) -> Ahead:
        """Up to ``most`` batches from the next one on."""
        directory = self._directory
        positions = self._draws.ahead(self.batch, directory.size)[:most]
        indices = directory.indices(positions)
        if len(self._hosts) == 1:
            return Ahead(self.batch, directory.end, indices)
        holders = directory.holders(positions)
        learners = route(self._routing, holders, self._hosts, self._batch_rows)
        moves = transfers(learners, holders, self._rank, len(self._hosts))
        drawn = indices.reshape(-1)
        return Ahead(
            self.batch, directory.end, drawn[moves.mine], drawn[moves.send], moves, learners,
            indices,
        )
