"""Packed rows in memory: tier ``host`` on the CPU, tier ``device`` on an accelerator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conduit.errors import CapacityError
from conduit.schema import CACHE_LINE_BYTES, Records, RowLayout

__all__ = ["MemoryTier", "available_bytes"]


class MemoryTier:
    """``rows`` packed rows, allocated once and written in place.

    ``all_rows`` is what all ranks allocate from the same memory, this one included. Raises
    CapacityError, before anything is allocated, when that cannot fit.
    """

    def __init__(
        self, layout: RowLayout, *, rows: int, all_rows: int, device: torch.device
    ) -> None:
        self.name = "host" if device.type == "cpu" else "device"
        self.device = device
        asked, available = all_rows * layout.row_bytes, available_bytes(device)
        if asked > available:
            raise CapacityError(
                f"the {self.name} tier cannot hold the shards of this memory's ranks",
                expected=f"at most {available:,} bytes",
                got=f"{asked:,} bytes ({all_rows:,} rows of {layout.row_bytes:,} bytes, staging "
                "included)",
                cure=f"Lower capacity, by at least a factor of {asked / max(available, 1):.2f}",
            )
        self.block = (
            _on_huge_pages(layout, rows) if device.type == "cpu" else layout.block(rows, device)
        )
        self._records: Any = layout.records(self.block)

    def gather(self, slots: NDArray[np.int64], out: Records) -> None:
        """Copies the rows at ``slots`` into ``out``, the records of a contiguous block
        ``[len(slots), row_bytes]`` (see :meth:`RowLayout.records`)."""
        if isinstance(out, Tensor):
            torch.index_select(self.block, 0, self._index(slots), out=out)
        else:
            # "clip" spares numpy a second, buffered copy; the slots are in range.
            self._records.take(slots, out=out, mode="clip")

    def write(self, slots: NDArray[np.int64], rows: Tensor) -> None:
        """Writes ``rows`` (uint8 ``[len(slots), row_bytes]``) at ``slots``, each named once."""
        self.block.index_copy_(0, self._index(slots), rows)

    @property
    def nbytes(self) -> int:
        return self.block.nbytes

    def close(self) -> None:
        """Gives the memory back once no view of it is left."""
        self.block = self.block.new_empty((0, self.block.shape[1]))
        self._records = self.block

    def _index(self, slots: NDArray[np.int64]) -> Tensor:
        index = torch.from_numpy(slots)
        return index if self.device.type == "cpu" else index.to(self.device)


def _on_huge_pages(layout: RowLayout, rows: int) -> Tensor:
    """Uninitialised packed rows as :meth:`RowLayout.block` makes them, from numpy's allocator.

    Of large arrays numpy asks the kernel to back them with huge pages, torch does not: random rows
    then miss the translation cache less, and gathers of small rows are about a fifth faster.
    """
    nbytes = rows * layout.row_bytes
    raw = np.empty(nbytes + CACHE_LINE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    with torch.inference_mode(False):
        return torch.from_numpy(raw[start : start + nbytes]).view(rows, layout.row_bytes)


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``, all processes of the host together."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / n for n in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
