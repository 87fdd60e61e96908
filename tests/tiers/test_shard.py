"""The shard against a list of rows: right rows in slots of their own, through every kind of commit,
and no row replaced while somebody may still read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conduit.errors import CapacityError
from conduit.schema import RowLayout, Schema
from conduit.tiers.shard import Runs, Shard, ring_rows
from tests.properties import examples
from tests.tiers.stores import block_of, store_of

# Rows without padding, so that they can be compared whole.
LAYOUT = RowLayout(Schema.from_example({
    "value": torch.tensor(0), "square": torch.tensor(0.0, dtype=torch.float64),
    "digits": torch.zeros(16, dtype=torch.uint8),
}))
INBOX = 4


def _columns(numbers: Tensor) -> list[Tensor]:
    """Rows that carry these numbers, three times over."""
    rows = {
        "value": numbers, "square": (numbers * numbers).double(),
        "digits": (numbers[:, None] * torch.arange(1, 17) % 251).to(torch.uint8),
    }
    return LAYOUT.check(rows)[1]


NUMBERS = _columns(torch.arange(20_000))
PACKED = LAYOUT.block(len(NUMBERS[0]))
LAYOUT.pack(NUMBERS, PACKED)


def columns(values: list[int]) -> list[Tensor]:
    """Staged rows that carry these numbers."""
    return [column[values] for column in NUMBERS]


def packed(values: list[int]) -> Tensor:
    return PACKED[values]


def shard_of(quota_rows: int, staging_rows: int) -> Shard:
    rows = ring_rows(quota_rows, staging_rows) + INBOX
    store = store_of(LAYOUT, rows)
    block_of(store).fill_(0xEE)
    return Shard(LAYOUT, store, quota_rows=quota_rows, staging_rows=staging_rows)


def numbers_at(shard: Shard, slots: np.ndarray) -> list[int]:
    """The numbers in the rows at ``slots``, checked to be whole rows."""
    out = LAYOUT.block(len(slots))
    shard.gather(slots, LAYOUT.records(out))
    values: list[int] = LAYOUT.views(out)["value",].tolist()
    assert torch.equal(out, packed(values))
    return values


@dataclass
class Model:
    """The same as lists: live (index, number), oldest first, and staged numbers."""

    live: list[tuple[int, int]] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)
    end: int = 0
    made: int = 0

    def fresh(self, rows: int) -> list[int]:
        self.made += rows
        return list(range(self.made - rows, self.made))


def stage(shard: Shard, model: Model, rows: int) -> None:
    values = model.fresh(rows)
    shard.stage(columns(values), rows)
    model.staged += values


def assert_holds(shard: Shard, model: Model) -> None:
    assert shard.staged == len(model.staged)
    indices = np.array([index for index, _ in model.live], dtype=np.int64)
    if not len(indices):
        return
    before = indices.copy()
    slots = shard.slots(indices)
    assert indices.tolist() == before.tolist(), "the indices are the caller's"
    assert len(set(slots.tolist())) == len(slots), "every row has a slot of its own"
    assert 0 <= slots.min() <= slots.max() < shard.ring_rows
    assert numbers_at(shard, slots) == [number for _, number in model.live]
    mixed = np.concatenate([indices[::-1], indices[::2]])
    assert shard.slots(mixed).tolist() == slots.tolist()[::-1] + slots.tolist()[::2]


@dataclass(frozen=True)
class CommitCase:
    """Numbers of rows of one commit: by others before and after the own rows, received here from
    lower and from higher ranks, and what becomes of the staged ones."""

    dropped: int
    kept: int
    gaps: tuple[int, int, int, int]
    before: tuple[int, int]
    after: tuple[int, int]
    lost: int


@st.composite
def commit_cases(draw: st.DrawFn, staged: int, live: int, quota: int) -> CommitCase:
    dropped = draw(st.integers(0, staged))
    if dropped:
        # Rows are dropped by commits that replace the whole buffer.
        lost = live
    else:
        lost = draw(st.integers(0, live))
    room = quota - (live - lost)
    kept = draw(st.integers(0, min(staged - dropped, room)))
    room -= kept
    counts = []
    for _ in range(4):
        counts.append(draw(st.one_of(st.just(0), st.integers(0, room))))
        room -= counts[-1]
    gaps = draw(st.tuples(*[st.sampled_from([0, 0, 1, 5])] * 4))
    return CommitCase(
        dropped=dropped, kept=kept, gaps=gaps, lost=lost,
        before=(counts[0], counts[1]), after=(counts[2], counts[3]),
    )


def apply(shard: Shard, model: Model, case: CommitCase) -> None:
    """Commits to both. Runs: gap, two from lower ranks, gap, own, gap, two from higher, gap."""
    own = model.staged[case.dropped : case.dropped + case.kept]
    received: list[int] = []
    starts, counts, mine = [], [], []

    def run(values: list[int], is_own: bool) -> None:
        starts.append(model.end)
        counts.append(len(values))
        mine.append(is_own)
        model.live += list(zip(
            range(model.end, model.end + len(values)), values, strict=True
        ))
        model.end += len(values)
        if not is_own:
            received.extend(values)

    model.live = model.live[case.lost :]
    # The last staged rows go to other ranks.
    staged, away = len(model.staged), len(model.staged) - case.dropped - case.kept
    leaving = torch.empty(away, shard.layout.row_bytes, dtype=torch.uint8)
    shard.copy_staged(staged - away, leaving)
    assert torch.equal(leaving, packed(model.staged[staged - away :]))
    model.end += case.dropped + case.gaps[0]
    for rows in case.before:
        run(model.fresh(rows), is_own=False)
    model.end += case.gaps[1]
    run(own, is_own=True)
    model.end += away + case.gaps[2]
    for rows in case.after:
        run(model.fresh(rows), is_own=False)
    model.end += case.gaps[3]
    begin = model.live[0][0] if model.live else model.end

    def arrive(take: Callable[[torch.Tensor, int], None]) -> None:
        """In two pieces, the later one first."""
        rows, middle = packed(received), len(received) // 3
        take(rows[middle:], middle)
        take(rows[:middle], 0)

    if received or away:
        shard.receive(
            counts=np.array(counts), own=np.array(mine), dropped=case.dropped, arrivals=arrive
        )
    shard.commit(
        starts=np.array(starts), counts=np.array(counts), dropped=case.dropped, begin=begin
    )
    model.staged = []


@examples(300)
@given(data=st.data(), quota=st.integers(0, 20), staging=st.integers(1, 12))
def test_a_shard_is_a_list(data: st.DataObject, quota: int, staging: int) -> None:
    shard, model = shard_of(quota, staging), Model()
    for _ in range(data.draw(st.integers(1, 15))):
        for _ in range(data.draw(st.integers(0, 3))):
            stage(shard, model, data.draw(st.integers(0, staging - len(model.staged))))
            assert_holds(shard, model)
        if data.draw(st.integers(0, 9)) == 0:
            shard.clear()
            model.live, model.staged = [], []
        else:
            case = data.draw(commit_cases(len(model.staged), len(model.live), quota))
            apply(shard, model, case)
        assert_holds(shard, model)
    assert (block_of(shard.store)[shard.ring_rows :] == 0xEE).all(), "only the ring is written"


@examples(200)
@given(data=st.data(), quota=st.integers(1, 20), staging=st.integers(1, 30))
def test_committing_own_rows_is_committing(
    data: st.DataObject, quota: int, staging: int
) -> None:
    # In a world of one: all rows stay, a commit larger than the buffer keeps the last.
    shard, twin = shard_of(quota, staging), shard_of(quota, staging)
    model, other = Model(), Model()
    for _ in range(data.draw(st.integers(1, 15))):
        rows = data.draw(st.integers(0, staging))
        stage(shard, model, rows)
        stage(twin, other, rows)
        dropped = max(rows - quota, 0)
        lost = max(len(other.live) + rows - dropped - quota, 0)
        apply(twin, other, CommitCase(
            dropped=dropped, kept=rows - dropped, gaps=(0, 0, 0, 0), before=(0, 0),
            after=(0, 0), lost=lost,
        ))
        model.live, model.end, model.staged = list(other.live), other.end, []
        shard.commit_own(
            start=other.end - rows + dropped, dropped=dropped,
            begin=other.live[0][0] if other.live else other.end,
        )
        assert_holds(shard, model)
        assert_holds(twin, other)


# ------------------------------------------------------------------------------ slots in reuse


@examples(200)
@given(data=st.data(), quota=st.integers(0, 15), staging=st.integers(1, 10))
def test_a_freed_slot_is_left_alone_until_the_next_commit(
    data: st.DataObject, quota: int, staging: int
) -> None:
    # Rows that lived before a commit can be read until the next one, unless the commit was larger
    # than the grace: then ranks make sure by a fence that nobody reads.
    shard, model = shard_of(quota, staging), Model()
    for _ in range(data.draw(st.integers(1, 12))):
        stage(shard, model, data.draw(st.integers(0, staging)))
        case = data.draw(commit_cases(len(model.staged), len(model.live), quota))
        arriving = case.kept + sum(case.before) + sum(case.after)
        fenced = len(model.live) + case.dropped + arriving > quota + staging
        old = [number for _, number in model.live]
        indices = np.array([index for index, _ in model.live], dtype=np.int64)
        slots = shard.slots(indices) if old else indices
        apply(shard, model, case)
        staged = stage_fully(shard, model)
        if not fenced:
            assert numbers_at(shard, slots) == old
        shard.staged -= staged
        del model.staged[len(model.staged) - staged :]
        assert_holds(shard, model)


def stage_fully(shard: Shard, model: Model) -> int:
    rows = shard.staging_rows - shard.staged
    stage(shard, model, rows)
    return rows


def test_after_clear_too() -> None:
    shard, model = shard_of(10, 4), Model()
    for _ in range(5):
        stage(shard, model, 4)
        lost = max(len(model.live) + 4 - 10, 0)
        apply(shard, model, CommitCase(0, 4, (0, 0, 0, 0), (0, 0), (0, 0), lost))
    old = [number for _, number in model.live]
    slots = shard.slots(np.array([index for index, _ in model.live]))
    shard.clear()
    model.live, model.staged = [], []
    stage(shard, model, 4)
    assert numbers_at(shard, slots) == old


# ------------------------------------------------------------------------------------- staging


def test_staging_is_bounded_exactly() -> None:
    shard, model = shard_of(10, 6), Model()
    stage(shard, model, 4)
    for rows in (3, 100):
        before = block_of(shard.store).clone()
        with pytest.raises(CapacityError, match="cannot be staged") as caught:
            shard.stage(columns(list(range(rows))), rows)
        assert "at most 2 more" in str(caught.value)
        assert shard.staged == 4
        assert torch.equal(block_of(shard.store), before)
    stage(shard, model, 2)
    assert shard.staged == 6
    with pytest.raises(CapacityError):
        shard.stage(columns([0]), 1)
    shard.stage(columns([]), 0)


def test_staged_rows_are_copies() -> None:
    shard = shard_of(4, 4)
    values = columns([7, 8])
    shard.stage(values, 2)
    for value in values:
        value.zero_()
    shard.commit_own(start=0, dropped=0, begin=0)
    assert numbers_at(shard, shard.slots(np.array([0, 1]))) == [7, 8]


def test_what_has_left_is_forgotten() -> None:
    # Gaps in the indices make a run of every commit; only those of live rows are kept.
    shard, model = shard_of(12, 4), Model()
    for _ in range(300):
        stage(shard, model, 3)
        lost = max(len(model.live) + 3 - 12, 0)
        apply(shard, model, CommitCase(0, 3, (5, 0, 0, 0), (0, 0), (0, 0), lost))
    assert_holds(shard, model)
    assert len(shard._runs) <= 5


def test_a_rank_without_quota_passes_rows_on() -> None:
    shard, model = shard_of(0, 5), Model()
    for _ in range(4):
        stage(shard, model, 5)
        apply(shard, model, CommitCase(0, 0, (0, 0, 0, 0), (0, 0), (0, 0), 0))
        assert model.live == []


# ---------------------------------------------------------------------------------------- Runs


@examples(200)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.integers(0, 6)),
        max_size=80,
    )
)
def test_runs_are_a_dictionary(steps: list[tuple[int, int, int, int]]) -> None:
    runs = Runs()
    places: dict[int, int] = {}
    index = ordinal = 0
    for index_gap, ordinal_gap, rows, forgotten in steps:
        index += index_gap
        ordinal += ordinal_gap
        runs.append(index, ordinal)
        places.update({index + i: ordinal + i for i in range(rows)})
        index += rows
        ordinal += rows
        for old in sorted(places)[:forgotten]:
            if len(places) > 1:
                del places[old]
        oldest = min(places)
        runs.forget_before(oldest)
        live = np.array(sorted(places), dtype=np.int64)
        assert runs.ordinals(live).tolist() == [places[i] for i in live.tolist()]
        assert runs.ordinals(live, turned=5).tolist() == [places[i] - 5 for i in live.tolist()]


def test_a_run_that_goes_on_is_one_run() -> None:
    runs = Runs()
    for start in range(0, 1000, 10):
        runs.append(start, start + 3)
    assert len(runs) == 1
    runs.forget_before(995)
    assert runs.ordinals(np.array([995, 999])).tolist() == [998, 1002]


def test_runs_forget_what_has_left() -> None:
    runs = Runs()
    for start in range(0, 10_000, 2):
        runs.append(start, start // 2)
        runs.forget_before(max(start - 20, 0))
    assert len(runs) <= 12
    runs.clear()
    assert len(runs) == 0
    runs.append(20_000, 5)
    assert runs.ordinals(np.array([20_003])).tolist() == [8]
