"""The split over tiers: all segments, within the rooms, and no other split is faster."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.errors import CapacityError
from conduit.tiers.address import PAGE_BYTES
from conduit.tiers.budgets import Budget
from conduit.tiers.mapped import MappedRing
from conduit.tiers.opening import open_store
from conduit.tiers.specification import Disk, Host, Memory
from conduit.tiers.split import Speed, measured, split
from conduit.tiers.tier import Ring
from tests.properties import examples
from tests.tiers.contract import LAYOUT
from tests.tiers.stores import CPU, OWNER, TIERS, tier_of

SPEEDS = st.sampled_from([0.001, 0.5, 1.0, 1.0, 3.0, 40.0])


def seconds(counts: list[int] | tuple[int, ...], speeds: list[float], apart: list[bool]) -> float:
    """What reading all takes: both sides work at the same time."""
    return max(
        sum(n / s for n, s, there in zip(counts, speeds, apart, strict=True) if there is side)
        for side in (False, True)
    )


@examples(300)
@given(data=st.data())
def test_no_split_is_faster(data: st.DataObject) -> None:
    tiers = data.draw(st.integers(1, 4))
    rooms = data.draw(st.lists(st.integers(0, 6), min_size=tiers, max_size=tiers))
    speeds = data.draw(st.lists(SPEEDS, min_size=tiers, max_size=tiers))
    apart = data.draw(st.lists(st.booleans(), min_size=tiers, max_size=tiers))
    needed = data.draw(st.integers(0, sum(rooms)))
    counts = split(needed, rooms, speeds, apart)
    best = min(
        seconds(other, speeds, apart)
        for other in itertools.product(*(range(room + 1) for room in rooms))
        if sum(other) == needed
    )
    assert sum(counts) == needed
    assert all(0 <= count <= room for count, room in zip(counts, rooms, strict=True))
    assert seconds(counts, speeds, apart) <= best * (1 + 1e-9)


@examples(200)
@given(data=st.data())
def test_many_segments_stay_within_their_rooms(data: st.DataObject) -> None:
    tiers = data.draw(st.integers(1, 8))
    rooms = data.draw(st.lists(st.integers(0, 8_192), min_size=tiers, max_size=tiers))
    speeds = data.draw(st.lists(SPEEDS, min_size=tiers, max_size=tiers))
    apart = data.draw(st.lists(st.booleans(), min_size=tiers, max_size=tiers))
    needed = data.draw(st.integers(0, sum(rooms)))
    counts = split(needed, rooms, speeds, apart)
    assert sum(counts) == needed
    assert all(0 <= count <= room for count, room in zip(counts, rooms, strict=True))


def test_the_faster_tier_is_filled_first() -> None:
    assert split(100, [30, 200, 60], [1.0, 0.1, 5.0], [False] * 3) == [30, 10, 60]
    # What is read at the same time gets its share: here four of five.
    assert split(100, [100, 100], [4.0, 1.0], [True, False]) == [80, 20]
    assert split(100, [50, 100], [4.0, 1.0], [True, False]) == [50, 50]
    assert split(100, [100, 10], [4.0, 1.0], [True, False]) == [90, 10]


RING = Ring(layout=LAYOUT, rows=4_096, segment_rows=1_024, device=CPU)


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_is_measured_and_left_empty(name: str, tmp_path: Path) -> None:
    tier = tier_of(name, RING, MappedRing(RING), tmp_path, 1)
    speed = measured(tier, RING)
    assert 0 < speed.read_gbps < 10_000 and 0 < speed.write_gbps < 10_000
    assert tier.free == 1
    tier.close()


def test_a_tier_is_measured_however_busy_the_machine_is(tmp_path: Path) -> None:
    tier = tier_of("host", RING, MappedRing(RING), tmp_path, 1)
    with mock.patch("time.perf_counter", side_effect=itertools.count(0.0, 10.0)):
        speed = measured(tier, RING)
    assert 0 < speed.read_gbps < 1e-3
    tier.close()


# ------------------------------------------------------------------------------------- opening


def budget(memory: Memory, segments: int) -> Budget:
    return Budget(memory=memory, asked_bytes=None, available_bytes=1 << 40,
                  usable_bytes=segments * RING.segment_bytes)


@pytest.mark.parametrize(("fast", "expected"), [("host", [3, 1]), ("disk", [0, 4])])
def test_segments_lie_where_they_are_read_fastest(
    fast: str, expected: list[int], tmp_path: Path
) -> None:
    def told(tier: object, ring: Ring) -> Speed:
        gbps = 8.0 if tier.name == fast else 2.0  # type: ignore[attr-defined]
        return Speed(read_gbps=gbps, write_gbps=1.0)

    with mock.patch("conduit.tiers.opening.measured", told):
        store = open_store(RING, [budget(Host(), 3), budget(Disk(tmp_path), 9)], OWNER)
    assert [held // RING.segment_bytes for _, held in store.held_bytes()] == expected
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == PAGE_BYTES + expected[1] * RING.segment_bytes
    # There is room for segments to move, but for no more than the ring has.
    assert [tier.segments for tier in store.tiers] == [3, 4]
    assert not store.tiers[0].free if fast == "host" else store.tiers[0].free == 3
    store.close()
    assert os.listdir(tmp_path) == []


def test_more_than_there_are_addresses_for() -> None:
    ring = Ring.of(LAYOUT, 1 << 44, CPU)
    found = Budget(memory=Host(), asked_bytes=None, available_bytes=1 << 50, usable_bytes=1 << 51)
    with pytest.raises(CapacityError, match="the tiers cannot be opened") as caught:
        open_store(ring, [found], OWNER)
    assert "Cannot allocate memory" in str(caught.value)
