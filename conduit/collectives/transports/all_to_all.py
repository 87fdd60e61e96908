"""Rows in one uneven all-to-all: the way of NCCL, and of Gloo where that is measured to be best."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from conduit.collectives.transports.parcel import Parcel
from conduit.collectives.world import World

__all__ = ["AllToAll"]


class AllToAll:
    """See :class:`.parcel.Network`. For exchanges that are all network: with nothing near.

    Every rank takes part in every chunk, so chunks need ``most_rows``; without it there is one.
    """

    name = "all-to-all"

    def __init__(self, world: World) -> None:
        self._world = world
        if world.borrowed:
            self.name = f"{AllToAll.name} on the job's group"

    def begin(self, parcel: Parcel) -> _Rounds:
        return _Rounds(self._world, parcel)


class _Rounds:
    """See :class:`.parcel.Transfer`. A single round is sent from the box and into the inbox; of
    several, each is brought together first, since its rows lie apart."""

    def __init__(self, world: World, parcel: Parcel) -> None:
        self._world, self._parcel = world, parcel
        self._chunk = max(parcel.chunk_bytes // parcel.inbox.shape[1], 1)
        most = parcel.most_rows
        self._rounds = 1 if most is None else max(-(-most // self._chunk), 1)
        self._works: list[dist.Work] = []
        self.arrived_ns: dict[int, int] = {}
        self._arriving: list[tuple[Tensor, list[Tensor]]] = []

    def issue(self) -> bool:
        number = len(self._works)
        if number == self._rounds:
            return False
        parcel = self._parcel
        outgoing, incoming = parcel.box.rows, parcel.inbox
        counts, out_counts = parcel.counts, parcel.out_counts
        if self._rounds > 1:
            sent = self._pieces(outgoing, parcel.starts, counts, number)
            places = self._pieces(incoming, parcel.out_starts, out_counts, number)
            counts, out_counts = [len(rows) for rows in sent], [len(rows) for rows in places]
            outgoing = torch.cat(sent)
            incoming = outgoing.new_empty(sum(out_counts), outgoing.shape[1])
            self._arriving.append((incoming, places))
        group = self._world.data  # not kept: see carriers.py
        assert group is not None
        self._works.append(group.alltoall_base(incoming, outgoing, out_counts, counts))
        return True

    def _pieces(
        self, block: Tensor, starts: list[int], counts: list[int], number: int
    ) -> list[Tensor]:
        begin = number * self._chunk
        return [
            block[start + min(begin, count) : start + min(begin + self._chunk, count)]
            for start, count in zip(starts, counts, strict=True)
        ]

    def finish(self) -> None:
        for work in self._works:
            if self._world.device.type == "cpu":
                work.wait(self._world.timeout)
            else:
                work.wait()  # the stream waits
        for incoming, places in self._arriving:
            begin = 0
            for place in places:
                place.copy_(incoming[begin : begin + len(place)])
                begin += len(place)
