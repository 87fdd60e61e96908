"""Spans: kept, added up, and written for viewers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from conduit.tracing import Tracer


def test_spans_are_kept_and_added_up() -> None:
    tracer = Tracer()
    tracer.add("draw", "lane", 100, 350)
    with tracer.span("draw", "lane"):
        time.sleep(0.002)
    with pytest.raises(ValueError, match="inside"), tracer.span("call", "calls"):
        raise ValueError("inside")
    assert [(span.name, span.lane) for span in tracer.spans] == [
        ("draw", "lane"), ("draw", "lane"), ("call", "calls")
    ]
    assert tracer.total_ns["draw"] >= 2_000_250
    assert tracer.total_ns["draw"] == sum(
        span.end_ns - span.begin_ns for span in tracer.spans if span.name == "draw"
    )


def test_only_the_last_are_kept() -> None:
    tracer = Tracer()
    for number in range(20_000):
        tracer.add("x", "lane", number, number + 1)
    assert len(tracer.spans) == 16_384
    assert tracer.spans[-1].begin_ns == 19_999 and tracer.total_ns["x"] == 20_000


def test_a_file_is_what_viewers_read(tmp_path: Path) -> None:
    tracer = Tracer(rank=2)
    tracer.add("draw", "lane", 5_000_000, 7_500_000)
    tracer.add("call", "calls", 8_000_000, 8_001_000)
    tracer.write(tmp_path / "trace.json", title="plane 'x'")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"plane 'x', rank 2", "lane", "calls"}
    draw, call = (event for event in events if event["ph"] == "X")
    assert (draw["name"], draw["pid"], draw["dur"], call["dur"]) == ("draw", 2, 2500.0, 1.0)
    assert call["ts"] - draw["ts"] == pytest.approx(3000, abs=1)
    assert draw["tid"] != call["tid"]
