"""Tier ``host``: memory of this process, in huge pages where the kernel has them."""

from __future__ import annotations

from conduit.tiers.mapped import MappedTier

__all__ = ["HostTier"]


class HostTier(MappedTier):
    """See :class:`~conduit.tiers.tier.Tier`. Pages are really taken when they are first written."""

    name = "host"
