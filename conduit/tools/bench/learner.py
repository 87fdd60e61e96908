"""A learner for benchmarks: a step that waits or computes, and gradients that are reduced."""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from conduit.tools.job import Job

__all__ = ["COMPUTES", "Learner", "Phases"]

COMPUTES = ("wait", "cpu")
_SIDE = 192
_CALIBRATION_NS = 300_000_000
_TIMED_PRODUCTS = 5


class Phases(Protocol):
    """What labels phases of a step: a plane."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


class Learner:
    """One step takes ``step_ms`` and then reduces ``reduce_bytes`` of gradients over the job: at
    least one number, since learners of one model meet in every step. If they did not, those of a
    synchronous plane would drift apart, and one would fetch while another works.

    ``compute="wait"`` sleeps, as the training thread does while an accelerator computes; ``"cpu"``
    does a set amount of work, which takes ``step_ms`` when nothing else runs.
    """

    def __init__(self, job: Job, *, step_ms: float, compute: str, reduce_bytes: int) -> None:
        self._job, self._step_s = job, step_ms / 1e3
        self._gradients = torch.zeros(max(reduce_bytes // 4, 1))
        # Orthogonal, so that products of it neither grow nor fade.
        self._matrix = torch.linalg.qr(torch.rand(_SIDE, _SIDE))[0]
        self._products = self._calibrated() if compute == "cpu" else 0

    def step(self, phases: Phases | None = None) -> None:
        """Collective."""
        with phases.phase("compute") if phases is not None else contextlib.nullcontext():
            if self._products:
                self._multiply(self._products)
            else:
                time.sleep(self._step_s)
        if self._job.group is not None:
            with phases.phase("reduce") if phases is not None else contextlib.nullcontext():
                dist.all_reduce(self._gradients, group=self._job.group)

    def _multiply(self, products: int) -> None:
        result = self._matrix
        for _ in range(products):
            result = result @ self._matrix

    def _calibrated(self) -> int:
        """Collective. Products that fit into the step on the slowest rank, all ranks at it."""
        self._multiply(20)
        self._job.barrier()
        # A few at a time, and their median: when others use the machine too, most of these times
        # are still undisturbed, while the mean can be a multiple of them.
        times: list[int] = []
        begun = before = time.perf_counter_ns()
        while before - begun < _CALIBRATION_NS:
            self._multiply(_TIMED_PRODUCTS)
            now = time.perf_counter_ns()
            times.append(now - before)
            before = now
        each_ns = self._job.largest(np.array([int(np.median(times)) // _TIMED_PRODUCTS]))[0]
        return max(round(self._step_s * 1e9 / int(each_ns)), 1)
