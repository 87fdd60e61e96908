"""The ring of a rank over its tiers: rows in, rows out, and segments from one tier to another.

[Note: moving segments]
A segment is moved while others go on reading it: they find it in its old place or in its new one,
with the same bytes. It is *not* moved while somebody writes to it. Who writes holds the lock, and
first gives up a move of a segment that is to be written; who moves holds it only to begin and to
end, and copies in between. A move that was given up can be tried again.

Slabs (memory of a GPU, pinned memory) are at addresses of their own: moves from and to them, and
gathers where there are any, hold the lock throughout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from conduit.blocks import BlockWriter
from conduit.errors import CapacityError
from conduit.schema import Records
from conduit.tiers.disk import DiskTier
from conduit.tiers.mapped import MappedRing, MappedTier
from conduit.tiers.slab import SlabTier
from conduit.tiers.split import Speed
from conduit.tiers.tier import Ring, Slots

__all__ = ["Store", "put"]


class Store:
    """``tiers`` hold all segments of ``ring``: ``counts[i]`` of them, in this order, tier i."""

    def __init__(
        self, ring: Ring, tiers: Sequence[MappedTier | SlabTier], counts: Sequence[int],
        speeds: Sequence[Speed], mapped: MappedRing | None,
    ) -> None:
        self.ring, self.tiers, self.speeds = ring, tuple(tiers), tuple(speeds)
        self._mapped = mapped
        self._where = np.repeat(np.arange(len(tiers)), counts)
        for segment, tier in enumerate(self._where.tolist()):
            tiers[tier].hold(segment)
        self._disks = [tier for tier in tiers if isinstance(tier, DiskTier)]
        self._slabs = [i for i, tier in enumerate(tiers) if isinstance(tier, SlabTier)]
        self._writers = {
            i: BlockWriter(ring.layout.columns, self._block(i))
            for i in range(len(tiers)) if counts[i] or len(tiers) > 1
        }
        self._lock, self._mover = threading.Lock(), threading.Lock()
        self._moving: int | None = None

    def _block(self, tier: int) -> Tensor:
        found = self.tiers[tier]
        if isinstance(found, SlabTier):
            return found.block
        assert self._mapped is not None
        return self._mapped.block

    @property
    def nbytes(self) -> int:
        """Bytes of all segments held."""
        return len(self._where) * self.ring.segment_bytes

    def held_bytes(self) -> tuple[tuple[str, int], ...]:
        """Each tier's name and the bytes that it holds."""
        counts = np.bincount(self._where, minlength=len(self.tiers)).tolist()
        return tuple(
            (tier.name, count * self.ring.segment_bytes)
            for tier, count in zip(self.tiers, counts, strict=True)
        )

    def gather(self, slots: Slots, out: Records) -> None:
        """Copies the rows at ``slots`` into ``out``, the records of a contiguous block
        ``[len(slots), row_bytes]`` (see :meth:`RowLayout.records`)."""
        if self._slabs:
            with self._lock:
                self._gather_apart(slots, out)
        elif self._disks:
            self._gather_mapped(slots, out)
        else:
            assert self._mapped is not None
            self._mapped.gather(slots, out)

    def _gather_mapped(self, slots: Slots, out: Records) -> None:
        """Where some rows may have to be read from a disk first."""
        assert self._mapped is not None
        for disk in self._disks:
            disk.tell(slots)
        begun_ns = time.perf_counter_ns()
        self._mapped.gather(slots, out)
        took_ns = time.perf_counter_ns() - begun_ns
        for disk in self._disks:
            disk.learn(len(slots), took_ns)

    def _gather_apart(self, slots: Slots, out: Records) -> None:
        """From slabs and from what is mapped, each its own rows."""
        if len(self.tiers) == 1:
            self.tiers[0].gather(slots, out)
            return
        where = self._where[slots // self.ring.segment_rows]
        mapped = np.ones(len(slots), dtype=np.bool_)
        for i in self._slabs:
            mine = where == i
            mapped &= ~mine
            self._gather_part(i, slots, mine.nonzero()[0], out)
        self._gather_part(None, slots, mapped.nonzero()[0], out)

    def _gather_part(
        self, slab: int | None, slots: Slots, places: Slots, out: Records
    ) -> None:
        """Rows of one slab, or of what is mapped, into their ``places``."""
        if len(places) == 0:
            return
        layout, on_gpu = self.ring.layout, isinstance(out, Tensor)
        if slab is not None:
            rows = layout.records(layout.block(len(places), self.ring.device))
            self.tiers[slab].gather(slots[places], rows)
        else:
            block = torch.empty(
                len(places), layout.row_bytes, dtype=torch.uint8, pin_memory=on_gpu
            )
            rows = layout.records(block)
            self._gather_mapped(slots[places], rows)
            if on_gpu:
                rows = block.to(self.ring.device, non_blocking=True)
        put(rows, out, places)

    def read(self, slots: Slots) -> Tensor:
        """The rows at ``slots`` in a new block."""
        block = self.ring.layout.block(len(slots), self.ring.device)
        self.gather(slots, self.ring.layout.records(block))
        return block

    def write(self, slots: Slots, rows: Tensor) -> None:
        """Writes ``rows`` (uint8 ``[len(slots), row_bytes]``) at ``slots``, each named once."""
        segments = slots // self.ring.segment_rows
        with self._lock:
            self._keep_still(segments)
            if not self._slabs:
                assert self._mapped is not None
                self._mapped.write(slots, rows)
                return
            where = self._where[segments]
            for i in np.unique(where).tolist():
                places = (where == i).nonzero()[0]
                part = rows[torch.from_numpy(places).to(rows.device)]
                self.tiers[i].write(slots[places], part)

    def overwrite(self, slots: Slots, column: int, values: Tensor) -> None:
        """Writes field number ``column`` of the rows at ``slots``, each named once: ``values`` are
        its bytes, uint8 ``[len(slots), bytes]``."""
        segments = slots // self.ring.segment_rows
        place = self.ring.layout.columns[column]
        first, end = place.offset_bytes, place.offset_bytes + place.field.size_bytes
        with self._lock:
            self._keep_still(segments)
            where = self._where[segments]
            for i in np.unique(where).tolist() if len(self.tiers) > 1 else [0]:
                places = torch.from_numpy((where == i).nonzero()[0])
                tier, block = self.tiers[i], self._block(i)
                at = torch.from_numpy(slots)[places]
                if isinstance(tier, SlabTier):
                    tier.settle()
                    at = tier.rows_at(at.numpy())
                block[:, first:end].index_copy_(
                    0, at, values.to(block.device)[places.to(block.device)]
                )

    def _keep_still(self, segments: Slots) -> None:
        """Gives up a move of one of these, which are about to be written."""
        if self._moving is not None and (segments == self._moving).any():
            self._moving = None

    def pack(self, values: Sequence[Tensor], start: int, rows: int) -> None:
        """Packs fields (column order, ``[rows, *shape]``) into the slots from ``start`` on, which
        do not pass the ring's end."""
        size = self.ring.segment_rows
        with self._lock:
            moving = self._moving
            if moving is not None and start // size <= moving <= (start + rows - 1) // size:
                self._moving = None
            if not self._slabs:
                self._writers[0].write(values, start, start + rows)
                return
            first = 0
            while first < rows:
                slot = start + first
                tier = int(self._where[slot // size])
                count = min(rows - first, size - slot % size)
                found, place = self.tiers[tier], slot
                if isinstance(found, SlabTier):
                    found.settle()
                    place = int(found.rows_at(np.array([slot])))
                part = [value[first : first + count] for value in values]
                self._writers[tier].write(part, place, place + count)
                first += count

    def move(self, segment: int, tier: int) -> bool:
        """Moves a segment to another tier, which has room for it. False if it was written
        meanwhile, and stays. Raises OSError or CapacityError, and then it stays, too."""
        with self._mover:
            source, target = (self.tiers[i] for i in (self._where[segment], tier))
            if source is target:
                return True
            if target.free == 0:
                raise CapacityError(
                    f"the {target.name} tier is full", expected="a free segment",
                    got=f"{target.segments} of {target.segments} held",
                )
            if isinstance(source, MappedTier) and isinstance(target, MappedTier):
                return self._remap(segment, source, target, tier)
            slots = self.ring.slots(segment)
            with self._lock:
                target.hold(segment)
                self._finish()
                target.write(slots, self._all_of(source, slots))
                self._finish()
                self._where[segment] = tier
                source.release(segment)
            return True

    def _remap(self, segment: int, source: MappedTier, target: MappedTier, tier: int) -> bool:
        with self._lock:
            self._moving = segment
        copy = target.copied(segment)
        with self._lock:
            if self._moving != segment:
                copy.drop()
                return False
            self._moving = None
            try:
                target.move_here(segment, copy)
            except BaseException:
                copy.drop()
                raise
            self._where[segment] = tier
            source.let_go(segment)
            return True

    def _all_of(self, source: MappedTier | SlabTier, slots: Slots) -> Tensor:
        """The rows of a segment, on the device on which they lie."""
        if isinstance(source, SlabTier):
            return source.block[source.rows_at(slots)]
        assert self._mapped is not None
        return self._mapped.block[torch.from_numpy(slots)]

    def _finish(self) -> None:
        """Returns when no stream reads or writes rows."""
        if self.ring.device.type == "cuda":
            torch.cuda.synchronize(self.ring.device)

    def sync(self) -> None:
        """Of all tiers: see :meth:`Tier.sync`."""
        for tier in self.tiers:
            tier.sync()

    def close(self) -> None:
        """Gives the memory back, and waits for a move that is under way."""
        with self._mover, self._lock:
            self._where = self._where[:0]
            self._writers = {}
            for tier in self.tiers:
                tier.close()
            if self._mapped is not None:
                self._mapped.close()


def put(rows: Records, out: Records, places: Slots) -> None:
    """Copies ``rows`` to ``places`` in ``out``."""
    if isinstance(out, Tensor):
        assert isinstance(rows, Tensor)
        out.index_copy_(0, torch.from_numpy(places).to(out.device), rows)
    else:
        out[places] = rows
