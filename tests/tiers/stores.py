"""Stores over any tiers, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from conduit.schema import RowLayout
from conduit.tiers.device import DeviceTier
from conduit.tiers.disk import DiskTier
from conduit.tiers.files import Owner
from conduit.tiers.host import HostTier
from conduit.tiers.mapped import MappedRing, MappedTier
from conduit.tiers.pinned import PinnedTier
from conduit.tiers.shared import SharedTier
from conduit.tiers.slab import SlabTier
from conduit.tiers.split import UNMEASURED
from conduit.tiers.store import Store
from conduit.tiers.tier import Ring

__all__ = ["CPU", "OWNER", "TIERS", "block_of", "store_of", "tier_of"]

CPU = torch.device("cpu")
OWNER = Owner(job="test", plane="plane", rank=0)
TIERS = ("host", "shared", "disk")


def tier_of(
    name: str, ring: Ring, mapped: MappedRing, folder: Path, segments: int
) -> MappedTier | SlabTier:
    """A tier of that name for so many segments."""
    if name == "host":
        return HostTier(mapped, segments)
    if name == "shared":
        return SharedTier(mapped, segments, OWNER)
    if name == "disk":
        return DiskTier(mapped, segments, OWNER, folder)
    return {"device": DeviceTier, "pinned": PinnedTier}[name](ring, segments)


def store_of(
    layout: RowLayout, rows: int, *, folder: Path = Path("/nowhere"),
    tiers: Sequence[str] = ("host",), device: torch.device = CPU, segment_rows: int | None = None,
) -> Store:
    """A store whose segments are dealt to the tiers in turn, each with room for all of them."""
    ring = Ring.of(layout, rows, device)
    if segment_rows is not None:
        ring = Ring(layout=layout, rows=rows, segment_rows=segment_rows, device=device)
    mapped = MappedRing(ring)
    made = [tier_of(name, ring, mapped, folder, ring.segments) for name in tiers]
    counts = [ring.segments // len(tiers)] * len(tiers)
    counts[0] += ring.segments - sum(counts)
    return Store(ring, made, counts, [UNMEASURED] * len(tiers), mapped)


def block_of(store: Store) -> Tensor:
    """All slots of a store without slabs, and what is behind them in the last segment."""
    assert store._mapped is not None
    return store._mapped.block
