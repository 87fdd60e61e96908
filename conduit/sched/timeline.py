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

__all__ = ["CALL", "LEARNER", "Timeline"]

CALL, LEARNER = "plane calls", "learner"
"""Lanes of spans of the training thread: in calls of the plane, and between them."""

_STEP_US, _FETCH_US = 1_000, 100
"""A shorter step hides little, and less is not worth hiding: giving a batch to the worker thread
and taking it back costs about this much."""

_FETCHING = ("draw", "gather", "exchange", "fetch")


class Timeline:
    """One rank's. ``step_us`` is the learner's time before this call, ``fetch_us`` what the stages
    of the last batch took, wherever they ran."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.span = tracer.span
        self._begun_ns = self._returned_ns = 0
        self._fetched_ns = 0
        self.step_us = self.fetch_us = 0

    def enter(self) -> None:
        """The training thread asks for a batch."""
        self._begun_ns = time.perf_counter_ns()
        if self._returned_ns:
            self._tracer.add("step", LEARNER, self._returned_ns, self._begun_ns)
            self.step_us = (self._begun_ns - self._returned_ns) // 1000

    def leave(self) -> int:
        """It gets one; returns how many nanoseconds that took."""
        self._returned_ns = time.perf_counter_ns()
        totals = self._tracer.total_ns
        fetched_ns = sum(totals.get(name, 0) for name in _FETCHING)
        self.fetch_us = (fetched_ns - self._fetched_ns) // 1000
        self._fetched_ns = fetched_ns
        return self._returned_ns - self._begun_ns

    @staticmethod
    def hides(step_us: NDArray[np.int64], fetch_us: NDArray[np.int64]) -> bool:
        """Whether the next batch should be fetched on the lane, by the figures of all ranks."""
        return bool(step_us.min() >= _STEP_US and fetch_us.max() >= _FETCH_US)
