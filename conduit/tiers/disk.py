"""Tier ``disk``: a file of rows, read through the page cache.

[Note: cold rows]
A file that is mapped is memory as long as its pages are in the page cache, and then costs what
memory costs. A page that is not there is read while the gather waits for it, one after the other:
a disk that could read hundreds of them at once reads one. So when gathers take as long as reading
takes, the kernel is told beforehand of all rows of the next ones (``posix_fadvise`` with
``WILLNEED``): it starts reading them all and returns, and the gather finds them there or on their
way. That is as fast as several threads with reads of their own (3.9 against 4.6 ms for 256 cold
rows of 256 bytes, 22 against 21 ms for 256 of 56 KB, where plain gathers took 8 and 172 ms), and
it needs no second way for rows to come in. Telling is dear where rows are warm (some 0.9 us a row):
now and then a gather goes without.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from conduit.schema import Records
from conduit.tiers.files import Owner, RowFile
from conduit.tiers.mapped import FileTier, MappedRing
from conduit.tiers.tier import Slots

__all__ = ["DiskTier"]

# What a row takes at most that is in memory, and at least one that is read from a disk.
_WARM_NS, _WARM_GBPS = 300, 2
_COLD_NS, _COLD_GBPS = 4_000, 1
_TOLD_LEAST, _TOLD_MOST = 8, 256


class DiskTier(FileTier):
    """See :class:`~conduit.tiers.tier.Tier`."""

    name = "disk"

    def __init__(self, mapped: MappedRing, segments: int, owner: Owner, folder: Path) -> None:
        super().__init__(mapped, segments, RowFile(folder, owner, mapped.ring, tier=self.name))
        self._ring, self._all = mapped.ring, mapped.ring.segments
        row_bytes = mapped.ring.layout.row_bytes
        self._warm_ns = _WARM_NS + row_bytes // _WARM_GBPS
        self._cold_ns = _COLD_NS + row_bytes // _COLD_GBPS
        self._to_tell, self._next_to_tell = 0, _TOLD_LEAST

    def gather(self, slots: Slots, out: Records) -> None:
        self.tell(slots)
        begun_ns = time.perf_counter_ns()
        super().gather(slots, out)
        self.learn(len(slots), time.perf_counter_ns() - begun_ns)

    def tell(self, slots: Slots) -> None:
        """Has the kernel read the rows at ``slots``, all at once, if they are likely to be cold."""
        if self._to_tell:
            row_bytes, fd = self._ring.layout.row_bytes, self._file.fd
            segment_rows = self._ring.segment_rows
            for slot in slots.tolist():
                segment, row = divmod(slot, segment_rows)
                place = self._places.get(segment)
                if place is not None:
                    start = self._file.start(place) + row * row_bytes
                    os.posix_fadvise(fd, start, row_bytes, os.POSIX_FADV_WILLNEED)

    def learn(self, rows: int, took_ns: int) -> None:
        """Takes note of what the gather of ``rows`` rows took, of which as many lie here as chance
        has it."""
        if self._to_tell:
            self._to_tell -= 1
        elif took_ns > rows * (self._warm_ns + self._cold_ns * len(self._places) // self._all):
            # Each time that they turn out to be cold still, it is asked less often.
            self._to_tell = self._next_to_tell
            self._next_to_tell = min(2 * self._next_to_tell, _TOLD_MOST)
        elif rows:
            self._next_to_tell = _TOLD_LEAST

    def forget(self) -> None:
        """Has the kernel drop what it caches of the file and has written."""
        os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
