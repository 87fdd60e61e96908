"""Rows as messages between pairs of ranks over Gloo, receives posted before sends.

Only pairs that have rows for each other talk: no thread is woken to run a collective, both
directions of a link are used at once, and an exchange that will never be complete, because a rank
failed meanwhile, does not hold up the closing of the group as an unfinished collective would.

Gloo tells a receiver at once that the sender is gone, but not of a message that has begun to come.
So a long transfer ends with a message of its own, its last bytes, which is waited for first: when
it is there, so is what was sent before.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch import Tensor

from conduit.collectives.transports.parcel import Parcel
from conduit.collectives.world import World

__all__ = ["PointToPoint", "messages", "remaining"]

_LONG_BYTES = 2 << 20
_TAIL_BYTES = 16
_WAITED_NS = 100_000
"""Who waits for less may have found the rows there already."""


class PointToPoint:
    """See :class:`.parcel.Network`."""

    name = "point-to-point"

    def __init__(self, world: World, *, tag: int) -> None:
        self._world, self._tag = world, tag

    def begin(self, parcel: Parcel) -> Messages:
        world = self._world
        # Starting with the next rank, so that not all send to the same one first.
        far = sorted(parcel.far, key=lambda peer: (peer - world.rank) % world.size)
        return Messages(world, self._tag, parcel, far)


class Messages:
    """See :class:`.parcel.Transfer`."""

    def __init__(self, world: World, tag: int, parcel: Parcel, far: list[int]) -> None:
        self._world, self._tag, self._parcel = world, tag, parcel
        group = world.data
        assert group is not None
        self.arrived_ns: dict[int, int] = {}
        self._receives = {
            peer: [
                group.recv([message], peer, tag) for message in messages(
                    parcel.inbox, parcel.out_starts[peer], parcel.out_counts[peer],
                    parcel.chunk_bytes,
                )
            ] for peer in far if parcel.out_counts[peer]
        }
        self._sends = [
            (
                peer, messages(
                    parcel.box.rows, parcel.starts[peer], parcel.counts[peer], parcel.chunk_bytes
                ),
            ) for peer in far if parcel.counts[peer]
        ]
        self._issued = 0

    def issue(self) -> bool:
        left = False
        group = self._world.data  # not kept: see carriers.py
        assert group is not None
        for peer, chunks in self._sends:
            if self._issued < len(chunks):
                left = True
                work = group.send([chunks[self._issued]], peer, self._tag)
                self._parcel.box.works.append(work)
        self._issued += 1
        return left

    def finish(self) -> None:
        deadline = time.monotonic() + self._world.timeout.total_seconds()
        for peer, works in self._receives.items():
            begun = time.perf_counter_ns()
            for work in reversed(works):
                work.wait(remaining(deadline))
            now = time.perf_counter_ns()
            if now - begun > _WAITED_NS:
                self.arrived_ns[peer] = now
        self._receives = {}


def remaining(deadline: float) -> timedelta:
    """What is left of the time until ``deadline``; never nothing, since a wait looks first."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def messages(rows: Tensor, start: int, count: int, chunk_bytes: int) -> list[Tensor]:
    """The messages that make up ``count`` rows from ``start`` on, cut alike at both ends."""
    part = rows[start : start + count].view(-1)
    nbytes = len(part)
    if nbytes <= min(chunk_bytes, _LONG_BYTES):
        return [part]
    body = nbytes - _TAIL_BYTES
    return [
        *(part[begin : min(begin + chunk_bytes, body)] for begin in range(0, body, chunk_bytes)),
        part[body:],
    ]
