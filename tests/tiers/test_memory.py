"""What a plane takes of memory and disk: what it was given, and no more as time goes by.

Measured in a process that does nothing else, from what the kernel says of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import conduit
from conduit import ExperiencePlane, Ingestion
from conduit.schema import RowLayout
from conduit.tiers.shard import ring_rows
from conduit.tiers.tier import Ring

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs Linux to see a process's memory"
)

ROOT = Path(__file__).parents[2]
ROW = {"x": torch.zeros(256)}
ROW_BYTES = 1 << 10
HOST, SHARED, DISK = 640 << 20, 32 << 20, 640 << 20
BUDGET = HOST + SHARED + DISK
STAGING_ROWS = 1_024


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of this module returns in a new process."""
    program = (
        f"import json; from {__name__} import {function.__name__} as f; "
        f"print(json.dumps(f(*json.loads({json.dumps(arguments)!r}))))"
    )
    # As users have it, without the checks that tests turn on.
    environment = {key: value for key, value in os.environ.items() if key != "CONDUIT_CHECKS"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def status(name: str) -> int:
    """A figure of /proc/self/status in bytes, such as RssAnon."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"the kernel says nothing of {name}")


def file_bytes(folder: Path) -> int:
    """What the files in a folder that this process has open take of the file system."""
    taken = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink().parent == folder:
                found = link.stat()
                taken[found.st_ino] = found.st_blocks * 512
    return sum(taken.values())


# ------------------------------------------------------------------------ over the budget


def filled(folder: str) -> dict[str, int]:
    """Fills a plane whose tiers hold its ring exactly, goes round once more and takes batches. What
    it took at most, in bytes."""
    capacity = BUDGET // ROW_BYTES - 2 * STAGING_ROWS
    layout = RowLayout(conduit.Schema.from_example(ROW))
    ring = Ring.of(layout, ring_rows(capacity, STAGING_ROWS), torch.device("cpu"))
    assert ring.nbytes == BUDGET
    assert all(size % ring.segment_bytes == 0 for size in (HOST, SHARED, DISK))
    rows = {"x": torch.ones(STAGING_ROWS, 256)}
    resident, anonymous = status("VmRSS"), status("RssAnon")
    # From now on VmHWM is the most there was since now.
    Path("/proc/self/clear_refs").write_text("5")
    most = {"anonymous": 0, "shared": 0, "disk": 0}
    with ExperiencePlane(
        ROW, capacity=capacity, batch_size=256, ingestion=Ingestion(staging_rows=STAGING_ROWS),
        tiers=[conduit.Host(HOST), conduit.Shared(SHARED), conduit.Disk(folder, DISK)],
    ) as plane:
        for step in range(12_000):
            if step < 2 * capacity // STAGING_ROWS:
                plane.extend(rows)
            # Later batches are for the spans of the trace, of which the last 16,384 are kept.
            assert plane.sample() is not None
            if step % 50 == 49:
                most["anonymous"] = max(most["anonymous"], status("RssAnon") - anonymous)
                most["shared"] = max(most["shared"], file_bytes(Path("/dev/shm")))
                most["disk"] = max(most["disk"], file_bytes(Path(folder)))
        assert len(plane) == capacity
        assert plane.report().tiers == (("host", HOST), ("shared", SHARED), ("disk", DISK))
        most["resident"] = status("VmHWM") - resident
    return most


def test_a_plane_takes_hardly_more_than_its_budget(tmp_path: Path) -> None:
    most = alone(filled, str(tmp_path))
    # It was full: less than all of it would mean that something was not counted.
    assert HOST <= most["anonymous"] <= HOST + 0.02 * BUDGET, most
    assert SHARED <= most["shared"] <= 1.02 * SHARED, most
    assert DISK <= most["disk"] <= 1.02 * DISK, most
    # The most at any moment, the making of the plane and pages of files included: torch's own code
    # as well, where it had not run before. (The kernel may have dropped pages of the disk's file.)
    assert HOST + SHARED <= most["resident"] <= 1.02 * BUDGET, most
    assert not list(tmp_path.iterdir()), "the file goes with the plane"


# ------------------------------------------------------------------------- as time goes by


def extended(folder: str) -> list[int]:
    """A million extends of one row, with batches and flushes in turn in between. Anonymous memory
    after each 100,000 of them, in bytes."""
    row = {"x": torch.zeros(1, 16)}
    libc = ctypes.CDLL(None)
    taken = []
    with ExperiencePlane(
        {"x": row["x"][0]}, capacity=20_000, batch_size=32,
        ingestion=Ingestion(staging_rows=100),
        tiers=[conduit.Host("1MB"), conduit.Shared("1MB"), conduit.Disk(folder, "1MB")],
    ) as plane:
        for number in range(1, 1_000_001):
            plane.extend(row)
            # More at first, until there are as many spans for the trace as are kept.
            every = 5 if number <= 100_000 else 100
            if number % (2 * every) == 0:
                plane.sample()
            elif number % every == 0:
                plane.flush()
            if number % 100_000 == 0:
                # What is free within the heap comes and goes, up to a few MB.
                gc.collect()
                libc.malloc_trim(0)
                taken.append(status("RssAnon"))
        assert plane.report().rows_committed == 1_000_000
    return taken


def test_a_million_extends_leave_nothing_behind(tmp_path: Path) -> None:
    taken = alone(extended, str(tmp_path))
    assert len(taken) == 10
    # Half a byte for each extend, or 60 for each batch or flush.
    assert max(taken) - taken[0] < 512 << 10, taken
