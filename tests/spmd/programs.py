"""Random programs for planes of 1, 2 and 4 ranks, and what a slow reference says they deliver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.reference import Job, LiveRow
from tests.spmd.rows import DTYPES, FieldSpec, row_content

__all__ = [
    "STREAMS", "Expected", "Program", "Setting", "as_sorted", "bytes_of", "cases", "expected",
]

STREAMS = 4
"""Streams of a program; every rank has a contiguous block of them."""


def owner(stream: int, ranks: int) -> int:
    """The rank that has this stream."""
    return stream * ranks // STREAMS


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a world runs a program: what may not change the global batches."""

    ranks: int
    routing: str
    placement: str
    quotas: Sequence[int]
    hosts: Sequence[int]
    staging_rows: int | None
    hidden: bool = False
    tiers: Sequence[str] = ("host",)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A schema, a buffer and what is done to it."""

    schema: Sequence[FieldSpec]
    capacity: int
    global_rows: int
    min_size: int
    seed: int
    operations: Sequence[Sequence[Any]]
    max_staleness: int = 0

    def arguments(self, setting: Setting) -> dict[str, Any]:
        """Of ``spmd_cases:play``."""
        return {
            "schema": self.schema, "operations": self.operations,
            "plane": {
                "capacity": self.capacity, "batch_rows": self.global_rows // setting.ranks,
                "min_size": self.min_size, "seed": self.seed, "routing": setting.routing,
                "placement": setting.placement, "quotas": list(setting.quotas),
                "hosts": list(setting.hosts), "staging_rows": setting.staging_rows,
                "hidden": setting.hidden, "max_staleness": self.max_staleness, "name": "played",
                "tiers": list(setting.tiers),
            },
        }


@dataclass(kw_only=True)
class Expected:
    """What the reference says of a program.

    ``samples`` are lists of rows by rank, None, or the name of an error; ``contents`` the buffer
    after every collective; ``sent`` the rows that went from one rank to another.
    """

    samples: list[list[list[LiveRow]] | str | None]
    contents: list[list[LiveRow]]
    agreed: list[int]
    sent: Counter[tuple[int, int]]
    commits: int
    job: Job


def expected(program: Program, setting: Setting) -> Expected:
    """Runs ``program`` on the slow reference."""
    job = Job(
        capacity=program.capacity, batch_rows=program.global_rows // setting.ranks,
        quotas=setting.quotas, hosts=setting.hosts, routing=setting.routing, seed=program.seed,
        name="played", hidden=setting.hidden, max_staleness=program.max_staleness,
    )
    found = Expected(samples=[], contents=[], agreed=[], sent=Counter(), commits=0, job=job)
    serial = 0
    for kind, *arguments in program.operations:
        if kind == "extend":
            for stream, n in enumerate(arguments[0]):
                job.staged[owner(stream, setting.ranks)] += range(serial, serial + n)
                serial += n
            continue
        if kind in ("sample", "flush"):
            source = {value: rank for rank, values in enumerate(job.staged) for value in values}
            found.commits += bool(source)
            job.commit()
            found.sent.update(
                (source[row.value], row.holder) for row in job.live
                if source.get(row.value, row.holder) != row.holder
            )
        if kind == "sample":
            if not job.live and program.min_size == 0:
                found.samples.append("EmptyError")
            elif len(job.live) < max(program.min_size, 1):
                found.samples.append(None)
            else:
                batches = job.sample()
                found.samples.append(batches)
        elif kind == "empty":
            job.empty()
        elif kind == "agree":
            found.agreed.append(max(arguments[0]))
        found.contents.append(list(job.live))
    found.sent.update(job.moved)
    return found


def as_sorted(index: NDArray[np.int64], rows: NDArray[np.uint8]) -> list[tuple[int, bytes]]:
    """A multiset of rows: logical indices and bytes, sorted."""
    return sorted((int(i), row.tobytes()) for i, row in zip(index, rows, strict=True))


def bytes_of(program: Program, rows: Sequence[LiveRow]) -> NDArray[np.uint8]:
    return row_content(program.schema, np.array([row.value for row in rows], dtype=np.int64))


_shapes = st.sampled_from([[], [1], [3], [2, 2], [0], [7]])
_keys = st.sampled_from([["a"], ["b"], ["obs"], ["next", "a"], ["next", "obs"], ["x", "y", "z"]])


@st.composite
def _schemas(draw: st.DrawFn) -> list[FieldSpec]:
    keys = draw(st.lists(_keys, min_size=1, max_size=5, unique_by=tuple))
    return [[key, draw(st.sampled_from(DTYPES)), draw(_shapes)] for key in keys]


@st.composite
def _programs(draw: st.DrawFn) -> Program:
    """Programs in which ranks produce unevenly, commit more than fits, flush, and start afresh."""
    capacity = draw(st.one_of(st.integers(1, 9), st.integers(10, 90)))
    usual = st.one_of(st.just(0), st.integers(0, max(capacity // 8, 1)))
    large = st.integers(0, 2 * capacity)
    operations: list[list[Any]] = []
    for _ in range(draw(st.integers(4, 24))):
        counts = large if draw(st.integers(0, 9)) == 0 else usual
        if draw(st.integers(0, 7)):
            operations.append(["extend", [draw(counts) for _ in range(STREAMS)]])
        if draw(st.integers(0, 9)) == 0:
            flags = st.integers(-(2**62), 2**62)
            operations.append(["agree", [draw(flags) for _ in range(STREAMS)]])
        kind = draw(st.sampled_from(["sample"] * 9 + ["flush"] * 3 + ["empty"]))
        # Between commits many batches may be known ahead.
        times = draw(st.integers(2, 20)) if draw(st.integers(0, 7)) == 0 else 1
        operations += [[kind]] * times
    return Program(
        schema=draw(_schemas()), capacity=capacity, operations=operations,
        global_rows=12 * draw(st.integers(1, 6)),
        min_size=draw(st.one_of(st.just(0), st.integers(0, capacity))),
        seed=draw(st.integers(0, 2**40)), max_staleness=draw(st.sampled_from([0, 0, 0, 1, 2])),
    )


@st.composite
def _settings(draw: st.DrawFn, program: Program, ranks: int) -> Setting:
    """A routing, a placement, hosts, tiers and a staging bound for ``ranks`` ranks."""
    capacity = program.capacity
    most = max([1] + [
        sum(n for stream, n in enumerate(rest[0]) if owner(stream, ranks) == rank)
        for kind, *rest in program.operations if kind == "extend" for rank in range(ranks)
    ])
    placement = draw(st.sampled_from(["balanced", "central", "own"]))
    chosen = draw(st.integers(0, ranks - 1))
    quotas = [capacity // ranks + (rank < capacity % ranks) for rank in range(ranks)]
    if placement == "central":
        quotas = [capacity if rank == chosen else 0 for rank in range(ranks)]
    elif placement == "own":
        shares = st.one_of(st.just(0), st.integers(0, capacity))
        quotas = [draw(shares) for _ in range(ranks)]
        quotas[chosen] = min(capacity, quotas[chosen] + max(capacity - sum(quotas), 0))
    hosts = [0] * ranks
    if ranks == 4:
        hosts = draw(st.sampled_from([[0] * 4, [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 2]]))
    return Setting(
        ranks=ranks, routing=draw(st.sampled_from(["exchangeable", "independent"])),
        placement=placement, quotas=quotas, hosts=hosts,
        staging_rows=draw(st.sampled_from([None, most, most + 3])), hidden=draw(st.booleans()),
        tiers=draw(st.sampled_from([
            ("host",), ("shared",), ("disk",), ("host", "disk"), ("host", "shared", "disk"),
        ])),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Program, list[Setting]]:
    """A program, and settings for 1, 2 (sometimes 3) and 4 ranks."""
    program = draw(_programs())
    worlds = draw(st.sampled_from([(1, 2, 4), (1, 3, 4), (1, 2, 4)]))
    return program, [draw(_settings(program, ranks)) for ranks in worlds]
