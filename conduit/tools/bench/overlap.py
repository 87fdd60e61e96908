"""``bench overlap``: by how much the experience path lengthens an iteration, stage by stage.

[Note: exposed latency]
The *null loop* is the learner's loop with no plane at all: the same step, in which ranks meet to
reduce gradients, and one batch that is always there. What a loop with a plane takes longer is what
of the experience path is exposed, whatever hides it. A rank's iteration time is the median over
iterations; that of the job is the maximum over ranks. (Not the median of each iteration's maximum:
ranks move in step but not together, and what one takes longer in this iteration it makes up for in
the next, so that these maxima add up to more time than has passed.)

Stages differ in the plane's arguments only, so that each says what one idea is worth:

- ``central``: everything lies on rank 0, which serves every learner's batch; synchronous.
- ``sharded``: every rank holds a part, every learner gets its own draws; synchronous.
- ``exchangeable``: learners get rows of their own shard first; synchronous.
- ``overlapped``: the next batch is fetched while the learner works, and ignores the last commit.
- ``late_rows``: likewise, but with what the last commit changed: the batch of ``exchangeable``.

Null loop and stages take turns, so that all meet the same moods of the machine. A turn begins with
iterations that do not count: the batch before them had all the other stages' turns to hide in.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conduit.edp.ingestion import Ingestion
from conduit.edp.placement import Central
from conduit.edp.routing import ROUTINGS
from conduit.metrics import Report
from conduit.plane import ExperiencePlane
from conduit.tiers.available import host_bytes
from conduit.tools.arguments import UsageError, at_least
from conduit.tools.bench.learner import COMPUTES, Learner
from conduit.tools.bench.rounds import turns_of
from conduit.tools.bench.timing import undisturbed
from conduit.tools.command import Command
from conduit.tools.environment import Environment
from conduit.tools.job import Job
from conduit.tools.output import Column, Reporter, Table
from conduit.tools.schemas import NamedSchema, named_schema, random_rows

__all__ = ["COMMAND"]

_TURNS = 4
_WARM_UP = 3
_FILLED_AT_ONCE = 64
_POOL_ROWS = 512
_PRODUCED = 4
_SEED = 0

COLUMNS = (
    Column(key="stage"), Column(key="routing"), Column(key="iteration_ms", form=",.2f"),
    Column(key="null_iteration_ms", form=",.2f", title="null_ms"),
    Column(key="exposed_ms", form=",.2f"), Column(key="blocked_ms", form=",.2f"),
    Column(key="bytes_moved", form=","), Column(key="busiest_bytes", form=",.0f"),
    Column(key="late_rows", form=","),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for. ``produce`` rows a rank and iteration."""

    schema: NamedSchema
    rows: int
    batch: int
    produce: int
    iterations: int
    step_ms: float
    compute: str
    routing: str
    reduce_mb: float
    trace: str | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage. ``bytes_moved`` between ranks and ``late_rows`` are sums over ranks and
    ``iterations``; ``busiest_bytes`` is what the busiest rank sends, or receives if that is more,
    in one iteration."""

    stage: str
    routing: str
    iteration_ms: float
    null_iteration_ms: float
    exposed_ms: float
    blocked_ms: float
    bytes_moved: int
    busiest_bytes: float
    late_rows: int
    iterations: int
    schema: str
    row_bytes: int
    rows: int
    batch: int
    produce: int
    step_ms: float
    reduce_mb: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schema", required=True, metavar="S",
                        help="mujoco, atari, or a file with the JSON of Schema.description")
    parser.add_argument("--rows", type=at_least(1), metavar="N",
                        help="rows in the buffer, all ranks together, filled first; by default "
                        "what is usual for the schema")
    parser.add_argument("--batch", type=at_least(1), default=256, metavar="B",
                        help="rows that each rank gets (default: 256)")
    parser.add_argument("--step-ms", type=float, required=True, metavar="M",
                        help="how long the learner's step takes by itself")
    parser.add_argument("--compute", choices=COMPUTES, default=COMPUTES[0],
                        help="wait: the step sleeps, in place of an accelerator; cpu: it computes "
                        f"(default: {COMPUTES[0]})")
    parser.add_argument("--produce", type=at_least(0), default=0, metavar="N",
                        help="rows that each rank extends in each iteration (default: 0)")
    parser.add_argument("--iterations", type=at_least(1), default=40, metavar="K",
                        help="how many iterations of each stage are timed (default: 40)")
    parser.add_argument("--routing", choices=ROUTINGS, default=ROUTINGS[0],
                        help="of the stages that overlap; independent leaves out the stage "
                        f"exchangeable (default: {ROUTINGS[0]})")
    parser.add_argument("--reduce", type=float, default=0.0, metavar="MB",
                        help="megabytes of gradients all-reduced in each step (default: 0)")
    parser.add_argument("--trace", metavar="PREFIX",
                        help="write PREFIX-STAGE-RANK.json, which `trace` draws")


def run(args: argparse.Namespace, report: Reporter) -> int:
    """Collective. Measures over all ranks of the job."""
    options = _options(args)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    job = Job.join()
    try:
        _check_memory(options, job)
        _check_trace(options, job)
        rows = _measure(options, job, report)
    finally:
        torch.set_num_threads(threads)
        job.leave()
    first, last = rows[0], rows[-1]
    found = [asdict(row) for row in rows]
    report.finish(found, Table(columns=COLUMNS, results=found), summary={
        "exposed_reduction": _reduction(first.exposed_ms, last.exposed_ms),
        "iteration_reduction": _reduction(first.iteration_ms, last.iteration_ms),
    })
    return 0


def _options(args: argparse.Namespace) -> Options:
    schema = named_schema(args.schema)
    if not (0 < args.step_ms < math.inf and 0 <= args.reduce < math.inf):
        raise UsageError("--step-ms must be above 0, --reduce at least 0, and both finite")
    return Options(
        schema=schema, rows=args.rows or schema.default_rows, batch=args.batch,
        produce=args.produce, iterations=args.iterations, step_ms=args.step_ms,
        compute=args.compute, routing=args.routing, reduce_mb=args.reduce, trace=args.trace,
    )


def _stages(options: Options) -> dict[str, dict[str, Any]]:
    """The plane's arguments in every stage."""
    stages: dict[str, dict[str, Any]] = {
        "central": {"placement": Central(0), "routing": "independent", "overlap": False},
        "sharded": {"routing": "independent", "overlap": False},
    }
    if options.routing == "exchangeable":
        stages["exchangeable"] = {"routing": "exchangeable", "overlap": False}
    stages["overlapped"] = {"routing": options.routing, "max_staleness": 1}
    stages["late_rows"] = {"routing": options.routing}
    return stages


def _check_memory(options: Options, job: Job) -> None:
    """Collective. Refuses on all ranks what does not fit on one. The hosts of an emulated cluster
    have one memory, so all ranks are counted."""
    stages = len(_stages(options))
    staging = 2 * _staging_rows(options) * job.ranks
    produced = (stages * _PRODUCED * options.produce + _pool_rows(options)) * job.ranks
    needed = (stages * (options.rows + staging) + produced) * options.schema.layout.row_bytes
    lacking = needed > 0.9 * host_bytes()[1]
    job.refuse_if(
        lacking,
        f"{options.rows:,} rows do not fit once for every stage: about {needed / 1e9:.1f} GB are "
        "needed, give fewer --rows or --produce",
    )


def _check_trace(options: Options, job: Job) -> None:
    """Collective. Refuses on all ranks what cannot be written on one, before it is measured."""
    folder = Path(f"{options.trace}-").parent
    lacking = options.trace is not None and not (folder.is_dir() and os.access(folder, os.W_OK))
    job.refuse_if(
        lacking, f"cannot write traces into {str(folder)!r}: every host needs that folder"
    )


def _reduction(first_ms: float, last_ms: float) -> float | None:
    """None if there was nothing to reduce."""
    return round(1 - last_ms / first_ms, 4) if first_ms > 0 else None


def _measure(options: Options, job: Job, report: Reporter) -> list[Row]:
    stages = _stages(options)
    learner = Learner(
        job, step_ms=options.step_ms, compute=options.compute,
        reduce_bytes=int(options.reduce_mb * 1e6),
    )
    with contextlib.ExitStack() as stack:
        planes = {}
        for name, arguments in stages.items():
            planes[name] = stack.enter_context(ExperiencePlane(
                options.schema.schema, capacity=options.rows, batch_size=options.batch,
                seed=_SEED, name="bench overlap",
                ingestion=Ingestion(staging_rows=_staging_rows(options)), **arguments,
            ))
        report.begin(
            Environment.here(world=job.ranks, hosts=planes["central"].report().hosts, device="cpu",
                             backend="gloo" if job.ranks > 1 else "none"),
            _notes(options),
        )
        for name, plane in planes.items():
            report.progress(f"filling {options.rows:,} rows for {name}")
            _fill(plane, options)
        runs = {name: Run(plane, learner, options) for name, plane in planes.items()}
        null = Run(None, learner, options)
        with undisturbed():
            for turn, iterations in enumerate(turns_of(options.iterations, _TURNS)):
                for name, loop in {"null": null, **runs}.items():
                    report.progress(f"turn {turn + 1} of {_TURNS}: {name}")
                    job.barrier()
                    loop.turn(iterations)
        rows = _rows(options, job, stages, null, runs)
        if options.trace is not None:
            for name, plane in planes.items():
                plane.trace(f"{options.trace}-{name}-{job.rank}.json")
        report.note(planes["late_rows"].explain())
    return rows


def _notes(options: Options) -> list[str]:
    step = {
        "wait": "a step sleeps, in place of an accelerator that computes",
        "cpu": "a step computes on the CPU, a set amount of work",
    }[options.compute]
    return [
        f"{options.schema.text}; {options.rows:,} rows over the ranks, full",
        f"{options.produce} rows extended a rank and iteration; {step}: {options.step_ms:g} ms; "
        f"then ranks meet to reduce {options.reduce_mb:g} MB of gradients",
        f"medians of {options.iterations} iterations in {_TURNS} turns, of the rank where they are "
        "longest; exposed: longer than the loop without a plane",
        "no stage `placed`: there is no placement by measured links yet",
    ]


def _fill(plane: ExperiencePlane, options: Options) -> None:
    """Collective. In commits as small as the later ones: the oldest rows, which leave first, then
    are spread over ranks as the new ones are."""
    pool_rows = _pool_rows(options)
    pool = random_rows(options.schema.schema, pool_rows, seed=_SEED + plane.rank)
    at_once = options.produce if options.produce >= 8 else _FILLED_AT_ONCE
    share = -(-options.rows // plane.ranks)
    for begin in range(0, share, at_once):
        n = min(at_once, share - begin)
        first = begin % (pool_rows - n + 1)
        plane.extend(pool[first : first + n])
        plane.flush()


def _pool_rows(options: Options) -> int:
    """Random rows to fill from: never fewer than one commit takes."""
    return max(_POOL_ROWS, options.produce)


def _staging_rows(options: Options) -> int:
    return max(1_024, options.produce)


class Run:
    """The loop of one stage, or the null loop, and what its iterations took on this rank."""

    def __init__(self, plane: ExperiencePlane | None, learner: Learner, options: Options) -> None:
        self._plane, self._learner = plane, learner
        self._produced: Iterator[Any] | None = None
        if options.produce and plane is not None:
            self._produced = cycle([
                random_rows(options.schema.schema, options.produce, seed=_SEED + 10 + i)
                for i in range(_PRODUCED)
            ])
        self.iterations_ns: list[int] = []
        self.blocked_ns: list[int] = []
        self.spans: list[tuple[Report, Report]] = []

    def turn(self, iterations: int) -> None:
        """Collective."""
        for _ in range(_WARM_UP):
            self._iterate()
        del self.iterations_ns[len(self.iterations_ns) - _WARM_UP :]
        del self.blocked_ns[len(self.blocked_ns) - _WARM_UP :]
        before = self._plane.report() if self._plane is not None else None
        for _ in range(iterations):
            self._iterate()
        if self._plane is not None and before is not None:
            self.spans.append((before, self._plane.report()))

    def _iterate(self) -> None:
        clock = time.perf_counter_ns
        begun = asked = given = clock()
        batch = None
        if self._plane is not None:
            if self._produced is not None:
                self._plane.extend(next(self._produced))
            asked = clock()
            batch = self._plane.sample()
            given = clock()
        self._learner.step(self._plane)
        del batch
        self.iterations_ns.append(clock() - begun)
        self.blocked_ns.append(given - asked)


def _rows(
    options: Options, job: Job, stages: dict[str, dict[str, Any]], null: Run, runs: dict[str, Run]
) -> list[Row]:
    """Collective. The figures of every stage."""
    null_ms = _median_ms(job, null.iterations_ns)
    rows = []
    for name, run in runs.items():
        iteration_ms = _median_ms(job, run.iterations_ns)
        sent, received = (
            np.array([
                sum(sum(getattr(last, field)) - sum(getattr(first, field))
                    for first, last in run.spans)
            ]) * options.schema.layout.row_bytes for field in ("sent_rows", "received_rows")
        )
        rows.append(Row(
            stage=name, routing=stages[name]["routing"], iteration_ms=round(iteration_ms, 3),
            null_iteration_ms=round(null_ms, 3), exposed_ms=round(iteration_ms - null_ms, 3),
            blocked_ms=round(_median_ms(job, run.blocked_ns), 3),
            bytes_moved=int(job.total(sent)[0]),
            busiest_bytes=int(job.largest(np.maximum(sent, received))[0]) / options.iterations,
            late_rows=sum(last.late_rows - first.late_rows for first, last in run.spans),
            iterations=options.iterations, schema=options.schema.name,
            row_bytes=options.schema.layout.row_bytes, rows=options.rows, batch=options.batch,
            produce=options.produce, step_ms=options.step_ms, reduce_mb=options.reduce_mb,
        ))
    return rows


def _median_ms(job: Job, times_ns: list[int]) -> float:
    """Collective. The largest of the ranks' medians."""
    return int(job.largest(np.array([int(np.median(times_ns))]))[0]) / 1e6


COMMAND = Command(
    words=("bench", "overlap"),
    help="how much of the experience path is exposed, stage by stage",
    add_arguments=add_arguments, run=run,
)
