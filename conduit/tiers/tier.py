"""What a tier is: one kind of memory that holds segments of a rank's ring of rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conduit.schema import Records, RowLayout
from conduit.tiers.address import PAGE_BYTES

__all__ = ["Ring", "Slots", "Tier"]

Slots = NDArray[np.int64]

_SEGMENT_BYTES = 4 << 20
_PARTS = 64
_MOST_SEGMENTS = 1 << 13


@dataclass(frozen=True, kw_only=True)
class Ring:
    """``rows`` slots for packed rows, in segments of ``segment_rows`` slots that each lie in one
    tier. Slots have the same numbers in all tiers. Batches of it are made on ``device``."""

    layout: RowLayout
    rows: int
    segment_rows: int
    device: torch.device

    @classmethod
    def of(cls, layout: RowLayout, rows: int, device: torch.device) -> Ring:
        """Segments are whole pages, a 64th of the ring or 4 MiB; larger where there would be more
        than 8,192 of them, because the kernel keeps a list of what lies where."""
        unit = PAGE_BYTES // gcd(layout.row_bytes, PAGE_BYTES)
        nbytes = rows * layout.row_bytes
        wanted_bytes = max(min(_SEGMENT_BYTES, nbytes // _PARTS), nbytes // _MOST_SEGMENTS)
        wanted = max(wanted_bytes // layout.row_bytes, 1)
        return cls(layout=layout, rows=rows, segment_rows=-(-wanted // unit) * unit, device=device)

    @property
    def segments(self) -> int:
        return -(-self.rows // self.segment_rows)

    @property
    def segment_bytes(self) -> int:
        return self.segment_rows * self.layout.row_bytes

    @property
    def nbytes(self) -> int:
        """Of all segments: the last one is whole, too."""
        return self.segments * self.segment_bytes

    def slots(self, segment: int) -> Slots:
        """All slots of a segment, also those beyond the ring's rows."""
        return np.arange(segment * self.segment_rows, (segment + 1) * self.segment_rows)


class Tier(Protocol):
    """One kind of memory, for up to ``segments`` segments of a ring.

    Slots are the ring's. What happens to one that lies in no segment held here is undefined.
    """

    name: str
    segments: int

    @property
    def free(self) -> int:
        """Segments that could still be held."""

    def hold(self, segment: int) -> None:
        """Makes room for a segment, whose rows are undefined then. Raises OSError or CapacityError
        where there is no memory, and holds nothing then."""

    def release(self, segment: int) -> None:
        """Gives a segment up."""

    def write(self, slots: Slots, rows: Tensor) -> None:
        """Writes ``rows`` (uint8 ``[len(slots), row_bytes]``) at ``slots``, each named once."""

    def gather(self, slots: Slots, out: Records) -> None:
        """Copies the rows at ``slots`` into ``out``, the records of a contiguous block
        ``[len(slots), row_bytes]`` (see :meth:`RowLayout.records`)."""

    def sync(self) -> None:
        """Returns when what was written would outlive this process, where the tier's memory can.
        Raises OSError."""

    def close(self) -> None:
        """Gives all memory back, and removes what the tier had under a name."""
