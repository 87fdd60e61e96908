"""Rows as messages between pairs of ranks over Gloo, receives posted before sends.

Only pairs that have rows for each other talk: no thread is woken to run a collective, both
directions of a link are used at once, and an exchange that will never be complete, because a rank
failed meanwhile, does not hold up the closing of the group as an unfinished collective would.

Gloo tells a receiver at once that the sender is gone, but not of a message that has begun to come.
So a long transfer ends with a message of its own, its last row, which is waited for first: when it
is there, so is what was sent before.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from conduit.collectives.transports.parcel import Parcel
from conduit.collectives.world import World

__all__ = ["PointToPoint", "remaining"]

_LONG_BYTES = 2 << 20


class PointToPoint:
    """See :class:`.parcel.Network`."""

    name = "point-to-point"

    def __init__(self, world: World, *, tag: int) -> None:
        self._world, self._tag = world, tag

    def begin(self, parcel: Parcel) -> Messages:
        world = self._world
        # Starting with the next rank, so that not all send to the same one first.
        far = sorted(parcel.far, key=lambda peer: (peer - world.rank) % world.size)
        assert world.data is not None
        return Messages(world.data, self._tag, world.timeout, parcel, far)


class Messages:
    """See :class:`.parcel.Transfer`."""

    def __init__(
        self, group: dist.ProcessGroup, tag: int, timeout: timedelta, parcel: Parcel,
        far: list[int],
    ) -> None:
        self._group, self._tag, self._timeout, self._parcel = group, tag, timeout, parcel
        row_bytes = parcel.inbox.shape[1]

        def spans(count: int) -> list[tuple[int, int]]:
            return _spans(count, row_bytes, parcel.chunk_bytes)

        self._receives = [
            [
                group.recv([parcel.inbox[first + begin : first + end]], peer, tag)
                for begin, end in spans(parcel.out_counts[peer])
            ] for peer in far if parcel.out_counts[peer]
            for first in [parcel.out_starts[peer]]
        ]
        self._sends = [
            (peer, parcel.starts[peer], spans(parcel.counts[peer]))
            for peer in far if parcel.counts[peer]
        ]
        self._issued = 0

    def issue(self) -> bool:
        left = False
        for peer, first, spans in self._sends:
            if self._issued < len(spans):
                left = True
                begin, end = spans[self._issued]
                rows = self._parcel.box.rows[first + begin : first + end]
                self._parcel.box.works.append(self._group.send([rows], peer, self._tag))
        self._issued += 1
        return left

    def finish(self) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        for works in self._receives:
            for work in reversed(works):
                work.wait(remaining(deadline))
        self._receives = []


def remaining(deadline: float) -> timedelta:
    """What is left of the time until ``deadline``; never nothing, since a wait looks first."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _spans(count: int, row_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of the messages that ``count`` rows make, alike at both ends."""
    chunk = max(chunk_bytes // row_bytes, 1)
    tail = count > 1 and count * row_bytes > _LONG_BYTES
    body = count - tail
    spans = [(begin, min(begin + chunk, body)) for begin in range(0, body, chunk)]
    return [*spans, (body, count)] if tail else spans
