"""What it means to measure flows between ranks, and how to with collectives alone, for NCCL.

NCCL has no messages that two ranks exchange by themselves. See :mod:`.streams` for Gloo.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from conduit.collectives.world import World

__all__ = ["PARTS", "CollectiveFlows", "Flow", "Flows", "gathered"]

Flow = tuple[int, int]

PARTS = 5
"""Repetitions of a measurement of bandwidth."""

_REPEATS = 16
_LEAST_BYTES, _MOST_BYTES = 64 * 1024, 64 * 1024 * 1024


class Flows(Protocol):
    """Collective calls over all ranks, each with the same ``flows`` of ``(source, target)``.

    What they return is for this rank's incoming flows, in the order of ``flows``. They raise one of
    ``TRANSPORT_ERRORS`` when a rank does not come.
    """

    def latency_ns(self, flows: Sequence[Flow]) -> list[int]:
        """Nanoseconds of a small message one way. For rounds in which a rank has one partner."""

    def bytes_per_s(self, flows: Sequence[Flow]) -> list[list[int]]:
        """``PARTS`` bandwidths of each flow, all flows running at once."""


def gathered(world: World, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Collective. ``values`` (int64 ``[n]``) of all ranks, ``[ranks, n]``."""
    sent = np.ascontiguousarray(np.broadcast_to(values, (world.size, len(values))))
    got = np.empty_like(sent)
    dist.all_to_all_single(torch.from_numpy(got), torch.from_numpy(sent), group=world.control)
    return got


class CollectiveFlows:
    """Flows as all-to-alls with zeros elsewhere: what NCCL has instead of messages.

    All ranks make the same calls, with sizes that follow from gathered times: as large as takes
    ``window_ns``, or 64 MiB a rank. Bandwidth is the slope between two sizes, so that what a call
    costs by itself does not count.
    """

    def __init__(self, world: World, window_ns: int) -> None:
        self._world, self._window_ns = world, window_ns
        self._on_gpu = world.device.type == "cuda"

    def latency_ns(self, flows: Sequence[Flow]) -> list[int]:
        self._longest_ns(flows, 8)
        times = sorted(self._time_ns(flows, 8) for _ in range(_REPEATS))
        return [times[_REPEATS // 2] for _, target in flows if target == self._world.rank]

    def bytes_per_s(self, flows: Sequence[Flow]) -> list[list[int]]:
        ends = [rank for flow in flows for rank in flow]
        most = _MOST_BYTES // max(map(ends.count, set(ends)), default=1)
        large = _LEAST_BYTES * 4
        while self._longest_ns(flows, large) < self._window_ns // PARTS and large * 4 <= most:
            large *= 4
        small_ns = min(self._time_ns(flows, _LEAST_BYTES) for _ in range(PARTS))
        found = []
        for _ in range(PARTS):
            large_ns = self._time_ns(flows, large)
            # A small call that took as long as the large one was held up by something else.
            slope_ns = max(large_ns - small_ns, large_ns // 2, 1)
            found.append((large - _LEAST_BYTES) * 10**9 // slope_ns)
        # The flows of a rank share its time, and they are of the same size.
        return [list(found) for _, target in flows if target == self._world.rank]

    def _longest_ns(self, flows: Sequence[Flow], size: int) -> int:
        """The longest time that a rank took, the second time: the first one makes connections."""
        self._time_ns(flows, size)
        took = np.array([self._time_ns(flows, size)])
        return int(gathered(self._world, took).max())

    def _time_ns(self, flows: Sequence[Flow], size: int) -> int:
        rank, device = self._world.rank, self._world.device
        sizes = [size * ((rank, peer) in flows) for peer in range(self._world.size)]
        out_sizes = [size * ((peer, rank) in flows) for peer in range(self._world.size)]
        rows = torch.ones(sum(sizes), dtype=torch.uint8, device=device)
        out = torch.empty(sum(out_sizes), dtype=torch.uint8, device=device)
        gathered(self._world, np.zeros(1, dtype=np.int64))
        self._synchronize()
        begun = time.perf_counter_ns()
        work = dist.all_to_all_single(
            out, rows, out_sizes, sizes, group=self._world.data, async_op=True
        )
        assert work is not None
        if self._on_gpu:
            work.wait()
            self._synchronize()
        else:
            work.wait(self._world.timeout)
        return time.perf_counter_ns() - begun

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._world.device)
