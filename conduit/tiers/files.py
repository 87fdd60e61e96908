"""Files that hold rows: named by their job, locked while it lives, removed at its end.

A process that is killed leaves its file behind, with the rows in it; the kernel gives the lock
back, which is how others tell. ``python -m conduit inspect --shared`` lists such files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conduit.errors import CapacityError, WorldError
from conduit.tiers.address import PAGE_BYTES
from conduit.tiers.tier import Ring

__all__ = ["Owner", "RowFile", "RowFileInfo", "found_in", "info_of", "remove_dead", "told"]

_PREFIX = "conduit-rows-"
_MAGIC = "conduit rows"
_FORMAT = 1
_KNOWN = {"job": str, "plane": str, "rank": int, "pid": int, "tier": str, "schema": int,
          "row_bytes": int, "segment_rows": int, "segment_bytes": int}
_MOST_LETTERS = 150
"""Of a name in the header, which is one page however the letters are written."""
_PUNCH_HOLE = 0x1 | 0x2

_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Whose rows they are: the job, the plane in it, the rank among the plane's."""

    plane: str
    rank: int
    job: str = ""

    @classmethod
    def here(cls, plane: str, rank: int) -> Owner:
        """In this process. Jobs under torchrun or Slurm have a name; others are told apart by
        process."""
        names = (os.environ.get(key) for key in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"))
        job = next((name for name in names if name and name != "none"), f"pid{os.getpid()}")
        return cls(plane=plane, rank=rank, job=job)

    @property
    def file_name(self) -> str:
        name = f"{self.job}-{self.plane}-{self.rank}"
        return _PREFIX + re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:200]


class RowFile:
    """A file for the segments of a ring, behind a header of one page. What of it is used is really
    there: touching a hole kills the process once the disk is full."""

    def __init__(self, folder: Path, owner: Owner, ring: Ring, *, tier: str) -> None:
        self._tier, self._bytes = tier, ring.segment_bytes
        header = json.dumps({
            "magic": _MAGIC, "format": _FORMAT, "job": owner.job[:_MOST_LETTERS],
            "plane": owner.plane[:_MOST_LETTERS], "rank": owner.rank, "pid": os.getpid(),
            "tier": tier, "schema": ring.layout.schema.hash, "row_bytes": ring.layout.row_bytes,
            "segment_rows": ring.segment_rows, "segment_bytes": ring.segment_bytes,
        }).encode()
        try:
            self.path, self.fd = _new(folder, owner.file_name)
            self._remove = weakref.finalize(self, _remove, self.path, self.fd, os.getpid())
            os.pwrite(self.fd, header.ljust(PAGE_BYTES), 0)
        except OSError as error:
            if hasattr(self, "fd"):
                self._remove()
            raise told(error, f"the {tier} tier cannot make its file", folder) from error

    def start(self, place: int) -> int:
        """The first byte of segment ``place`` of the file."""
        return PAGE_BYTES + place * self._bytes

    def take(self, place: int) -> None:
        """Allocates a segment. Raises CapacityError if the disk is full."""
        try:
            os.posix_fallocate(self.fd, self.start(place), self._bytes)
        except OSError as error:
            raise told(error, f"the {self._tier} tier cannot grow", self.path) from error

    def give_back(self, place: int) -> None:
        """Frees a segment's memory, where the file system can."""
        _libc.fallocate(self.fd, _PUNCH_HOLE, self.start(place), self._bytes)

    def sync(self) -> None:
        """Returns when what was written is on the disk. Raises CapacityError or WorldError."""
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise told(error, f"the {self._tier} tier cannot write", self.path) from error

    def close(self) -> None:
        """Removes the file; memory that is mapped from it stays while it is used."""
        self._remove()


def told(error: OSError, what: str, path: Path) -> CapacityError | WorldError:
    """An error of the system in the words of Conduit."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CapacityError(
            what, expected=f"free space under {path}", got=error.strerror,
            cure="Lower capacity or the tier's size, or free some space",
        )
    return WorldError(
        what, got=f"{error.strerror} ({path})", expected="a folder that this user may write to",
        cure="Give another folder, or leave the tier out",
    )


def _new(folder: Path, name: str) -> tuple[Path, int]:
    """A new locked file. One of that name that nobody holds any more makes way."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    for number in range(1_000):
        path = folder / (f"{name}-{number}" if number else name)
        with contextlib.suppress(OSError):
            if not _is_alive(path):
                path.unlink()
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError:
                path.unlink()
                os.close(fd)
                raise
            if _is_at(path, fd):
                return path, fd
            os.close(fd)  # somebody took it for dead before it was locked
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def _remove(path: Path, fd: int, pid: int) -> None:
    # A process that was forked from the owner has the file as well, and ends earlier.
    if os.getpid() == pid and _is_at(path, fd):
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    """Whether the open file still has that name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class RowFileInfo:
    """A file of rows as found: its header, its size, and whether its process lives."""

    path: Path
    header: dict[str, Any]
    nbytes: int
    alive: bool

    @property
    def segments(self) -> int:
        """Places for segments, in use or not."""
        return (self.nbytes - PAGE_BYTES) // int(self.header["segment_bytes"])

    @property
    def whole(self) -> bool:
        """Whether nothing is missing at its end."""
        return self.nbytes == PAGE_BYTES + self.segments * int(self.header["segment_bytes"])


def found_in(folder: Path) -> Iterator[RowFileInfo]:
    """The files of rows in a folder, oldest first; only those that this user may read."""
    paths = [path for path in folder.glob(f"{_PREFIX}*") if path.is_file()]
    for path in sorted(paths, key=_time):
        info = info_of(path)
        if info is not None:
            yield info


def info_of(path: Path) -> RowFileInfo | None:
    """What a file of rows says of itself; None for any other file, and for one that this user may
    not read."""
    header = _header(path)
    with contextlib.suppress(OSError):
        if header is not None:
            return RowFileInfo(
                path=path, header=header, nbytes=path.stat().st_size, alive=_is_alive(path)
            )
    return None


def remove_dead(info: RowFileInfo) -> bool:
    """Removes a file unless its process lives; whether it did. Raises OSError."""
    if _is_alive(info.path):
        return False
    info.path.unlink()
    return True


def _header(path: Path) -> dict[str, Any] | None:
    """The header of a file of rows; None for any other file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            header = json.loads(os.pread(fd, PAGE_BYTES, 0))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.get("magic") != _MAGIC:
        return None
    known = all(isinstance(header.get(key), kind) for key, kind in _KNOWN.items())
    if not known or header.get("format") != _FORMAT or header["segment_bytes"] < 1:
        return None
    return header


def _is_alive(path: Path) -> bool:
    """Whether a process holds the file's lock. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
