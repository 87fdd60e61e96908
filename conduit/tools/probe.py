"""``conduit probe``: measures links, hosts and copies, or shows in which rounds it would."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

from conduit.collectives.links import LinkMatrix
from conduit.collectives.probe import SHORT_WINDOW_NS, WINDOW_NS, probe_links
from conduit.collectives.schedule import Round, rounds
from conduit.collectives.streams import expected_ns
from conduit.collectives.world import World
from conduit.tools.arguments import UsageError, at_least
from conduit.tools.command import Command
from conduit.tools.environment import Environment
from conduit.tools.job import Job, leads
from conduit.tools.output import Column, Reporter, Result, Table

__all__ = ["COMMAND"]

_TIMEOUT = timedelta(seconds=60)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", metavar="FILE",
                        help="write the measured links there, as JSON")
    parser.add_argument("--short", action="store_true",
                        help="few pairs and short streams, as when a plane starts")
    parser.add_argument("--schedule", metavar="RANKS", type=at_least(1),
                        help="measure nothing: show the rounds of a job of so many ranks")
    parser.add_argument("--hosts", type=at_least(1), default=1, help="of --schedule (default 1)")
    parser.add_argument("--bandwidth-gbps", metavar="GBPS", type=float, default=1.0,
                        help="of the links of --schedule, in GB/s (default 1)")


def _run(args: argparse.Namespace, report: Reporter) -> int:
    if args.schedule is not None:
        if leads():
            _show_schedule(args, report)
        return 0
    if args.save is not None and not Path(args.save).absolute().parent.is_dir():
        raise UsageError(f"cannot write {args.save!r}: name a file in a directory that exists")
    job = Job.join()
    try:
        world = World.join(device=_device(), timeout=_TIMEOUT)
        report.progress("probing")
        try:
            matrix = probe_links(world, short=args.short)
        finally:
            world.close()
    finally:
        job.leave()
    backend = "none" if world.size == 1 else "gloo" if world.device.type == "cpu" else "nccl"
    report.begin(Environment.here(
        world=world.size, hosts=max(matrix.hosts) + 1, backend=backend, device=world.device.type,
    ), _notes(matrix))
    results = _results(matrix)
    columns = [Column(key="rank"), Column(key="source"), Column(key="target"),
               Column(key="direction"), Column(key="latency_us", form=",.1f"),
               Column(key="bandwidth_gbps", form=",.3f"), Column(key="spread", form=".2f")]
    report.finish(results, Table(
        columns=columns, results=[result for result in results if result["kind"] == "tier"]
    ))
    if args.save is not None and report.leads:
        try:
            matrix.save(args.save)
        except OSError as error:
            raise UsageError(f"cannot write {args.save!r}: {error.strerror}") from error
    return 0


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _notes(matrix: LinkMatrix) -> list[str]:
    gpus = [
        f"rank {gpu.rank}: {gpu.nvlinks} NVLinks, PCIe {gpu.pcie_generation} x{gpu.pcie_width}, "
        f"NUMA node {gpu.numa_node}, reads {gpu.readable} other GPUs (-1: unknown)"
        for gpu in matrix.gpus
    ]
    return [
        "payload, not bits on the wire; a stream's steady state, as its receiver saw it",
        "at least: the other hosts together could not send or take more",
        *gpus, *matrix.table().splitlines(),
    ]


def _results(matrix: LinkMatrix) -> list[Result]:
    found: list[Result] = [
        {
            "kind": "tier", "rank": copy.rank, "source": copy.source, "target": copy.target,
            "direction": copy.operation, "latency_us": copy.latency_ns / 1e3,
            "bandwidth_gbps": copy.bytes_per_s / 1e9, "spread": copy.spread_per_mille / 1e3,
        } for copy in matrix.copies
    ]
    found += [
        {
            "kind": "link", "source": link.source, "target": link.target,
            "direction": "within_host" if within else "between_hosts",
            "latency_us": link.latency_ns / 1e3, "bandwidth_gbps": link.bytes_per_s / 1e9,
            "spread": link.spread_per_mille / 1e3,
        } for link in matrix.links
        for within in [matrix.hosts[link.source] == matrix.hosts[link.target]]
    ]
    for host, capacity in enumerate(matrix.capacities):
        found += [
            {
                "kind": "host", "source": host, "target": None, "direction": direction,
                "latency_us": None, "bandwidth_gbps": bytes_per_s / 1e9, "spread": spread / 1e3,
                "at_least": at_least,
            } for direction, bytes_per_s, spread, at_least in (
                ("egress", capacity.egress_bytes_per_s, capacity.egress_spread_per_mille,
                 capacity.egress_at_least),
                ("ingress", capacity.ingress_bytes_per_s, capacity.ingress_spread_per_mille,
                 capacity.ingress_at_least),
            )
        ]
    return found


def _show_schedule(args: argparse.Namespace, report: Reporter) -> None:
    if args.schedule % args.hosts or not 0 < args.bandwidth_gbps < 1e6:
        raise UsageError("--schedule must be a multiple of --hosts, --bandwidth-gbps above 0")
    per_host = args.schedule // args.hosts
    schedule = rounds([rank // per_host for rank in range(args.schedule)], short=args.short)
    bytes_per_s = max(int(args.bandwidth_gbps * 1e9), 1)
    window_ns = SHORT_WINDOW_NS if args.short else WINDOW_NS
    turn_ms = 2 * expected_ns(window_ns, bytes_per_s) / 1e6
    results = [_round(number, turn, turn_ms) for number, turn in enumerate(schedule)]
    report.begin(Environment.here(
        world=args.schedule, hosts=args.hosts, backend="none", device="none",
    ), [f"{count} rounds {kind}" for kind, count in Counter(r.kind for r in schedule).items()] + [
        f"about {len(schedule) * turn_ms / 1e3:.1f} s over links of {args.bandwidth_gbps:g} GB/s; "
        "a loaded round shares them out"
    ])
    columns = [Column(key="round"), Column(key="kind"), Column(key="flows", form=","),
               Column(key="first"), Column(key="ms", form=",.0f")]
    report.finish(results, Table(columns=columns, results=results))


def _round(number: int, turn: Round, turn_ms: float) -> Result:
    return {"round": number, "kind": turn.kind, "flows": len(turn.flows), "ms": turn_ms,
            "first": _flows(turn.flows)}


def _flows(flows: Sequence[tuple[int, int]]) -> str:
    shown = " ".join(f"{source}-{target}" for source, target in flows[:4])
    return shown + (" ..." if len(flows) > 4 else "")


COMMAND = Command(
    words=("probe",), help="measure the links between ranks and hosts, and copies within ranks",
    add_arguments=_add_arguments, run=_run,
)
