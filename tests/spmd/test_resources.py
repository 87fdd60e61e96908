"""A plane takes no more descriptors and threads as it works, and gives them back."""

from __future__ import annotations

import gc
import os
import sys

import pytest
import torch

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
