"""Which tiers a plane is to have, as users write it: ``tiers=[conduit.Device("8GB"), ...]``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch

from conduit.errors import CapacityError, WorldError
from conduit.tiers import address
from conduit.tiers.available import Available, device_bytes, host_bytes, mount_bytes
from conduit.tiers.shared import SHM

__all__ = [
    "MOST_TIERS", "Device", "Disk", "Host", "Memory", "Pinned", "Shared", "checked_tiers",
    "parse_bytes",
]

MOST_TIERS = 8
"""In one plane."""

_UNITS = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}
Size: TypeAlias = int | str | None


def parse_bytes(text: str) -> int | None:
    """``"64GB"``, ``"1.5 TiB"`` or ``"512B"`` as bytes; None for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B\s*", text.upper())
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


@dataclass(frozen=True, slots=True)
class Memory:
    """One tier. ``size`` is how much of it may be used: bytes (``"8GB"`` or an integer), a part of
    all there is (``"25%"``), or None for whatever is free.
    """

    size: Size = None

    name: ClassVar[str] = ""
    on_gpu_only: ClassVar[bool] = False
    in_ram: ClassVar[bool] = False

    def asked_bytes(self, total: int) -> int | None:
        """Of ``total`` bytes; None for whatever is free. CapacityError if it is no size."""
        size = self.size
        if size is None:
            return None
        if isinstance(size, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", size)):
            share = float(found[1])
            if 0 < share <= 100:
                return int(total * share / 100)
        whole = parse_bytes(size) if isinstance(size, str) else size
        if not isinstance(whole, int) or isinstance(whole, bool) or whole < 1:
            raise CapacityError(
                f"the size of tier {self.name!r} is not understood", got=repr(size),
                expected="bytes such as '8GB' or 8_000_000_000, or a part such as '25%'",
            )
        return whole

    def available(self, device: torch.device) -> Available:
        """All there is of this memory, and what of it is free. Raises OSError."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Device(Memory):
    """Memory of this rank's GPU."""

    name: ClassVar[str] = "device"
    on_gpu_only: ClassVar[bool] = True

    def available(self, device: torch.device) -> Available:
        return device_bytes(device)


@dataclass(frozen=True, slots=True)
class Host(Memory):
    """Memory of the ranks' processes. ``size`` is for all ranks of a host together."""

    name: ClassVar[str] = "host"
    in_ram: ClassVar[bool] = True

    def available(self, device: torch.device) -> Available:
        return host_bytes()


@dataclass(frozen=True, slots=True)
class Pinned(Host):
    """Page-locked memory, which a GPU reads by itself. ``size`` is for all ranks of a host
    together."""

    name: ClassVar[str] = "pinned"
    on_gpu_only: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Shared(Memory):
    """Memory in /dev/shm, which outlives a process that is killed. ``size`` is for all ranks of a
    host together."""

    name: ClassVar[str] = "shared"
    in_ram: ClassVar[bool] = True

    def available(self, device: torch.device) -> Available:
        return mount_bytes(SHM)


@dataclass(frozen=True, slots=True)
class Disk(Memory):
    """A file in folder ``path``, best on a local NVMe disk. ``size`` is for all ranks of a host
    together."""

    path: str | os.PathLike[str] = "."

    name: ClassVar[str] = "disk"

    def __init__(self, path: str | os.PathLike[str], size: Size = None) -> None:
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "size", size)

    def available(self, device: torch.device) -> Available:
        return mount_bytes(Path(self.path))


def checked_tiers(tiers: Any, device: torch.device) -> tuple[Memory, ...]:
    """The tiers of a plane on ``device``: ``"auto"`` is its own memory, on a GPU the host's as
    well. CapacityError or WorldError for what cannot be."""
    if isinstance(tiers, str) and tiers == "auto":
        return (Host(),) if device.type == "cpu" else (Device(), Host())
    if not (
        isinstance(tiers, Sequence) and 0 < len(tiers) <= MOST_TIERS
        and all(isinstance(tier, Memory) and tier.name for tier in tiers)
    ):
        raise WorldError(
            "tiers is out of range", got=repr(tiers),
            expected=f"'auto', or a list of 1 to {MOST_TIERS} such as [conduit.Host('8GB'), "
            "conduit.Disk('/nvme', '500GB')]",
        )
    names = [tier.name for tier in tiers if not isinstance(tier, Disk)]
    if len(names) != len(set(names)):
        raise WorldError("a tier is named twice", got=names, expected="each kind once; of disk "
                         "as many as there are disks")
    for tier in tiers:
        tier.asked_bytes(1 << 62)
        if tier.on_gpu_only and device.type != "cuda":
            raise WorldError(
                f"tier {tier.name!r} needs a GPU", expected="a plane with device='cuda'",
                got=device, cure="Leave the tier out",
            )
        if not address.WORKS and tier.name in ("shared", "disk"):
            raise WorldError(f"tier {tier.name!r} needs Linux", cure="Leave the tier out")
        if isinstance(tier, Disk) and not _usable(tier.path):
            raise WorldError(
                "the disk tier's folder cannot be used", got=repr(tier.path),
                expected="a folder that exists and that this user may write to",
            )
    return tuple(tiers)


def _usable(folder: Any) -> bool:
    try:
        return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
    except (TypeError, ValueError):  # no path, or none that there could be
        return False
