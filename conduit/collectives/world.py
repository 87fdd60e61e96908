"""The ranks of the job as one plane sees them: hosts, groups, and memory shared within a host."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from conduit.collectives import nccl
from conduit.collectives.groups import (
    TRANSPORT_ERRORS,
    close_groups,
    leaders_group,
    make_groups,
    told,
)
from conduit.collectives.hosts import host_identity
from conduit.collectives.shared import Windows, open_windows
from conduit.errors import WorldError

__all__ = ["RECORD_WORDS", "TRANSPORT_ERRORS", "TWO_LEVEL_RANKS", "World"]

TWO_LEVEL_RANKS = 64
"""Above so many ranks on several hosts, one rank of each host speaks for all of them."""

_LONGER = timedelta(seconds=30)

RECORD_WORDS = 32
"""Integers of a rank's control record at most."""


@dataclass(kw_only=True)
class World:
    """Ranks ``0 .. size-1`` of one plane; ``hosts[r]`` numbers the host of rank r by first rank.

    ``lane`` is the same world for what runs beside the training thread: its ``data`` is a group of
    its own. ``borrowed`` says that ``data`` is the job's. ``numbers[r]`` is what rank r is called
    in the job, where that is another number. In a world of one the groups are None and nothing is
    ever sent. ``windows`` is memory shared with the other ranks of this host, None where there are
    none or it cannot be had. ``leaders`` is the group of the first ranks of the hosts, made for
    those ranks where the control exchange has two levels.
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
    lane: World | None = None
    leaders: dist.ProcessGroup | None = None
    windows: Windows | None = None
    two_level: bool = False
    borrowed: bool = False

    @classmethod
    def join(
        cls, *, device: torch.device, timeout: timedelta, group: dist.ProcessGroup | None = None
    ) -> World:
        """Collective. Joins the ranks of ``group`` (default: all ranks of the job).

        Uses the process group that the program has made. Under torchrun without one it makes it
        with a timeout 30 seconds above the plane's, for the rest of the process: a group that is
        made again finds the first one's addresses in torchrun's store. Without torchrun it is a
        world of one.
        """
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise WorldError("timeout is no duration", expected="a timedelta above 0",
                             got=repr(timeout), cure="For example timedelta(minutes=5)")
        if not dist.is_available() or not (dist.is_initialized() or "WORLD_SIZE" in os.environ):
            if group is not None:
                raise WorldError("a group without torch.distributed",
                                 cure="Call init_process_group first")
            return cls.alone(device, timeout)
        if not dist.is_initialized():
            # Longer than the plane's own: a rank that waits for another in a gradient's reduction
            # is told by the plane on that one, which names who is late.
            longer = timeout + _LONGER
            if device.type == "cuda":
                torch.cuda.set_device(device)
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=longer, device_id=device)
            else:
                dist.init_process_group("gloo", timeout=longer)
            atexit.register(_destroy_default_group)
        everyone = dist.group.WORLD
        assert everyone is not None
        base = group if group is not None else everyone
        if dist.get_rank(base) < 0:
            raise WorldError("this rank is not in the group that it gave",
                             rank=dist.get_rank(), cure="Make the plane on the group's ranks only")
        size = dist.get_world_size(base)
        if size == 1:
            return cls.alone(device, timeout)
        ranks = dist.get_process_group_ranks(base)
        shared = _shared_nccl(base) if device.type == "cuda" else None
        control, watch, data, lane = make_groups(
            ranks, dist.get_rank(base), device, timeout, shared
        )
        world = cls(
            rank=dist.get_rank(base), size=size, device=device, timeout=timeout,
            hosts=np.zeros(size, dtype=np.int64), control=control, watch=watch, data=data,
            numbers=ranks if ranks != list(range(size)) else None, borrowed=shared is not None,
        )
        try:
            world._find_hosts(ranks)
        except TRANSPORT_ERRORS as error:
            raise WorldError(
                "a rank was lost while the plane was made", rank=dist.get_rank(base),
                cure=f"The transport said: {str(error).splitlines()[0]}",
            ) from error
        world.add_lane(lane)
        return world

    def add_lane(self, group: dist.ProcessGroup) -> None:
        """Gives the world its lane, once all else is known."""
        self.lane = replace(self, data=group)

    def close_lane(self) -> None:
        """Local. Lets go of the lane's connections, so that lanes elsewhere that wait end."""
        if self.lane is not None:
            self.lane.data = None

    def _find_hosts(self, ranks: list[int]) -> None:
        """Collective. Who is on which host, memory shared in it, and how hosts talk."""
        identities = self.gather(np.array([host_identity()]))[:, 0]
        numbers: dict[int, int] = {}
        self.hosts = np.array(
            [numbers.setdefault(identity, len(numbers)) for identity in identities.tolist()]
        )
        opened = self.open_windows(1, words=2 * (1 + self.size) * RECORD_WORDS)
        self.windows = opened[0] if opened else None
        self._agree_on_levels(ranks)

    def gather(self, mine: NDArray[np.int64]) -> NDArray[np.int64]:
        """Collective. Every rank's integers, ``[ranks, len(mine)]``. Not for the hot path, and
        errors are the transport's."""
        if self.size == 1:
            return mine[None]
        sent = np.tile(mine, (self.size, 1))
        got = np.empty_like(sent)
        dist.all_to_all_single(
            torch.from_numpy(got), torch.from_numpy(sent), group=self.control
        )
        return got

    def _agree_on_levels(self, ranks: list[int]) -> None:
        """Collective, once it is known who is where."""
        self.two_level = (
            self.windows is not None and self.hosts.max() > 0 and self.size > TWO_LEVEL_RANKS
        )
        if self.two_level:
            leaders = [ranks[first] for first in np.unique(self.hosts, return_index=True)[1]]
            self.leaders = leaders_group(ranks, leaders, self.timeout)

    def open_windows(self, count: int, *, words: int) -> list[Windows] | None:
        """Collective. Memory shared within each host, or None: see :mod:`.shared`."""
        if len(np.unique(self.hosts)) == self.size:
            return None
        assert self.control is not None
        return open_windows(
            count, words=words, rank=self.rank, hosts=self.hosts, group=self.control
        )

    @classmethod
    def alone(cls, device: torch.device, timeout: timedelta) -> World:
        """A world of one."""
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
        return told(ranks, self.numbers)

    def close(self) -> None:
        """Local. Gives up the plane's own groups and the memory that it shares."""
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.windows = None  # the same as here
            lane.close()
        made = self.control, self.watch, None if self.borrowed else self.data, self.leaders
        self.control = self.watch = self.data = self.leaders = None
        if self.windows is not None:
            self.windows.close()
            self.windows = None
        close_groups(made)


def _shared_nccl(base: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The job's group, where rows are to travel on it: see ``nccl.py``."""
    nccl.warn_of_one_queue(os.environ)
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    has_nccl = "nccl" in str(dist.get_backend_config(base))
    return base if nccl.shares_group(os.environ, version, job_has_nccl=has_nccl) else None


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
