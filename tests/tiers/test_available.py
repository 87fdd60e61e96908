"""How much memory there is, as the kernel tells it: for the host, and for control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conduit.tiers.available import host_bytes, mount_bytes

TOTAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def two(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    """A control group of version 2."""
    base = f"sys/fs/cgroup/{folder}"
    return {
        f"{base}/memory.max": limit, f"{base}/memory.current": used,
        f"{base}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 9",
    }


def one(folder: str, limit: object, used: int, inactive: int = 0) -> dict[str, object]:
    """A control group of version 1."""
    base = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{base}/memory.limit_in_bytes": limit, f"{base}/memory.usage_in_bytes": used,
        f"{base}/memory.stat": f"cache 7\ninactive_file {inactive}",
    }


FREE = {"proc/meminfo": f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable:  {80 << 10} kB"}


@pytest.mark.parametrize(("files", "expected"), [
    ({}, (TOTAL, TOTAL)),
    (FREE, (TOTAL, 80 * MIB)),
    # Version 2: the page cache that would be given back first is free, and a group without a
    # limit says nothing.
    ({"proc/self/cgroup": "0::/job", **two("job", 60 * MIB, 50 * MIB)}, (60 * MIB, 10 * MIB)),
    ({"proc/self/cgroup": "0::/job", **two("job", 60 * MIB, 50 * MIB, 30 * MIB)},
     (60 * MIB, 40 * MIB)),
    ({"proc/self/cgroup": "0::/job", **two("job", "max", 50 * MIB)}, (TOTAL, 80 * MIB)),
    ({"proc/self/cgroup": "0::/job", **two("job", 90 * MIB, 0)}, (90 * MIB, 80 * MIB)),
    # More is used than may be: nothing is free.
    ({"proc/self/cgroup": "0::/job", **two("job", 60 * MIB, 61 * MIB)}, (60 * MIB, 0)),
    # The least of all groups around it.
    ({"proc/self/cgroup": "0::/outer/inner", **two("outer/inner", 60 * MIB, 10 * MIB),
      **two("outer", 70 * MIB, 65 * MIB)}, (60 * MIB, 5 * MIB)),
    # In a container the path is the host's, and the group is at the top.
    ({"proc/self/cgroup": "0::/docker/0123", **two("", 50 * MIB, 20 * MIB)}, (50 * MIB, 30 * MIB)),
    ({"proc/self/cgroup": "0::/../../elsewhere", **two("", 50 * MIB, 20 * MIB)},
     (50 * MIB, 30 * MIB)),
    # Version 1, whose other controllers have groups of their own.
    ({"proc/self/cgroup": "5:cpu,cpuacct:/cpus\n4:hugetlb,memory:/job\n0::/job",
      **one("job", 40 * MIB, 10 * MIB, 2 * MIB), **one("cpus", 1, 1)}, (40 * MIB, 32 * MIB)),
    ({"proc/self/cgroup": "4:memory:/job", **one("job", (1 << 63) - 4096, 10 * MIB)},
     (TOTAL, 80 * MIB)),
    # Nothing that can be read.
    ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/memory.max": 1}, (TOTAL, 80 * MIB)),
])
def test_memory_of_a_host(
    files: dict[str, object], expected: tuple[int, int], tmp_path: Path
) -> None:
    write(tmp_path, (FREE if files else {}) | files)
    assert host_bytes(tmp_path) == expected


def test_memory_of_this_host() -> None:
    total, free = host_bytes()
    assert 0 <= free <= total <= TOTAL


def test_memory_of_a_mount(tmp_path: Path) -> None:
    total, free = mount_bytes(tmp_path)
    assert 0 <= free <= total
    with pytest.raises(FileNotFoundError):
        mount_bytes(tmp_path / "no such folder")
