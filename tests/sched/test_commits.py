"""Commits on ranks that are threads of this process: no row is replaced while another rank may
still read it, and no rank holds more than it may."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit import Central, ExperiencePlane, Ingestion
from tests.numbered import EXAMPLE, numbered
from tests.properties import examples
from tests.simulation import Simulation


def live_slots(plane: ExperiencePlane) -> np.ndarray:
    """Slots of the rows that this rank holds."""
    directory, positions = plane._directory, np.arange(len(plane))
    here = directory.holders(positions) == plane.rank
    indices = directory.indices(positions)[here]
    return plane._shard.slots(indices) if len(indices) else indices


def snapshot(plane: ExperiencePlane) -> tuple[np.ndarray, torch.Tensor]:
    slots = live_slots(plane)
    return slots, plane._shard.store.read(slots)


def assert_still_there(plane: ExperiencePlane, before: tuple[np.ndarray, torch.Tensor]) -> None:
    slots, rows = before
    assert torch.equal(plane._shard.store.read(slots), rows)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(1, 4))
    capacity = draw(st.integers(1, 30))
    return {
        "hosts": [0] * ranks,
        "capacity": capacity,
        "staging_rows": draw(st.integers(1, 12)),
        "placement": draw(st.sampled_from([None, Central(ranks - 1)])),
    }


@examples(60)
@given(case=cases(), data=st.data())
def test_rows_stay_readable_until_the_next_collective(
    case: dict[str, Any], data: st.DataObject
) -> None:
    staging_rows = case["staging_rows"]
    made = 0
    with Simulation(case["hosts"]) as world:
        planes = world.run(lambda rank: ExperiencePlane(
            EXAMPLE, capacity=case["capacity"], batch_size=2, placement=case["placement"],
            ingestion=Ingestion(staging_rows=staging_rows),
        ))
        for _ in range(data.draw(st.integers(1, 14))):
            before = [snapshot(plane) for plane in planes]
            fences = planes[0].report().fences
            operation = data.draw(st.sampled_from(["flush", "flush", "sample", "empty"]))
            if operation == "sample" and len(planes[0]) == 0:
                operation = "flush"
            world.run(lambda rank, operation=operation: getattr(planes[rank], operation)())
            fenced = planes[0].report().fences > fences
            for plane, old in zip(planes, before, strict=True):
                live = live_slots(plane)
                assert len(set(live.tolist())) == len(live)
                assert len(live) <= plane._shard.quota_rows
                # Another rank may still read what was there before this collective, however much
                # this one stages.
                rows = data.draw(st.one_of(
                    st.just(staging_rows), st.integers(0, staging_rows)
                ))
                plane.extend(numbered(range(made, made + rows)))
                made += rows
                if not fenced:
                    assert_still_there(plane, old)
        if len(planes) == 1:
            assert planes[0].report().fences == 0


def test_a_commit_beyond_the_grace_is_fenced() -> None:
    with Simulation([0, 0, 0]) as world:
        planes = world.run(lambda rank: ExperiencePlane(
            EXAMPLE, capacity=12, batch_size=2, placement=Central(0),
            ingestion=Ingestion(staging_rows=4),
        ))
        for step in range(6):
            # Twelve rows in a commit come to rank 0, which has a grace of four.
            for rank, plane in enumerate(planes):
                first = 12 * step + 4 * rank
                plane.extend(numbered(range(first, first + 4)))
            world.run(lambda rank: planes[rank].flush())
        assert {plane.report().fences for plane in planes} == {5}
        assert [plane.report().shard_rows for plane in planes] == [12, 0, 0]
        for batch in world.run(lambda rank: planes[rank].sample()):
            assert batch is not None
            assert set(batch["number"].tolist()) <= set(range(60, 72))


def test_commits_within_the_grace_are_not_fenced() -> None:
    with Simulation([0, 0]) as world:
        planes = world.run(lambda rank: ExperiencePlane(
            EXAMPLE, capacity=40, batch_size=2, ingestion=Ingestion(staging_rows=4)
        ))
        for step in range(30):
            for rank, plane in enumerate(planes):
                plane.extend(numbered(range(8 * step + 4 * rank, 8 * step + 4 * rank + 4)))
            world.run(lambda rank: planes[rank].sample())
        assert {plane.report().fences for plane in planes} == {0}
