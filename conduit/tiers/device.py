"""Tier ``device``: memory of a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from conduit.schema import Records
from conduit.tiers.slab import SlabTier
from conduit.tiers.tier import Ring, Slots

__all__ = ["DeviceTier"]


class DeviceTier(SlabTier):
    """See :class:`~conduit.tiers.tier.Tier`. Whatever is done with it is ordered by the current
    stream."""

    name = "device"

    def __init__(self, ring: Ring, segments: int) -> None:
        block = ring.layout.block(segments * ring.segment_rows, ring.device)
        super().__init__(ring, segments, block)

    def gather(self, slots: Slots, out: Records) -> None:
        assert isinstance(out, Tensor)
        torch.index_select(self.block, 0, self.rows_at(slots), out=out)
