"""This process's place in the job that a benchmark measures, and the group it measures over."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from conduit.tools.arguments import UsageError

__all__ = ["Job", "leads"]


def leads() -> bool:
    """Whether this process is the first rank, which speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """The ranks that measure. ``group`` is a Gloo group apart from the plane's, None if there is
    one rank; ``made`` says that the default process group was made here."""

    rank: int
    ranks: int
    group: dist.ProcessGroup | None
    made: bool

    @classmethod
    def join(cls) -> Job:
        """Collective. Joins the ranks that torchrun started; without it, a world of one."""
        made = "WORLD_SIZE" in os.environ and not dist.is_initialized()
        if made:
            dist.init_process_group("gloo")
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(rank=0, ranks=1, group=None, made=made)
        group = dist.new_group(backend="gloo", group_desc="conduit/benchmark")
        assert isinstance(group, dist.ProcessGroup)
        return cls(rank=dist.get_rank(), ranks=dist.get_world_size(), group=group, made=made)

    @classmethod
    def alone(cls) -> Job | None:
        """A world of one on the first rank, also under torchrun; None on the others, which have
        nothing to do then."""
        if not leads():
            return None
        made = "WORLD_SIZE" in os.environ and not dist.is_initialized()
        if made:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return cls(rank=0, ranks=1, group=None, made=made)

    def leave(self) -> None:
        """Local. Gives up what was made to join."""
        if self.made and dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Collective. Returns when all ranks are here."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def refuse_if(self, wrong: bool, why: str) -> None:
        """Collective. Raises UsageError on all ranks if something is ``wrong`` on one of them."""
        if self.largest(np.array([wrong], dtype=np.int64))[0]:
            raise UsageError(why)

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
