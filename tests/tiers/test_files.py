"""Files of rows: whose they are, when they go, and that nobody else's are taken away."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from conduit.errors import WorldError
from conduit.tiers.address import PAGE_BYTES
from conduit.tiers.files import Owner, RowFile, found_in, info_of, remove_dead
from conduit.tiers.tier import Ring
from tests.spmd.ranks import Rank, Ranks
from tests.tiers.contract import LAYOUT
from tests.tiers.stores import CPU, OWNER

RING = Ring(layout=LAYOUT, rows=7 * 64 - 5, segment_rows=64, device=CPU)


def file_in(folder: Path, owner: Owner = OWNER) -> RowFile:
    return RowFile(folder, owner, RING, tier="disk")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def program() -> Iterator[Ranks]:
    """A process that a test may end."""
    ranks = Ranks(1)
    yield ranks
    ranks.close()


def make_and_keep(rank: Rank, *, folder: str) -> str:
    """A file that its process has until it ends."""
    make_and_keep.file = file_in(Path(folder))  # type: ignore[attr-defined]
    make_and_keep.file.take(0)  # type: ignore[attr-defined]
    return str(make_and_keep.file.path)  # type: ignore[attr-defined]


def end(rank: Rank, *, how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)


def fork_and_close(rank: Rank, *, folder: str) -> list[bool]:
    """Whether the file is there after a forked process has closed it, and after its owner has."""
    file = file_in(Path(folder))
    child = os.fork()
    if child == 0:
        file.close()
        os._exit(0)
    os.waitpid(child, 0)
    there = [file.path.exists()]
    file.close()
    return [*there, file.path.exists()]


# --------------------------------------------------------------------------- names and headers


def test_a_file_says_whose_it_is_and_only_they_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = file_in(tmp_path, Owner(job="job 7", plane="a/b", rank=3))
    finally:
        os.umask(before)
    assert file.path == tmp_path / "conduit-rows-job_7-a_b-3"
    state = file.path.stat()
    assert stat.S_IMODE(state.st_mode) == 0o600 and state.st_size == PAGE_BYTES
    info = info_of(file.path)
    assert info is not None and info.alive and info.whole and info.segments == 0
    expected = {
        "job": "job 7", "plane": "a/b", "rank": 3, "pid": os.getpid(), "tier": "disk",
        "schema": LAYOUT.schema.hash, "row_bytes": LAYOUT.row_bytes, "segment_rows": 64,
        "segment_bytes": RING.segment_bytes,
    }
    assert {key: info.header[key] for key in expected} == expected
    file.take(2)
    info = info_of(file.path)
    assert info is not None and info.whole and info.segments == 3
    assert info.nbytes == PAGE_BYTES + 3 * RING.segment_bytes == file.start(3)
    file.close()


@pytest.mark.parametrize("name", ["", "..", "é" * 300, "\0", "\U0001f600" * 5_000, "/" * 5_000])
def test_any_name_will_do(name: str, tmp_path: Path) -> None:
    # A header longer than its page would lie where rows are.
    file = file_in(tmp_path, Owner(job=name, plane=name, rank=0))
    assert os.listdir(tmp_path) == [file.path.name]
    assert file.path.stat().st_size == PAGE_BYTES
    info = info_of(file.path)
    assert info is not None and info.header["plane"] == name[: len(info.header["plane"])]
    file.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("names", "job"), [
    ({"TORCHELASTIC_RUN_ID": "run", "SLURM_JOB_ID": "8"}, "run"),
    ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "8"}, "8"),
    ({}, f"pid{os.getpid()}"),
])
def test_a_job_has_the_name_that_its_launcher_gave(
    names: dict[str, str], job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(key, raising=False)
    for key, value in names.items():
        monkeypatch.setenv(key, value)
    assert Owner.here("plane", 1) == Owner(job=job, plane="plane", rank=1)


def test_planes_of_one_name_have_files_of_their_own(tmp_path: Path) -> None:
    files = [file_in(tmp_path) for _ in range(3)]
    assert sorted(os.listdir(tmp_path)) == sorted(file.path.name for file in files)
    assert len({file.path for file in files}) == 3
    files[0].close()
    assert not files[0].path.exists() and files[1].path.exists()
    # The file of a dead job of that name makes way.
    files[0].path.write_bytes(b"rows of long ago")
    again = file_in(tmp_path)
    assert again.path == files[0].path and again.path.stat().st_size == PAGE_BYTES
    for file in (again, *files[1:]):
        file.close()
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------------- when they go


def test_closing_removes_it_and_may_be_done_twice(tmp_path: Path) -> None:
    before = open_files()
    file = file_in(tmp_path)
    file.close()
    file.close()
    assert os.listdir(tmp_path) == [] and open_files() == before
    file = file_in(tmp_path)
    del file
    assert os.listdir(tmp_path) == [] and open_files() == before, "nobody has it any more"


def test_it_is_removed_when_its_process_ends(program: Ranks, tmp_path: Path) -> None:
    path = Path(program.run(make_and_keep, folder=str(tmp_path))[0])
    assert path.exists()
    program.start(end, how="by itself")
    assert program.exit_code(0) == 0
    assert os.listdir(tmp_path) == []


def test_it_stays_when_its_process_is_killed(program: Ranks, tmp_path: Path) -> None:
    path = Path(program.run(make_and_keep, folder=str(tmp_path))[0])
    (info,) = found_in(tmp_path)
    assert info.path == path and info.alive and info.header["pid"] == program.pids[0]
    assert not remove_dead(info) and path.exists()
    program.start(end, how="killed")
    assert program.exit_code(0) == -signal.SIGKILL
    (info,) = found_in(tmp_path)
    assert info.path == path and not info.alive and info.segments == 1
    assert remove_dead(info) and os.listdir(tmp_path) == []


def test_a_forked_process_leaves_it(program: Ranks, tmp_path: Path) -> None:
    assert program.run(fork_and_close, folder=str(tmp_path)) == [[True, False]]


def test_a_file_that_came_in_its_place_is_left_alone(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    file.path.unlink()
    file.take(0)
    file.sync()
    file.path.write_bytes(b"another")
    file.close()
    assert file.path.read_bytes() == b"another"


def test_where_files_cannot_be_locked_nothing_is_left(tmp_path: Path) -> None:
    before = open_files()
    with (
        mock.patch("fcntl.flock", side_effect=OSError(37, "No locks available")),
        pytest.raises(WorldError, match="No locks available"),
    ):
        file_in(tmp_path)
    assert os.listdir(tmp_path) == [] and open_files() == before


def test_a_file_that_was_taken_for_dead_is_made_again(tmp_path: Path) -> None:
    # Between its making and its locking another process of the same name may remove it.
    lock = fcntl.flock
    made: list[int] = []

    def flock(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            made.append(fd)
            if len(made) == 1:
                (tmp_path / OWNER.file_name).unlink()
        lock(fd, operation)

    before = open_files()
    with mock.patch("fcntl.flock", flock):
        file = file_in(tmp_path)
    assert len(made) == 2 and os.path.samestat(file.path.stat(), os.fstat(file.fd))
    file.close()
    assert open_files() == before


# ------------------------------------------------------------------------- finding, and removing


def header(**other: object) -> bytes:
    """Of a file of a dead job."""
    known: dict[str, object] = {
        "magic": "conduit rows", "format": 1, "job": "dead", "plane": "plane", "rank": 0, "pid": 1,
        "tier": "disk", "schema": 1, "row_bytes": 16, "segment_rows": 256, "segment_bytes": 4096,
    }
    return json.dumps(known | other).encode().ljust(PAGE_BYTES)


def test_only_files_of_rows_are_found_and_only_dead_ones_removed(tmp_path: Path) -> None:
    live = file_in(tmp_path)
    dead = tmp_path / "conduit-rows-dead"
    dead.write_bytes(header() + bytes(4096))
    os.utime(dead, (1, 1))
    others = {
        "conduit-rows-": b"", "conduit-rows-text": b"a letter", "conduit-rows-list": b"[1]",
        "conduit-rows-deep": b"[" * PAGE_BYTES, "conduit-rows-bytes": bytes(range(256)),
        "conduit-rows-new": header(format=2), "conduit-rows-magic": header(magic="else"),
        "conduit-rows-rank": header(rank="none"), "conduit-rows-empty": header(segment_bytes=0),
        "conduit-window-1": header(), "rows": header(),
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "conduit-rows-folder").mkdir()
    os.mkfifo(tmp_path / "conduit-rows-pipe")
    found = list(found_in(tmp_path))
    assert [(info.path, info.alive) for info in found] == [(dead, False), (live.path, True)]
    assert [info.segments for info in found] == [1, 0]
    before = set(os.listdir(tmp_path))
    assert [remove_dead(info) for info in found] == [True, False]
    assert before - set(os.listdir(tmp_path)) == {dead.name}
    live.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_bytes(header())
    link = folder / OWNER.file_name
    link.symlink_to(elsewhere)
    (folder / f"{OWNER.file_name}-1").symlink_to(tmp_path / "nothing")
    assert list(found_in(folder)) == [] and info_of(link) is None
    file = file_in(folder)
    assert file.path.name == f"{OWNER.file_name}-2"
    file.take(0)
    file.close()
    assert elsewhere.read_bytes() == header() and not (tmp_path / "nothing").exists()
    assert sorted(os.listdir(folder)) == [OWNER.file_name, f"{OWNER.file_name}-1"]


def test_a_file_that_goes_while_it_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "conduit-rows-dead"
    path.write_bytes(header())
    (info,) = found_in(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        remove_dead(info)
    assert list(found_in(tmp_path / "no such folder")) == []


def test_memory_of_places_is_given_back(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    for place in range(3):
        file.take(place)
    full = file.path.stat().st_blocks
    file.give_back(1)
    state = file.path.stat()
    if state.st_blocks == full:
        pytest.skip("this file system cannot free a part of a file")
    assert (full - state.st_blocks) * 512 >= RING.segment_bytes - PAGE_BYTES
    assert state.st_size == file.start(3), "the others stay where they are"
    file.close()
