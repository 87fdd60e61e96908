"""Tier ``shared``: named memory in /dev/shm, which outlives a process that is killed."""

from __future__ import annotations

from pathlib import Path

from conduit.tiers.files import Owner, RowFile
from conduit.tiers.mapped import FileTier, MappedRing

__all__ = ["SHM", "SharedTier"]

SHM = Path("/dev/shm")


class SharedTier(FileTier):
    """See :class:`~conduit.tiers.tier.Tier`."""

    name = "shared"

    def __init__(self, mapped: MappedRing, segments: int, owner: Owner) -> None:
        super().__init__(mapped, segments, RowFile(SHM, owner, mapped.ring, tier=self.name))

    def sync(self) -> None:
        """What was written is already there for whoever opens it."""
