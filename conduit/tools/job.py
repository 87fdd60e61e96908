"""This process's place in the job that a benchmark measures, and the group it measures over."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

__all__ = ["Job", "leads", "work_alone"]


def leads() -> bool:
    """Whether this process is the first rank, which speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def work_alone() -> bool:
    """Makes the first rank a world of one, also under torchrun. False on the other ranks, which
    have nothing to do then. To be undone with ``Job.leave``."""
    if not leads():
        return False
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return True


@dataclass(frozen=True, kw_only=True)
class Job:
    """All ranks of the job. ``group`` is a Gloo group apart from the plane's; None if alone."""

    rank: int
    ranks: int
    group: dist.ProcessGroup | None

    @classmethod
    def join(cls) -> Job:
        """Collective. Joins the ranks that torchrun started; without it, a world of one."""
        if "WORLD_SIZE" in os.environ and not dist.is_initialized():
            dist.init_process_group("gloo")
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(rank=0, ranks=1, group=None)
        group = dist.new_group(backend="gloo", group_desc="conduit/benchmark")
        assert isinstance(group, dist.ProcessGroup)
        return cls(rank=dist.get_rank(), ranks=dist.get_world_size(), group=group)

    @staticmethod
    def leave() -> None:
        """Local. Gives up the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Collective. Returns when all ranks are here."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def largest(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Collective. The maximum over ranks, element by element."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Collective. The sum over ranks, element by element."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(
        self, values: NDArray[np.int64], how: dist.ReduceOp.RedOpType
    ) -> NDArray[np.int64]:
        result = np.array(values, dtype=np.int64)
        if self.group is not None:
            dist.all_reduce(torch.from_numpy(result), op=how, group=self.group)
        return result
