"""Memory that the processor addresses: what host, pinned, shared and disk tiers have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conduit.schema import Records
from conduit.tiers.address import AddressRange, Replacement
from conduit.tiers.files import RowFile
from conduit.tiers.tier import Ring, Slots

__all__ = ["FileTier", "MappedRing", "MappedTier"]


class MappedRing:
    """The slots of a ring in one range of addresses, for all tiers that back pieces of it.

    ``block`` is uint8 ``[rows, row_bytes]``, of whole segments.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.range = AddressRange(ring.nbytes)
        self.block = self.range.block.view(-1, ring.layout.row_bytes)
        self._records: Any = ring.layout.records(self.block)

    def gather(self, slots: Slots, out: Records) -> None:
        """See :meth:`Tier.gather`; of any tiers that are mapped here."""
        if isinstance(out, Tensor):
            out.copy_(torch.index_select(self.block, 0, torch.from_numpy(slots)))
        else:
            # "clip" spares numpy a second, buffered copy; the slots are in range.
            self._records.take(slots, out=out, mode="clip")

    def write(self, slots: Slots, rows: Tensor) -> None:
        """See :meth:`Tier.write`; to any tiers that are mapped here."""
        # As records: torch copies bytes one by one.
        self._records[slots] = self.ring.layout.records(rows.cpu().contiguous())

    def close(self) -> None:
        """The memory goes when no view of it is left."""
        self.block = self.block.new_empty((0, self.block.shape[1]))
        self.range.block = self.block
        self._records = self.ring.layout.records(self.block)


class MappedTier:
    """Holds segments in memory of the kernel's choice. What it is, a subclass says."""

    name = "mapped"

    def __init__(self, mapped: MappedRing, segments: int) -> None:
        self.segments = segments
        self._mapped = mapped
        self._bytes = mapped.ring.segment_bytes
        # The lowest places are given first: a file is written from its beginning on.
        self._spare = list(range(segments - 1, -1, -1))
        self._places: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._spare)

    def hold(self, segment: int) -> None:
        place = self._spare[-1]
        fd, offset = self._take(place)
        self._mapped.range.back(segment * self._bytes, self._bytes, fd=fd, offset=offset)
        self._places[segment] = self._spare.pop()

    def copied(self, segment: int) -> Replacement:
        """A copy of a segment that another tier of the range holds, in the memory that it will have
        here. Raises OSError or CapacityError."""
        fd, offset = self._take(self._spare[-1])
        return self._mapped.range.copy(
            segment * self._bytes, self._bytes, fd=fd, offset=offset
        )

    def move_here(self, segment: int, copy: Replacement) -> None:
        """Puts what was ``copied`` in place of the segment, which the other tier is to
        ``let_go``. Raises OSError, and then nothing has changed."""
        copy.put()
        self._places[segment] = self._spare.pop()

    def release(self, segment: int) -> None:
        self._mapped.range.clear(segment * self._bytes, self._bytes)
        self.let_go(segment)

    def let_go(self, segment: int) -> None:
        """Gives up a segment that has other memory already."""
        place = self._places.pop(segment)
        self._give_back(place)
        self._spare.append(place)

    def write(self, slots: Slots, rows: Tensor) -> None:
        self._mapped.write(slots, rows)

    def gather(self, slots: Slots, out: Records) -> None:
        self._mapped.gather(slots, out)

    def sync(self) -> None:
        """Memory of this process never outlives it."""

    def close(self) -> None:
        self._places, self._spare, self.segments = {}, [], 0

    def _take(self, place: int) -> tuple[int, int]:
        """The file, or -1 for memory of this process, and the byte in it at which a place begins.
        """
        return -1, 0

    def _give_back(self, place: int) -> None:
        """The memory of a place is no longer used."""


class FileTier(MappedTier):
    """Holds segments in a file."""

    def __init__(self, mapped: MappedRing, segments: int, file: RowFile) -> None:
        super().__init__(mapped, segments)
        self._file = file

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        super().close()
        self._file.close()

    def _take(self, place: int) -> tuple[int, int]:
        self._file.take(place)
        return self._file.fd, self._file.start(place)

    def _give_back(self, place: int) -> None:
        self._file.give_back(place)
