"""What is still exposed of the experience path, and why, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from conduit.sched.timeline import CALL, CALLING, LEARNER, PHASES, STEP, Timeline
from conduit.tracing import Span

__all__ = ["explain"]

_ITERATIONS = 50
_NOTHING_MS = 0.005


def explain(timeline: Timeline, spans: Sequence[Span], *, rank: int, max_staleness: int) -> str:
    """Of the last iterations among ``spans``, newest last: medians on this rank."""
    found = _iterations(spans)
    if not found:
        return "no batch has been delivered yet, or only one"
    lines = [
        f"an iteration takes {_ms(found, STEP) + _ms(found, CALLING):.2f} ms (median of "
        f"{len(found)}, rank {rank}): {_ms(found, STEP):.2f} ms in the learner, "
        f"{_ms(found, CALLING):.2f} ms exposed in plane calls"
    ]
    parts = {
        name: _ms(found, name) for name in dict.fromkeys(
            span.name for iteration in found for span in iteration if span.lane == CALL
        ) if name != CALLING
    }
    for name, ms in sorted(parts.items(), key=lambda part: -part[1]):
        if ms < _NOTHING_MS:
            continue
        lines.append(f"  {name} {ms:.2f} ms: {_why(name, timeline, rank, max_staleness)}")
    hidden = sum(
        median(sum(_length(span) for span in iteration if span.name == name)
               for iteration in found)
        for name in {s.name for iteration in found for s in iteration
                     if s.lane not in (CALL, LEARNER, PHASES)}
    ) / 1e6
    lines.append(f"  hidden behind the learner: {hidden:.2f} ms" + (
        "" if timeline.hidden else f"; batches are fetched within the call, since {timeline.why}"
    ))
    return "\n".join(lines)


def _why(name: str, timeline: Timeline, rank: int, max_staleness: int) -> str:
    last = timeline.last_rank
    reasons = {
        "control": "ranks agree" + (
            f"; rank {last} comes last, after a step of {timeline.longest_step_us / 1e3:.2f} ms"
            if last is not None and last != rank else ""
        ),
        "commit": "new rows become visible, and go home where a rank is over its quota",
        "deal": "draws are compared with the draft's",
        "late rows": "draws that the last commit changed are fetched after it"
        + ("" if max_staleness else "; max_staleness=1 leaves them out"),
        "fetch": "a batch is fetched within the call",
        "wait for gather": "the lane still gathers rows: the step is shorter than that",
        "wait for exchange": "rows are still on their way: the transfer takes longer than the step",
    }
    return reasons.get(name, "")


def _iterations(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans of each of the last iterations: from one step of the learner to the next."""
    found: list[list[Span]] = []
    for span in reversed(spans):
        if span.name == CALLING:
            if len(found) == _ITERATIONS:
                break
            found.append([])
        if found:
            found[-1].append(span)
    return [
        iteration for iteration in found if any(span.name == STEP for span in iteration)
    ]


def _ms(iterations: Sequence[Sequence[Span]], name: str) -> float:
    return median(
        sum(_length(span) for span in iteration if span.name == name) for iteration in iterations
    ) / 1e6


def _length(span: Span) -> int:
    return span.end_ns - span.begin_ns
