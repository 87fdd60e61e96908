"""A delivery, stage by stage: draw and route, gather, exchange, late rows, views.

[Note: what hides, and what waits for what]
A draft goes through three stages. *draw* draws and routes it and looks up where its rows lie;
*gather* gathers the rows that others want, sends them, gathers those that lie here, and makes the
views; *exchange* waits for the rows of others and puts them in their places. All three run on the
lane from the moment the batch before is handed over, or, when that would hide nothing (see
``timeline.py``), within the next call while control records are on their way. The batch is the
same.

Before a commit, the training thread waits for *gather*. So a stage on the lane reads the directory
and the shard only while nothing changes them, and no row of a draft can be replaced before it is
read. After the commit it fetches late rows, and waits for *exchange*.

The lane's exchange of rows and that of late rows each have a process group of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from conduit.collectives.exchange import RowExchange
from conduit.edp.delivery import Ahead, Delivery, Late, Replay
from conduit.metrics import Counters
from conduit.sched.batch import BatchMaker
from conduit.sched.fetch import Fetch, Wanted
from conduit.sched.lanes import Lane, Ticket
from conduit.sched.slabs import LANE, POOL, USER, Slab, SlabPool
from conduit.sched.stages import DRAW, EXCHANGE, GATHER, LATE, Due
from conduit.sched.timeline import CALL, Timeline
from conduit.tiers.shard import AnyShard
from conduit.tiers.store import put

__all__ = ["Deliveries"]

_NOTHING = np.empty(0, dtype=np.int64)
_NO_MOVES = (_NOTHING, _NOTHING, _NOTHING, _NOTHING, 0)


class _Pending(NamedTuple):
    """A batch that is being fetched: its slab, logical indices, columns, and its TensorDict still
    without the indices, of which late rows change some."""

    slab: Slab
    indices: NDArray[np.int64]
    columns: list[Tensor]
    batch: TensorDict


class Deliveries:
    """Turns what the sampler deals into this rank's batches."""

    def __init__(
        self, *, replay: Replay, shard: AnyShard, exchange: RowExchange, late_exchange: RowExchange,
        slabs: SlabPool, batches: BatchMaker, counters: Counters, lane: Lane, timeline: Timeline,
    ) -> None:
        self._replay, self._shard = replay, shard
        self._slabs, self._batches, self._counters = slabs, batches, counters
        self._lane, self._timeline = lane, timeline
        self._fetch = Fetch(shard, exchange, counters, what="exchanging the rows of a batch")
        self._late = Fetch(shard, late_exchange, counters, what="exchanging late rows")
        self._draft: Delivery | None = None
        self._pending: _Pending | None = None
        # Of stages on the lane, the last ones that are due at either point.
        self._due: dict[Due, Ticket] = {}
        # The batches known ahead, and what each of them takes.
        self._known: Ahead | None = None
        self._wanted: list[Wanted] = []

    def hide(self) -> None:
        """Collective. Begins the next batch on the lane, as far as it is known now."""
        for stage, work in (
            (DRAW, self._draw), (GATHER, self._gather), (EXCHANGE, self._fetch.finish)
        ):
            self._due[stage.due] = self._lane.run(stage.name, work)

    def settle(self) -> None:
        """Local. Returns when the lane no longer reads what a commit changes. Raises StageError.
        """
        if Due.COMMIT in self._due:
            with self._timeline.span("wait for gather", CALL):
                self._due[Due.COMMIT].wait()
            del self._due[Due.COMMIT]  # only now: a wait can be interrupted

    def begin(self) -> None:
        """Collective. Begins the next batch before a commit, unless the lane already has."""
        if Due.BATCH not in self._due:
            with self._timeline.span("fetch", CALL):
                self._draw()
                self._gather()

    def deliver(self, *, contiguous: bool) -> TensorDict:
        """Collective. This rank's rows of the next global batch, as views or ``contiguous`` copies.
        """
        with self._timeline.span("deal", CALL):
            delivery = self._replay.deal()
        if delivery.anew and self._pending is not None:
            self._await_rows()
            self._pending = None
        if self._pending is None:
            with self._timeline.span("fetch", CALL):
                self._pending = self._begin(delivery)
        pending, self._pending = self._pending, None
        if delivery.late is None:
            self._await_rows()
        else:
            self._add_late(delivery.late, pending)
        pending.slab.give(LANE, USER)
        counters = self._counters
        counters.samples += 1
        counters.rows_delivered += len(pending.indices)
        with torch.inference_mode(False):  # a batch outlives the mode in which it was asked for
            if contiguous:
                copies = [c.clone(memory_format=torch.contiguous_format) for c in pending.columns]
                return self._batches.make(copies, pending.indices)
            self._batches.number(pending.batch, pending.indices)
            return pending.batch

    def clear(self) -> None:
        """Collective. Drops the batch that is being fetched."""
        self._await_rows()
        self._due.clear()
        self._draft = self._pending = None

    def close(self) -> None:
        """Local. Drops it without waiting for anyone."""
        self._lane.close()
        self._fetch.abandon()
        self._late.abandon()
        self._draft = self._pending = None

    def _draw(self) -> None:
        self._draft = self._replay.draft()
        if self._draft is not None:
            self._locate(self._draft.ahead)

    def _gather(self) -> None:
        if self._draft is not None:
            self._pending = self._begin(self._draft)
            self._draft = None

    def _await_rows(self) -> None:
        """Returns when the rows of others are in their places."""
        if Due.BATCH not in self._due:
            if self._fetch.is_under_way:
                with self._timeline.span("fetch", CALL):
                    self._fetch.finish()
        else:
            with self._timeline.span("wait for exchange", CALL):
                self._due[Due.BATCH].wait()
            del self._due[Due.BATCH]

    def _begin(self, delivery: Delivery) -> _Pending:
        self._locate(delivery.ahead)
        slab = self._slabs.take()
        slab.give(POOL, LANE)
        self._fetch.begin(self._wanted[delivery.row], slab.records)
        # While rows are on their way:
        columns, batch = slab.batch(self._batches.prepare)
        # Late rows will change them.
        return _Pending(slab, delivery.ahead.indices[delivery.row].copy(), columns, batch)

    def _add_late(self, late: Late, pending: _Pending) -> None:
        """Fetches late rows and puts them in their seats."""
        count = len(late.seats)
        block = self._shard.layout.block(count, self._shard.store.ring.device)
        records = self._shard.layout.records(block)
        moves = late.transfers
        slots = self._shard.slots(late.indices)
        with self._timeline.span(LATE.name, CALL):
            if moves is None:
                wanted = Wanted(slots, *_NO_MOVES)
            else:
                slots[moves.receive] = 0
                wanted = Wanted(
                    slots, moves.receive, moves.receive_counts[0], self._shard.slots(late.send),
                    moves.send_counts[0], moves.moved[0],
                )
            self._late.begin(wanted, records)
        self._await_rows()
        with self._timeline.span(LATE.name, CALL):
            self._late.finish()
            put(records, pending.slab.records, late.seats)
        pending.indices[late.seats] = late.indices

    def _locate(self, ahead: Ahead) -> None:
        """Where the rows of some deliveries lie: all at once, which is cheaper than one by one."""
        if ahead is self._known:
            return
        slots, moves = self._shard.slots(ahead.indices), ahead.transfers
        self._known = ahead
        if moves is None:
            self._wanted = [Wanted(row, *_NO_MOVES) for row in slots]
            return
        assert ahead.send is not None
        slots.reshape(-1)[moves.receive] = 0
        send_slots = self._shard.slots(ahead.send)
        places = moves.receive % slots.shape[1]
        self._wanted = [
            Wanted(
                slots[row], places[moves.receive_bounds[row] : moves.receive_bounds[row + 1]],
                moves.receive_counts[row],
                send_slots[moves.send_bounds[row] : moves.send_bounds[row + 1]],
                moves.send_counts[row], moved,
            ) for row, moved in enumerate(moves.moved)
        ]
