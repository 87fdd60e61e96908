"""Windows: nothing is left of them, whatever goes wrong."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from conduit.collectives import shared
from conduit.collectives.exchange import RowExchange
from conduit.collectives.world import World
from conduit.tiers.files import Owner
from tests.simulation import Simulation

DIRECTORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not DIRECTORY.is_dir(), reason="needs /dev/shm")


def joined() -> World:
    return World.join(device=torch.device("cpu"), timeout=timedelta(seconds=20))


@pytest.fixture
def before() -> set[str]:
    return set(os.listdir(DIRECTORY))


def left(before: set[str]) -> set[str]:
    """New names that stay: those of other jobs on this machine come and go."""
    new = set(os.listdir(DIRECTORY)) - before
    deadline = time.monotonic() + 5
    while new and time.monotonic() < deadline:
        time.sleep(0.05)
        new &= set(os.listdir(DIRECTORY))
    return new


def test_windows_have_no_names_once_they_are_mapped(before: set[str]) -> None:
    with Simulation([0, 0, 1], shared=True) as simulation:
        worlds = simulation.run(lambda rank: joined())
        assert worlds[0].windows is not None
        assert set(worlds[0].windows.peers) == {1} and set(worlds[2].windows.peers) == set()
        assert left(before) == set()


@pytest.mark.parametrize("failing", ["os.posix_fallocate", "fcntl.flock", "torch.from_file"])
def test_where_they_cannot_be_made_nothing_is_left(failing: str, before: set[str]) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    with Simulation([0, 0], shared=True) as simulation:
        simulation.run(lambda rank: joined())
        descriptors = len(os.listdir("/proc/self/fd"))
        with mock.patch(failing, fail):
            assert simulation.run(lambda rank: joined().windows) == [None, None]
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert left(before) == set()


def test_files_of_killed_ranks_are_removed_in_time() -> None:
    made = [DIRECTORY / f"conduit-window-{'0' * 16}-{number}" for number in (90, 91, 92)]
    old = time.time() - 3600
    try:
        for path in made:
            path.write_bytes(b"")
        for path in made[:2]:
            os.utime(path, (old, old))
        with open(made[0], "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            shared._remove_abandoned()
            # One is held by its rank, one is abandoned, one may be about to be locked.
            assert [path.exists() for path in made] == [True, False, True]
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def test_rows_of_a_dead_job_are_no_windows() -> None:
    owner = Owner(job="dead", plane="plane", rank=secrets.randbits(60))
    path = DIRECTORY / owner.file_name
    old = time.time() - 3600
    try:
        path.write_bytes(b"rows")
        os.utime(path, (old, old))
        shared._remove_abandoned()
        assert path.read_bytes() == b"rows"
    finally:
        path.unlink(missing_ok=True)


def test_a_closed_exchange_gives_its_memory_back() -> None:
    def used() -> int:
        state = os.statvfs(DIRECTORY)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    counts = np.array([[0, 8], [8, 0]])
    with Simulation([0, 0], shared=True) as simulation:
        def make(rank: int) -> RowExchange:
            world = joined()
            windows = world.open_windows(1, words=3)
            assert windows is not None
            exchange = RowExchange(world, 1 << 20, windows=windows[0])
            exchange.outbox(8, what="testing").fill_(1)
            exchange.begin(counts[rank], counts[:, rank], what="testing").wait(lambda *_: None)
            return exchange

        exchanges = simulation.run(make)
        full = used()
        for exchange in exchanges:
            exchange.close()
        assert used() <= full - (16 << 20)
