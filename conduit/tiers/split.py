"""How many segments each tier gets: as many as make the gather of a batch fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from conduit.tiers.disk import DiskTier
from conduit.tiers.tier import Ring, Tier

__all__ = ["UNMEASURED", "Speed", "measured", "split"]

_BATCH_ROWS = 256
_MEASURED_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Of a tier: random rows read, and rows written, in bytes per nanosecond (GB/s)."""

    read_gbps: float
    write_gbps: float


UNMEASURED = Speed(read_gbps=1.0, write_gbps=1.0)
"""Where there is only one tier, or one that holds nothing."""


def measured(tier: Tier, ring: Ring) -> Speed:
    """Writes one segment to a tier that holds nothing, and reads rows of it. What a disk has
    written is dropped from the page cache first."""
    tier.hold(0)
    slots, layout = ring.slots(0), ring.layout
    rows = layout.block(len(slots)).zero_()
    begun = time.perf_counter()
    tier.write(slots, rows)
    tier.sync()
    write_s = time.perf_counter() - begun
    if isinstance(tier, DiskTier):
        tier.forget()
    wanted = np.random.default_rng(0).permutation(slots)
    batch = min(_BATCH_ROWS, len(slots))
    block = layout.block(batch, ring.device)
    out = layout.records(block)
    begun, read = time.perf_counter(), 0
    # At least once, however long the processor was away.
    while read == 0 or (
        read + batch <= len(slots) and time.perf_counter() - begun < _MEASURED_S
    ):
        tier.gather(wanted[read : read + batch], out)
        read += batch
    if block.device.type == "cuda":
        torch.cuda.synchronize(block.device)
    read_s = time.perf_counter() - begun
    tier.release(0)
    return Speed(
        read_gbps=read * layout.row_bytes / read_s / 1e9,
        write_gbps=rows.nbytes / write_s / 1e9,
    )


def split(
    needed: int, rooms: Sequence[int], speeds: Sequence[float], apart: Sequence[bool]
) -> list[int]:
    """Hands ``needed`` segments to tiers with room for ``rooms``, which suffice.

    Random rows come from each tier in proportion to what it holds. Tiers that are ``apart`` (memory
    of a GPU) are read at the same time as the others, which the processor reads one after the
    other. So the others are filled fastest first, and what is apart gets what makes both sides take
    equally long.
    """
    order = sorted(range(len(rooms)), key=lambda i: -speeds[i])
    together = [i for i in order if not apart[i]]
    beside = [i for i in order if apart[i]]

    def cost(members: Sequence[int], count: int) -> tuple[float, list[int]]:
        taken, seconds = [], 0.0
        for i in members:
            taken.append(min(rooms[i], count))
            count -= taken[-1]
            seconds += taken[-1] / speeds[i]
        return seconds, taken

    least = max(needed - sum(rooms[i] for i in together), 0)
    most = min(needed, sum(rooms[i] for i in beside))
    low, high = least, most
    while low < high:  # the fewest beside that take at least as long as the rest
        middle = (low + high) // 2
        if cost(beside, middle)[0] >= cost(together, needed - middle)[0]:
            high = middle
        else:
            low = middle + 1
    best = min(
        (count for count in (low - 1, low) if least <= count <= most),
        key=lambda count: max(cost(beside, count)[0], cost(together, needed - count)[0]),
    )
    counts = [0] * len(rooms)
    for members, count in ((beside, best), (together, needed - best)):
        for i, taken in zip(members, cost(members, count)[1], strict=True):
            counts[i] = taken
    return counts
