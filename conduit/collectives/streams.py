"""What flows between ranks achieve: the latency of small messages, the bandwidth of a stream.

Links are shaped: a token bucket lets the first 64 to 256 KB pass at full speed, so the time of one
message tells nothing about a slow link. A flow therefore streams chunks for a set time, whatever
the link carries in it, and the receiver notes on its own clock when each one came: clocks of hosts
need not agree. The first part is left out, the rest is cut into ``PARTS`` repetitions.

Both ends of a transfer must know its size before it is sent, and the sender alone knows when time
is up. So every byte of a chunk has the same value, which says how large the chunk ``_DEPTH`` later
is (0: there is none). The sender lets chunks grow while word of them comes back quickly, which
takes some round trips: enough for hosts of one cluster, not for distant ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conduit.collectives.flows import PARTS, Flow
from conduit.collectives.world import World

__all__ = ["StreamedFlows", "expected_ns", "rates"]

_DEPTH = 4
_SMALLEST_BYTES = 8 * 1024
_SIZES = 8
"""A chunk is 8 KiB, 16 KiB, ... or 1 MiB; ``_DEPTH`` of them are under way."""

_UNDER_WAY_NS = 10_000_000
_PINGS, _PING_NS = 16, 20_000_000
_AROUND_NS = 25_000_000
"""What meeting, small messages and getting going add to a flow, as measured."""

_POLL_S = 3e-4
"""How often ends look for what came: Gloo waits for one message, never for the first of several."""

_STALL_NS = 500_000_000
_DATA, _ACK, _PING = 11, 12, 13
"""Tags of messages; the exchange of rows has others."""


def expected_ns(window_ns: int, bytes_per_s: int) -> int:
    """About how long the streams of a round take one way, over links of that bandwidth: the window,
    what is under way when it ends, and what comes around it."""
    under_way_ns = _DEPTH * _SMALLEST_BYTES * 10**9 // bytes_per_s
    return _lasts_ns(window_ns) + max(_UNDER_WAY_NS, under_way_ns) + _AROUND_NS


def _lasts_ns(window_ns: int) -> int:
    """How long a sender goes on. A flow that began late is measured late: a quarter more, and those
    it shares a link with are still there."""
    return window_ns * 5 // 4


class StreamedFlows:
    """Flows over Gloo, message by message; ``window_ns`` is how much of a stream counts."""

    def __init__(self, world: World, window_ns: int) -> None:
        self._rank, self._timeout, self._window_ns = world.rank, world.timeout, window_ns
        assert world.data is not None
        self._group = world.data
        largest = _SMALLEST_BYTES << _SIZES - 1
        self._filled = [torch.full((largest,), m, dtype=torch.uint8) for m in range(_SIZES + 1)]

    def latency_ns(self, flows: Sequence[Flow]) -> list[int]:
        found = []
        for source, target in flows:
            if self._rank == source:
                self._answer(target)
            elif self._rank == target:
                found.append(self._ping(source))
        return found

    def _ping(self, peer: int) -> int:
        """Half the median round trip; the first one is for warming up."""
        note = torch.ones(1, dtype=torch.uint8)
        times: list[int] = []
        begun = now = time.perf_counter_ns()
        while note[0]:
            last = len(times) == _PINGS or (times and now - begun > _PING_NS)
            note[0] = not last
            answer = self._group.recv([torch.empty_like(note)], peer, _PING)
            self._group.send([note], peer, _PING).wait(self._timeout)
            answer.wait(self._timeout)
            before, now = now, time.perf_counter_ns()
            times.append(now - before)
        return sorted(times[1:])[len(times[1:]) // 2] // 2

    def _answer(self, peer: int) -> None:
        note = torch.ones(1, dtype=torch.uint8)
        while note[0]:
            self._group.recv([note], peer, _PING).wait(self._timeout)
            self._group.send([note], peer, _PING).wait(self._timeout)

    def bytes_per_s(self, flows: Sequence[Flow]) -> list[list[int]]:
        ins = [_In(self._group, source) for source, target in flows if target == self._rank]
        outs = [
            _Out(self._group, target, self._filled, _lasts_ns(self._window_ns))
            for source, target in flows if source == self._rank
        ]
        _run([*ins, *outs], self._timeout)
        return [rates(flow.came, self._window_ns, PARTS) for flow in ins]


class _In:
    """The receiving end: notes ``(ns, bytes so far)`` of every chunk, and sends word of it.

    A Gloo work cannot be asked whether it is done, and waiting for one flow would hold up others;
    but a chunk has come when its last byte has, as bytes of a connection come in order.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        largest = _SMALLEST_BYTES << _SIZES - 1
        self._room = torch.zeros(_DEPTH, largest, dtype=torch.uint8)
        self._seen = self._room.numpy()
        self._free = deque(range(_DEPTH))
        self._word = torch.ones(1, dtype=torch.uint8)
        self._words: list[dist.Work] = []
        self._waits: deque[tuple[int, int, dist.Work]] = deque()
        self._bytes = 0
        self.came: list[tuple[int, int]] = []
        for _ in range(_DEPTH):
            self._expect(1)

    def _expect(self, size: int) -> None:
        place, length = self._free.popleft(), _SMALLEST_BYTES << size - 1
        self._seen[place, length - 1] = 0xFF
        work = self._group.recv([self._room[place, :length]], self._peer, _DATA)
        self._waits.append((place, length, work))

    @property
    def oldest(self) -> dist.Work | None:
        return self._waits[0][2] if self._waits else None

    def advance(self, timeout: timedelta) -> bool:
        """Takes the next chunk if it is there."""
        if not self._waits or self._seen[self._waits[0][0], self._waits[0][1] - 1] == 0xFF:
            return False
        now = time.perf_counter_ns()
        place, length, work = self._waits.popleft()
        work.wait(timeout)
        self._bytes += length
        self.came.append((now, self._bytes))
        self._words.append(self._group.send([self._word], self._peer, _ACK))
        self._free.append(place)
        if size := int(self._seen[place, length - 1]):
            self._expect(size)
        elif not self._waits:
            for word in self._words:
                word.wait(timeout)
        return True


class _Out:
    """The sending end: keeps ``_DEPTH`` chunks under way until its time is up."""

    def __init__(
        self, group: dist.ProcessGroup, peer: int, filled: list[Tensor], lasts_ns: int
    ) -> None:
        self._group, self._peer, self._filled, self._lasts_ns = group, peer, filled, lasts_ns
        self._words = torch.zeros(_DEPTH, dtype=torch.uint8)
        self._seen = self._words.numpy()
        self._free = deque(range(_DEPTH))
        # Of chunks under way: place, when sent, size, the size it says, and what to wait for.
        self._waits: deque[tuple[int, int, int, int, dist.Work, dist.Work]] = deque()
        self._next, self._quickest_ns = 1, 0
        self._took_ns: deque[int] = deque(maxlen=_DEPTH)
        self._begun_ns = time.perf_counter_ns()
        for _ in range(_DEPTH):
            self._send(1)

    def _send(self, size: int) -> None:
        """Sends a chunk that says what the fourth one after it will be."""
        now, place = time.perf_counter_ns(), self._free.popleft()
        says = 0 if now - self._begun_ns > self._lasts_ns else self._next
        self._seen[place] = 0
        word = self._group.recv([self._words[place : place + 1]], self._peer, _ACK)
        chunk = self._filled[says][: _SMALLEST_BYTES << size - 1]
        sent = self._group.send([chunk], self._peer, _DATA)
        self._waits.append((place, now, size, says, word, sent))

    @property
    def oldest(self) -> dist.Work | None:
        return self._waits[0][4] if self._waits else None

    def advance(self, timeout: timedelta) -> bool:
        """Sends the next chunk if word has come of an earlier one."""
        if not self._waits or not self._seen[self._waits[0][0]]:
            return False
        place, sent_ns, size, says, word, sent = self._waits.popleft()
        word.wait(timeout)
        sent.wait(timeout)
        self._free.append(place)
        self._took_ns.append(time.perf_counter_ns() - sent_ns)
        # Of the last few: one that took long may only have waited for a processor.
        took_ns = min(self._took_ns)
        self._quickest_ns = min(self._quickest_ns or took_ns, took_ns)
        if says:
            if took_ns < _UNDER_WAY_NS // 2 + self._quickest_ns:
                self._next = min(size + 1, _SIZES)
            elif took_ns > _UNDER_WAY_NS + self._quickest_ns:
                self._next = max(size - 1, 1)
            self._send(says)
        return True


def _run(ends: Iterable[_In | _Out], timeout: timedelta) -> None:
    """Until all are done. Each wait has a deadline, and notices a connection that is closed."""
    left, moved_ns = list(ends), time.perf_counter_ns()
    while left:
        if sum(end.advance(timeout) for end in left):
            moved_ns = time.perf_counter_ns()
            left = [end for end in left if end.oldest is not None]
        elif time.perf_counter_ns() - moved_ns < _STALL_NS:
            time.sleep(_POLL_S)
        else:
            oldest = left[0].oldest
            assert oldest is not None
            oldest.wait(timeout)


def rates(came: Sequence[tuple[int, int]], window_ns: int, parts: int) -> list[int]:
    """Bytes per second in ``parts`` stretches of the window, from ``(ns, bytes so far)`` of chunks.

    The first quarter, in which buckets empty and TCP's windows open, is left out, and so is what
    came late: of flows that share a link, those that end last have it for themselves by then.
    Between two chunks bytes are taken to have come evenly.
    """
    times = np.array([ns for ns, _ in came]) - came[0][0]
    last = max(min(int(times[-1]), window_ns), 1)
    edges = np.linspace(last / 4, last, parts + 1)
    amounts = np.diff(np.interp(edges, times, [amount for _, amount in came]))
    return [int(rate) for rate in amounts / np.diff(edges) * 1e9]
