"""How much memory there is, and how much of it is free: of all processes together, in bytes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["Available", "device_bytes", "host_bytes", "mount_bytes"]

Available = tuple[int, int]
"""All there is, and what can still be had."""

_RESERVE_BYTES = 1 << 30
"""Of a GPU, for what CUDA and NCCL allocate later."""


def host_bytes(root: Path = Path("/")) -> Available:
    """Of this host's memory, or of the control group's, if that has less.

    A group's page cache counts as free as far as the kernel would give it back first, which is what
    MemAvailable means for the whole host.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = total
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for folder, names in _groups(root):
        limit, used = (_number(folder / name) for name in names)
        if limit is not None and used is not None:
            reclaimable = _statistic(folder / "memory.stat", "inactive_file")
            total = min(total, limit)
            available = min(available, max(limit - used + reclaimable, 0))
    return total, available


def _groups(root: Path) -> list[tuple[Path, tuple[str, str]]]:
    """The control groups that this process is in, from the innermost outwards: where they are,
    and what their limit and their use are called."""
    found: list[tuple[Path, tuple[str, str]]] = []
    membership = root / "proc/self/cgroup"
    lines = membership.read_text().splitlines() if membership.exists() else []
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = base, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top = base / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = top / path.lstrip("/")
        # A container may show its own group as the root, while its path names the one outside.
        folders = (folder for folder in (inner, *inner.parents) if folder.is_relative_to(top))
        found += [(folder, names) for folder in folders]
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def mount_bytes(folder: Path) -> Available:
    """Of the file system that a folder is on, for this user. Raises OSError."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def device_bytes(device: torch.device) -> Available:
    """Of a GPU's memory, without a reserve of 1 GiB; what the job has allocated is not free."""
    free, total = torch.cuda.mem_get_info(device)
    return total, max(free - _RESERVE_BYTES, 0)
