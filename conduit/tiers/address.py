"""One range of addresses, backed piece by piece by whatever memory there is.

[Note: one range, any memory]
Host memory, shared memory and files are all memory that the kernel maps, so the rows of a shard lie
side by side in one range of addresses, whichever of them is behind each piece. A gather over
several tiers is then the same single pass as over one: nothing is split by tier, and nothing is
copied twice. The processor's page tables know where a row is, and they know it for free.

A piece is moved to other memory by filling that beside the range and then having the kernel put it
in place of the old one (``mremap``), which holds up whoever touches the range meanwhile: a reader
sees the old memory or the new, and both hold the same bytes. Who writes during a move must see to
it that the move is given up (see ``store.py``).

Only Linux can do this. Elsewhere the range is plain memory, the only tier is ``host``, and nothing
is moved.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["PAGE_BYTES", "WORKS", "AddressRange"]

WORKS = sys.platform == "linux"
PAGE_BYTES = 4096 if not WORKS else mmap.PAGESIZE
_HUGE_BYTES = 2 << 20
_FIXED, _MOVE_TO = 0x10, 0x1 | 0x2
_NO_ACCESS, _ACCESS = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
if WORKS:
    _libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    ]
    _libc.mremap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    ]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class AddressRange:
    """``nbytes`` bytes of addresses. ``block`` (uint8 ``[nbytes]``) sees all of them; what has no
    memory yet must not be touched. The range is given back when no view of it is left.

    Pieces begin and end at multiples of ``PAGE_BYTES``. A piece is backed by a file, from
    ``offset`` bytes on, or by anonymous memory of this process. Raises OSError.
    """

    def __init__(self, nbytes: int) -> None:
        self._address = 0
        if not WORKS:
            raw = np.empty(nbytes, dtype=np.uint8)
        else:
            # Huge pages begin at multiples of their size.
            whole = nbytes + _HUGE_BYTES
            begin = _map(None, whole, _NO_ACCESS, -1, 0)
            self._address = -(-begin // _HUGE_BYTES) * _HUGE_BYTES
            memory = (ctypes.c_uint8 * nbytes).from_address(self._address)
            weakref.finalize(memory, _libc.munmap, begin, whole).atexit = False
            raw = _array(memory)
        with torch.inference_mode(False):
            self.block: Tensor = torch.from_numpy(raw)

    def back(self, start: int, nbytes: int, *, fd: int = -1, offset: int = 0) -> None:
        """Puts memory behind a piece. What was in it is lost."""
        if WORKS:
            _map(self._address + start, nbytes, _ACCESS, fd, offset)

    def clear(self, start: int, nbytes: int) -> None:
        """Gives the memory of a piece back."""
        if WORKS:
            _map(self._address + start, nbytes, _NO_ACCESS, -1, 0)

    def copy(self, start: int, nbytes: int, *, fd: int = -1, offset: int = 0) -> Replacement:
        """A copy of a piece in other memory, to be put in its place."""
        return Replacement(self._address + start, nbytes, fd, offset)


class Replacement:
    """Other memory for a piece of a range, already with the same bytes."""

    def __init__(self, address: int, nbytes: int, fd: int, offset: int) -> None:
        self._target, self._nbytes = address, nbytes
        self._address = _map(None, nbytes, _ACCESS, fd, offset)
        try:
            source, target = (
                _array((ctypes.c_uint8 * nbytes).from_address(at))
                for at in (address, self._address)
            )
            np.copyto(target, source)
        except BaseException:
            self.drop()
            raise

    def put(self) -> None:
        """Takes the place of the piece. Raises OSError, and then nothing has changed."""
        moved = _libc.mremap(self._address, self._nbytes, self._nbytes, _MOVE_TO, self._target)
        if moved == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def drop(self) -> None:
        """Gives it up."""
        _libc.munmap(self._address, self._nbytes)


def _array(memory: Any) -> NDArray[np.uint8]:
    return np.frombuffer(memory, dtype=np.uint8)


def _map(address: int | None, nbytes: int, access: int, fd: int, offset: int) -> int:
    flags = _FIXED if address is not None else 0
    if fd >= 0:
        flags |= mmap.MAP_SHARED
    else:
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = _libc.mmap(address, nbytes, access, flags, fd, offset)
    if mapped == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if access != _NO_ACCESS:
        # Random rows: of a file only what is asked for, of memory as much in a page as can be.
        _libc.madvise(mapped, nbytes, mmap.MADV_RANDOM if fd >= 0 else mmap.MADV_HUGEPAGE)
    return int(mapped)
