"""What ranks do in tests: these functions run in rank processes, several at a time."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

import conduit
import conduit.collectives.world
import conduit.tiers.opening
from conduit.sched.timeline import Timeline
from conduit.schema import Field
from conduit.tiers.specification import Memory
from tests.simulation import no_links
from tests.spmd.ranks import Rank
from tests.spmd.rows import FieldSpec, Serials, content, field_bytes

__all__ = ["Quotas", "Rows", "inspect", "make_plane", "play"]

TIMEOUT = timedelta(seconds=15)
TIERS = {
    "host": conduit.Host("10%"), "shared": conduit.Shared("10%"),
    "disk": conduit.Disk(tempfile.gettempdir(), "1GB"),
}

OWN_DECISION = Timeline.hides
"""What a plane decides by time, before :func:`make_plane` puts something in its place."""


@dataclass(frozen=True)
class Quotas:
    """A placement that somebody else wrote."""

    rows: tuple[int, ...]

    def quotas(self, *, capacity: int, ranks: int) -> Sequence[int]:
        assert ranks == len(self.rows)
        return self.rows


class Rows:
    """Makes rows of a schema from serial numbers, and turns batches back into bytes."""

    def __init__(self, schema: Sequence[FieldSpec]) -> None:
        self._specs = schema
        self.schema = conduit.Schema(tuple(
            Field(key=tuple(key), dtype=getattr(torch, dtype), shape=tuple(shape))
            for key, dtype, shape in schema
        ))

    def make(self, serials: Serials) -> dict[tuple[str, ...], torch.Tensor]:
        """Rows as ``extend`` takes them."""
        rows = {}
        for number, spec in enumerate(self._specs):
            key, dtype, shape = tuple(spec[0]), getattr(torch, spec[1]), spec[2]
            raw = torch.from_numpy(content(spec, number, serials).reshape(-1))
            rows[key] = raw.view(dtype).reshape(len(serials), *shape)
        return rows

    def bytes_of(self, batch: TensorDict) -> NDArray[np.uint8]:
        """The bytes of a batch, field by field: ``[rows, bytes]``."""
        fields = []
        for spec in self._specs:
            value = batch[tuple(spec[0])]
            assert value.shape == (*batch.batch_size, *spec[2]), (spec, value.shape)
            assert value.dtype is getattr(torch, spec[1]), (spec, value.dtype)
            raw = value.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
            fields.append(raw.reshape(len(batch), field_bytes(spec)))
        return np.concatenate(fields, axis=1)


def make_plane(
    rank: Rank, example: Any, *, capacity: int | str, batch_rows: int,
    placement: str = "balanced", quotas: Sequence[int] = (), staging_rows: int | None = None,
    hosts: Sequence[int] | None = None, hidden: bool = False,
    tiers: str | Sequence[str | Memory] = "auto", **more: Any,
) -> conduit.ExperiencePlane:
    """A plane with a placement of the library, or with one of our ``"own"`` that gives ``quotas``.

    ``hosts[r]`` is where rank r seems to run; by default they share this host. Batches are always
    fetched on the lane if ``hidden``, else never: left to itself a plane decides by time. Of
    several ``tiers`` all get equal parts of the shard, whatever they cost.
    """
    Timeline.hides = staticmethod(lambda *figures: hidden)  # type: ignore[method-assign]
    placements: dict[str, conduit.Placement | None] = {
        "balanced": None, "own": Quotas(tuple(quotas)),
        "central": conduit.Central(int(np.argmax(quotas)) if quotas else 0),
    }
    if hosts is not None and rank.size > 1:
        identity = conduit.collectives.world.host_identity
        conduit.collectives.world.host_identity = lambda: 1_000 + hosts[rank.number]
        conduit.creation.links_at_start = no_links  # they are all this host's loopback
    memory = tiers if isinstance(tiers, str) else [
        TIERS[tier] if isinstance(tier, str) else tier for tier in tiers
    ]
    split, conduit.tiers.opening.split = conduit.tiers.opening.split, even_split
    try:
        return conduit.ExperiencePlane(
            example, capacity=capacity, batch_size=batch_rows, placement=placements[placement],
            tiers=memory, **{
                "timeout": TIMEOUT, "ingestion": conduit.Ingestion(staging_rows=staging_rows),
                **more,
            },
        )
    finally:
        conduit.tiers.opening.split = split
        if hosts is not None and rank.size > 1:
            conduit.collectives.world.host_identity = identity


def even_split(needed: int, rooms: Sequence[int], *rest: object) -> list[int]:
    """In place of the library's rule: as many segments to every tier."""
    return [needed // len(rooms) + (i < needed % len(rooms)) for i in range(len(rooms))]


def play(
    rank: Rank, *, schema: Sequence[FieldSpec], operations: Sequence[Sequence[Any]],
    plane: dict[str, Any], jitter: int = 0, pause_ms: float = 0.0, keep: bool = False,
    inspect_all: bool = False, contiguous: bool = False,
) -> dict[str, Any]:
    """Runs a program of ``["extend", rows by stream]``, ``["agree", flags by stream]``,
    ``["sample"]``, ``["flush"]`` and ``["empty"]``; a rank has a contiguous block of the streams.

    With ``keep`` batches are looked at only when the program is over. With ``inspect_all`` the
    shard is looked at after every collective. ``contiguous`` is an argument of ``sample``.
    """
    rank.jitter(jitter, pause_ms)
    ways = random.Random(f"{jitter} {rank.number}")
    rows = Rows(schema)
    serial = 0
    samples: list[Any] = []
    sizes: list[int] = []
    agreed: list[int] = []
    shards: list[dict[str, Any]] = []

    def looked_at(batch: TensorDict) -> dict[str, Any]:
        assert batch["loss_scale"] == 1.0
        return {"index": batch["index"].cpu().numpy(), "rows": rows.bytes_of(batch)}

    with make_plane(rank, rows.schema, **plane) as p:
        store = p._shard.store
        for kind, *arguments in operations:
            rank.pause()
            for _ in range(ways.randrange(4) if len(store.tiers) > 1 else 0):
                store.move(ways.randrange(store.ring.segments), ways.randrange(len(store.tiers)))
            if kind in ("extend", "agree"):
                streams = arguments[0]
                owners = [stream * rank.size // len(streams) for stream in range(len(streams))]
                mine = [n for n, who in zip(streams, owners, strict=True) if who == rank.number]
            if kind == "extend":
                first = serial + sum(streams[: owners.index(rank.number)])
                serial += sum(streams)
                pieces = [sum(mine)] if ways.random() < 0.5 else mine
                for n in pieces:
                    numbers = np.arange(first, first + n)
                    first += n
                    if n == 1 and ways.random() < 0.5:
                        p.add({key: value[0] for key, value in rows.make(numbers).items()})
                    elif n or ways.random() < 0.5:
                        p.extend(rows.make(numbers))
                continue
            if kind == "agree":
                agreed.append(p.agree(max(mine)))
            elif kind == "sample":
                try:
                    batch = p.sample(contiguous=contiguous)
                    if contiguous and batch is not None:
                        assert all(value.is_contiguous() for value in _tensors(batch))
                    samples.append(batch if keep or batch is None else looked_at(batch))
                except conduit.EmptyError:
                    samples.append("EmptyError")
            elif kind == "flush":
                p.flush()
            elif kind == "empty":
                p.empty()
            sizes.append(len(p))
            if inspect_all:
                shards.append(inspect(p, rows))
        p._deliveries.settle()  # counts what the lane has sent for a batch to come
        report = p.report().as_dict()
    kept = [looked_at(one) if isinstance(one, TensorDict) else one for one in samples]
    return {"samples": kept, "sizes": sizes, "agreed": agreed, "report": report, "shards": shards}


def _tensors(batch: TensorDict) -> list[torch.Tensor]:
    leaves = batch.values(include_nested=True, leaves_only=True)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def inspect(plane: conduit.ExperiencePlane, rows: Rows) -> dict[str, Any]:
    """What this rank believes about the buffer, and the rows that it holds."""
    directory, shard = plane._directory, plane._shard
    indices = directory.indices(np.arange(directory.size))
    holders = directory.holders(np.arange(directory.size))
    order = np.argsort(indices)
    mine = indices[order][holders[order] == plane.rank]
    block = plane._layout.block(len(mine), torch.device("cpu"))
    shard.gather(shard.slots(mine.copy()), plane._layout.records(block))
    return {
        "indices": indices[order], "holders": holders[order], "held": directory.held.copy(),
        "mine": mine, "rows": rows.bytes_of(plane._layout.tensordict(block)),
        "staged": shard.staged,
    }


def play_watching_slots(
    rank: Rank, *, schema: Sequence[FieldSpec], operations: Sequence[Sequence[Any]],
    plane: dict[str, Any],
) -> dict[str, Any]:
    """Compares, after every commit and after every extend that follows it, the bytes of the slots
    that were live before the commit with what they held."""
    rows, serial, watched = Rows(schema), 0, 0
    before: tuple[NDArray[np.int64], torch.Tensor] | None = None
    with make_plane(rank, rows.schema, **plane) as p:
        shard = p._shard

        def live() -> tuple[NDArray[np.int64], torch.Tensor]:
            slots = shard.slots(inspect(p, rows)["mine"])
            return slots, shard.store.read(slots)

        for kind, *arguments in operations:
            if kind == "extend":
                by_rank = np.array(arguments[0]).reshape(rank.size, -1).sum(1)
                first = serial + int(by_rank[: rank.number].sum())
                serial += int(by_rank.sum())
                p.extend(rows.make(np.arange(first, first + by_rank[rank.number])))
            else:
                before, calls, fences = live(), p._control.number, p.report().fences
                p.sample() if kind == "sample" and serial else p.flush()
                fenced = p.report().fences - fences
                if rank.size > 1:
                    assert p._control.number - calls == 1 + fenced, "a fence is a collective call"
                if fenced:
                    before = None
            if before is not None:
                slots, held = before
                assert torch.equal(shard.store.read(slots), held)
                watched += len(slots)
    return {"watched": watched}
