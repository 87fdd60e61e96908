"""``inspect``: files of rows, listed, verified, and removed where their job is dead."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conduit.__main__ import main
from conduit.tiers.address import PAGE_BYTES
from conduit.tiers.files import Owner, RowFile
from conduit.tiers.tier import Ring
from conduit.tools import inspect
from tests.tiers.contract import LAYOUT
from tests.tiers.stores import CPU

Measured = Callable[..., dict[str, Any]]
Refused = Callable[..., str]

RING = Ring(layout=LAYOUT, rows=7 * 64, segment_rows=64, device=CPU)
HASH = f"{LAYOUT.schema.hash:016x}"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm: other jobs' files there are not for tests to remove."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(inspect, "SHM", folder)
    return folder


@pytest.fixture
def live(shared: Path) -> Iterator[RowFile]:
    """A file of this process with room for two segments."""
    file = RowFile(shared, Owner(job="live", plane="plane", rank=3), RING, tier="shared")
    file.take(1)
    yield file
    file.close()


def dead_in(folder: Path, live: RowFile) -> Path:
    """The same file without a process."""
    path = folder / "conduit-rows-dead"
    path.write_bytes(live.path.read_bytes().replace(b'"job": "live"', b'"job": "dead"'))
    os.utime(path, (1, 1))
    return path


# ------------------------------------------------------------------------------------ --shared


def test_files_are_listed(
    measured: Measured, shared: Path, live: RowFile, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    dead = dead_in(disk, live)
    (shared / "conduit-rows-no").write_bytes(b"something else")
    (shared / "conduit-window-1").write_bytes(live.path.read_bytes())
    expected = {
        "path": str(live.path), "job": "live", "plane": "plane", "rank": 3, "tier": "shared",
        "bytes": PAGE_BYTES + 2 * RING.segment_bytes, "alive": True, "schema_hash": HASH,
        "removed": False,
    }
    assert measured("inspect", "--shared")["results"] == [expected]
    # A folder that is named twice is listed once.
    found = measured("inspect", "--shared", "--folder", str(disk), str(shared), "--folder", ".")
    assert found["command"] == "inspect" and found["args"]["folder"][2] == "."
    assert found["results"] == [
        expected, expected | {"path": str(dead), "job": "dead", "alive": False},
    ]
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines() if "conduit-rows" in line]
    assert lines[-1][:6] == [str(dead), "dead", "plane", "3", "shared", "12,288"]
    assert lines[-1][6:] == ["no", HASH, "no"] and lines[-2][6] == "yes"
    assert dead.exists()


def test_only_files_of_dead_jobs_are_removed(
    measured: Measured, shared: Path, live: RowFile, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dead, other = dead_in(tmp_path, live), shared / "conduit-rows-letter"
    other.write_bytes(b"something else")
    found = measured("inspect", "--shared", "--folder", str(tmp_path), "--remove")
    assert [(r["path"], r["removed"]) for r in found["results"]] == [
        (str(live.path), False), (str(dead), True),
    ]
    assert f"# removed {dead}\n" in capsys.readouterr().out
    assert not dead.exists() and live.path.exists() and other.exists()
    again = measured("inspect", "--shared", "--folder", str(tmp_path), "--remove")
    assert [r["path"] for r in again["results"]] == [str(live.path)]
    assert "# removed nothing\n" in capsys.readouterr().out


def test_what_cannot_be_removed_is_told(
    shared: Path, live: RowFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = dead_in(shared, live)

    def refuse(info: object) -> bool:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(inspect, "remove_dead", refuse)
    assert main(["inspect", "--shared", "--remove"]) == 1
    assert f"# cannot remove {dead}: Operation not permitted\n" in capsys.readouterr().out


def test_nothing_to_list(measured: Measured, shared: Path) -> None:
    assert measured("inspect", "--shared")["results"] == []
    shared.rmdir()
    assert measured("inspect", "--shared", "--remove")["results"] == []


# ---------------------------------------------------------------------------------------- PATH


def test_files_are_verified(measured: Measured, live: RowFile, tmp_path: Path) -> None:
    dead = dead_in(tmp_path, live)
    found = measured("inspect", str(live.path), str(dead))
    assert {key: found["results"][0][key] for key in
            ("part", "rows", "bytes", "schema_hash", "ok", "alive")} == {
        "part": str(live.path), "rows": 128, "bytes": PAGE_BYTES + 2 * RING.segment_bytes,
        "schema_hash": HASH, "ok": True, "alive": True,
    }
    assert found["results"][1]["job"] == "dead" and not found["results"][1]["alive"]


def test_what_is_no_file_of_rows_or_only_a_part_of_one(
    live: RowFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, other, target = dead_in(tmp_path, live), tmp_path / "other", tmp_path / "results.json"
    other.write_bytes(b"something else")
    os.truncate(dead, PAGE_BYTES + 2 * RING.segment_bytes - 1)
    words = ["inspect", str(live.path), str(dead), str(other), "--json", str(target)]
    assert main(words) == 1
    rows = json.loads(target.read_text())["results"]
    assert [row["ok"] for row in rows] == [True, False, False]
    assert [row["rows"] for row in rows] == [128, 64, None]
    assert rows[2]["bytes"] == 14 and rows[2]["schema_hash"] is None
    text = capsys.readouterr().out
    assert f"# {dead} is not whole" in text and f"# {other} is no file of rows" in text
    for path in (dead, other):
        assert main(["inspect", str(path)]) == 1
    os.truncate(dead, 10)
    assert main(["inspect", str(dead)]) == 1


# --------------------------------------------------------------------------------------- usage


def test_what_is_refused(refused: Refused, shared: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert "--shared" in refused("inspect")
    assert "--shared" in refused("inspect", "--shared", __file__)
    assert "go with --shared" in refused("inspect", __file__, "--remove")
    assert "go with --shared" in refused("inspect", __file__, "--folder", str(tmp_path))
    for wrong in (missing, __file__):
        said = refused("inspect", "--shared", "--folder", str(tmp_path), wrong)
        assert wrong in said and "a folder that exists" in said
    for wrong in (missing, str(tmp_path)):
        said = refused("inspect", wrong)
        assert wrong in said and "a file that exists" in said


def test_as_a_command(
    launched: Callable[..., subprocess.CompletedProcess[str]], live: RowFile, tmp_path: Path
) -> None:
    """In another process, which sees that this one lives."""
    dead = dead_in(tmp_path, live)
    words = ["inspect", "--shared", "--folder", str(live.path.parent), str(tmp_path)]
    done = launched(*words, "--json", "-")
    assert done.returncode == 0, done.stderr
    found = {row["path"]: row for row in json.loads(done.stdout)["results"]}
    assert found[str(live.path)]["alive"] and not found[str(dead)]["alive"]
