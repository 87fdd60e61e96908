"""Memory in one slab of its own, at other places than the ring's: device and pinned tiers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from conduit.schema import Records
from conduit.tiers.tier import Ring, Slots

__all__ = ["SlabTier"]


class SlabTier:
    """Holds segments in ``block`` (uint8 ``[rows, row_bytes]``), which is allocated once."""

    name = "slab"

    def __init__(self, ring: Ring, segments: int, block: Tensor) -> None:
        self.segments, self.block = segments, block
        self._ring = ring
        self._spare = list(range(segments - 1, -1, -1))
        # By segment of the ring: where it begins here, less where it begins there.
        self._shift = np.zeros(ring.segments, dtype=np.int64)
        self._places: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._spare)

    def hold(self, segment: int) -> None:
        place = self._places[segment] = self._spare.pop()
        self._shift[segment] = (place - segment) * self._ring.segment_rows

    def release(self, segment: int) -> None:
        self._spare.append(self._places.pop(segment))

    def rows_at(self, slots: Slots) -> Tensor:
        """The rows of ``block`` at ``slots``, on the block's device."""
        places = slots + self._shift[slots // self._ring.segment_rows]
        return torch.from_numpy(places).to(self.block.device)

    def settle(self) -> None:
        """Returns when nothing reads it any more. For memory that is written in stream order, which
        is after all reads, at once."""

    def write(self, slots: Slots, rows: Tensor) -> None:
        self.settle()
        self.block.index_copy_(0, self.rows_at(slots), rows.to(self.block.device))

    def gather(self, slots: Slots, out: Records) -> None:
        """Copies the rows at ``slots`` into ``out``."""
        raise NotImplementedError

    def sync(self) -> None:
        """This memory never outlives its process."""

    def close(self) -> None:
        self.block = self.block.new_empty((0, self.block.shape[1]))
        self._places, self._spare, self.segments = {}, [], 0
