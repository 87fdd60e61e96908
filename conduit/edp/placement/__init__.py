"""Placement: how many rows each rank holds. One policy a file, behind :class:`Placement`."""

from conduit.edp.placement.balanced import Balanced
from conduit.edp.placement.central import Central
from conduit.edp.placement.policy import Placement, checked_quotas

__all__ = ["Balanced", "Central", "Placement", "checked_quotas"]
