"""A delivery, stage by stage: draft, fetch, late rows, views."""

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
from conduit.sched.fetch import Fetch, Wanted, put
from conduit.sched.slabs import Slab, SlabPool
from conduit.tiers.shard import Shard

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
    """Turns what the sampler deals into this rank's batches.

    A draft is fetched before the commit that may change it, so its rows are still there, and the
    exchange of rows overlaps that of control records. What the commit changes is fetched after it.
    """

    def __init__(
        self, *, replay: Replay, shard: Shard, exchange: RowExchange, late_exchange: RowExchange,
        slabs: SlabPool, batches: BatchMaker, counters: Counters,
    ) -> None:
        self._replay, self._shard = replay, shard
        self._slabs, self._batches, self._counters = slabs, batches, counters
        self._fetch = Fetch(shard, exchange, counters, what="exchanging the rows of a batch")
        self._late = Fetch(shard, late_exchange, counters, what="exchanging late rows")
        self._pending: _Pending | None = None
        # The batches known ahead, and what each of them takes.
        self._known: Ahead | None = None
        self._wanted: list[Wanted] = []

    def begin(self) -> None:
        """Collective. Begins to fetch the next batch as far as it is known before a commit."""
        draft = self._replay.draft()
        if draft is not None:
            self._pending = self._begin(draft)

    def deliver(self, *, contiguous: bool) -> TensorDict:
        """Collective. This rank's rows of the next global batch, as views or ``contiguous`` copies.
        """
        delivery = self._replay.deal()
        pending, self._pending = self._pending, None
        if pending is None:
            pending = self._begin(delivery)
        if delivery.late is None:
            self._fetch.finish()
        else:
            self._add_late(delivery.late, pending)
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
        self._fetch.finish()
        self._pending = None

    def close(self) -> None:
        """Local. Drops it without waiting for anyone."""
        self._fetch.abandon()
        self._late.abandon()
        self._pending = None

    def _begin(self, delivery: Delivery) -> _Pending:
        if delivery.ahead is not self._known:
            self._known, self._wanted = delivery.ahead, self._locate(delivery.ahead)
        slab = self._slabs.take()
        self._fetch.begin(self._wanted[delivery.row], slab.records)
        # While rows are on their way:
        columns, batch = slab.batch(self._batches.prepare)
        indices = delivery.ahead.indices[delivery.row]
        if delivery.ahead.transfers is not None:
            indices = indices.copy()  # late rows will change it
        return _Pending(slab, indices, columns, batch)

    def _add_late(self, late: Late, pending: _Pending) -> None:
        """Fetches late rows and puts them in their seats."""
        count = len(late.seats)
        block = self._shard.layout.block(count, self._shard.tier.device)
        records = self._shard.layout.records(block)
        moves = late.transfers
        slots = self._shard.slots(late.indices)
        slots[moves.receive] = 0
        self._late.begin(
            Wanted(
                slots, moves.receive, moves.receive_counts[0], self._shard.slots(late.send),
                moves.send_counts[0], moves.moved[0],
            ), records,
        )
        self._fetch.finish()
        self._late.finish()
        put(records, pending.slab.records, late.seats)
        pending.indices[late.seats] = late.indices

    def _locate(self, ahead: Ahead) -> list[Wanted]:
        """Where the rows of some deliveries lie: all at once, which is cheaper than one by one."""
        slots, moves = self._shard.slots(ahead.indices), ahead.transfers
        if moves is None:
            return [Wanted(row, *_NO_MOVES) for row in slots]
        assert ahead.send is not None
        slots.reshape(-1)[moves.receive] = 0
        send_slots = self._shard.slots(ahead.send)
        places = moves.receive % slots.shape[1]
        return [
            Wanted(
                slots[row], places[moves.receive_bounds[row] : moves.receive_bounds[row + 1]],
                moves.receive_counts[row],
                send_slots[moves.send_bounds[row] : moves.send_bounds[row + 1]],
                moves.send_counts[row], moved,
            ) for row, moved in enumerate(moves.moved)
        ]
