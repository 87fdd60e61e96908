"""Which host a rank is on: ranks are on one host if they share /dev/shm."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

__all__ = ["host_identity"]


def host_identity() -> int:
    """63 bits that ranks have in common exactly when they share /dev/shm.

    The hostname alone would not do: containers on one machine may share a name without sharing
    memory, or share memory under two names.
    """
    parts = [platform.node()]
    boot, shm = Path("/proc/sys/kernel/random/boot_id"), Path("/dev/shm")
    if boot.exists() and shm.exists():
        parts = [boot.read_text().strip(), str(shm.stat().st_dev)]
    digest = hashlib.sha256("|".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
