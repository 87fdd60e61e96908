"""Memory that is not there: a clear error on every rank, nothing left behind, and no row lost."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import conduit
import conduit.tiers.shared
import conduit.tiers.specification
from conduit.errors import CapacityError
from conduit.tiers.address import PAGE_BYTES
from conduit.tiers.files import info_of
from tests.faults.scripts import TIMEOUT_S, names
from tests.spmd.ranks import Rank, Ranks
from tests.tiers.contract import LAYOUT
from tests.tiers.stores import store_of

World = Callable[..., Ranks]
Mount = Callable[..., Path]

ROW = {"x": torch.zeros(256)}
ROW_BYTES, TINY_BYTES = 1024, 8 << 20
NOBODY = 65534


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mount]:
    """A file system of 8 MiB, with such options."""
    made: list[Path] = []

    def mount(*options: str) -> Path:
        folder = tmp_path / f"mount {len(made)}"
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={TINY_BYTES}", *options])]
        try:
            done = subprocess.run(
                [*words, "tmpfs", str(folder)], check=False, capture_output=True, text=True
            )
        except OSError as error:
            pytest.skip(f"cannot mount a file system: {error}")
        if done.returncode:
            pytest.skip(f"cannot mount a file system: {done.stderr.strip()}")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def tiers_of(kinds: Sequence[str], folder: str) -> list[Any]:
    made = {"host": conduit.Host, "shared": conduit.Shared, "disk": lambda: conduit.Disk(folder)}
    return [made[kind]() for kind in kinds]


def plane_of(tiers: list[Any], capacity: int) -> conduit.ExperiencePlane:
    return conduit.ExperiencePlane(
        ROW, capacity=capacity, batch_size=8, tiers=tiers, timeout=timedelta(seconds=TIMEOUT_S),
        ingestion=conduit.Ingestion(staging_rows=1_000),
    )


@contextlib.contextmanager
def shared_in(folder: str) -> Iterator[None]:
    """That folder in place of /dev/shm, for rows."""
    with contextlib.ExitStack() as stack:
        for module in (conduit.tiers.shared, conduit.tiers.specification):
            stack.enter_context(mock.patch.object(module, "SHM", Path(folder)))
        yield


def make(
    rank: Rank, *, kinds: Sequence[str], folders: Sequence[str], promised: int,
    capacity: int = 16_000,
) -> dict[str, Any]:
    """The error of a plane over these kinds of memory, with this rank's folder for a disk and for
    /dev/shm, where file systems seem to have ``promised`` bytes (0 for what they have); and what
    this rank then gets from another plane."""
    seen = conduit.tiers.specification.mount_bytes
    told = mock.patch.object(
        conduit.tiers.specification, "mount_bytes",
        lambda folder: (promised, promised) if promised else seen(folder),
    )
    found: dict[str, Any] = {"error": None, "text": ""}
    with shared_in(folders[rank.number]), told:
        try:
            plane_of(tiers_of(kinds, folders[rank.number]), capacity).close()
        except Exception as error:
            found = {"error": type(error).__name__, "text": str(error)}
    found["left"] = os.listdir(folders[rank.number])
    with plane_of([conduit.Host()], 100) as plane:
        plane.extend({"x": torch.ones(20, 256)})
        batch = plane.sample()
        assert batch is not None
        found["sampled"] = len(batch)
    return found


def outcomes_of(
    world: World, ranks: int, *, left: Sequence[str] = (), **arguments: Any
) -> list[dict[str, Any]]:
    """Of ``make``, which must leave in the folders what was ``left`` there before."""
    made = world(ranks)
    made.start(make, **arguments)
    outcomes = made.outcomes()
    for outcome in outcomes:
        assert outcome.error is None, outcome
        assert outcome.seconds < 3 * TIMEOUT_S
        assert outcome.value["left"] == list(left) and outcome.value["sampled"] == 8, outcome
    return [outcome.value for outcome in outcomes]


# --------------------------------------------------------------------------------------- no room


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_too_little_room(world: World, mounted: Mount, kind: str, ranks: int) -> None:
    """All ranks see it before anything is taken."""
    folder = str(mounted())
    for found in outcomes_of(world, ranks, kinds=[kind], folders=[folder] * ranks, promised=0):
        assert found["error"] == "CapacityError", found
        assert re.search(rf"\n +{kind} +all +0\.008 GB", found["text"]), found
        assert "largest capacity that fits this rank" in found["text"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kinds", [["disk"], ["shared"], ["disk", "host"], ["shared", "host"]])
def test_room_that_somebody_else_takes_first(
    world: World, mounted: Mount, kinds: list[str], ranks: int
) -> None:
    """There was room when all looked, and there is none when it is taken."""
    folder = mounted()
    (folder / "others").write_bytes(bytes(TINY_BYTES - 2 * PAGE_BYTES - (4 << 10) * ranks))
    for found in outcomes_of(
        world, ranks, left=["others"], kinds=kinds, folders=[str(folder)] * ranks,
        promised=1 << 30,
    ):
        assert found["error"] == "CapacityError", found
        assert f"the {kinds[0]} tier cannot" in found["text"] and str(folder) in found["text"]
        assert "No space left on device" in found["text"] and "Lower capacity" in found["text"]


def test_no_room_on_one_rank(world: World, mounted: Mount, tmp_path: Path) -> None:
    """The other has taken its memory by then, and gives it back."""
    (tmp_path / "large").mkdir()
    first, second = outcomes_of(
        world, 2, kinds=["disk"], folders=[str(tmp_path / "large"), str(mounted())],
        promised=1 << 30,
    )
    assert second["error"] == "CapacityError" and "disk tier cannot grow" in second["text"]
    assert first["error"] == "WorldError" and names(first["text"], 1), first


def test_a_disk_that_fills_up_later_loses_no_row(mounted: Mount) -> None:
    """What a plane has is really there, and no write into a mapped file meets a full disk."""
    folder = mounted()
    with plane_of([conduit.Disk(folder)], 4_000) as plane:
        with contextlib.suppress(OSError), open(folder / "others", "wb", buffering=0) as file:
            while True:
                file.write(bytes(PAGE_BYTES))
        assert os.statvfs(folder).f_bavail == 0
        for number in range(6):
            plane.extend({"x": torch.full((1_000, 256), float(number))})
            plane.flush()
        for _ in range(20):
            batch = plane.sample()
            assert batch is not None and ((batch["x"] >= 2) & (batch["x"] <= 5)).all()
    assert os.listdir(folder) == ["others"]


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_a_move_to_a_full_disk_changes_nothing(kind: str, mounted: Mount) -> None:
    folder = mounted()
    with shared_in(str(folder)):
        store = store_of(LAYOUT, 640, folder=folder, tiers=("host", kind), segment_rows=64)
    model = torch.randint(0, 256, (640, LAYOUT.row_bytes), dtype=torch.uint8)
    store.write(np.arange(640), model)
    others, held = folder / "others", store.held_bytes()
    with contextlib.suppress(OSError), open(others, "wb", buffering=0) as file:
        while True:
            file.write(bytes(PAGE_BYTES))
    for segment in range(5):
        with pytest.raises(CapacityError, match=f"the {kind} tier cannot grow") as caught:
            store.move(segment, 1)
        assert "No space left on device" in str(caught.value) and str(folder) in str(caught.value)
        assert store.held_bytes() == held
        assert torch.equal(store.read(np.arange(640)), model)
    others.unlink()
    assert all(store.move(segment, 1) for segment in range(5))
    assert torch.equal(store.read(np.arange(640)), model)
    assert dict(store.held_bytes())["host"] == 0
    store.close()
    assert os.listdir(folder) == []


# --------------------------------------------------------------------------- no file, no right to


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_a_file_that_vanishes(kind: str, tmp_path: Path) -> None:
    """Somebody clears up: its rows stay as long as the plane does."""
    with shared_in(str(tmp_path)):
        plane = plane_of([conduit.Host("100MB"), *tiers_of([kind], str(tmp_path))], 4_000)
    store = plane._shard.store
    assert store.move(0, 1)
    (file,) = tmp_path.iterdir()
    file.unlink()
    for number in range(6):
        plane.extend({"x": torch.full((1_000, 256), float(number))})
        plane.flush()
        for segment in range(store.ring.segments):
            assert store.move(segment, (segment + number) % 2)
        batch = plane.sample()
        assert batch is not None and (batch["x"] <= number).all()
    store.sync()
    plane.close()
    plane.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "promised"), [("disk", 0), ("shared", 0), ("shared", 1 << 30)])
def test_a_file_system_that_is_read_only(
    world: World, mounted: Mount, kind: str, promised: int, ranks: int
) -> None:
    folder = str(mounted("ro"))
    for found in outcomes_of(
        world, ranks, kinds=[kind], folders=[folder] * ranks, promised=promised, capacity=1_000
    ):
        assert found["error"] == "WorldError" and folder in found["text"], found
        assert "that this user may write to" in found["text"]


def make_as_nobody(rank: Rank, *, folder: str, file: str) -> list[Any]:
    """The error of a plane in a folder of somebody else, and what their file says."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        plane_of([conduit.Disk(folder)], 1_000).close()
    except conduit.ConduitError as error:
        return [type(error).__name__, str(error), info_of(Path(file)) is None]
    return ["made", "", False]


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can be somebody else")
def test_a_folder_of_somebody_else(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("theirs")
    with plane_of([conduit.Disk(folder)], 1_000):
        (file,) = folder.iterdir()
        folder.chmod(0o755)
        ((error, text, unreadable),) = world(1).run(
            make_as_nobody, folder=str(folder), file=str(file)
        )
        assert error == "WorldError" and str(folder) in text and "may write to" in text
        assert unreadable
