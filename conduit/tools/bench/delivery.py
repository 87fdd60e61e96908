"""``bench delivery``: whole collective ``sample`` calls, and where their time goes.

[Note: what a delivery costs]
``us`` is a whole ``plane.sample()``, nothing of which is done before (``overlap=False``): the
control exchange, the commit of what was extended, draws, routing, gather, exchange and the batch,
on the rank that takes longest. Beside it, in the same iterations, run

- ``small_collective_us``: the smallest collective there is, so what any agreement costs at least;
- ``gather_us``: a gather of as many rows as a batch has from a plain tensor;
- a bare all-to-all of exactly the bytes that the plane has just moved, without any self split;
  ``transfer_us`` is the median of gather and bare transfer together.

What is left, ``fixed_us = us - transfer_us``, is the price of doing it collectively, and
``fixed_collectives = fixed_us / small_collective_us`` tells it in small collectives. Alone there is
nothing to transfer or to agree on: then ``transfer_us`` is the gather, and what is told in small
collectives is null. ``rows_delivered``, ``rows_moved`` (of them, those that changed ranks) and
``bytes_moved`` are sums over all ranks and all ``iterations``.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from statistics import median

import numpy as np
import torch
from tensordict import TensorDict

from conduit.edp.ingestion import Ingestion
from conduit.edp.routing import ROUTINGS
from conduit.metrics import Report
from conduit.plane import ExperiencePlane
from conduit.tiers.available import host_bytes
from conduit.tools.arguments import UsageError, at_least
from conduit.tools.bench.floor import Floor, packed
from conduit.tools.bench.peers import TorchRLRemote, require
from conduit.tools.bench.rounds import Step, Times, collective_rounds, turns_of
from conduit.tools.bench.transfers import BareTransfer, SmallCollective
from conduit.tools.command import Command
from conduit.tools.environment import Environment
from conduit.tools.job import Job
from conduit.tools.output import Column, Reporter, Table
from conduit.tools.schemas import NamedSchema, named_schema, random_rows

__all__ = ["COMMAND"]

_CHUNK_ROWS = 1_024
_POOL_CHUNKS = 4
_SEED = 0
_TURNS = 10
_WARM_UP = 3

COLUMNS = (
    Column(key="routing"), Column(key="batch", form=","), Column(key="us", form=",.1f"),
    Column(key="us_p99", form=",.1f"), Column(key="rows_per_s", form=",.0f"),
    Column(key="moved_share", form=".2%", title="moved"),
    Column(key="small_collective_us", form=",.1f", title="small_us"),
    Column(key="gather_us", form=",.1f"), Column(key="transfer_us", form=",.1f"),
    Column(key="fixed_us", form=",.1f"), Column(key="fixed_collectives", form=".2f", title="fixed"),
)
PEER_COLUMNS = (
    Column(key="peer"), Column(key="peer_version", title="version"),
    Column(key="peer_learners", title="learners"), Column(key="us", form=",.1f"),
    Column(key="peer_us", form=",.1f"), Column(key="vs_peer", form=".3f"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for."""

    schema: NamedSchema
    rows: int
    batch: int
    routing: str
    produce: int
    iterations: int
    peer: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the results. ``peer_learners`` ranks sample from the peer at once."""

    schema: str
    routing: str
    batch: int
    us: float
    rows_per_s: float
    rows_delivered: int
    rows_moved: int
    bytes_moved: int
    moved_share: float
    small_collective_us: float | None
    gather_us: float
    transfer_us: float
    fixed_us: float
    fixed_collectives: float | None
    us_min: float
    us_p99: float
    iterations: int
    produce: int
    rows: int
    row_bytes: int
    rows_sent_home: int
    late_rows: int
    peer: str | None = None
    peer_learners: int | None = None
    peer_us: float | None = None
    vs_peer: float | None = None
    peer_version: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schema", required=True, metavar="S",
                        help="mujoco, atari, or a file with the JSON of Schema.description")
    parser.add_argument("--batch", type=at_least(1), default=256, metavar="B",
                        help="rows that each rank gets (default: 256)")
    parser.add_argument("--routing", choices=ROUTINGS, default=ROUTINGS[0],
                        help=f"which rank gets which rows (default: {ROUTINGS[0]})")
    parser.add_argument("--rows", type=at_least(1), metavar="N",
                        help="rows in the buffer, all ranks together; by default what is usual for "
                        "the schema")
    parser.add_argument("--produce", type=at_least(0), default=0, metavar="N",
                        help="rows that each rank extends before each sample (default: 0)")
    parser.add_argument("--iterations", type=at_least(1), default=200, metavar="K",
                        help="how many samples are timed (default: 200)")
    parser.add_argument("--peer", choices=("none", TorchRLRemote.name), default="none",
                        help="torchrl-rpc: TorchRL's RemoteTensorDictReplayBuffer beside it; needs "
                        "2 ranks or more")


def run(args: argparse.Namespace, report: Reporter) -> int:
    """Collective. Measures over all ranks of the job."""
    options = _options(args)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    job = Job.join()
    try:
        _check_memory(options, job)
        rows = _measure(options, job, report)
        found = [asdict(row) for row in rows]
        tables = [Table(columns=COLUMNS, results=found[:1])]
        if options.peer:
            tables.append(Table(columns=PEER_COLUMNS, results=found))
        report.finish(found, *tables)
    finally:
        torch.set_num_threads(threads)
        job.leave()
    return 0


def _options(args: argparse.Namespace) -> Options:
    schema = named_schema(args.schema)
    peer = args.peer == TorchRLRemote.name
    if peer:
        require(args.peer, TorchRLRemote.packages)
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            raise UsageError(f"peer {args.peer!r} needs a second rank: run it under torchrun "
                             "--nproc-per-node 2")
    return Options(
        schema=schema, rows=args.rows or schema.default_rows, batch=args.batch,
        routing=args.routing, produce=args.produce, iterations=args.iterations, peer=peer,
    )


def _check_memory(options: Options, job: Job) -> None:
    """Collective. Refuses on all ranks what does not fit on one: a share of the plane with its
    staging, as much again for the gather, and the peer's buffer on the first rank."""
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = -(-options.rows // job.ranks)
    plane = share + 2 * _staging_rows(options, job) + options.batch
    buffers = sharers * (plane + share + 2 * _POOL_CHUNKS * _CHUNK_ROWS)
    needed = (buffers + options.peer * options.rows) * options.schema.layout.row_bytes
    lacking = needed > 0.9 * host_bytes()[1]
    job.refuse_if(
        lacking,
        f"{options.rows:,} rows do not fit: every host needs about {needed / 1e9:.1f} GB, "
        "give fewer --rows",
    )


def _staging_rows(options: Options, job: Job) -> int:
    """What is usual, or as much as is filled or produced at once."""
    usual = Ingestion().rows(capacity=options.rows, ranks=job.ranks)
    return max(usual, _CHUNK_ROWS, options.produce)


def _measure(options: Options, job: Job, report: Reporter) -> list[Row]:
    schema, layout = options.schema.schema, options.schema.layout
    pool = [random_rows(schema, _CHUNK_ROWS, seed=_SEED + job.rank * _POOL_CHUNKS + i)
            for i in range(_POOL_CHUNKS)]
    staging_rows = _staging_rows(options, job)
    with ExperiencePlane(
        schema, capacity=options.rows, batch_size=options.batch, routing=options.routing,
        ingestion=Ingestion(staging_rows=staging_rows), seed=_SEED, name="bench delivery",
        overlap=False,
    ) as plane:
        hosts = plane.report().hosts
        report.begin(
            Environment.here(world=job.ranks, hosts=hosts, device="cpu",
                             backend="gloo" if job.ranks > 1 else "none"),
            _notes(options, job),
        )
        report.progress(f"filling {options.rows:,} rows")
        _fill(plane, job, pool, options.rows)
        floor = Floor(rows=-(-options.rows // job.ranks),
                      blocks=[packed(layout, chunk) for chunk in pool])
        peer = None
        if options.peer:
            report.progress("filling the peer")
            peer = TorchRLRemote(
                job, rows=options.rows, batch=options.batch, chunks=lambda: cycle(pool)
            )
        try:
            return _race(options, job, report, plane, floor, peer)
        finally:
            if peer is not None:
                peer.close(graceful=sys.exc_info()[0] is None)


def _notes(options: Options, job: Job) -> list[str]:
    nbytes = options.rows * options.schema.layout.row_bytes
    return [
        f"{options.schema.text}; {options.rows:,} rows ({nbytes / 1e9:.2f} GB) over the ranks, "
        "full and wrapped",
        f"{options.produce} rows extended a rank and sample; us: median of {options.iterations} "
        "samples, on the slowest rank",
        "small: all-to-all of one int64 a peer; transfer: bare all-to-all of the bytes moved, and "
        "the gather",
        "fixed_us: us without the transfer; fixed: the same, counted in small collectives",
        *([f"plane and peer take {_TURNS} turns; vs_peer: median of the turns' ratios of medians",
           "peer: with 1 learner only the second rank samples, else all do, the first by a plain "
           "call"] if options.peer else []),
    ]


def _fill(plane: ExperiencePlane, job: Job, pool: list[TensorDict], rows: int) -> None:
    """Collective. A third more rows than fit, so that the oldest is in the middle of the memory."""
    share = -(-rows // job.ranks)
    for i in range(-(-share * 4 // (3 * _CHUNK_ROWS))):
        plane.extend(pool[i % len(pool)])
        plane.flush()


def _race(
    options: Options, job: Job, report: Reporter, plane: ExperiencePlane, floor: Floor,
    peer: TorchRLRemote | None,
) -> list[Row]:
    """Collective. Plane and peer take turns of some iterations, so that neither finds the caches as
    the other has left them, and both meet the same drift of the machine."""
    bare = BareTransfer(job, options.schema.layout.row_bytes)
    produced = cycle([
        random_rows(options.schema.schema, options.produce, seed=_SEED + i)
        for i in range(_POOL_CHUNKS)
    ])
    accounts = [plane.report()]

    def before() -> None:
        if options.produce:
            plane.extend(next(produced))

    def after() -> None:
        accounts.append(plane.report())
        bare.follow(accounts[-2], accounts[-1])

    ours = [
        Step(name="sample", call=plane.sample, before=before, after=after),
        Step(name="gather", call=floor.gather(options.batch, seed=_SEED + job.rank)),
        Step(name="bare", call=bare),
    ]
    if job.ranks > 1:
        ours.append(Step(name="small", call=SmallCollective(job)))
    theirs = []
    if peer is not None:
        theirs.append(Step(name="everyone", call=peer.sample))
        theirs.append(Step(name="one", call=peer.sample if job.rank == 1 else lambda: None))
    turns: list[dict[str, Times]] = []
    spans: list[tuple[Report, Report]] = []
    for iterations in turns_of(options.iterations, _TURNS):
        turn: dict[str, Times] = {}
        for steps in (ours, theirs):
            turn |= collective_rounds(
                job, steps, iterations=iterations, warm_up=_WARM_UP, progress=report.progress,
                what=f"{options.routing} delivery, turn {len(turns) + 1} of {_TURNS}",
            )
        spans.append((accounts[-1 - iterations], accounts[-1]))
        del accounts[:-1]
        turns.append(turn)
    times = {name: Times.joined([turn[name] for turn in turns]) for name in turns[0]}
    row = _row(options, job, times, spans)
    if peer is None:
        return [row]
    return [
        replace(
            row, peer=peer.name, peer_learners=learners, peer_us=round(times[step].us, 3),
            vs_peer=round(median(turn["sample"].us / turn[step].us for turn in turns), 4),
            peer_version=peer.version,
        )
        for step, learners in (("everyone", job.ranks), ("one", 1))
    ]


def _row(
    options: Options, job: Job, times: dict[str, Times], spans: list[tuple[Report, Report]]
) -> Row:
    """Collective. What happened between pairs of the plane's reports, summed over ranks."""
    delivered, moved, sent_home = job.total(np.array([
        sum(getattr(last, name) - getattr(first, name) for first, last in spans)
        for name in ("rows_delivered", "rows_received", "rows_sent_home")
    ])).tolist()
    row_bytes = options.schema.layout.row_bytes
    sample, gather = times["sample"], times["gather"]
    transfer = Times(iterations_us=gather.iterations_us + times["bare"].iterations_us)
    small = times["small"].us if "small" in times else None
    fixed_us = sample.us - transfer.us
    return Row(
        schema=options.schema.name, routing=options.routing, batch=options.batch,
        us=round(sample.us, 3), rows_per_s=round(options.batch * job.ranks / sample.us * 1e6, 1),
        rows_delivered=delivered, rows_moved=moved, bytes_moved=moved * row_bytes,
        moved_share=moved / delivered, small_collective_us=small and round(small, 3),
        gather_us=round(gather.us, 3), transfer_us=round(transfer.us, 3),
        fixed_us=round(fixed_us, 3), fixed_collectives=small and round(fixed_us / small, 3),
        us_min=round(float(sample.iterations_us.min()), 3), us_p99=round(sample.p99_us, 3),
        iterations=options.iterations, produce=options.produce,
        rows=options.rows, row_bytes=row_bytes, rows_sent_home=sent_home,
        late_rows=sum(last.late_rows - first.late_rows for first, last in spans),
    )


COMMAND = Command(
    words=("bench", "delivery"),
    help="whole collective sample calls, and where their time goes",
    add_arguments=add_arguments, run=run,
)
