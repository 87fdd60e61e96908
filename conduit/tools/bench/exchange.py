"""``bench exchange``: the row exchange in the manner of nccl-tests.

[Note: what an exchange costs]
``bytes`` are what the busiest rank sends to *other* ranks. ``time_us`` is an exchange of rows that
lie ready in the outbox until all of them can be read at the receivers, on the rank that takes
longest; ``gather_time_us`` gathers them from a large table first, as a delivery does. Rows that
come through shared memory are read where their sender gathered them: nothing is copied. Taking
turns with it, ``raw_time_us`` is a plain ``all_to_all_single`` of the same bytes with
nothing for the rank itself, and ``raw_gather_time_us`` the same after an ``index_select`` into its
send buffer. ``vs_raw`` compares without a gather, ``vs_raw_gather`` with one on both sides.

``algbw_gbps`` is ``bytes`` over ``time_us``; ``busbw_gbps`` is what the busiest rank sends or
receives, whichever is more, over ``time_us`` (the rule of nccl-tests' alltoallv). Where rows go
through shared memory it is the gather that moves them, so there it is over ``gather_time_us``.
``wrong`` counts rows that arrived other than they were sent, before and after the timing.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives.agreement import Decisions
from conduit.collectives.choice import TRANSPORTS, open_exchanges
from conduit.collectives.exchange import RowExchange
from conduit.collectives.world import World
from conduit.tools.arguments import UsageError, at_least, comma_list
from conduit.tools.bench.patterns import PATTERNS, count_matrix
from conduit.tools.bench.rounds import Step, Times, collective_rounds
from conduit.tools.command import Command
from conduit.tools.environment import Environment
from conduit.tools.job import Job
from conduit.tools.output import Column, Reporter, Table
from conduit.tools.schemas import named_schema

__all__ = ["COMMAND"]

_FACTOR = 4
_TURNS = 4
_WARM_UP = 2
_TABLE_BYTES = 64 << 20
"""Of the table that rows are gathered from: more than caches hold."""
_ENVIRONMENT = ("NCCL_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS")

COLUMNS = (
    Column(key="ranks"), Column(key="transport"), Column(key="bytes", form=","),
    Column(key="rows", form=","), Column(key="time_us", form=",.1f"),
    Column(key="algbw_gbps", form=".3f", title="algbw"),
    Column(key="busbw_gbps", form=".3f", title="busbw"),
    Column(key="raw_time_us", form=",.1f", title="raw_us"),
    Column(key="vs_raw", form=".3f"), Column(key="gather_time_us", form=",.1f", title="gather_us"),
    Column(key="vs_raw_gather", form=".3f"), Column(key="wrong"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the results; ratios and raw times are None where nothing is sent."""

    pattern: str
    transport: str
    ranks: int
    bytes: int
    rows: int
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    raw_time_us: float | None
    vs_raw: float | None
    gather_time_us: float
    raw_gather_time_us: float | None
    vs_raw_gather: float | None
    wrong: int
    row_bytes: int
    iterations: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--min", type=_size, default=4 << 10, metavar="BYTES",
                        help="what the busiest rank sends at first, such as 4K (the default)")
    parser.add_argument("--max", type=_size, default=64 << 20, metavar="BYTES",
                        help="and at last, in steps of a factor of 4 (default: 64M)")
    parser.add_argument("--pattern", choices=PATTERNS, default=PATTERNS[0],
                        help="who sends how much to whom; surplus is what exchangeable routing "
                        f"sends (default: {PATTERNS[0]})")
    parser.add_argument("--transport", choices=TRANSPORTS, default=TRANSPORTS[0],
                        help="network: as between hosts, even on one; shared: nothing but shared "
                        "memory, on one host; or what is used between hosts, with shared memory "
                        "within them (default: auto, what a plane would do)")
    parser.add_argument("--ranks", type=comma_list(at_least(1)), metavar="N,...",
                        help="measure over the first N ranks of the job (default: all)")
    parser.add_argument("--schema", default="mujoco", metavar="S",
                        help="of the rows: mujoco, atari, or a file (default: mujoco)")
    parser.add_argument("--iterations", type=at_least(1), default=20, metavar="K",
                        help="how many exchanges of each size are timed (default: 20)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="where the rows lie; on cuda they move over NCCL (default: cpu)")


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)(?:I?B)?", text.upper())
    nbytes = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]] if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"expected bytes such as 4K or 64M, got {text!r}")
    return nbytes


def run(args: argparse.Namespace, report: Reporter) -> int:
    """Collective. Measures over parts of the job, one after the other."""
    if args.min > args.max:
        raise UsageError("--min is larger than --max")
    row_bytes = named_schema(args.schema).layout.row_bytes
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this process sees no GPU that torch can use")
    torch.set_num_threads(1)
    job = Job.join()
    try:
        parts = args.ranks or [job.ranks]
        if max(parts) > job.ranks:
            raise UsageError(f"--ranks {max(parts)}: the job has {job.ranks} rank(s)")
        rows: list[Row] = []
        for ranks in parts:
            rows += _measure_part(args, job, ranks, row_bytes, report, first=not rows)
        if rows:  # none where this rank is in no part
            found = [asdict(row) for row in rows]
            report.finish(found, Table(columns=COLUMNS, results=found))
    finally:
        job.leave()
    return int(any(row.wrong for row in rows))


def _measure_part(
    args: argparse.Namespace, job: Job, ranks: int, row_bytes: int, report: Reporter, *,
    first: bool,
) -> list[Row]:
    """Collective. The results of the first ``ranks`` ranks; the others wait, and get none."""
    part, group = job, None
    if job.ranks > 1:
        # Groups are made by all ranks, as torch demands. The raw exchange has one to itself, as the
        # plane's has: a barrier has just woken the threads of the group that it uses.
        group, meeting = (dist.new_group(list(range(ranks)), backend="gloo") for _ in range(2))
        part = replace(job, ranks=ranks, group=meeting if ranks > 1 else None, made=False)
    rows: list[Row] = []
    if job.rank < ranks:
        world = _world(args, part, group)
        try:
            rows = _measure(args, part, world, group, row_bytes, report, first=first)
        finally:
            world.close()
    job.barrier()
    return rows


def _world(args: argparse.Namespace, part: Job, group: dist.ProcessGroup | None) -> World:
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(minutes=5)
    if part.ranks == 1:
        return World.alone(device, timeout)
    return World.join(device=device, timeout=timeout, group=group)


def _measure(
    args: argparse.Namespace, part: Job, world: World, group: dist.ProcessGroup | None,
    row_bytes: int, report: Reporter, *, first: bool,
) -> list[Row]:
    if first:
        report.begin(
            Environment.here(
                world=part.ranks, hosts=len(np.unique(world.hosts)), device=args.device,
                backend="none" if world.size == 1 else
                "nccl" if args.device == "cuda" else "gloo",
            ), _notes(args, row_bytes),
        )
    rows = []
    table = torch.arange(_TABLE_BYTES // 4, dtype=torch.int32).view(torch.uint8)
    table = table[: len(table) // row_bytes * row_bytes].view(-1, row_bytes).to(world.device)
    nbytes = args.min
    while nbytes <= args.max:
        report.progress(f"{args.pattern}, {part.ranks} ranks, {nbytes:,} bytes")
        count = max(round(nbytes / row_bytes), 1)
        counts = count_matrix(args.pattern, ranks=part.ranks, rows=count)
        [exchange] = open_exchanges(
            world, row_bytes, count=1, trial_rows=count, decisions=Decisions(),
            transport=args.transport,
        )
        transport = _told(exchange, world)
        if args.transport == "shared" and transport not in ("shared memory", "none"):
            raise UsageError("--transport shared: these ranks do not all share memory")
        trial = _Trial(world, exchange, counts, table, group)
        rows.append(_row(args, part, trial, transport, report))
        exchange.close()
        nbytes *= _FACTOR
    return rows


def _told(exchange: RowExchange, world: World) -> str:
    ways = {exchange.transport(peer) for peer in range(world.size)} - {"none"}
    return " + ".join(sorted(ways)) or "none"


def _notes(args: argparse.Namespace, row_bytes: int) -> list[str]:
    shown = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_ENVIRONMENT)]
    return [
        f"pattern {args.pattern}, rows of {row_bytes:,} bytes, {args.iterations} iterations in "
        f"{_TURNS} turns, {_WARM_UP} to warm up in each; the slowest rank's median",
        "bytes: sent to other ranks by the busiest; raw: all_to_all_single of the same bytes; "
        "bandwidths in GB/s",
        "environment: " + (" ".join(shown) or "none of " + ", ".join(_ENVIRONMENT)),
    ]


class _Trial:
    """One exchange and its raw twin, with all they need made beforehand."""

    def __init__(
        self, world: World, exchange: RowExchange, counts: NDArray[np.int64], table: Tensor,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.world, self.exchange, self.counts = world, exchange, counts
        self._table, self._group = table, group
        self._out_counts, self._in_counts = counts[world.rank], counts[:, world.rank]
        sent, received = int(self._out_counts.sum()), int(self._in_counts.sum())
        generator = np.random.default_rng(0)
        chosen = [  # by sending rank: all ranks know what comes
            generator.integers(0, len(table), int(counts[rank].sum()))
            for rank in range(world.size)
        ]
        self._slots = chosen[world.rank]
        self._index = torch.from_numpy(self._slots).to(world.device)
        self._expected = torch.from_numpy(np.concatenate([
            chosen[peer][counts[peer, : world.rank].sum() :][: counts[peer, world.rank]]
            for peer in range(world.size)
        ])).to(world.device)
        self._records: NDArray[np.void] | None = None
        if world.device.type == "cpu":
            self._records = _as_records(table)
        self._sent = table.new_ones(sent, table.shape[1])
        self._received = table.new_ones(received, table.shape[1])
        self.busiest_rows = int(max(counts.sum(axis=0).max(), counts.sum(axis=1).max()))
        self.rows = int(counts.sum(axis=1).max())
        self.wrong = 0

    def ready(self) -> None:
        """An exchange of what lies in the outbox already."""
        self.exchange.outbox(len(self._slots), what="measuring")
        self._go(lambda rows, start: None)

    def gathered(self) -> None:
        """An exchange with its gather."""
        self._gather()
        self._go(lambda rows, start: None)

    def check(self) -> None:
        """Untimed: counts rows that arrive other than they were sent."""
        self._gather()

        def compare(rows: Tensor, start: int) -> None:
            expected = self._table[self._expected[start : start + len(rows)]]
            self.wrong += int((rows != expected).any(dim=1).sum())

        self._go(compare)

    def _gather(self) -> None:
        rows = self.exchange.outbox(len(self._slots), what="measuring")
        if self._records is None:
            torch.index_select(self._table, 0, self._index, out=rows)
        else:
            self._records.take(self._slots, out=_as_records(rows), mode="clip")

    def _go(self, take: Callable[[Tensor, int], None]) -> None:
        self.exchange.begin(self._out_counts, self._in_counts, what="measuring").wait(take)
        self._settle()

    def raw(self) -> None:
        dist.all_to_all_single(
            self._received, self._sent, self._in_counts.tolist(), self._out_counts.tolist(),
            group=self._group if self.world.device.type == "cpu" else self.world.data,
        )
        self._settle()

    def raw_gathered(self) -> None:
        torch.index_select(self._table, 0, self._index, out=self._sent)
        self.raw()

    def _settle(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def _as_records(rows: Tensor) -> NDArray[np.void]:
    return rows.numpy().view(np.dtype((np.void, rows.shape[1])))[:, 0]


def _row(
    args: argparse.Namespace, part: Job, trial: _Trial, transport: str, report: Reporter
) -> Row:
    """Collective. One size, measured."""
    trial.check()
    steps = [
        Step(name="ready", call=trial.ready), Step(name="gathered", call=trial.gathered),
    ]
    if part.ranks > 1:
        steps += [
            Step(name="raw", call=trial.raw), Step(name="raw gathered", call=trial.raw_gathered)
        ]
    times = _in_turns(args, part, steps, report)
    trial.check()
    us = {name: round(series.us, 3) for name, series in times.items()}
    row_bytes = trial.exchange.row_bytes
    moving_us = us["gathered" if "shared" in transport else "ready"]
    raw, raw_gathered = us.get("raw"), us.get("raw gathered")
    return Row(
        pattern=args.pattern, transport=transport, ranks=part.ranks,
        bytes=trial.rows * row_bytes, rows=trial.rows, time_us=us["ready"],
        algbw_gbps=trial.rows * row_bytes / moving_us / 1e3,
        busbw_gbps=trial.busiest_rows * row_bytes / moving_us / 1e3,
        raw_time_us=raw, vs_raw=raw and round(us["ready"] / raw, 4),
        gather_time_us=us["gathered"], raw_gather_time_us=raw_gathered,
        vs_raw_gather=raw_gathered and round(us["gathered"] / raw_gathered, 4),
        wrong=int(part.total(np.array([trial.wrong]))[0]), row_bytes=row_bytes,
        iterations=args.iterations,
    )


def _in_turns(
    args: argparse.Namespace, part: Job, steps: list[Step], report: Reporter
) -> dict[str, Times]:
    """Collective. Each step some times in a row, as nccl-tests loop, and then the next one, so that
    none finds the caches as another left them and all meet the same drift of the machine."""
    turns: dict[str, list[Times]] = {step.name: [] for step in steps}
    for turn in range(_TURNS):
        iterations = args.iterations // _TURNS + (turn < args.iterations % _TURNS)
        for step in steps if iterations else []:
            turns[step.name].append(collective_rounds(
                part, [step], iterations=iterations, warm_up=_WARM_UP, progress=report.progress,
                what=f"{args.pattern}, {part.ranks} ranks, {step.name}",
            )[step.name])
    return {name: Times.joined(parts) for name, parts in turns.items()}


COMMAND = Command(
    words=("bench", "exchange"),
    help="the row exchange beside a plain all-to-all, in the manner of nccl-tests",
    add_arguments=add_arguments, run=run,
)
