"""A delivery, stage by stage: draw and route, gather what goes away, exchange, gather, views."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from conduit.collectives.exchange import RowExchange
from conduit.edp.delivery import Delivery, Replay
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
        # The drafted delivery, and the slots of the rows to gather and of the rows to send.
        self._draft: Delivery | None = None
        self._draft_slots: tuple[Slots, Slots] | None = None
        # In a world of one: the batches known ahead, and their rows' slots.
        self._known = self._known_slots = np.empty((0, 0), dtype=np.int64)

    def draft(self) -> None:
        """Local. Prepares the next batch as far as it is known before the commit."""
        self._draft = self._replay.draft()
        self._draft_slots = self._slots(self._draft) if self._draft is not None else None

    def deliver(self) -> TensorDict:
        """Collective. This rank's rows of the next global batch."""
        delivery = self._replay.deal()
        if delivery.block is None:
            slots = self._receive(delivery)
        else:
            if delivery.block is not self._known:
                self._known, self._known_slots = delivery.block, self._shard.slots(delivery.block)
            slots = self._known_slots[delivery.row]
        slab = self._slabs.take()
        self._shard.gather(slots, slab.records)
        self._counters.samples += 1
        self._counters.rows_delivered += len(slots)
        return self._batches.make(slab.views.fresh(), delivery.indices, loss_scale=1.0)

    def _receive(self, delivery: Delivery) -> Slots:
        """Exchanges the rows of a delivery; returns the slots of this rank's rows, in order."""
        shard, moves = self._shard, delivery.transfers
        assert moves is not None
        if self._draft_slots is not None and delivery is self._draft:
            slots, send = self._draft_slots
        else:
            slots, send = self._slots(delivery)
        if moves.moved:
            outgoing, incoming = len(send), len(moves.receive)
            if len(self._outbox) < outgoing:
                self._outbox = shard.layout.block(2 * outgoing, self._outbox.device)
                self._outbox_records = shard.layout.records(self._outbox)
            if outgoing:
                shard.gather(send, self._outbox_records[:outgoing])
            self._exchange(
                self._outbox[:outgoing], moves.send_counts, shard.inbox[:incoming], moves.receive_counts,
                what="exchanging the rows of a batch",
            )
            self._counters.rows_received += incoming
        return slots

    def _slots(self, delivery: Delivery) -> tuple[Slots, Slots]:
        """Slots of the rows of a delivery in order, those received in the inbox, and of the rows
        that this rank sends."""
        shard, moves = self._shard, delivery.transfers
        assert moves is not None and delivery.send is not None
        incoming = len(moves.receive)
        if incoming == 0:
            slots = shard.slots(delivery.indices)
        else:
            own = np.ones(len(delivery.indices), dtype=np.bool_)
            own[moves.receive] = False
            slots = np.empty(len(delivery.indices), dtype=np.int64)
            slots[own] = shard.slots(delivery.indices[own])
            slots[moves.receive] = np.arange(shard.inbox_slot, shard.inbox_slot + incoming)
        return slots, shard.slots(delivery.send) if len(delivery.send) else delivery.send
