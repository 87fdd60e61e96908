"""The row exchange: packed rows from every rank to every rank, in one uneven all-to-all.

Only uint8 moves, which every c10d backend carries. Both ends have worked out the counts from the
directory before anything is sent (a Gloo receiver that expects fewer bytes than come aborts the
process, one that expects more keeps stale ones), and a rank's own rows never enter the collective.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives.watch import raise_missing
from conduit.collectives.world import TRANSPORT_ERRORS, World
from conduit.errors import WorldError

__all__ = ["RowExchange"]

Counts = NDArray[np.int64]


class RowExchange:
    """Moves rows between ranks, and counts what it really sent and received, by peer."""

    def __init__(self, world: World, row_bytes: int) -> None:
        self._world, self._row_bytes = world, row_bytes
        self.sent_rows = np.zeros(world.size, dtype=np.int64)
        self.received_rows = np.zeros(world.size, dtype=np.int64)
        self.calls = 0

    def __call__(
        self, rows: Tensor, counts: Counts, out: Tensor, out_counts: Counts, *, what: str
    ) -> None:
        """Collective. Sends ``counts[p]`` of ``rows`` to rank p, in order, and fills ``out``.

        ``rows`` and ``out`` are contiguous uint8 ``[n, row_bytes]`` on the plane's device, by
        receiving and by sending rank; counts are int64 ``[ranks]``, zeros allowed, 0 for the rank
        itself. Raises WorldError on counts that do not fit, TimeoutError or WorldError naming the
        ranks that did not come.
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
        try:
            dist.all_to_all_single(out, rows, out_sizes, sizes, group=self._world.data)
        except TRANSPORT_ERRORS as error:
            raise_missing(self._world, what, error)
        self.calls += 1
        self.sent_rows += counts
        self.received_rows += out_counts

    @property
    def sent_bytes(self) -> Counts:
        """Payload bytes sent to each rank so far."""
        return self.sent_rows * self._row_bytes
