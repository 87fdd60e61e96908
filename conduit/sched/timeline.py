"""The timeline: what the learner and the plane did when, and what follows for the next batch.

Hiding a batch on the lane has a price: threads are woken, and the lane's Python competes with the
learner's for the interpreter. It is worth it when there is a step to hide behind and something to
hide. Ranks bring their two figures, the learner's time between plane calls and the time the last
batch took, in the control record, and decide alike.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from conduit.tracing import Tracer

__all__ = ["CALL", "CALLING", "LEARNER", "PHASES", "STEP", "Timeline"]

CALL, LEARNER, PHASES = "plane calls", "learner", "phases"
"""Lanes of spans of the training thread: in calls of the plane, between them, and what the program
calls it."""

CALLING, STEP = "sample", "step"

_STEP_US, _FETCH_US = 1_000, 250
"""A shorter step hides little, and less is not worth hiding: giving a batch to the worker thread
and taking it back costs about this much."""

_FETCHING = ("draw", "gather", "exchange", "fetch")


class Timeline:
    """One rank's. ``step_us`` is the learner's time before this call, ``fetch_us`` what the stages
    of the last batch took, wherever they ran; ``hidden`` says whether the next one is fetched on
    the lane, and ``why`` it is not; ``last_rank`` had the longest step, ``longest_step_us``."""

    def __init__(self, tracer: Tracer, *, overlap: bool) -> None:
        self._tracer, self._overlap = tracer, overlap
        self.span = tracer.span
        self._begun_ns = self._returned_ns = 0
        self._fetched_ns = 0
        self.step_us = self.fetch_us = 0
        self._step = self._fetch = 0
        self.hidden = False
        self.last_rank: int | None = None
        self.longest_step_us = 0

    def enter(self) -> None:
        """The training thread asks for a batch."""
        self._begun_ns = time.perf_counter_ns()
        if self._returned_ns:
            self._tracer.add(STEP, LEARNER, self._returned_ns, self._begun_ns)
            self.step_us = (self._begun_ns - self._returned_ns) // 1000

    def leave(self) -> int:
        """It gets one; returns how many nanoseconds that took."""
        now = self._returned_ns = time.perf_counter_ns()
        totals = self._tracer.total_ns
        fetched_ns = sum([totals.get(name, 0) for name in _FETCHING])
        self.fetch_us = (fetched_ns - self._fetched_ns) // 1000
        self._fetched_ns = fetched_ns
        self._tracer.add(CALLING, CALL, self._begun_ns, now)
        return now - self._begun_ns

    def decide(self, step_us: NDArray[np.int64], fetch_us: NDArray[np.int64]) -> bool:
        """Whether the next batch is to be fetched on the lane, by the figures of all ranks."""
        steps, fetch = step_us.tolist(), max(fetch_us.tolist())
        self.longest_step_us = max(steps)
        self.last_rank = steps.index(self.longest_step_us)
        self._step, self._fetch = min(steps), fetch
        self.hidden = self._overlap and self.hides(self._step, fetch)
        return self.hidden

    @staticmethod
    def hides(step_us: int, fetch_us: int) -> bool:
        """Whether there is enough to hide behind every rank's step, and enough to hide."""
        return step_us >= _STEP_US and fetch_us >= _FETCH_US

    @property
    def why(self) -> str:
        """Why batches are not fetched on the lane."""
        if not self._overlap:
            return "overlap is off"
        return (
            f"the shortest step of {self._step / 1e3:.2f} ms is too short to hide much, or "
            f"{self._fetch / 1e3:.2f} ms of fetching too little to hide"
        )
