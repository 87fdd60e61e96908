"""``trace``: what the files of ``plane.trace()`` hold, as a table and as a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from conduit.sched.timeline import CALL, CALLING, LEARNER, PHASES, STEP
from conduit.tools.arguments import UsageError
from conduit.tools.command import Command
from conduit.tools.environment import Environment
from conduit.tools.output import Column, Reporter, Table

__all__ = ["COMMAND", "Event", "read"]

_ITERATIONS = 5
_ORDER = (LEARNER, PHASES, CALL)
_WAITS = {"control": "#D55E00", "wait for exchange": "#CC3311", "wait for gather": "#EE7733",
          "late rows": "#AA3377", "fetch": "#882255", "send home": "#EE3377"}
"""Exposed, and so in colours that stand out."""
_WORK = {STEP: "#BBBBBB", CALLING: "#FBE3D6", "draw": "#88CCEE", "gather": "#33BBEE",
         "exchange": "#0077BB", "commit": "#DDAA33", "deal": "#CCBB44"}
_OTHERS = ("#B5DCCF", "#6BAF92", "#D9E2A8", "#A9C1A9")

COLUMNS = (
    Column(key="rank"), Column(key="lane"), Column(key="name"), Column(key="count", form=","),
    Column(key="total_ms", form=",.2f"), Column(key="median_ms", form=",.3f"),
    Column(key="share", form=".1%"),
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """A span in a file: ``begin_us`` by the clock of its machine."""

    rank: int
    lane: str
    name: str
    begin_us: float
    length_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="what plane.trace() wrote")
    parser.add_argument("--merge", metavar="FILE",
                        help="write one file with all ranks, for ui.perfetto.dev")
    parser.add_argument("--png", metavar="FILE", help="draw a timeline; needs matplotlib")
    parser.add_argument("--last", type=float, metavar="MS",
                        help=f"how much of the end to draw (default: {_ITERATIONS} steps)")
    parser.add_argument("--title", default="", metavar="TEXT", help="of the picture")


def run(args: argparse.Namespace, report: Reporter) -> int:
    """Local."""
    documents = [_document(file) for file in args.files]
    events = [event for file, document in zip(args.files, documents, strict=True)
              for event in read(file, document)]
    if not events:
        raise UsageError("these traces hold no spans: make some calls before plane.trace()")
    report.begin(
        Environment.here(world=1, hosts=1, device="cpu", backend="none"),
        [f"{len(events):,} spans of {len({event.rank for event in events})} rank(s)",
         "share: of the time from a rank's first span to its last"],
    )
    found = _table(events)
    if args.merge is not None:
        merged = {"traceEvents": [e for document in documents for e in document["traceEvents"]],
                  "displayTimeUnit": "ms"}
        _write(args.merge, json.dumps(merged).encode())
    if args.png is not None:
        _draw(events, args.png, last_ms=args.last, title=args.title)
    report.finish(found, Table(columns=COLUMNS, results=found))
    return 0


def _document(file: str) -> dict[str, Any]:
    try:
        document = json.loads(Path(file).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file!r}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file!r} is no JSON") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise UsageError(f"{file!r} is no trace: it has no list of traceEvents")
    return document


def read(file: str, document: dict[str, Any]) -> list[Event]:
    """The spans in a trace; UsageError naming the ``file`` where it is not one of plane.trace()."""
    try:
        lanes = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in document["traceEvents"] if event.get("name") == "thread_name"
        }
        return [
            Event(
                rank=int(event["pid"]), lane=lanes[event["pid"], event["tid"]],
                name=str(event["name"]), begin_us=float(event["ts"]),
                length_us=float(event["dur"]),
            ) for event in document["traceEvents"] if event["ph"] == "X"
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{file!r} was not written by plane.trace()") from error


def _table(events: Sequence[Event]) -> list[dict[str, object]]:
    rows = []
    for rank in sorted({event.rank for event in events}):
        mine = [event for event in events if event.rank == rank]
        whole_us = max(e.begin_us + e.length_us for e in mine) - min(e.begin_us for e in mine)
        for lane, name in sorted({(event.lane, event.name) for event in mine}, key=_place):
            lengths = [e.length_us for e in mine if (e.lane, e.name) == (lane, name)]
            rows.append({
                "rank": rank, "lane": lane, "name": name, "count": len(lengths),
                "total_ms": round(sum(lengths) / 1e3, 3),
                "median_ms": round(median(lengths) / 1e3, 4),
                "share": round(sum(lengths) / whole_us, 5) if whole_us else 0.0,
            })
    return rows


def _place(lane_and_name: tuple[str, str]) -> tuple[int, str, bool, str]:
    lane, name = lane_and_name
    return _order(lane), lane, name != CALLING, name


def _order(lane: str) -> int:
    return _ORDER.index(lane) if lane in _ORDER else len(_ORDER)


def _draw(events: Sequence[Event], file: str, *, last_ms: float | None, title: str) -> None:
    """A band per rank, in it a row per lane."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UsageError("--png needs matplotlib: pip install 'conduit-edp[cli]'") from error
    end_us = max(event.begin_us + event.length_us for event in events)
    begin_us = end_us - last_ms * 1e3 if last_ms is not None else _begin_of_last_steps(events)
    shown = [event for event in events if event.begin_us + event.length_us > begin_us]
    rows = sorted({(event.rank, event.lane) for event in shown},
                  key=lambda row: (row[0], _order(row[1]), row[1]))
    names = sorted({event.name for event in shown}, key=lambda name: (name not in _WORK, name))
    unknown = [name for name in names if name not in _WORK and name not in _WAITS]
    colours = _WORK | _WAITS | {
        name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(unknown)
    }
    figure, axes = plt.subplots(figsize=(12, 1.6 + 0.36 * len(rows)), dpi=100)
    for place, row in enumerate(rows):
        for event in sorted(shown, key=lambda event: event.name != CALLING):
            if (event.rank, event.lane) == row:
                left = max(event.begin_us, begin_us)
                axes.barh(
                    place, (event.begin_us + event.length_us - left) / 1e3,
                    left=(left - begin_us) / 1e3, height=0.8, color=colours[event.name],
                )
        if place and row[0] != rows[place - 1][0]:
            axes.axhline(place - 0.5, color="black", linewidth=0.6)
    axes.set_yticks(range(len(rows)), [f"rank {rank}  {lane}" for rank, lane in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, (end_us - begin_us) / 1e3)
    axes.set_xlabel("ms")
    axes.set_title(title)
    axes.legend(
        handles=[Patch(color=colours[name], label=name) for name in names], fontsize=8,
        loc="upper center", bbox_to_anchor=(0.5, -0.55 / (0.36 * len(rows))),
        ncols=min(len(names), 9), frameon=False,
    )
    try:
        figure.savefig(file, bbox_inches="tight", format="png")
    except OSError as error:
        raise UsageError(f"cannot write {file!r}: {error.strerror}") from error
    finally:
        plt.close(figure)


def _begin_of_last_steps(events: Sequence[Event]) -> float:
    """Of the lowest rank."""
    first = min(event.rank for event in events)
    steps = sorted(e.begin_us for e in events if e.rank == first and e.name == STEP)
    return steps[-_ITERATIONS :][0] if steps else min(event.begin_us for event in events)


def _write(file: str, data: bytes) -> None:
    try:
        Path(file).write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {file!r}: {error.strerror}") from error


COMMAND = Command(
    words=("trace",), help="what plane.trace() wrote, as a table and a picture",
    add_arguments=add_arguments, run=run,
)
