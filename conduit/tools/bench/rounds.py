"""Timing collective steps: every rank takes them in the same order, side by side.

Before each timed step all ranks meet at a barrier. A step's time in one iteration is the longest
that any rank took, since the job goes on when the last one is done; it contains the few
microseconds by which ranks leave the barrier at different times, for all steps alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conduit.tools.bench.timing import undisturbed
from conduit.tools.job import Job
from conduit.tools.output import Progress

__all__ = ["Step", "Times", "collective_rounds", "turns_of"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """``call`` is timed; ``before`` and ``after`` run on either side of it and are not."""

    name: str
    call: Callable[[], object]
    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of one step in microseconds, one an iteration: the maximum over ranks."""

    iterations_us: NDArray[np.float64]

    @property
    def us(self) -> float:
        """The median."""
        return float(np.median(self.iterations_us))

    @property
    def p99_us(self) -> float:
        return float(np.percentile(self.iterations_us, 99))

    @classmethod
    def joined(cls, parts: Sequence[Times]) -> Times:
        """The times of several turns."""
        return cls(iterations_us=np.concatenate([part.iterations_us for part in parts]))


def collective_rounds(
    job: Job, steps: list[Step], *, iterations: int, warm_up: int, progress: Progress, what: str
) -> dict[str, Times]:
    """Collective. Takes all ``steps`` in turn, ``warm_up`` times without and ``iterations`` times
    with the clock."""
    times = np.zeros((len(steps), warm_up + iterations), dtype=np.int64)
    kept: list[object] = [None] * len(steps)
    clock = time.perf_counter_ns
    with undisturbed():
        for iteration in range(warm_up + iterations):
            if iteration % 10 == 0:
                progress(f"{what}: iteration {iteration} of {warm_up + iterations}")
            for number, step in enumerate(steps):
                if step.before is not None:
                    step.before()
                job.barrier()
                begun = clock()
                # Held until the next one is there, as in a loop; giving it up counts.
                kept[number] = step.call()
                times[number, iteration] = clock() - begun
                if step.after is not None:
                    step.after()
    longest = job.largest(times)[:, warm_up:] / 1e3
    return {step.name: Times(iterations_us=longest[i]) for i, step in enumerate(steps)}


def turns_of(iterations: int, turns: int) -> list[int]:
    """The iterations of every turn: as equal as can be, and none without any."""
    shares = [iterations // turns + (turn < iterations % turns) for turn in range(turns)]
    return [share for share in shares if share]
