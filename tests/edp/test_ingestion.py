"""Ingestion: the plan of a commit against placing its rows one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.edp.directory import Directory
from conduit.edp.ingestion import Ingestion, match, plan_commit, water_fill
from conduit.errors import CapacityError
from tests import reference
from tests.properties import examples


@st.composite
def quotas(draw: st.DrawFn, ranks: int, capacity: int) -> list[int]:
    """Quotas that hold the buffer: equal, all on one rank, exact or generous."""
    kind = draw(st.sampled_from(["equal", "one", "exact", "generous"]))
    if kind == "equal":
        return [capacity // ranks + (rank < capacity % ranks) for rank in range(ranks)]
    if kind == "one":
        one = draw(st.integers(0, ranks - 1))
        return [capacity * (rank == one) for rank in range(ranks)]
    cuts = sorted(draw(st.lists(
        st.integers(0, capacity), min_size=ranks - 1, max_size=ranks - 1
    )))
    exact = [b - a for a, b in zip([0, *cuts], [*cuts, capacity], strict=True)]
    if kind == "exact":
        return exact
    return [min(rows + draw(st.integers(0, capacity)), capacity) for rows in exact]


def assert_plan_is_right(
    staged: list[int], directory: Directory, live_holders: list[int], rank_quotas: list[int]
) -> list[int]:
    """Compares one plan with the reference, applies it, and returns the holders of new rows."""
    ranks, capacity = len(staged), directory.capacity
    expected = reference.placed(staged, live_holders, rank_quotas, capacity)
    plan = plan_commit(
        np.array(staged, dtype=np.int64), directory, np.array(rank_quotas, dtype=np.int64)
    )
    # Row by row: where the rows of every source go, in order.
    homes: list[list[int | None]] = [[None] * int(rows) for rows in plan.dropped]
    last = -1
    for source, holder, count in zip(
        plan.sources.tolist(), plan.holders.tolist(), plan.counts.tolist(), strict=True
    ):
        assert source >= last, "runs are in rank order"
        last = source
        homes[source] += [holder] * count
    assert homes == expected.homes
    new = [home for rows in homes for home in rows if home is not None]
    assert plan.lost.tolist() == expected.lost
    assert plan.skipped == max(sum(staged) - capacity, 0) == int(plan.dropped.sum())
    assert plan.arriving.tolist() == [new.count(rank) for rank in range(ranks)]
    # What ranks tell each other.
    moved = 0
    for rank in range(ranks):
        kept = homes[rank].count(rank)
        assert plan.kept_by(rank) == kept
        sent = [homes[rank].count(peer) if peer != rank else 0 for peer in range(ranks)]
        assert plan.sent_by(rank).tolist() == sent
        received = [homes[peer].count(rank) if peer != rank else 0 for peer in range(ranks)]
        assert plan.received_by(rank).tolist() == received
        assert kept + sum(received) == plan.arriving[rank]
        moved += sum(sent)
    assert plan.moves == (moved > 0)
    # Nothing is lost on the way, and nobody holds more than the quota.
    assert len(new) == sum(staged) - plan.skipped
    directory.append(
        plan.holders, plan.counts, skipped=plan.skipped, lost=plan.lost, arriving=plan.arriving
    )
    assert (directory.held <= np.array(rank_quotas)).all()
    assert (directory.held >= 0).all()
    return new


@examples(300)
@given(data=st.data(), ranks=st.integers(1, 6), capacity=st.integers(1, 40))
def test_commits_are_those_of_the_reference(
    data: st.DataObject, ranks: int, capacity: int
) -> None:
    rank_quotas = data.draw(quotas(ranks, capacity))
    directory = Directory(capacity=capacity, ranks=ranks)
    live: list[int] = []
    most = data.draw(st.sampled_from([3, capacity, 2 * capacity]))
    for _ in range(data.draw(st.integers(1, 8))):
        staged = data.draw(st.lists(st.integers(0, most), min_size=ranks, max_size=ranks))
        new = assert_plan_is_right(staged, directory, live, rank_quotas)
        live = (live + new)[-capacity:]
        positions = np.arange(directory.size)
        order = np.argsort(directory.indices(positions))
        assert directory.holders(positions)[order].tolist() == live


def test_a_rank_keeps_its_rows_up_to_its_quota() -> None:
    directory = Directory(capacity=12, ranks=3)
    plan = plan_commit(np.array([3, 6, 0]), directory, np.array([4, 4, 4]))
    # Rank 1 has two rows too many, and rank 2 most room.
    assert plan.sources.tolist() == [0, 1, 1, 2]
    assert plan.holders.tolist() == [0, 1, 2, 2]
    assert plan.counts.tolist() == [3, 4, 2, 0]
    assert plan.moves


def test_a_commit_larger_than_the_buffer_keeps_the_last_rows() -> None:
    directory = Directory(capacity=6, ranks=3)
    plan = plan_commit(np.array([4, 3, 2]), directory, np.array([2, 2, 2]))
    assert plan.skipped == 3
    assert plan.dropped.tolist() == [3, 0, 0]
    assert plan.arriving.tolist() == [2, 2, 2]
    # Rank 0 has room for the row of rank 1 that is too many.
    assert plan.sent_by(1).tolist() == [1, 0, 0]


def test_what_was_staged_is_not_changed() -> None:
    staged, rank_quotas = np.array([9, 0, 4]), np.array([3, 3, 3])
    directory = Directory(capacity=9, ranks=3)
    plan_commit(staged, directory, rank_quotas)
    assert staged.tolist() == [9, 0, 4]
    assert rank_quotas.tolist() == [3, 3, 3]
    assert directory.size == 0


# ------------------------------------------------------------------------------- water_fill


@examples(300)
@given(
    free=st.lists(st.integers(0, 30), min_size=1, max_size=8), share=st.floats(0, 1)
)
def test_water_fill_is_the_greedy_rule(free: list[int], share: float) -> None:
    rows = int(share * sum(free))
    found = water_fill(np.array(free, dtype=np.int64), rows)
    assert found.dtype == np.int64
    assert found.tolist() == reference.greedy_fill(free, rows)


@pytest.mark.parametrize(
    ("free", "rows"), [([5], 5), ([5], 0), ([0, 0], 0), ([1, 1, 1], 2), ([3, 0, 3], 6)], ids=str
)
def test_water_fill_at_the_edges(free: list[int], rows: int) -> None:
    assert water_fill(np.array(free), rows).tolist() == reference.greedy_fill(free, rows)


def test_water_fill_of_large_numbers() -> None:
    free = np.array([10**15, 10**15 - 7, 3, 0])
    assert water_fill(free, 10).tolist() == [9, 1, 0, 0]
    assert water_fill(free, 2 * 10**15 - 4).tolist() == [10**15, 10**15 - 7, 3, 0]


def test_water_fill_without_room_is_refused() -> None:
    with pytest.raises(CapacityError, match="too little room") as caught:
        water_fill(np.array([2, 3]), 6)
    assert caught.value.got == 5


# -------------------------------------------------------------------------------------- match


@examples(300)
@given(data=st.data(), give=st.lists(st.integers(0, 9), min_size=1, max_size=7))
def test_match_counts_both_sides_off(data: st.DataObject, give: list[int]) -> None:
    takers = data.draw(st.integers(1, 7))
    take = [0] * takers
    for _ in range(sum(give)):
        take[data.draw(st.integers(0, takers - 1))] += 1
    runs = match(np.array(give), np.array(take))
    rows = [
        (giver, taker) for giver, taker, count in zip(*(r.tolist() for r in runs), strict=True)
        for _ in range(count)
    ]
    assert rows == reference.matched(give, take)
    assert all(count > 0 for count in runs[2].tolist())


def test_match_of_nothing() -> None:
    givers, takers, counts = match(np.array([0, 0]), np.array([0, 0]))
    assert len(givers) == len(takers) == len(counts) == 0


# ---------------------------------------------------------------------------------- Ingestion


def test_staging_bounds() -> None:
    assert Ingestion().rows(capacity=100, ranks=1) == 1024
    assert Ingestion().rows(capacity=80_000, ranks=1) == 10_000
    assert Ingestion().rows(capacity=80_000, ranks=2) == 5_000
    assert Ingestion(staging_rows=7).rows(capacity=80_000, ranks=2) == 7
    for rows in (0, -3, 2.5, "5"):
        with pytest.raises(CapacityError, match="staging_rows is out of range"):
            Ingestion(staging_rows=rows).rows(capacity=10, ranks=1)  # type: ignore[arg-type]


def test_ingestion_is_plain_data() -> None:
    assert Ingestion() == Ingestion(staging_rows=None)
    assert dataclasses.replace(Ingestion(), staging_rows=5).staging_rows == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ingestion().staging_rows = 5  # type: ignore[misc]
