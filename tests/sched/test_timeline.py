"""When batches are hidden, and what is said of what is not."""

from __future__ import annotations

import time

import numpy as np
import pytest

from conduit.sched.explanation import explain
from conduit.sched.timeline import CALL, CALLING, LEARNER, STEP, Timeline
from conduit.tracing import Span, Tracer


@pytest.mark.parametrize(("step_us", "fetch_us", "hidden"), [
    ([5_000, 1_000], [10, 250], True), ([5_000, 999], [10, 9_000], False),
    ([5_000, 5_000], [249, 10], False), ([0], [0], False), ([1_000], [250], True),
])
def test_a_batch_is_hidden_where_there_is_enough_to_hide_and_to_hide_behind(
    step_us: list[int], fetch_us: list[int], hidden: bool
) -> None:
    timeline = Timeline(Tracer(), overlap=True)
    assert timeline.decide(np.array(step_us), np.array(fetch_us)) is hidden
    assert timeline.hidden is hidden
    assert (timeline.last_rank, timeline.longest_step_us) == (
        step_us.index(max(step_us)), max(step_us)
    )
    never = Timeline(Tracer(), overlap=False)
    assert never.decide(np.array(step_us), np.array(fetch_us)) is False
    assert never.why == "overlap is off"


def test_the_figures_of_an_iteration() -> None:
    tracer = Tracer()
    timeline = Timeline(tracer, overlap=True)
    timeline.enter()
    tracer.add("draw", "lane", 0, 1_000_000)
    tracer.add("gather", "lane", 0, 2_000_000)
    tracer.add("control", CALL, 0, 9_000_000)
    assert timeline.leave() > 0
    assert (timeline.step_us, timeline.fetch_us) == (0, 3_000)
    time.sleep(0.01)
    timeline.enter()
    assert timeline.step_us >= 10_000
    timeline.leave()
    assert timeline.fetch_us == 0
    assert [span.name for span in tracer.spans if span.lane == LEARNER] == [STEP]


def spans_of(iterations: int, *, control_ms: float) -> list[Span]:
    spans, now = [], 0
    for _ in range(iterations):
        for name, lane, ms in ((STEP, LEARNER, 10.0), ("gather", "lane", 4.0),
                               ("control", CALL, control_ms), ("commit", CALL, 0.5),
                               (CALLING, CALL, control_ms + 0.75)):
            spans.append(Span(name, lane, now, now + int(ms * 1e6)))
        now += 20_000_000
    return spans


def test_what_takes_longest_is_told_first() -> None:
    timeline = Timeline(Tracer(), overlap=True)
    timeline.decide(np.array([10_000, 12_000]), np.array([4_000, 4_000]))
    told = explain(timeline, spans_of(30, control_ms=2.0), rank=0, max_staleness=0).splitlines()
    assert "12.75 ms" in told[0] and "10.00 ms in the learner" in told[0]
    assert "2.75 ms exposed" in told[0]
    assert told[1].startswith("  control 2.00 ms") and "rank 1 comes last" in told[1]
    assert told[2].startswith("  commit 0.50 ms")
    assert told[3] == "  hidden behind the learner: 4.00 ms"
    assert "commit 0.50" in explain(
        timeline, spans_of(30, control_ms=0.1), rank=1, max_staleness=0
    ).splitlines()[1]


def test_why_nothing_is_hidden() -> None:
    timeline = Timeline(Tracer(), overlap=True)
    timeline.decide(np.array([400]), np.array([9_000]))
    told = explain(timeline, spans_of(3, control_ms=1.0), rank=0, max_staleness=0)
    assert "the shortest step of 0.40 ms is too short" in told
    assert explain(timeline, [], rank=0, max_staleness=0).startswith("no batch")
