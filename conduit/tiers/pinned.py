"""Tier ``pinned``: page-locked host memory, which a GPU's copy engine reads by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from conduit.schema import Records
from conduit.tiers.slab import SlabTier
from conduit.tiers.tier import Ring, Slots

__all__ = ["PinnedTier"]

_OWN_COPY_BYTES = 16 << 10
"""From this size on a row is worth a copy of its own."""


class PinnedTier(SlabTier):
    """See :class:`~conduit.tiers.tier.Tier`. One slab, locked once: locking is slow, and what is
    locked cannot be moved.

    Large rows are copied to the GPU one by one, with no work for the processor but to ask for it.
    Small ones are put together first.
    """

    name = "pinned"

    def __init__(self, ring: Ring, segments: int) -> None:
        with torch.inference_mode(False):
            rows = segments * ring.segment_rows
            block = torch.empty(rows, ring.layout.row_bytes, dtype=torch.uint8, pin_memory=True)
        super().__init__(ring, segments, block)
        self._read: torch.cuda.Event | None = None

    def settle(self) -> None:
        # The processor writes at once, whatever the copy engine still reads.
        if self._read is not None:
            self._read.synchronize()

    def gather(self, slots: Slots, out: Records) -> None:
        assert isinstance(out, Tensor)
        places = self.rows_at(slots)
        if self.block.shape[1] >= _OWN_COPY_BYTES:
            for row, place in zip(out, places.tolist(), strict=True):
                row.copy_(self.block[place], non_blocking=True)
        else:
            together = torch.empty(out.shape, dtype=torch.uint8, pin_memory=True)
            torch.index_select(self.block, 0, places, out=together)
            out.copy_(together, non_blocking=True)
        self._read = torch.cuda.current_stream(out.device).record_event()
