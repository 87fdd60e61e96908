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
import weakref
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from numpy.typing import NDArray

from conduit.errors import TimeoutError, WorldError

__all__ = ["TRANSPORT_ERRORS", "World"]


TRANSPORT_ERRORS = (RuntimeError, ValueError)
"""What a failing collective raises; ValueError when torch describes the failure on a group that it
does not know."""


@dataclass(kw_only=True)
class World:
    """Ranks ``0 .. size-1`` of one plane; ``hosts[r]`` numbers the host of rank r by first rank.

    ``numbers[r]`` is what rank r is called in the job, where that is another number. In a world of
    one the groups are None and nothing is ever sent.
    """

    rank: int
    size: int
    device: torch.device
    timeout: timedelta
    hosts: NDArray[np.int64]
    numbers: list[int] | None = None
    control: dist.ProcessGroup | None = None
    watch: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None

    @classmethod
    def join(
        cls, *, device: torch.device, timeout: timedelta, group: dist.ProcessGroup | None = None
    ) -> World:
        """Collective. Joins the ranks of ``group`` (default: all ranks of the job).

        Uses the process group that the program has made. Under torchrun without one it makes it,
        for the rest of the process: a group that is made again finds the first one's addresses in
        torchrun's store. Without torchrun it is a world of one.
        """
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise WorldError("timeout is no duration", expected="a timedelta above 0",
                             got=repr(timeout), cure="For example timedelta(minutes=5)")
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
        everyone = dist.group.WORLD
        assert everyone is not None
        base = group if group is not None else everyone
        if dist.get_rank(base) < 0:
            raise WorldError("this rank is not in the group that it gave",
                             rank=dist.get_rank(), cure="Make the plane on the group's ranks only")
        size = dist.get_world_size(base)
        if size == 1:
            return cls._alone(device, timeout)
        ranks = dist.get_process_group_ranks(base)
        control, watch, data = _make_groups(ranks, dist.get_rank(base), device, timeout)
        identities = np.empty(size, dtype=np.int64)
        mine = np.full(size, _host_identity())
        try:
            dist.all_to_all_single(
                torch.from_numpy(identities), torch.from_numpy(mine), group=control
            )
        except TRANSPORT_ERRORS as error:
            raise WorldError(
                "a rank was lost while the plane was made", rank=dist.get_rank(base),
                cure=f"The transport said: {str(error).splitlines()[0]}",
            ) from error
        numbers: dict[int, int] = {}
        hosts = [numbers.setdefault(identity, len(numbers)) for identity in identities.tolist()]
        return cls(
            rank=dist.get_rank(base), size=size, device=device, timeout=timeout,
            hosts=np.array(hosts, dtype=np.int64), control=control, watch=watch, data=data,
            numbers=ranks if ranks != list(range(size)) else None,
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

    def told(self, ranks: list[int]) -> str:
        """``rank 1`` or ``ranks [1, 2]``, in a plane on part of the job with their numbers there.
        """
        return _told(ranks, self.numbers)

    def close(self) -> None:
        """Local. Gives up the plane's own groups."""
        made = self.control, self.watch, self.data
        self.control = self.watch = self.data = None
        for group in made:
            if group is not None and group not in _unregistered and dist.is_initialized():
                dist.destroy_process_group(group)


def _told(ranks: list[int], numbers: list[int] | None) -> str:
    text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    if numbers is None:
        return text
    return f"{text} (in the job {_told([numbers[rank] for rank in ranks], None)})"


_made: dict[tuple[int, ...], int] = {}
"""How many planes were made on these ranks of the job: the same number on each of them."""


def _make_groups(
    ranks: list[int], rank: int, device: torch.device, timeout: timedelta
) -> list[dist.ProcessGroup]:
    """The groups control, watch and data on these ranks of the job.

    Raises TimeoutError naming the ranks that did not come, WorldError if all did and it failed.
    """
    number = _made[tuple(ranks)] = _made.get(tuple(ranks), 0) + 1
    here = _store(ranks, f"here {number}")
    here.set(str(rank), "here")
    try:
        devices = _gloo_devices()
        control, watch = (
            _gloo_group(f"{name} {number}", ranks, timeout, devices)
            for name in ("control", "watch")
        )
        if device.type == "cuda":
            return [control, watch, _nccl_group(f"data {number}", ranks, timeout)]
        return [control, watch, _gloo_group(f"data {number}", ranks, timeout, devices)]
    except TRANSPORT_ERRORS as error:
        missing = [peer for peer in range(len(ranks)) if not here.check([str(peer)])]
        if missing:
            who = _told(missing, ranks if ranks != list(range(len(ranks))) else None)
            raise TimeoutError(
                f"{who} did not come to making the plane", rank=rank,
                expected="all ranks within the timeout of the job's process group",
                got=f"nothing from {who}",
                cure="Make the plane on every rank of its group, in the same order as others, and "
                "start the job anew: ranks have now counted different numbers of planes",
            ) from error
        raise WorldError(
            "the groups of the plane could not be made", rank=rank,
            cure=f"The transport said: {str(error).splitlines()[0]}",
        ) from error


def _gloo_devices() -> list[Any]:
    """What listens for the groups of one plane: one thread for all of them, where ``new_group``
    would start one for each, so that a rank is woken once for what arrives together."""
    gloo: Any = c10d.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces]


def _gloo_group(
    name: str, ranks: list[int], timeout: timedelta, devices: list[Any]
) -> dist.ProcessGroup:
    """A Gloo group of these ranks of the job, made by them alone.

    ``new_group(use_local_synchronization=True)`` would be the way, but in torch 2.13 it names the
    group by how many groups a rank is in, so that ranks in different groups wait for each other in
    vain, and a second group finds the addresses of the first. Here the name is the ranks and the
    number of the plane, which all of them know.
    """
    store = _store(ranks, name)
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout, options._devices, options._threads = timeout, devices, len(devices)
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo(store, rank, size, options))
    _unregistered.add(group)
    return group


def _nccl_group(name: str, ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """An NCCL group of these ranks of the job, made by them alone (see ``_gloo_group``)."""
    if len(ranks) == dist.get_world_size():
        made = dist.new_group(
            ranks, backend="nccl", timeout=timeout, group_desc=f"conduit/{name}"
        )
        assert isinstance(made, dist.ProcessGroup)
        return made
    store = _store(ranks, name)
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(
        torch.device("cuda"), kind, c10d.ProcessGroupNCCL(store, rank, size, options)
    )
    _unregistered.add(group)
    return group


def _store(ranks: list[int], name: str) -> c10d.Store:
    """A place in the job's store that belongs to these ranks and this name."""
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return c10d.PrefixStore(f"conduit/{digest}/{name}", c10d._get_default_store())


_unregistered: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups that torch does not know: dropping them is enough to close them."""


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
