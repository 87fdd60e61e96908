"""A delivery, stage by stage: draw and route, gather what goes away, exchange, gather, views."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from conduit.collectives.exchange import RowExchange
from conduit.edp.delivery import Ahead, Replay
from conduit.edp.routing import Transfers
from conduit.metrics import Counters
from conduit.sched.batch import BatchMaker
from conduit.sched.slabs import SlabPool
from conduit.tiers.shard import Shard

__all__ = ["Deliveries"]

Slots = NDArray[np.int64]


class Deliveries:
    """Turns what the sampler deals into this rank's batches."""

    def __init__(
        self, *, replay: Replay, shard: Shard, exchange: RowExchange, slabs: SlabPool,
        batches: BatchMaker, counters: Counters, device: torch.device,
    ) -> None:
        self._replay, self._shard, self._exchange = replay, shard, exchange
        self._slabs, self._batches, self._counters = slabs, batches, counters
        self._outbox = shard.layout.block(0, device)
        self._outbox_records = shard.layout.records(self._outbox)
        # The batches known ahead, and the slots of their rows and of the rows to send.
        self._known: Ahead | None = None
        self._slots: Slots = np.empty((0, 0), dtype=np.int64)
        self._send_slots: Slots = np.empty(0, dtype=np.int64)

    def draft(self) -> None:
        """Local. Prepares the next batch as far as it is known before the commit."""
        draft = self._replay.draft()
        if draft is not None:
            self._locate(draft.ahead)

    def deliver(self, *, contiguous: bool) -> TensorDict:
        """Collective. This rank's rows of the next global batch, as views or ``contiguous`` copies.
        """
        ahead, row = self._replay.deal()
        self._locate(ahead)
        if ahead.transfers is not None and ahead.transfers.moved[row]:
            self._receive(ahead.transfers, row)
        slab = self._slabs.take()
        slots = self._slots[row]
        self._shard.gather(slots, slab.records)
        self._counters.samples += 1
        self._counters.rows_delivered += len(slots)
        columns = slab.views.fresh()
        if contiguous:
            columns = [column.clone(memory_format=torch.contiguous_format) for column in columns]
        return self._batches.make(columns, ahead.indices[row], loss_scale=1.0)

    def _receive(self, moves: Transfers, row: int) -> None:
        """Exchanges the rows that change ranks in a delivery; they come to lie in the inbox."""
        start, stop = moves.send_bounds[row : row + 2]
        outgoing = stop - start
        incoming = moves.receive_bounds[row + 1] - moves.receive_bounds[row]
        if len(self._outbox) < outgoing:
            self._outbox = self._shard.layout.block(2 * outgoing, self._outbox.device)
            self._outbox_records = self._shard.layout.records(self._outbox)
        if outgoing:
            self._shard.gather(self._send_slots[start:stop], self._outbox_records[:outgoing])
        self._exchange(
            self._outbox[:outgoing], moves.send_counts[row],
            self._shard.inbox[:incoming], moves.receive_counts[row],
            what="exchanging the rows of a batch",
        )
        self._counters.rows_received += incoming

    def _locate(self, ahead: Ahead) -> None:
        """Finds the slots of all rows of some deliveries, those received being in the inbox."""
        if ahead is self._known:
            return
        shard, moves, indices = self._shard, ahead.transfers, ahead.indices
        self._known = ahead
        if moves is None or len(moves.receive) == 0:
            self._slots = shard.slots(indices)
        else:
            own = np.ones(indices.size, dtype=np.bool_)
            own[moves.receive] = False
            slots = np.empty(indices.size, dtype=np.int64)
            slots[own] = shard.slots(indices.reshape(-1)[own])
            bounds = np.array(moves.receive_bounds)
            first = shard.inbox_slot - bounds[:-1].repeat(bounds[1:] - bounds[:-1])
            slots[moves.receive] = first + np.arange(len(moves.receive))
            self._slots = slots.reshape(indices.shape)
        if ahead.send is not None and len(ahead.send):
            self._send_slots = shard.slots(ahead.send)
