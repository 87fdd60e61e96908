"""The ranks of the job as one plane sees them, and the process groups it talks over.

A plane has three groups of its own: *control* (pure Gloo, for the small exchange that begins every
collective call), *watch* (pure Gloo, silent until a call fails, then used to find out who is
missing) and *data* (Gloo for CPU, NCCL for CUDA), so that Conduit's traffic never shares a group,
and therefore an order, with the user's.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from conduit.errors import WorldError

__all__ = ["World"]


@dataclass(kw_only=True)
class World:
    """Ranks ``0 .. size-1`` of one plane; ``hosts[r]`` numbers the host of rank r by first rank.

    In a world of one the groups are None and nothing is ever sent.
    """

    rank: int
    size: int
    device: torch.device
    timeout: timedelta
    hosts: NDArray[np.int64]
    control: dist.ProcessGroup | None = None
    watch: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    _owned: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def join(
        cls, *, device: torch.device, timeout: timedelta, group: dist.ProcessGroup | None = None
    ) -> World:
        """Collective. Joins the ranks of ``group`` (default: all ranks of the job).

        Uses the process group that the program has made. Under torchrun without one it makes it,
        for the rest of the process: a group that is made again finds the first one's addresses in
        torchrun's store. Without torchrun it is a world of one.
        """
        if not dist.is_available() or not (dist.is_initialized() or "WORLD_SIZE" in os.environ):
            if group is not None:
                raise WorldError("a group without torch.distributed",
                                 cure="Call init_process_group first")
            return cls._alone(device, timeout)
        if not dist.is_initialized():
            if device.type == "cuda":
                torch.cuda.set_device(device)
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl", timeout=timeout, device_id=device
                )
            else:
                dist.init_process_group("gloo", timeout=timeout)
            atexit.register(_destroy_default_group)
        base = group if group is not None else dist.group.WORLD
        if dist.get_rank(base) < 0:
            raise WorldError("this rank is not in the group that it gave",
                             rank=dist.get_rank(), cure="Make the plane on the group's ranks only")
        size = dist.get_world_size(base)
        if size == 1:
            return cls._alone(device, timeout)
        ranks = dist.get_process_group_ranks(base)
        # Ranks outside a sub-group know nothing of this plane and cannot take part in making it.
        local = len(ranks) < dist.get_world_size()

        def new_group(name: str, backend: str) -> dist.ProcessGroup:
            made = dist.new_group(
                ranks, backend=backend, timeout=timeout, use_local_synchronization=local,
                group_desc=f"conduit/{name}",
            )
            assert isinstance(made, dist.ProcessGroup)
            return made

        control, watch = new_group("control", "gloo"), new_group("watch", "gloo")
        data = new_group("data", "nccl" if device.type == "cuda" else "gloo")
        identities = np.empty(size, dtype=np.int64)
        mine = np.full(size, _host_identity())
        dist.all_to_all_single(
            torch.from_numpy(identities), torch.from_numpy(mine), group=control
        )
        numbers: dict[int, int] = {}
        hosts = [numbers.setdefault(identity, len(numbers)) for identity in identities.tolist()]
        return cls(
            rank=dist.get_rank(base), size=size, device=device, timeout=timeout,
            hosts=np.array(hosts, dtype=np.int64), control=control, watch=watch, data=data,
            _owned=[control, watch, data],
        )

    @classmethod
    def _alone(cls, device: torch.device, timeout: timedelta) -> World:
        return cls(
            rank=0, size=1, device=device, timeout=timeout, hosts=np.zeros(1, dtype=np.int64)
        )

    @property
    def memory_sharers(self) -> NDArray[np.bool_]:
        """Which ranks allocate from the same memory as this one: those of its host, or on CUDA
        only itself, since every rank has a GPU of its own."""
        if self.device.type == "cuda":
            return np.arange(self.size) == self.rank
        return self.hosts == self.hosts[self.rank]

    def close(self) -> None:
        """Local. Destroys the plane's own groups."""
        while self._owned:
            group = self._owned.pop()
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self.control = self.watch = self.data = None


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _host_identity() -> int:
    """63 bits that ranks have in common exactly when they share /dev/shm.

    The hostname alone would not do: containers on one machine may share a name without sharing
    memory, or share memory under two names.
    """
    parts = [platform.node()]
    boot, shm = Path("/proc/sys/kernel/random/boot_id"), Path("/dev/shm")
    if boot.exists() and shm.exists():
        parts = [boot.read_text().strip(), str(shm.stat().st_dev)]
    digest = hashlib.sha256("|".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
