"""``bench sample``: local sample and extend of a plane in a world of one.

Every contender holds the same number of the same rows, is full and has wrapped, and uses one
thread. *Sample* is a whole ``plane.sample()``: draws, gather, batch. *Extend* is ``plane.extend()``
of one chunk and the ``flush()`` that commits it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from conduit.plane import ExperiencePlane
from conduit.tiers.available import host_bytes
from conduit.tiers.specification import Disk, Host, Memory, Shared
from conduit.tools.arguments import UsageError, at_least, comma_list
from conduit.tools.bench.floor import Floor, packed
from conduit.tools.bench.peers import LOCAL_PEERS, LocalPeer, PeerError, chosen_peers
from conduit.tools.bench.tiers import TIERS, writable_folder
from conduit.tools.bench.timing import Call, Contender, Series, interleaved
from conduit.tools.command import Command
from conduit.tools.environment import Environment
from conduit.tools.job import Job
from conduit.tools.output import Column, Reporter, Table
from conduit.tools.schemas import NamedSchema, named_schema, random_rows

__all__ = ["COMMAND"]

CHUNK_ROWS = (64, 1_024)
_POOL_CHUNKS = 4
_SEED = 0

COLUMNS = (
    Column(key="operation"), Column(key="batch", form=",", title="rows"),
    Column(key="us", form=",.1f"), Column(key="us_after_extend", form=",.1f", title="committing"),
    Column(key="us_p99", form=",.1f", title="p99"), Column(key="floor_us", form=",.1f"),
    Column(key="vs_floor", form=".2f"),
    Column(key="peer"), Column(key="peer_us", form=",.1f"), Column(key="vs_peer", form=".3f"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for."""

    schema: NamedSchema
    rows: int
    batches: tuple[int, ...]
    sampler: str
    tiers: str
    folder: Path
    peers: dict[str, bool]
    rounds: int
    round_ms: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the results; ``batch`` is the length of the chunk where rows are extended.

    ``us_after_extend`` is a sample that also commits the 64 rows which were extended before it.
    """

    schema: str
    sampler: str
    tiers: str
    batch: int
    operation: str
    us: float
    floor_us: float
    vs_floor: float
    peer: str | None
    peer_us: float | None
    vs_peer: float | None
    us_mean: float
    us_p99: float
    us_after_extend: float | None
    floor_us_mean: float
    peer_us_mean: float | None
    peer_version: str | None
    rows: int
    row_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schema", required=True, metavar="S",
                        help="mujoco, atari, or a file with the JSON of Schema.description")
    parser.add_argument("--rows", type=at_least(1), metavar="N",
                        help="rows in the buffer; by default what is usual for the schema")
    parser.add_argument("--batch", type=comma_list(at_least(1)), default=[256], metavar="B",
                        help="rows of a sample, or several such numbers with commas between them "
                        "(default: 256)")
    parser.add_argument("--sampler", choices=("uniform",), default="uniform",
                        help="how rows are drawn (default: uniform)")
    parser.add_argument("--tiers", choices=TIERS, default="host",
                        help="the memory of our rows (default: host)")
    parser.add_argument("--folder", type=writable_folder, default=".", metavar="DIR",
                        help="where files of rows go that are on disk, ours and peers' (default: "
                        "the current folder)")
    parser.add_argument("--peer", default="auto", metavar="P",
                        help=f"of {', '.join(LOCAL_PEERS)}, with commas between them; auto is all "
                        "that are installed and on disk or not as ours is, none is none (default: "
                        "auto)")
    parser.add_argument("--rounds", type=at_least(1), default=30, metavar="N",
                        help="how often the contenders take turns (default: 30)")
    parser.add_argument("--round-ms", type=at_least(1), default=10, metavar="MS",
                        help="about how long a turn is (default: 10)")


def run(args: argparse.Namespace, report: Reporter) -> int:
    """Measures on the first rank; the others have nothing to do."""
    options = _options(args)
    job = Job.alone()
    if job is None:
        return 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peers, notes = _usable_peers(options)
        _check_memory(options, len(peers))
        report.begin(Environment.here(world=1, hosts=1, backend="none", device="cpu"), [
            f"{options.schema.text}; {options.rows:,} rows "
            f"({options.rows * options.schema.layout.row_bytes / 1e9:.2f} GB), full and wrapped, "
            f"ours in tier {options.tiers}",
            f"us: median of the medians of {options.rounds} rounds; vs: median of their ratios, "
            "below 1 is faster",
            "floor: one index_select of packed rows into a block that is there (sample), or one "
            "copy_ (extend)",
            "sample: batches are strided views on packed rows; committing: a sample after 64 rows "
            "were extended; extend: with the commit",
            *notes,
        ])
        results = []
        for i, batch in enumerate(options.batches):
            results += _measure(options, batch, peers, CHUNK_ROWS if i == 0 else (), report)
        found = [asdict(row) for row in results]
        report.finish(found, Table(columns=COLUMNS, results=found))
    finally:
        torch.set_num_threads(threads)
        job.leave()
    return 0


def _options(args: argparse.Namespace) -> Options:
    schema = named_schema(args.schema)
    return Options(
        schema=schema, rows=args.rows or schema.default_rows, batches=tuple(args.batch),
        sampler=args.sampler, tiers=args.tiers, folder=Path(args.folder),
        peers=chosen_peers(args.peer, on_disk=args.tiers == "disk"), rounds=args.rounds,
        round_ms=args.round_ms,
    )


def _usable_peers(options: Options) -> tuple[list[str], list[str]]:
    """The peers that can hold the schema, and lines on them for the header."""
    usable, notes = [], []
    for name, asked_for in options.peers.items():
        try:
            peer = LOCAL_PEERS[name](
                options.schema.schema, rows=1, batch=1, folder=options.folder
            )
        except (PeerError, ImportError) as error:
            if asked_for:
                raise UsageError(f"peer {name!r} cannot be measured: {error}; leave it out of "
                                 "--peer") from error
            notes.append(f"peer {name} left out: {error}")
        else:
            usable.append(name)
            notes.append(f"peer {name} {peer.version}")
    return usable, notes or ["no peers"]


def _check_memory(options: Options, peers: int) -> None:
    """Refuses what does not fit: the plane with its staging, the floor, peers, the rows to extend.
    Rows on disk count, too: they are to be in the page cache.
    """
    buffers = options.rows * (2 + peers) + max(options.rows // 4, 2_048)
    pool = 3 * _POOL_CHUNKS * sum(CHUNK_ROWS)
    needed = (buffers + pool) * options.schema.layout.row_bytes
    available = host_bytes()[1]
    if needed > 0.9 * available:
        fitting = int(0.9 * available / options.schema.layout.row_bytes - pool) // (3 + peers)
        raise UsageError(
            f"{options.rows:,} rows take {needed / 1e9:.1f} GB in {2 + peers} buffers and "
            f"{available / 1e9:.1f} GB are available: give --rows {max(fitting, 1):_} or fewer"
        )


def _measure(
    options: Options, batch: int, names: Sequence[str], chunk_rows: Sequence[int],
    report: Reporter,
) -> list[Row]:
    """Fills every contender, then lets them take turns."""
    schema, rows = options.schema, options.rows
    report.progress(f"batch {batch}: filling {rows:,} rows")
    pool = [random_rows(schema.schema, max(CHUNK_ROWS), seed=_SEED + i)
            for i in range(_POOL_CHUNKS)]
    blocks = [packed(schema.layout, chunk) for chunk in pool]
    peers = {
        name: LOCAL_PEERS[name](schema.schema, rows=rows, batch=batch, folder=options.folder)
        for name in names
    }
    floor = Floor(rows=rows, blocks=blocks)
    with ExperiencePlane(
        schema.schema, capacity=rows, batch_size=batch, seed=_SEED, name="bench sample",
        tiers=[_memory(options)],
    ) as plane:
        _fill(plane, peers, pool, rows)
        versions = {name: peer.version for name, peer in peers.items()}
        some = [chunk[: min(CHUNK_ROWS)].clone() for chunk in pool]
        results = _rows(options, batch, "sample", versions, _race(
            options, f"sample {batch}", report,
            {"conduit": plane.sample, "floor": floor.gather(batch, seed=_SEED),
             **{name: peer.sample for name, peer in peers.items()}},
            committing=Contender(call=plane.sample, before=_cycling(plane.extend, some)),
        ))
        for count in chunk_rows:
            chunks = [chunk[:count].clone() for chunk in pool]
            results += _rows(options, count, "extend", versions, _race(
                options, f"extend {count}", report,
                {"conduit": _extend_and_commit(plane, chunks),
                 "floor": floor.write([block[:count].clone() for block in blocks]),
                 **{name: _cycling(peer.extend, [peer.converted(chunk) for chunk in chunks])
                    for name, peer in peers.items()}},
            ))
    return results


def _memory(options: Options) -> Memory:
    if options.tiers == "disk":
        return Disk(options.folder)
    return Shared() if options.tiers == "shared" else Host()


def _fill(
    plane: ExperiencePlane, peers: dict[str, LocalPeer], pool: Sequence[TensorDict], rows: int
) -> None:
    """A third more rows than fit, so that the oldest row is in the middle of the memory."""
    chunks = -(-rows * 4 // (3 * len(pool[0])))
    converted = {name: [peer.converted(chunk) for chunk in pool] for name, peer in peers.items()}
    for i in range(chunks):
        plane.extend(pool[i % len(pool)])
        plane.flush()
        for name, peer in peers.items():
            peer.extend(converted[name][i % len(pool)])


def _race(
    options: Options, what: str, report: Reporter, calls: dict[str, Call], **others: Contender
) -> dict[str, Series]:
    contenders = {name: Contender(call=call) for name, call in calls.items()}
    return interleaved(contenders | others, rounds=options.rounds, round_ms=options.round_ms,
                       progress=report.progress, what=what)


def _cycling(extend: Callable[[Any], object], chunks: Sequence[Any]) -> Call:
    turn = cycle(chunks)
    return lambda: extend(next(turn))


def _extend_and_commit(plane: ExperiencePlane, chunks: Sequence[TensorDict]) -> Call:
    extend = _cycling(plane.extend, chunks)

    def call() -> None:
        extend()
        plane.flush()

    return call


def _rows(
    options: Options, batch: int, operation: str, versions: dict[str, str],
    series: dict[str, Series],
) -> list[Row]:
    """One row for each peer, or one without a peer."""
    ours, floor, committing = series["conduit"], series["floor"], series.get("committing")
    results = []
    names: list[str | None] = [*versions] or [None]
    for name in names:
        theirs = series[name] if name else None
        results.append(Row(
            schema=options.schema.name, sampler=options.sampler, tiers=options.tiers, batch=batch,
            operation=operation, us=round(ours.us, 3), floor_us=round(floor.us, 3),
            vs_floor=round(ours.over(floor), 4), peer=name,
            peer_us=round(theirs.us, 3) if theirs else None,
            vs_peer=round(ours.over(theirs), 4) if theirs else None,
            us_mean=round(ours.mean_us, 3), us_p99=round(ours.p99_us, 3),
            us_after_extend=round(committing.us, 3) if committing else None,
            floor_us_mean=round(floor.mean_us, 3),
            peer_us_mean=round(theirs.mean_us, 3) if theirs else None,
            peer_version=versions[name] if name else None,
            rows=options.rows, row_bytes=options.schema.layout.row_bytes,
        ))
    return results


COMMAND = Command(
    words=("bench", "sample"),
    help="local sample and extend latency beside the floor and installed peers, in one process",
    add_arguments=add_arguments, run=run,
)
