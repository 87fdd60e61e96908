"""Memory that the ranks of one host share: every rank has windows, which the others map.

[Note: shared memory]
A window is a file in /dev/shm that one rank writes and the other ranks of its host map. It loses
its name as soon as all have mapped it, so that nothing is left behind however a process ends;
unless it is killed in these milliseconds, when a later job that makes windows removes the file. A
window grows with what is asked of it, in memory that is really there (a page that the file system
cannot give would kill the process that touches it), and readers map it anew when they find it too
short.

Its first words are a header. A rank that has something to say writes it, and then the number of
the call into a word that only it writes; others watch that word, yielding the core at first, then
asleep until it changes (futex.py). All processes see the words of one window change in the order in
which they were written, given a barrier between data and number on both sides.

Who waits has a deadline, and finds out earlier if the other rank is gone: a rank locks its own
windows (``flock``), and the kernel gives a lock back when a process ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives import futex

__all__ = ["NUMBERS", "Window", "Windows", "open_windows"]

NUMBERS = 8
"""Words at the start of a window that hold published numbers; what follows is data."""

_DIRECTORY = Path("/dev/shm")
_PREFIX = "conduit-window-"
"""Of windows alone: other files of Conduit are to outlive the process that made them."""
_PAGE_BYTES = 4096
_GIVEN_UP = 3
"""The first words are three numbers that ranks publish; as many say at which a rank gave up waiting
for the others'; the last one says that it has closed the window."""
_CLOSED = NUMBERS - 1
_YIELDING_S = 0.0003
_LOOK_AFTER_S = 0.05
_ABANDONED_S = 60.0


class Window:
    """One file as this process maps it: ``words`` are the integers of its header, ``block`` the
    bytes behind it."""

    def __init__(self, fd: int, header_bytes: int) -> None:
        self._fd, self._header_bytes = fd, header_bytes
        self.block: Tensor
        self.words: memoryview
        self._map()
        self._close = weakref.finalize(self, os.close, fd)

    def _map(self) -> None:
        with torch.inference_mode(False):
            everything = torch.from_file(  # keeps no descriptor, unlike mmap.mmap
                f"/proc/self/fd/{self._fd}", shared=True, size=os.fstat(self._fd).st_size,
                dtype=torch.uint8, device=torch.device("cpu"),
            )
        self.block = everything[self._header_bytes :]
        self.words = everything[: self._header_bytes].numpy().data.cast("q")
        self._address = everything.data_ptr()

    def reach(self, nbytes: int) -> Tensor:
        """The block, mapped anew where its writer has made it longer, to at least ``nbytes``."""
        if nbytes > len(self.block):
            self._map()
        return self.block

    def grow(self, nbytes: int) -> None:
        """Makes the block at least ``nbytes`` long. Raises OSError if there is no memory."""
        if nbytes > len(self.block):
            os.posix_fallocate(self._fd, 0, self._header_bytes + nbytes)
            self._map()

    def set(self, word: int, number: int) -> None:
        """Writes a word of the header and wakes who sleeps on it."""
        self.words[word] = number
        futex.wake(self._address + 8 * word)

    def sleep_while(self, word: int, number: int, longest_s: float) -> None:
        """Until the word is no longer ``number``; may return earlier."""
        futex.sleep_while(self._address + 8 * word, number, longest_s)

    def is_abandoned(self) -> bool:
        """Whether the rank that locked it is gone."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """The memory itself goes when no view of it is left."""
        self._close()
        self.block = self.block.new_empty(0)
        self.words = memoryview(b"").cast("q")


class Windows:
    """This rank's window and those of the ``peers``: ranks of its host that map each other's."""

    def __init__(self, own: Window, peers: dict[int, Window]) -> None:
        self.own, self.peers = own, peers

    def publish(self, word: int, number: int) -> None:
        """Lets others see what was written before, under a number that only grows."""
        _barrier()
        self.own.set(word, number)

    def wait(self, word: int, number: int, peers: Sequence[int], timeout_s: float) -> None:
        """Returns when each of ``peers`` has published at least ``number`` in its ``word``.

        Raises RuntimeError naming the first that did not within the time, is gone, or has itself
        given up waiting for this one.
        """
        begun = time.monotonic()
        try:
            for peer in peers:
                if self.peers[peer].words[word] < number:
                    self._wait(word, number, peer, peers, begun, timeout_s)
            _barrier()
            for peer in peers:
                if 0 < number <= self.peers[peer].words[_GIVEN_UP + word]:
                    raise RuntimeError(f"rank {peer} did not wait any longer")
        except RuntimeError:
            self.publish(_GIVEN_UP + word, number)
            raise

    def _wait(
        self, word: int, number: int, peer: int, peers: Sequence[int], begun: float,
        timeout_s: float,
    ) -> None:
        window = self.peers[peer]
        look_at = begun + _LOOK_AFTER_S
        while (seen := window.words[word]) < number:
            now = time.monotonic()
            # A rank closes its windows when all have come, and what one published just before it
            # ended still counts: so look for the number once more.
            if window.words[_CLOSED] and window.words[word] < number:
                raise RuntimeError(f"rank {peer} has closed its shared memory")
            if now - begun < _YIELDING_S:
                os.sched_yield()
                continue
            if now >= look_at:
                ended = [p for p in peers if self.peers[p].is_abandoned()]
                if ended and window.words[word] < number:
                    raise RuntimeError(f"processes of ranks {ended} have ended")
                if now - begun > timeout_s:
                    raise RuntimeError(f"waited {timeout_s:g} s for rank {peer}")
                look_at = now + min(_LOOK_AFTER_S, max(timeout_s - (now - begun), 0.001))
            window.sleep_while(word, seen, look_at - now)

    def close(self) -> None:
        """Local. Ranks that wait for this one learn, within 50 ms, that it will not come."""
        self.publish(_CLOSED, 1)
        for window in (self.own, *self.peers.values()):
            window.close()
        self.peers = {}


def open_windows(
    count: int, *, words: int, rank: int, hosts: NDArray[np.int64], group: dist.ProcessGroup
) -> list[Windows] | None:
    """Collective. ``count`` windows with headers of ``words`` integers, on all ranks or on none.

    None where some rank cannot make or map them: another system, another user, no memory left.
    """
    header_bytes = -(-(NUMBERS + words) * 8 // _PAGE_BYTES) * _PAGE_BYTES
    near = [peer for peer in range(len(hosts)) if peer != rank and hosts[peer] == hosts[rank]]
    _remove_abandoned()
    name = secrets.randbits(62)
    own = _map(name, count, header_bytes, make=True)
    try:
        names = _swap(np.full(len(hosts), name), group).tolist()
        peers = {peer: _map(names[peer], count, header_bytes, make=False) for peer in near}
        here = all(len(windows) == count for windows in (own, *peers.values()))
        everywhere = bool(_swap(np.full(len(hosts), int(here)), group).all())
    finally:
        for i in range(len(own)):
            with contextlib.suppress(OSError):
                _path(name, i).unlink()
    if everywhere:
        return [
            Windows(own[i], {peer: windows[i] for peer, windows in peers.items()})
            for i in range(count)
        ]
    for windows in (own, *peers.values()):
        for window in windows:
            window.close()
    return None


def _map(name: int, count: int, header_bytes: int, *, make: bool) -> list[Window]:
    """The windows of that name, fewer than ``count`` if something is in the way."""
    windows: list[Window] = []
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if make else 0)
    with contextlib.suppress(OSError, RuntimeError):
        for i in range(count if futex.WORKS else 0):
            path = _path(name, i)
            fd = os.open(path, flags, 0o600)
            try:
                if make:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.posix_fallocate(fd, 0, header_bytes)
                windows.append(Window(fd, header_bytes))
            except BaseException:
                os.close(fd)
                if make:
                    path.unlink()
                raise
    return windows


def _remove_abandoned() -> None:
    """Removes windows whose rank was killed while it made them."""
    for path in _DIRECTORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < _ABANDONED_S:
                continue  # perhaps not locked yet
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


def _path(name: int, i: int) -> Path:
    return _DIRECTORY / f"{_PREFIX}{name:016x}-{i}"


def _swap(sent: NDArray[np.int64], group: dist.ProcessGroup) -> NDArray[np.int64]:
    received = np.empty_like(sent)
    dist.all_to_all_single(torch.from_numpy(received), torch.from_numpy(sent), group=group)
    return received


_lock = threading.Lock()


def _barrier() -> None:
    """Neither the compiler nor the processor moves reads and writes of memory across it.

    Taking a lock is an acquire and giving it back a release; a release followed by an acquire of
    the same lock is ordered on every processor that has weaker rules than x86.
    """
    with _lock:
        pass
    with _lock:
        pass
