"""The collectives that a delivery is compared with: the smallest one, and its own bytes alone."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from conduit.metrics import Report
from conduit.tools.job import Job

__all__ = ["BareTransfer", "SmallCollective"]


class SmallCollective:
    """An equal-split all-to-all of one int64 a peer: what any agreement of ranks costs at least."""

    def __init__(self, job: Job) -> None:
        self._group = job.group
        self._sent = torch.arange(job.ranks)
        self._received = torch.empty_like(self._sent)

    def __call__(self) -> None:
        dist.all_to_all_single(self._received, self._sent, group=self._group)


class BareTransfer:
    """The bytes that the plane has just sent, again, in one all-to-all and with nothing around it.

    Call ``follow`` with the plane's reports from before and after the delivery. Nothing is sent
    when no rank of the job sent anything, as in the plane.
    """

    def __init__(self, job: Job, row_bytes: int) -> None:
        self._job, self._row_bytes = job, row_bytes
        self._sent = torch.ones(0, row_bytes, dtype=torch.uint8)
        self._received = torch.ones(0, row_bytes, dtype=torch.uint8)
        self._send_counts: list[int] = []
        self._receive_counts: list[int] = []
        self._moves = False

    def follow(self, before: Report, after: Report) -> None:
        """Collective. Takes over the counts of what happened between two reports."""
        self._send_counts = _difference(before.sent_rows, after.sent_rows)
        self._receive_counts = _difference(before.received_rows, after.received_rows)
        self._sent = self._grown(self._sent, sum(self._send_counts))
        self._received = self._grown(self._received, sum(self._receive_counts))
        moved: NDArray[np.int64] = np.array([sum(self._send_counts)], dtype=np.int64)
        self._moves = bool(self._job.total(moved)[0])

    def __call__(self) -> None:
        if self._moves:
            dist.all_to_all_single(
                self._received[: sum(self._receive_counts)], self._sent[: sum(self._send_counts)],
                self._receive_counts, self._send_counts, group=self._job.group,
            )

    def _grown(self, block: torch.Tensor, rows: int) -> torch.Tensor:
        if len(block) >= rows:
            return block
        return torch.ones(2 * rows, self._row_bytes, dtype=torch.uint8)


def _difference(before: tuple[int, ...], after: tuple[int, ...]) -> list[int]:
    return [now - then for then, now in zip(before, after, strict=True)]
