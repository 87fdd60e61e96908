"""Sleeping until another process changes a word of memory that both map.

The kernel's futex (``man 2 futex``): a thread sleeps on an address as long as the 32 bits there are
what it saw, and another one wakes all who sleep on the same byte of the same file. So there is
nothing to poll, and who waits runs again as soon as the word has changed.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable

__all__ = ["WORKS", "sleep_while", "wake"]

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1

_number = _NUMBERS.get(platform.machine(), 0)

WORKS = sys.platform == "linux" and _number > 0
"""Whether this system has futexes, and the low half of a 64-bit word comes first."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _load() -> Callable[..., int]:
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Timespec)
    )
    return call


_call = _load() if WORKS else None


def sleep_while(address: int, word: int, longest_s: float) -> None:
    """Until the 64-bit word at ``address`` is no longer ``word``, for at most ``longest_s``.

    May return earlier: look again. Sees the low 32 bits. Other threads run meanwhile.
    """
    seconds = int(longest_s)
    longest = _Timespec(seconds, int((longest_s - seconds) * 1e9))
    assert _call is not None
    _call(_number, address, _WAIT, word & 0xFFFFFFFF, ctypes.byref(longest))


def wake(address: int) -> None:
    """Wakes every process that sleeps on that word."""
    assert _call is not None
    _call(_number, address, _WAKE, _ALL, None)
