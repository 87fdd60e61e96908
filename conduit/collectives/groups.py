"""The process groups of a plane: its own, over its own place in the job's store.

A plane has four: *control* (pure Gloo, for the small exchange that begins every collective call),
*watch* (pure Gloo, silent until a call fails, then used to find out who is missing), *data*
(Gloo for CPU, NCCL for CUDA) and *lane* (on CPU, for the worker thread; on CUDA data once more,
since its work is issued by the same thread), so that Conduit's traffic never shares a group, and
therefore an order, with the user's.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from conduit.errors import TimeoutError, WorldError

__all__ = ["TRANSPORT_ERRORS", "close_groups", "leaders_group", "make_groups", "told"]

TRANSPORT_ERRORS = (RuntimeError, ValueError)
"""What a failing collective raises; ValueError when torch describes the failure on a group that it
does not know."""


_made: dict[tuple[int, ...], int] = {}
"""How many planes were made on these ranks of the job: the same number on each of them."""


def make_groups(
    ranks: list[int], rank: int, device: torch.device, timeout: timedelta,
    shared: dist.ProcessGroup | None,
) -> list[dist.ProcessGroup]:
    """The groups control, watch, data and lane on these ranks of the job.

    ``shared`` is data on CUDA, where it is not a group of the plane's own (see ``nccl.py``).
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
            data = shared or _nccl_group(f"data {number}", ranks, timeout)
            return [control, watch, data, data]
        data, lane = (
            _gloo_group(f"{name} {number}", ranks, timeout, devices) for name in ("data", "lane")
        )
        return [control, watch, data, lane]
    except TRANSPORT_ERRORS as error:
        missing = [peer for peer in range(len(ranks)) if not here.check([str(peer)])]
        if missing:
            who = told(missing, ranks if ranks != list(range(len(ranks))) else None)
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


def leaders_group(
    ranks: list[int], leaders: list[int], timeout: timedelta
) -> dist.ProcessGroup | None:
    """Collective for ``leaders``, one of ``ranks`` on every host: a Gloo group of theirs.

    None on the other ranks. Comes after ``make_groups`` on the same ``ranks``.
    """
    if dist.get_rank() not in leaders:
        return None
    return _gloo_group(f"leaders {_made[tuple(ranks)]}", leaders, timeout, _gloo_devices())


def close_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Local. Gives up groups made here."""
    for group in groups:
        if group is not None and group not in _unregistered and dist.is_initialized():
            dist.destroy_process_group(group)


def told(ranks: list[int], numbers: list[int] | None) -> str:
    """``rank 1`` or ``ranks [1, 2]``, and their ``numbers`` in the job if they have others."""
    text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    if numbers is None:
        return text
    return f"{text} (in the job {told([numbers[rank] for rank in ranks], None)})"


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
