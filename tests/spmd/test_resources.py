"""A plane takes no more descriptors and threads as it works, and gives them back."""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from conduit.collectives.agreement import Decisions
from conduit.collectives.choice import open_exchanges
from conduit.collectives.world import World
from tests.spmd.cases import make_plane
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="counts descriptors and threads in /proc"
)

EXAMPLE = {"x": torch.zeros(30)}


def taken() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def busy(rank: Rank) -> list[list[int]]:
    """What is taken at first, and after some hundred collective calls of all kinds."""
    counts = []
    with make_plane(
        rank, EXAMPLE, capacity=200, batch_rows=16, staging_rows=30, routing="independent"
    ) as plane:
        for step in range(300):
            if step in (5, 299):
                counts.append(list(taken()))
            plane.extend({"x": torch.zeros(step % 30, 30)})
            plane.sample() if step else plane.flush()
            plane.flush()
            plane.agree(step)
            if step % 100 == 99:
                plane.empty()
                plane.extend({"x": torch.zeros(3, 30)})
        # Of many small commits and large ones that move rows and wait at fences.
        report = plane.report()
        assert report.fences > 0 and report.rows_sent_home + report.rows_received > 0
    return counts


@pytest.mark.parametrize("ranks", [2, 4])
def test_collective_calls_take_nothing(pools: Pools, ranks: int) -> None:
    for before, after in pools[ranks].run(busy):
        assert after == before


def opened_and_closed(rank: Rank, *, planes: int) -> list[list[int]]:
    """What is taken after each plane is closed. The planes stay referenced, as by an agent that
    still has one as its attribute."""
    gc.collect()
    kept, counts = [], []
    for _ in range(planes):
        plane = make_plane(rank, EXAMPLE, capacity=200, batch_rows=16)
        plane.extend({"x": torch.zeros(3, 30)})
        plane.sample()
        plane.agree(1)
        plane.close()
        kept.append(plane)
        counts.append(list(taken()))
    assert all(plane.report().shard_bytes == 0 for plane in kept)
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_closed_planes_give_everything_back(pools: Pools, ranks: int) -> None:
    for counts in pools[ranks].run(opened_and_closed, planes=10):
        assert counts == [counts[0]] * 10


def opened_and_dropped(rank: Rank, *, planes: int) -> list[list[int]]:
    """What is taken after each plane is dropped without being closed, a batch on its way."""
    gc.collect()
    counts = []
    for _ in range(planes):
        plane = make_plane(rank, EXAMPLE, capacity=200, batch_rows=16)
        plane.extend({"x": torch.zeros(3, 30)})
        plane.sample()
        plane.flush()
        plane.agree(1)
        del plane
        counts.append(list(taken()))
    return counts


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropped_planes_give_everything_back(pools: Pools, ranks: int) -> None:
    for counts in pools[ranks].run(opened_and_dropped, planes=10):
        assert counts == [counts[0]] * 10


def exchanging(rank: Rank, *, transport: str, exchanges: int) -> list[list[int]]:
    """What is taken after each quarter of so many exchanges: descriptors, threads, bytes of
    resident memory, bytes in /dev/shm."""
    world = World.join(device=torch.device("cpu"), timeout=timedelta(seconds=20))
    [exchange] = open_exchanges(
        world, 64, count=1, trial_rows=10, decisions=Decisions(), transport=transport
    )
    taken_so_far = []
    for number in range(exchanges):
        # Of all sizes up to 40 rows, nothing now and then.
        counts = np.array([
            [(source + 2 * target + number) % 41 if source != target else 0
             for target in range(rank.size)] for source in range(rank.size)
        ])
        exchange.outbox(int(counts[rank.number].sum()), what="testing").fill_(number % 251)
        seen: list[int] = []
        exchange.begin(counts[rank.number], counts[:, rank.number], what="testing").wait(
            lambda rows, start, seen=seen: seen.append(int(rows.amax()))
        )
        assert set(seen) <= {number % 251}
        if (number + 1) % (exchanges // 4) == 0:
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
            shared = os.statvfs("/dev/shm")
            used = (shared.f_blocks - shared.f_bfree) * shared.f_frsize
            taken_so_far.append([*taken(), resident, used])
    exchange.close()
    world.close()
    return taken_so_far


@pytest.mark.parametrize("transport", ["shared", "network"])
def test_exchanges_take_nothing(pools: Pools, transport: str) -> None:
    """(Of 10,000 exchanges too, but that takes longer.)"""
    for quarters in pools[3].run(exchanging, transport=transport, exchanges=1_200):
        descriptors, threads, resident, shared = zip(*quarters, strict=True)
        assert descriptors[-1] <= descriptors[1] and threads[-1] <= threads[1]
        assert resident[-1] - resident[1] < 1 << 20
        assert shared[-1] - shared[1] <= 1 << 20  # other tests use it too
