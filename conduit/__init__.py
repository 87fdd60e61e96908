"""Conduit: an experience data plane for distributed reinforcement learning.

Every rank of a ``torchrun`` job holds a shard of one experience buffer; ranks agree collectively on
where experience lives and when it moves. After *Conduit: An Experience Data Plane for Distributed
Reinforcement Learning* (arXiv:2609.24456).
"""

from conduit.edp.ingestion import Ingestion
from conduit.edp.placement import Balanced, Central, Placement
from conduit.edp.steps import Steps
from conduit.errors import (
    CapacityError,
    ConduitError,
    DesyncError,
    EmptyError,
    SchemaError,
    TimeoutError,
    WorldError,
)
from conduit.metrics import Report
from conduit.plane import ExperiencePlane
from conduit.schema import Field, RowLayout, Schema
from conduit.tiers.specification import Device, Disk, Host, Pinned, Shared

__version__ = "0.1.0"

__all__ = [
    "Balanced",
    "CapacityError",
    "Central",
    "ConduitError",
    "DesyncError",
    "Device",
    "Disk",
    "EmptyError",
    "ExperiencePlane",
    "Field",
    "Host",
    "Ingestion",
    "Pinned",
    "Placement",
    "Report",
    "RowLayout",
    "Schema",
    "SchemaError",
    "Shared",
    "Steps",
    "TimeoutError",
    "WorldError",
]
