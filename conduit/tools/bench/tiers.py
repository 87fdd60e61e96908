"""``bench tiers``: gathers and writes of a rank's ring over each mix of tiers, beside the floor.

All mixes hold the same rows and take turns in the same rounds, the tiers that a mix is made of
among them. *Gather* copies random rows into a block that is there; *write* puts rows at consecutive
slots. A disk is measured with all its rows in the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from conduit.schema import Records
from conduit.tiers import address
from conduit.tiers.available import host_bytes, mount_bytes
from conduit.tiers.disk import DiskTier
from conduit.tiers.files import Owner
from conduit.tiers.host import HostTier
from conduit.tiers.mapped import MappedRing, MappedTier
from conduit.tiers.shared import SHM, SharedTier
from conduit.tiers.split import UNMEASURED
from conduit.tiers.store import Store
from conduit.tiers.tier import Ring
from conduit.tools.arguments import UsageError, at_least, comma_list
from conduit.tools.bench.floor import Floor, packed
from conduit.tools.bench.timing import Call, Contender, Series, interleaved
from conduit.tools.command import Command
from conduit.tools.environment import Environment
from conduit.tools.job import Job
from conduit.tools.output import Column, Reporter, Table
from conduit.tools.schemas import NamedSchema, named_schema, random_rows

__all__ = ["COMMAND", "TIERS", "writable_folder"]

TIERS = ("host", "shared", "disk")
# A prime number: no row is like one that lies a whole number of segments away.
_POOL_ROWS = 1_021
_DRAWS = 1 << 20
_MOST_PLACES = 1 << 13
_CPU = torch.device("cpu")
_SEED = 0

COLUMNS = (
    Column(key="operation"), Column(key="batch", form=",", title="rows"), Column(key="tiers"),
    Column(key="us", form=",.1f"), Column(key="us_p99", form=",.1f", title="p99"),
    Column(key="floor_us", form=",.1f"), Column(key="vs_floor", form=".3f"),
    Column(key="vs_host", form=".3f"), Column(key="vs_slower", form=".3f"), Column(key="wrong"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for. ``mixes`` are names of tiers, each mix after the tiers in it."""

    schema: NamedSchema
    rows: int
    batches: tuple[int, ...]
    mixes: tuple[tuple[str, ...], ...]
    folder: Path
    rounds: int
    round_ms: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the results. ``vs_host`` is beside the host tier alone, ``vs_slower`` a mix
    beside the slower one of its tiers alone; ``wrong`` counts rows with other bytes than were
    written."""

    schema: str
    tiers: str
    operation: str
    batch: int
    us: float
    floor_us: float
    vs_floor: float
    vs_host: float | None
    vs_slower: float | None
    us_mean: float
    us_p99: float
    wrong: int
    rows: int
    row_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schema", required=True, metavar="S",
                        help="mujoco, atari, or a file with the JSON of Schema.description")
    parser.add_argument("--rows", type=at_least(1), metavar="N",
                        help="rows in each mix; by default what is usual for the schema")
    parser.add_argument("--batch", type=comma_list(at_least(1)), default=[256], metavar="B",
                        help="rows of a gather and of a write, or several such numbers with commas "
                        "between them (default: 256)")
    parser.add_argument("--tiers", type=comma_list(_mix), metavar="T",
                        default=[("host", "shared"), ("host", "disk"), ("shared", "disk")],
                        help=f"mixes of {', '.join(TIERS)}, with commas between them and a + in "
                        "them; rows are split evenly, and tiers of a mix are measured alone, too "
                        "(default: host+shared,host+disk,shared+disk)")
    parser.add_argument("--folder", type=writable_folder, default=".", metavar="DIR",
                        help="where the file of a disk tier goes (default: the current folder)")
    parser.add_argument("--rounds", type=at_least(1), default=30, metavar="N",
                        help="how often the mixes take turns (default: 30)")
    parser.add_argument("--round-ms", type=at_least(1), default=10, metavar="MS",
                        help="about how long a turn is (default: 10)")


def _mix(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split("+"))
    if not set(names) <= set(TIERS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"expected tiers such as host+disk, of {', '.join(TIERS)}, each once; got {text!r}"
        )
    return names


def writable_folder(text: str) -> str:
    """For ``type=``: a folder that exists and that this user may write to."""
    if not (Path(text).is_dir() and os.access(text, os.W_OK | os.X_OK)):
        raise argparse.ArgumentTypeError(
            f"expected a folder that exists and that you may write to, got {text!r}"
        )
    return text


def run(args: argparse.Namespace, report: Reporter) -> int:
    """Measures on the first rank; the others have nothing to do."""
    options = _options(args)
    job = Job.alone()
    if job is None:
        return 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _check_room(options)
        report.begin(Environment.here(world=1, hosts=1, backend="none", device="cpu"), [
            f"{options.schema.text}; {options.rows:,} rows "
            f"({options.rows * options.schema.layout.row_bytes / 1e9:.2f} GB) in each mix, split "
            "evenly between its tiers",
            f"us: median of the medians of {options.rounds} rounds; vs: median of their ratios, "
            "below 1 is faster",
            "floor: one index_select of packed rows from one tensor into a block that is there "
            "(gather), or one copy_ (write)",
            f"disk: in {options.folder.resolve()}, all rows in the page cache; slower: the slower "
            "one of a mix's tiers alone",
        ])
        results = _measure(options, report)
        found = [asdict(row) for row in results]
        report.finish(found, Table(columns=COLUMNS, results=found))
    finally:
        torch.set_num_threads(threads)
        job.leave()
    return 1 if any(row.wrong for row in results) else 0


def _options(args: argparse.Namespace) -> Options:
    schema = named_schema(args.schema)
    # The tiers of a mix are measured alone, too.
    mixes = dict.fromkeys(
        part for mix in args.tiers for part in [*((name,) for name in mix), mix]
    )
    if not address.WORKS and set(mixes) != {("host",)}:
        raise UsageError("tiers other than host need Linux: give --tiers host")
    return Options(
        schema=schema, rows=args.rows or schema.default_rows, batches=tuple(args.batch),
        mixes=tuple(mixes), folder=Path(args.folder), rounds=args.rounds, round_ms=args.round_ms,
    )


def _check_room(options: Options) -> None:
    """Refuses what does not fit: a ring for each mix, the floor, the rows that are written. Of a
    disk the page cache holds as much, so all of it is counted as memory."""
    row_bytes = options.schema.layout.row_bytes
    parts = {name: sum(1 / len(mix) for mix in options.mixes if name in mix) for name in TIERS}
    rooms = {"memory": (len(options.mixes) + 1.0, host_bytes()[1])}
    if parts["shared"]:
        rooms[os.fspath(SHM)] = (parts["shared"], mount_bytes(SHM)[1])
    if parts["disk"]:
        rooms[os.fspath(options.folder)] = (parts["disk"], mount_bytes(options.folder)[1])
    pool_bytes = (2 * _POOL_ROWS + max(options.batches) * 2) * row_bytes
    for name, (rings, available) in rooms.items():
        needed = options.rows * rings * row_bytes + pool_bytes
        if needed > 0.9 * available:
            fitting = int((0.9 * available - pool_bytes) / (rings * row_bytes))
            raise UsageError(
                f"{options.rows:,} rows take {needed / 1e9:.1f} GB of {name} for all mixes and "
                f"{available / 1e9:.1f} GB are available: give --rows {max(fitting, 1):_} or "
                "fewer, or fewer --tiers"
            )


def _measure(options: Options, report: Reporter) -> list[Row]:
    """Fills all mixes, then lets them take turns."""
    pool = packed(
        options.schema.layout, random_rows(options.schema.schema, _POOL_ROWS, seed=_SEED)
    )
    floor = Floor(rows=options.rows, blocks=[pool])
    results = []
    with contextlib.ExitStack() as stack:
        mixes: dict[str, Filled] = {}
        for names in options.mixes:
            mix = "+".join(names)
            report.progress(f"{mix}: filling {options.rows:,} rows")
            mixes[mix] = Filled(stack.enter_context(_opened(options, names)), options.rows, pool)
        for shift, batch in enumerate(options.batches, 1):
            sources = _sources(pool, options.rows, min(batch, options.rows), shift)
            races: dict[str, dict[str, Call]] = {
                "gather": {"floor": floor.gather(batch, seed=_SEED),
                           **{mix: filled.gather(batch) for mix, filled in mixes.items()}},
                "write": {"floor": floor.write(sources),
                          **{mix: filled.write(sources, shift) for mix, filled in mixes.items()}},
            }
            for operation, calls in races.items():
                series = interleaved(
                    {name: Contender(call=call) for name, call in calls.items()},
                    rounds=options.rounds, round_ms=options.round_ms, progress=report.progress,
                    what=f"{operation} {batch}",
                )
                report.progress(f"{operation} {batch}: checking")
                wrong = {mix: filled.wrong() for mix, filled in mixes.items()}
                results += _rows(options, batch, operation, series, wrong)
    return results


@contextlib.contextmanager
def _opened(options: Options, names: Sequence[str]) -> Iterator[Store]:
    """A store over the tiers of a mix, split evenly."""
    ring = Ring.of(options.schema.layout, options.rows, _CPU)
    mapped = MappedRing(ring)
    owner = Owner.here(f"bench-tiers-{'+'.join(names)}", 0)
    counts = [len(part) for part in np.array_split(np.arange(ring.segments), len(names))]
    with contextlib.ExitStack() as stack:
        tiers: list[MappedTier] = []
        for name, count in zip(names, counts, strict=True):
            if name == "host":
                tiers.append(HostTier(mapped, count))
            elif name == "shared":
                tiers.append(SharedTier(mapped, count, owner))
            else:
                tiers.append(DiskTier(mapped, count, owner, options.folder))
            stack.callback(tiers[-1].close)
        store = Store(ring, tiers, counts, [UNMEASURED] * len(names), mapped)
        stack.callback(store.close)
        yield store


def _sources(pool: Tensor, rows: int, count: int, shift: int) -> list[Tensor]:
    """Rows to write, ``count`` at a time: for slot i, row i + ``shift`` of the pool."""
    again = pool[torch.arange(_POOL_ROWS + count) % _POOL_ROWS]
    starts = range(0, rows - count + 1, count)[:_MOST_PLACES]
    firsts = ((start + shift) % _POOL_ROWS for start in starts)
    return [again[first : first + count] for first in firsts]


class Filled:
    """A store full of rows of ``pool``, and which row it ought to have where."""

    def __init__(self, store: Store, rows: int, pool: Tensor) -> None:
        self._store, self._pool = store, pool
        self._held = np.arange(rows) % _POOL_ROWS
        self._writing: tuple[int, int, int] = (0, 0, 0)
        self._written = 0
        for start in range(0, rows, _POOL_ROWS):
            slots = np.arange(start, min(start + _POOL_ROWS, rows))
            store.write(slots, pool[: len(slots)])
        # Else the kernel writes to the disk while others are measured.
        store.sync()

    def gather(self, batch: int) -> Call:
        """Random rows into a block that is there; draws are made beforehand, as the floor's."""
        draws = np.random.default_rng(_SEED).integers(
            len(self._held), size=(max(_DRAWS // batch, 16), batch)
        )
        wanted, (_, out) = cycle(list(draws)), self._block(batch)
        return lambda: self._store.gather(next(wanted), out)

    def write(self, sources: Sequence[Tensor], shift: int) -> Call:
        """The next ``sources`` (made with that ``shift``) at the next slots."""
        count = len(sources[0])
        places = cycle([
            (np.arange(i * count, (i + 1) * count), source) for i, source in enumerate(sources)
        ])
        self._written, self._writing = 0, (len(sources), count, shift)

        def call() -> None:
            self._store.write(*next(places))
            self._written += 1

        return call

    def wrong(self) -> int:
        """How many rows are not as they were written, gathered in random order."""
        most, count, shift = self._writing
        end = min(self._written, most) * count
        self._held[:end] = (np.arange(end) + shift) % _POOL_ROWS
        found = 0
        order = np.random.default_rng(_SEED).permutation(len(self._held))
        for start in range(0, len(order), _POOL_ROWS):
            slots = order[start : start + _POOL_ROWS]
            block, out = self._block(len(slots))
            self._store.gather(slots, out)
            expected = self._pool[torch.from_numpy(self._held[slots])]
            if not torch.equal(block, expected):
                found += int((block != expected).any(dim=1).sum())
        return found

    def _block(self, rows: int) -> tuple[Tensor, Records]:
        layout = self._store.ring.layout
        block = layout.block(rows)
        return block, layout.records(block)


def _rows(
    options: Options, batch: int, operation: str, series: dict[str, Series], wrong: dict[str, int]
) -> list[Row]:
    floor, host = series["floor"], series.get("host")
    results = []
    for names in options.mixes:
        mix = "+".join(names)
        ours = series[mix]
        slower = max((series[name] for name in names), key=lambda one: one.over(floor))
        results.append(Row(
            schema=options.schema.name, tiers=mix, operation=operation, batch=batch,
            us=round(ours.us, 3), floor_us=round(floor.us, 3), vs_floor=round(ours.over(floor), 4),
            vs_host=round(ours.over(host), 4) if host and host is not ours else None,
            vs_slower=round(ours.over(slower), 4) if len(names) > 1 else None,
            us_mean=round(ours.mean_us, 3), us_p99=round(ours.p99_us, 3), wrong=wrong[mix],
            rows=options.rows, row_bytes=options.schema.layout.row_bytes,
        ))
    return results


COMMAND = Command(
    words=("bench", "tiers"),
    help="gathers and writes over each mix of tiers beside the floor, in one process",
    add_arguments=add_arguments, run=run,
)
