"""Timing contenders against each other on a machine that others use too.

A shared machine is fast in one second and slow in the next, so what is compared is measured side by
side: in every one of many short rounds each contender is called some times in a row, as a loop
would, and the order changes from round to round. A time is the median of the rounds' medians; a
ratio is the median of the ratios within rounds, which the machine's moods hardly touch.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median

from conduit.tools.output import Progress

__all__ = ["Call", "Contender", "Series", "interleaved", "undisturbed"]

Call = Callable[[], object]

_WARM_UP_MS = 200.0
_FEWEST_CALLS, _MOST_CALLS = 3, 200


@dataclass(frozen=True, kw_only=True)
class Series:
    """One contender's times in microseconds, by round and call."""

    rounds_us: tuple[tuple[float, ...], ...]

    @property
    def medians_us(self) -> list[float]:
        return [median(times) for times in self.rounds_us]

    @property
    def us(self) -> float:
        """The median of the rounds' medians."""
        return median(self.medians_us)

    @property
    def mean_us(self) -> float:
        """The mean of all calls: holds what only some of them pay, and the machine's noise."""
        return fmean(chain.from_iterable(self.rounds_us))

    @property
    def p99_us(self) -> float:
        """What one call in a hundred exceeds."""
        times = sorted(chain.from_iterable(self.rounds_us))
        return times[min(len(times) * 99 // 100, len(times) - 1)]

    def over(self, other: Series) -> float:
        """This contender's time over the other's: the median of the ratios within rounds."""
        pairs = zip(self.medians_us, other.medians_us, strict=True)
        return median(mine / theirs for mine, theirs in pairs)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """``call`` is timed; ``before`` comes before each call and is not."""

    call: Call
    before: Call | None = None


def interleaved(
    contenders: Mapping[str, Contender], *, rounds: int, round_ms: float, progress: Progress,
    what: str,
) -> dict[str, Series]:
    """Times all contenders in each of ``rounds`` rounds, about ``round_ms`` each."""
    with undisturbed():
        calls = {}
        for name, contender in contenders.items():
            progress(f"{what}: warming up {name}")
            calls[name] = _warm_up(contender, round_ms)
        names = list(contenders)
        times: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
        for number in range(rounds):
            progress(f"{what}: round {number + 1} of {rounds}")
            first = number % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(_timed(contenders[name], calls[name]))
            gc.collect(0)
    return {name: Series(rounds_us=tuple(series)) for name, series in times.items()}


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keeps the garbage collector away."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _warm_up(contender: Contender, round_ms: float) -> int:
    """Calls until the contender is in its stride; returns how many calls make a round."""
    taken: list[float] = []
    while len(taken) < _FEWEST_CALLS or sum(taken) < min(_WARM_UP_MS, 10 * round_ms) * 1e3:
        taken += _timed(contender, _FEWEST_CALLS)
    return min(max(int(round_ms * 1e3 / median(taken)), _FEWEST_CALLS), _MOST_CALLS)


def _timed(contender: Contender, calls: int) -> tuple[float, ...]:
    """Microseconds of each of ``calls`` calls, after one that is not counted.

    As in a loop, the result of a call is held until the next one is there, and giving it up counts.
    """
    clock, call, before = time.perf_counter_ns, contender.call, contender.before
    times: list[float] = []
    kept: object = None
    for _ in range(calls + 1):
        if before is not None:
            before()
        begun = clock()
        kept = call()
        times.append((clock() - begun) / 1e3)
    del kept
    return tuple(times[1:])
