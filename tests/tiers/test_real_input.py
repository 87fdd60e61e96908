"""What real environments make goes into a plane of several tiers, and comes out the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import conduit
from conduit import ExperiencePlane, Ingestion, Schema
from conduit.schema import RowLayout
from conduit.tiers.shard import ring_rows
from conduit.tiers.specification import Memory
from conduit.tiers.tier import Ring
from tests.spmd.cases import make_plane
from tests.spmd.ranks import Rank, Ranks
from tests.tiers.real import ATARI, Recording, atari, hopper, hopper_schema

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="shared and disk tiers need Linux"
)

FRAMES = 200_000


def three_tiers(
    schema: Schema, *, capacity: int, staging_rows: int, folder: Path
) -> list[Memory]:
    """Host, shared and disk memory with hardly more room together than the shard needs, so that
    each must hold a part of it, whichever is the fastest here."""
    ring = Ring.of(RowLayout(schema), ring_rows(capacity, staging_rows), torch.device("cpu"))
    # In containers there are often 64 MB of shared memory, not all of them free.
    shared = min(ring.segments // 4, (48 << 20) // ring.segment_bytes)
    host = ring.segments // 3
    disk = ring.segments - shared - host + 1
    assert min(shared, host, disk) > 1
    return [
        conduit.Host(host * ring.segment_bytes), conduit.Shared(shared * ring.segment_bytes),
        conduit.Disk(folder, disk * ring.segment_bytes),
    ]


def assert_in_all_tiers(plane: ExperiencePlane) -> None:
    """Each tier holds more than there are slots without a live row, so some live rows as well."""
    report = plane.report()
    assert [name for name, _ in report.tiers] == ["host", "shared", "disk"]
    vacant_bytes = report.shard_bytes - report.shard_rows * report.row_bytes
    assert min(nbytes for _, nbytes in report.tiers) > vacant_bytes, report.tiers


def check_stream(plane: ExperiencePlane, recording: Recording, *, most: int) -> None:
    """Stores all rows, in pieces of up to ``most`` rows, with a batch after each; then reads all
    that are left."""
    sizes = np.random.default_rng(len(recording))
    end = 0
    while end < len(recording):
        first, end = end, min(end + int(sizes.integers(1, most + 1)), len(recording))
        plane.extend(recording.rows(first, end))
        batch = plane.sample()
        assert batch is not None
        live = range(max(end - plane.capacity, 0), end)
        assert len(plane) == len(live)
        recording.assert_batch(batch, live=live)
    recording.assert_held(plane)


# ---------------------------------------------------------------------------------- Atari


@pytest.fixture(scope="module")
def frames() -> Recording:
    """Real ones, of which hardly any is like the one before."""
    recording = atari(FRAMES)
    assert len(recording) == FRAMES and recording.distinct() > 0.95
    assert recording.fields["done"].sum() > 20 and (recording.fields["reward"] != 0).sum() > 500
    return recording


@pytest.mark.parametrize(
    "capacity", [60_000, FRAMES + 500], ids=["the last frames", "all frames"]
)
def test_atari_frames_come_back(frames: Recording, capacity: int, tmp_path: Path) -> None:
    staging = 500
    with ExperiencePlane(
        ATARI, capacity=capacity, batch_size=256, ingestion=Ingestion(staging_rows=staging),
        tiers=three_tiers(ATARI, capacity=capacity, staging_rows=staging, folder=tmp_path),
    ) as plane:
        check_stream(plane, frames, most=staging)
        assert len(plane) == min(capacity, FRAMES)
        assert_in_all_tiers(plane)


# --------------------------------------------------------------------------------- MuJoCo


def both_ends(recording: Recording) -> bool:
    """Whether some episodes ended and some were cut off, and rows are such that a change shows."""
    fields = recording.fields
    assert fields["observation"].dtype == fields["reward"].dtype == np.float64
    assert recording.distinct() == 1.0
    return bool(fields["terminated"].any() and fields["truncated"].any())


@pytest.fixture(scope="module")
def hops() -> Recording:
    """Some thousand episodes of a few steps each."""
    recording = hopper(20_000, seed=3)
    assert both_ends(recording)
    return recording


@pytest.mark.parametrize("capacity", [6_000, 20_500], ids=["the last steps", "all steps"])
def test_mujoco_steps_come_back(hops: Recording, capacity: int, tmp_path: Path) -> None:
    schema, staging = hopper_schema(), 200
    with ExperiencePlane(
        schema, capacity=capacity, batch_size=64, ingestion=Ingestion(staging_rows=staging),
        tiers=three_tiers(schema, capacity=capacity, staging_rows=staging, folder=tmp_path),
    ) as plane:
        check_stream(plane, hops, most=staging)
        assert_in_all_tiers(plane)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two real ranks."""
    world = Ranks(2)
    yield world
    world.close()


def steps_of(rank: int, step: int) -> int:
    """How many rows a rank extends by in a step: as good as random, and often more on one."""
    return (7 * step + 13 * rank) % 41


def stepping(rank: Rank, *, steps: int, capacity: int, folder: str) -> list[dict[str, Any]]:
    """Each rank steps an environment of its own; gives back the bytes of its batches."""
    schema = hopper_schema()
    mine = hopper(sum(steps_of(rank.number, step) for step in range(steps)), seed=rank.number)
    seen, end = [], 0
    with make_plane(
        rank, schema, capacity=capacity, batch_rows=64, staging_rows=41, hidden=True,
        routing="independent", tiers=["host", "shared", conduit.Disk(folder, "1GB")],
    ) as plane:
        for step in range(steps):
            first, end = end, end + steps_of(rank.number, step)
            plane.extend(mine.rows(first, end))
            batch = plane.sample()
            assert batch is not None
            seen.append({key: batch[key].numpy().copy() for key in ["index", *schema.keys]})
        assert min(nbytes for _, nbytes in plane.report().tiers) > 0
        assert plane.report().rows_received > 0
    return seen


def test_mujoco_steps_of_two_ranks_come_back(pair: Ranks, tmp_path: Path) -> None:
    steps, capacity = 100, 1_500
    counts = [[steps_of(rank, step) for step in range(steps)] for rank in range(2)]
    # The same episodes once more, in the order in which the commits put them.
    streams = [hopper(sum(counts[rank]), seed=rank) for rank in range(2)]
    assert all(both_ends(stream) for stream in streams)
    ends = np.cumsum(counts, axis=1)
    parts = [
        (stream.fields, slice(ends[rank][step] - counts[rank][step], ends[rank][step]))
        for step in range(steps) for rank, stream in enumerate(streams)
    ]
    together = Recording({
        key: np.concatenate([fields[key][part] for fields, part in parts])
        for key in streams[0].fields
    })
    assert len(together) > 2 * capacity
    for batches in pair.run(stepping, steps=steps, capacity=capacity, folder=str(tmp_path)):
        assert len(batches) == steps
        for step, batch in enumerate(batches):
            end = int(ends[:, step].sum())
            together.assert_batch(
                TensorDict({key: torch.from_numpy(value.copy()) for key, value in batch.items()}),
                live=range(max(end - capacity, 0), end),
            )
