"""The world of a single process, with and without a process group. (Several ranks: tests/spmd.)"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conduit import ExperiencePlane, WorldError
from conduit.collectives.hosts import host_identity
from conduit.collectives.world import World
from tests.numbered import EXAMPLE, numbered
from tests.simulation import Simulation

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=10)


@pytest.fixture
def no_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def own_group(no_group: None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("no_group")
def test_without_torchrun_it_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.join(device=CPU, timeout=TIMEOUT)
    assert (world.rank, world.size) == (0, 1)
    assert world.hosts.tolist() == [0]
    assert world.control is world.watch is world.data is None
    assert not dist.is_initialized()
    world.close()
    world.close()


@pytest.mark.usefixtures("own_group")
def test_a_group_of_one_is_a_world_of_one_and_stays_the_users() -> None:
    group = dist.new_group([0])
    for given in (None, group):
        with ExperiencePlane(EXAMPLE, capacity=10, batch_size=2, group=given) as plane:
            assert (plane.rank, plane.ranks) == (0, 1)
            plane.extend(numbered(range(5)))
            assert plane.sample() is not None
    assert dist.is_initialized()
    assert dist.get_world_size() == 1


@pytest.mark.usefixtures("no_group")
def test_under_torchrun_the_group_is_made_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with ExperiencePlane(EXAMPLE, capacity=10, batch_size=2) as plane:
            plane.extend(numbered(range(5)))
            assert plane.sample() is not None
        assert dist.is_initialized()
        assert dist.get_backend() == "gloo"


@pytest.mark.usefixtures("no_group")
def test_a_group_without_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(WorldError, match="init_process_group"):
        World.join(device=CPU, timeout=TIMEOUT, group=object())  # type: ignore[arg-type]


def test_who_shares_memory() -> None:
    def sharers(rank: int, device: str) -> list[bool]:
        shared: list[bool] = World(
            rank=rank, size=4, device=torch.device(device), timeout=TIMEOUT,
            hosts=np.array([0, 1, 0, 1]),
        ).memory_sharers.tolist()
        return shared

    assert sharers(0, "cpu") == sharers(2, "cpu") == [True, False, True, False]
    assert sharers(3, "cpu") == [False, True, False, True]
    assert sharers(2, "cuda:0") == [False, False, True, False]


def test_a_host_is_known_by_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = host_identity()
    assert 0 <= identity < 1 << 63
    assert host_identity() == identity
    if Path("/dev/shm").exists() and Path("/proc/sys/kernel/random/boot_id").exists():
        # A name says nothing where shared memory can be told apart.
        monkeypatch.setattr("platform.node", lambda: "elsewhere")
        assert host_identity() == identity


def test_ranks_of_a_part_are_told_with_their_numbers_in_the_job() -> None:
    with Simulation([0, 0, 0]) as simulated:
        [world, *_] = simulated.run(
            lambda rank: World.join(device=CPU, timeout=TIMEOUT)
        )
    assert (world.told([1]), world.told([0, 2])) == ("rank 1", "ranks [0, 2]")
    part = replace(world, numbers=[1, 4, 5])
    assert part.told([1]) == "rank 1 (in the job rank 4)"
    assert part.told([0, 2]) == "ranks [0, 2] (in the job ranks [1, 5])"
