"""Boxes: where rows wait to be sent, in shared memory where other ranks of the host read them."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives.shared import NUMBERS, Window, Windows
from conduit.errors import CapacityError

__all__ = ["Box"]

_FILLED, _READ = 0, 1
"""Words in which a rank publishes up to which exchange it filled its box, and read all others'."""


class Box:
    """Memory for the outgoing rows of one exchange after another, by receiving rank.

    Without ``windows`` it is private. With them the ranks ``near`` read it, unless the system has
    no more shared memory to give: then it is private from there on, and says so to them. It is
    filled again only when its rows have been sent (``works``) and read. ``number`` counts the
    exchanges for which it was filled, ``count`` the ``rows`` in it. Where others must be able to
    read it, since they have its rows ``relayed``, CapacityError is raised when there is no shared
    memory.
    """

    def __init__(
        self, row_bytes: int, *, ranks: int, device: torch.device, timeout: timedelta,
        windows: Windows | None, relayed: bool = False,
    ) -> None:
        self._relayed = relayed
        self._row_bytes, self._timeout, self._windows = row_bytes, timeout, windows
        self.near = sorted(windows.peers) if windows is not None else []
        self.works: list[dist.Work] = []
        self.number = 0
        self.private = windows is None
        self.rows = self._block = torch.empty(0, row_bytes, dtype=torch.uint8, device=device)
        self.count = self._room = 0
        if windows is not None:
            self._header = _Header(windows.own, ranks)
            self._headers = {peer: _Header(windows.peers[peer], ranks) for peer in self.near}

    def reserve(self, rows: int) -> Tensor:
        """Room for ``rows`` rows (uint8 ``[rows, row_bytes]``), to be filled in.

        Waits for those who still read what was in it. Raises one of ``TRANSPORT_ERRORS``.
        """
        if self.works:
            for work in self.works:
                work.wait(self._timeout)
            self.works = []
        if self._windows is not None:
            self._windows.wait(_READ, self.number, self.near, self._timeout.total_seconds())
        if rows > self._room:
            self._room = rows + rows // 4
            self._block = self._more(self._room)
        if rows != self.count:
            self.count, self.rows = rows, self._block[:rows]
        return self.rows

    def _more(self, rows: int) -> Tensor:
        nbytes = rows * self._row_bytes
        if not self.private and self._windows is not None:
            try:
                self._windows.own.grow(nbytes)
                return _as_rows(self._windows.own.block, rows, self._row_bytes)
            except OSError as error:
                if self._relayed:
                    raise CapacityError(
                        "no shared memory is left for rows on their way", expected=nbytes,
                        got=str(error), cure="Make /dev/shm larger (in containers --shm-size)",
                    ) from error
                self.private = True
        return self._block.new_empty(rows, self._row_bytes)

    def publish(self, counts: list[int]) -> None:
        """Lets the ranks near read what was filled in: ``counts`` rows for each rank."""
        self.number += 1
        if self._windows is not None:
            self._header.fill(counts, private=self.private)
            self._windows.publish(_FILLED, self.number)

    def wait(self, peers: list[int]) -> None:
        """Returns when ``peers`` have published what they send in this exchange.

        Raises RuntimeError naming the first that did not within the time, or is gone.
        """
        if self._windows is not None:
            self._windows.wait(_FILLED, self.number, peers, self._timeout.total_seconds())

    def done(self) -> None:
        """This rank has read what it wanted from the others' boxes."""
        if self._windows is not None:
            self._windows.publish(_READ, self.number)

    def close(self) -> None:
        """Local. Gives the memory up."""
        self.rows = self._block = self._block.new_empty(0, self._row_bytes)
        self.works = []
        if self._windows is not None:
            self._windows.close()
            self._windows = None
            del self._header, self._headers

    def counts(self, peer: int) -> NDArray[np.int64]:
        """How many rows ``peer`` has for each rank in its box."""
        return self._headers[peer].counts

    def is_private(self, peer: int) -> bool:
        """Whether the rows of ``peer`` come over the network after all."""
        return bool(self._headers[peer].private[0])

    def rows_of(self, peer: int, receiver: int) -> Tensor:
        """The rows that ``peer`` has for ``receiver``: valid until ``done``."""
        assert self._windows is not None
        counts = self.counts(peer)
        first = int(counts[:receiver].sum())
        end = first + int(counts[receiver])
        block = self._windows.peers[peer].reach(end * self._row_bytes)
        return _as_rows(block, end, self._row_bytes)[first:]


class _Header:
    """What a box says of its rows, in the header of its window."""

    def __init__(self, window: Window, ranks: int) -> None:
        words = np.frombuffer(window.words, dtype=np.int64)[NUMBERS:]
        self.private, self.counts = words[:1], words[1 : 1 + ranks]

    def fill(self, counts: list[int], *, private: bool) -> None:
        self.private[0] = private
        self.counts[:] = counts


def _as_rows(block: Tensor, rows: int, row_bytes: int) -> Tensor:
    return block[: rows * row_bytes].view(rows, row_bytes)
