"""The row exchange: packed rows from every rank to every rank, uneven counts, zeros too.

Only uint8 moves, which every c10d backend carries. Both ends have worked out the counts from the
directory before anything is sent (a Gloo receiver that expects fewer bytes than come aborts the
process, one that expects more keeps stale ones), and a rank's own rows never enter the collective.

NCCL does an exchange as one all-to-all. On Gloo only the pairs that have rows for each other talk,
receives posted before sends: no thread is woken to run a collective, both directions of a link are
used at once, and an exchange that will never be complete, because a rank failed meanwhile, does not
hold up the closing of the group as an unfinished collective would.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives.watch import raise_missing
from conduit.collectives.world import TRANSPORT_ERRORS, World
from conduit.errors import WorldError

__all__ = ["InFlight", "RowExchange"]

Counts = NDArray[np.int64]


class InFlight:
    """An exchange that has begun. The blocks it was given belong to it until ``wait`` returns."""

    def __init__(
        self, world: World, what: str, works: list[dist.Work], failure: Exception | None
    ) -> None:
        self._world, self._what, self._works, self._failure = world, what, works, failure

    def wait(self) -> None:
        """Returns when all rows have come and gone (on CUDA: makes the stream wait for that).

        Raises TimeoutError or WorldError naming the ranks that did not come.
        """
        try:
            if self._failure is not None:
                raise self._failure
            for work in self._works:
                if self._world.device.type == "cpu":
                    work.wait(self._world.timeout)
                else:
                    work.wait()
        except TRANSPORT_ERRORS as error:
            raise_missing(self._world, self._what, error)


class RowExchange:
    """Moves rows between ranks, and counts what it really sent and received, by peer."""

    def __init__(self, world: World, row_bytes: int) -> None:
        self._world, self._row_bytes = world, row_bytes
        self.sent_rows = np.zeros(world.size, dtype=np.int64)
        self.received_rows = np.zeros(world.size, dtype=np.int64)
        self.calls = 0

    def begin(
        self, rows: Tensor, counts: Counts, out: Tensor, out_counts: Counts, *, what: str
    ) -> InFlight:
        """Collective. Sends ``counts[p]`` of ``rows`` to rank p, in order, and fills ``out``.

        ``rows`` and ``out`` are contiguous uint8 ``[n, row_bytes]`` on the plane's device, by
        receiving and by sending rank; counts are int64 ``[ranks]``, zeros allowed, 0 for the rank
        itself. Raises WorldError on counts that do not fit; whatever goes wrong with other ranks is
        raised by ``wait``.
        """
        rank = self._world.rank
        sizes, out_sizes = counts.tolist(), out_counts.tolist()
        for block, n in ((rows, sizes), (out, out_sizes)):
            if sum(n) != block.shape[0] or n[rank] or block.shape[1] != self._row_bytes:
                raise WorldError(
                    f"the counts of {what} do not fit the rows", rank=rank,
                    expected=f"{n} rows of {self._row_bytes} bytes and 0 for this rank",
                    got=list(block.shape),
                )
        works: list[dist.Work] = []
        failure = None
        try:
            if self._world.device.type == "cpu":
                works = self._point_to_point(rows, sizes, out, out_sizes)
            else:
                works = self._all_to_all(rows, sizes, out, out_sizes)
        except TRANSPORT_ERRORS as error:
            # Told by ``wait``: until then the control record may say why others are gone.
            failure = error
        self.calls += 1
        self.sent_rows += counts
        self.received_rows += out_counts
        return InFlight(self._world, what, works, failure)

    def __call__(
        self, rows: Tensor, counts: Counts, out: Tensor, out_counts: Counts, *, what: str
    ) -> None:
        """``begin`` and ``wait`` in one."""
        self.begin(rows, counts, out, out_counts, what=what).wait()

    def _point_to_point(
        self, rows: Tensor, sizes: list[int], out: Tensor, out_sizes: list[int]
    ) -> list[dist.Work]:
        group = self._world.data
        assert group is not None
        works = [group.recv([part], peer, 0) for peer, part in _parts(out, out_sizes)]
        works += [group.send([part], peer, 0) for peer, part in _parts(rows, sizes)]
        return works

    def _all_to_all(
        self, rows: Tensor, sizes: list[int], out: Tensor, out_sizes: list[int]
    ) -> list[dist.Work]:
        work = dist.all_to_all_single(
            out, rows, out_sizes, sizes, group=self._world.data, async_op=True
        )
        assert work is not None
        return [work]

    @property
    def sent_bytes(self) -> Counts:
        """Payload bytes sent to each rank so far."""
        return self.sent_rows * self._row_bytes


def _parts(block: Tensor, sizes: list[int]) -> list[tuple[int, Tensor]]:
    """The rows of every peer that has some."""
    parts, start = [], 0
    for peer, size in enumerate(sizes):
        if size:
            parts.append((peer, block[start : start + size]))
            start += size
    return parts
