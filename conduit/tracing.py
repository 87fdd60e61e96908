"""Spans: what ran when, on which lane, kept for the last iterations and written for a viewer.

The file is JSON in the format of Chrome's trace events, which Perfetto (ui.perfetto.dev) and
``chrome://tracing`` open. Times are microseconds of the machine's clock, so that files of ranks on
one host fit together to the microsecond, those of several hosts as well as their clocks do.
"""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

__all__ = ["Span", "Tracer"]

_KEPT = 16_384


class Span(NamedTuple):
    """``name`` ran on ``lane`` from ``begin_ns`` to ``end_ns``, by ``time.perf_counter_ns``."""

    name: str
    lane: str
    begin_ns: int
    end_ns: int


class Tracer:
    """Keeps the last spans of one rank and adds up what each name took. A name belongs to one
    lane, and so to one thread at a time."""

    def __init__(self, *, rank: int = 0) -> None:
        self._rank = rank
        self.spans: deque[Span] = deque(maxlen=_KEPT)
        self.total_ns: dict[str, int] = {}
        self._since_epoch_ns = time.time_ns() - time.perf_counter_ns()

    def span(self, name: str, lane: str) -> _Open:
        """Context manager: what happens in it."""
        return _Open(self, name, lane)

    def add(self, name: str, lane: str, begin_ns: int, end_ns: int) -> None:
        """A span that is over."""
        self.spans.append(Span(name, lane, begin_ns, end_ns))
        self.total_ns[name] = self.total_ns.get(name, 0) + end_ns - begin_ns

    def write(self, path: str | Path, *, title: str) -> None:
        """Writes what is kept. Raises OSError."""
        spans = list(self.spans)
        lanes = list(dict.fromkeys(span.lane for span in spans))
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": self._rank,
             "args": {"name": f"{title}, rank {self._rank}"}},
            *({"ph": "M", "name": "thread_name", "pid": self._rank, "tid": i,
               "args": {"name": lane}} for i, lane in enumerate(lanes)),
            *({"ph": "X", "name": span.name, "pid": self._rank, "tid": lanes.index(span.lane),
               "ts": (span.begin_ns + self._since_epoch_ns) / 1000,
               "dur": (span.end_ns - span.begin_ns) / 1000} for span in spans),
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


class _Open:
    def __init__(self, tracer: Tracer, name: str, lane: str) -> None:
        self._tracer, self._name, self._lane = tracer, name, lane
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tracer.add(self._name, self._lane, self._begin_ns, time.perf_counter_ns())
