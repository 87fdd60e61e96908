"""Opening the tiers of a rank: allocated within their budgets, measured, and shared out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conduit.errors import CapacityError
from conduit.tiers.budgets import Budget
from conduit.tiers.device import DeviceTier
from conduit.tiers.disk import DiskTier
from conduit.tiers.files import Owner
from conduit.tiers.host import HostTier
from conduit.tiers.mapped import MappedRing, MappedTier
from conduit.tiers.pinned import PinnedTier
from conduit.tiers.shared import SharedTier
from conduit.tiers.slab import SlabTier
from conduit.tiers.specification import Device, Disk, Memory, Pinned, Shared
from conduit.tiers.split import UNMEASURED, measured, split
from conduit.tiers.store import Store
from conduit.tiers.tier import Ring

__all__ = ["open_store"]


def open_store(ring: Ring, found: Sequence[Budget], owner: Owner) -> Store:
    """The ring over tiers of the ``found`` budgets, which suffice. Raises CapacityError or
    WorldError if the memory cannot be had after all, and then leaves nothing behind."""
    rooms = [min(budget.usable_bytes // ring.segment_bytes, ring.segments) for budget in found]
    kinds = [budget.memory for budget in found]
    slabs = all(isinstance(kind, (Device, Pinned)) for kind in kinds)
    try:
        return _opened(ring, kinds, rooms, owner, None if slabs else MappedRing(ring))
    except OSError as error:
        raise CapacityError(
            "the tiers cannot be opened", expected=f"memory for {ring.nbytes:,} bytes",
            got=error.strerror, cure="Lower capacity, or what this process may use was limited "
            "(ulimit -v, vm.overcommit_memory)",
        ) from error


def _opened(
    ring: Ring, kinds: Sequence[Memory], rooms: Sequence[int], owner: Owner,
    mapped: MappedRing | None,
) -> Store:
    speeds = [UNMEASURED] * len(kinds)
    counts = [ring.segments]
    if len(kinds) > 1:
        for i, kind in enumerate(kinds):
            if rooms[i]:
                trial = _made(kind, ring, mapped, 1, owner)
                try:
                    speeds[i] = measured(trial, ring)
                finally:
                    trial.close()
        counts = split(
            ring.segments, rooms, [speed.read_gbps for speed in speeds],
            [isinstance(kind, Device) for kind in kinds],
        )
    tiers: list[MappedTier | SlabTier] = []
    try:
        for kind, room, count in zip(kinds, rooms, counts, strict=True):
            # A slab is taken whole, so no larger than it must be.
            segments = count if isinstance(kind, (Device, Pinned)) else room
            tiers.append(_made(kind, ring, mapped, segments, owner))
        return Store(ring, tiers, counts, speeds, mapped)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise


def _made(
    kind: Memory, ring: Ring, mapped: MappedRing | None, segments: int, owner: Owner
) -> MappedTier | SlabTier:
    if isinstance(kind, Device):
        return DeviceTier(ring, segments)
    if isinstance(kind, Pinned):
        return PinnedTier(ring, segments)
    assert mapped is not None
    if isinstance(kind, Shared):
        return SharedTier(mapped, segments, owner)
    if isinstance(kind, Disk):
        return DiskTier(mapped, segments, owner, Path(kind.path))
    return HostTier(mapped, segments)
