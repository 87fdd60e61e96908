"""Rows for other hosts in two levels, by rail: few large messages instead of many small ones.

[Note: rails]
Rank i of a host is on rail i. Rows for rank j of another host are first brought together on rail j
of the sender's host, through the memory that its ranks share, and then cross the network in one
message. So a rank sends at most one message to every rank of its rail on another host (where hosts
have L ranks, one for L of the flat exchange), there is no second hop at the receiving host, and no
rank is busier than others. Both ends know the sizes: the sender from its neighbours' boxes, the
receiver because it knows what it gets from each rank. (NCCL's PXN sends like this between GPUs.)

Where hosts have different numbers of ranks, rail j of a host is its rank j modulo its ranks.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist

from conduit.collectives.transports.parcel import Parcel
from conduit.collectives.transports.point_to_point import messages, remaining
from conduit.collectives.world import World

__all__ = ["Rail"]


class Rail:
    """See :class:`.parcel.Network`. Needs memory shared within every host, and hosts whose ranks
    are numbered one after the other. A parcel's chunks are all sent at once."""

    name = "rail"

    def __init__(self, world: World, *, tag: int) -> None:
        self.world, self.tag = world, tag
        host = int(world.hosts[world.rank])
        by_host = [np.flatnonzero(world.hosts == h).tolist() for h in range(world.hosts.max() + 1)]
        self.near = by_host[host]
        place = self.near.index(world.rank)
        # Who sends here what comes from each other host, and the ranks that this one sends to.
        self.sources = [
            (ranks[place % len(ranks)], ranks) for h, ranks in enumerate(by_host) if h != host
        ]
        self.targets = [
            peer for h, ranks in enumerate(by_host) if h != host
            for i, peer in enumerate(ranks) if i % len(self.near) == place
        ]

    @staticmethod
    def is_possible(world: World) -> bool:
        """Whether the hosts of this world have rails, the same answer on every rank."""
        hosts = world.hosts
        return world.windows is not None and hosts.max() > 0 and bool((np.diff(hosts) >= 0).all())

    def begin(self, parcel: Parcel) -> _Relayed:
        return _Relayed(self, parcel)


class _Relayed:
    """See :class:`.parcel.Transfer`."""

    def __init__(self, rail: Rail, parcel: Parcel) -> None:
        self._rail, self._parcel = rail, parcel
        group = rail.world.data  # not kept: see carriers.py
        assert group is not None
        self.arrived_ns: dict[int, int] = {}
        self._receives: list[list[dist.Work]] = []
        for source, ranks in rail.sources:
            first = parcel.out_starts[ranks[0]]
            count = sum(parcel.out_counts[peer] for peer in ranks)
            if count:
                self._receives.append([
                    group.recv([message], source, rail.tag)
                    for message in messages(parcel.inbox, first, count, parcel.chunk_bytes)
                ])

    def issue(self) -> bool:
        # Sent by ``finish``: it takes what the neighbours send too, and waits for them.
        return False

    def finish(self) -> None:
        rail, box = self._rail, self._parcel.box
        group = rail.world.data
        assert group is not None
        deadline = time.monotonic() + rail.world.timeout.total_seconds()
        box.wait(box.near)
        for target in rail.targets:
            pieces = [
                self._own(target) if peer == rail.world.rank else box.rows_of(peer, target)
                for peer in rail.near
            ]
            rows = torch.cat(pieces)
            if len(rows):
                box.works += [
                    group.send([message], target, rail.tag)
                    for message in messages(rows, 0, len(rows), self._parcel.chunk_bytes)
                ]
        for works in self._receives:
            for work in reversed(works):  # the last one first: see point_to_point.py
                work.wait(remaining(deadline))
        self._receives = []

    def _own(self, target: int) -> torch.Tensor:
        start = self._parcel.starts[target]
        return self._parcel.box.rows[start : start + self._parcel.counts[target]]
