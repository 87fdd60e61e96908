"""Replay on all ranks of a job at once, against one list of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.edp.delivery import Delivery, Replay
from conduit.edp.directory import Directory
from conduit.edp.draws import UniformDraws
from conduit.edp.ingestion import plan_commit
from conduit.edp.routing import ROUTINGS
from tests import reference
from tests.properties import examples, hosts_of


@dataclass(frozen=True)
class Part:
    """One rank's part in one delivery: positions in ``receive`` are those of its batch."""

    indices: list[int]
    send: list[int]
    send_counts: list[int]
    receive: list[int]
    receive_counts: list[int]
    moved: int


@dataclass(frozen=True)
class Dealt:
    """A delivery on one rank: the draft, what is late in it, and the batch that these make."""

    indices: list[int]
    draft: Part
    seats: list[int]
    late: Part | None


def dealt(delivery: Delivery) -> Dealt:
    draft, late = part_of(delivery), delivery.late
    if late is None:
        return Dealt(draft.indices, draft, [], None)
    indices, moves = list(draft.indices), late.transfers
    for seat, index in zip(late.seats.tolist(), late.indices.tolist(), strict=True):
        assert indices[seat] != index, "what has not changed is not late"
        indices[seat] = index
    if moves is None:
        return Dealt(indices, draft, late.seats.tolist(), None)
    return Dealt(indices, draft, late.seats.tolist(), Part(
        indices=late.indices.tolist(), send=late.send.tolist(),
        send_counts=moves.send_counts[0].tolist(), receive=moves.receive.tolist(),
        receive_counts=moves.receive_counts[0].tolist(), moved=moves.moved[0],
    ))


def part_of(delivery: Delivery) -> Part:
    ahead, row = delivery.ahead, delivery.row
    indices, moves = ahead.indices[row], ahead.transfers
    assert indices.dtype == np.int64
    if moves is None:
        return Part(indices.tolist(), [], [], [], [], 0)
    assert ahead.send is not None
    send = slice(moves.send_bounds[row], moves.send_bounds[row + 1])
    receive = slice(moves.receive_bounds[row], moves.receive_bounds[row + 1])
    return Part(
        indices=indices.tolist(), send=ahead.send[send].tolist(),
        send_counts=moves.send_counts[row].tolist(),
        receive=(moves.receive[receive] - row * len(indices)).tolist(),
        receive_counts=moves.receive_counts[row].tolist(), moved=moves.moved[row],
    )


class Ranks:
    """A Replay for every rank over one directory (which all ranks replicate), and no rows."""

    def __init__(
        self, *, capacity: int, quotas: list[int], hosts: list[int], batch_rows: int,
        routing: str, seed: int = 0,
    ) -> None:
        ranks = len(quotas)
        # Who held what when the draft was made, until it is dealt.
        self.drafted: dict[int, int] | None = None
        self.directory = Directory(capacity=capacity, ranks=ranks)
        self.quotas = np.array(quotas, dtype=np.int64)
        self.replays = [
            Replay(
                directory=self.directory, routing=routing, rank=rank, batch_rows=batch_rows,
                hosts=np.array(hosts, dtype=np.int64),
                draws=UniformDraws(
                    seed=seed, name="experience", global_rows=batch_rows * ranks,
                    capacity=capacity,
                ),
            )
            for rank in range(ranks)
        ]

    def commit(self, staged: list[int]) -> list[Part | None]:
        drafts = [replay.draft() for replay in self.replays]
        parts = [part_of(draft) if draft is not None else None for draft in drafts]
        if parts[0] is not None:
            self.drafted = holders(self.directory)
        if any(staged):
            counts = np.array(staged, dtype=np.int64)
            plan = plan_commit(counts, self.directory, self.quotas)
            self.directory.append(
                plan.holders, plan.counts, skipped=plan.skipped, lost=plan.lost,
                arriving=plan.arriving,
            )
        return parts

    def deal(self) -> list[Dealt]:
        """Deals, and checks that all ranks know who sends which rows to whom."""
        deliveries = [dealt(replay.deal()) for replay in self.replays]
        if len(self.replays) > 1:
            now = holders(self.directory)
            assert_transfers_fit([delivery.draft for delivery in deliveries], self.drafted or now)
            late = [delivery.late for delivery in deliveries if delivery.late is not None]
            assert len(late) in (0, len(deliveries))
            assert_transfers_fit(late, now)
        self.drafted = None
        return deliveries

    def empty(self) -> None:
        self.directory.clear()
        self.drafted = None
        for replay in self.replays:
            replay.clear()


def holders(directory: Directory) -> dict[int, int]:
    positions = np.arange(directory.size)
    return dict(zip(
        directory.indices(positions).tolist(), directory.holders(positions).tolist(), strict=True
    ))


def assert_transfers_fit(parts: list[Part], holder: dict[int, int]) -> None:
    """Every rank sends what the others expect, in their order, from what it holds."""
    for rank, part in enumerate(parts):
        assert all(holder[index] == rank for index in part.send)
        foreign = [i for i, index in enumerate(part.indices) if holder[index] != rank]
        assert sorted(part.receive) == foreign
        at = 0
        for peer, other in enumerate(parts):
            count = part.receive_counts[peer]
            places = part.receive[at : at + count]
            at += count
            start = sum(other.send_counts[:rank])
            assert other.send_counts[rank] == count
            sent = other.send[start : start + count]
            assert sent == [part.indices[place] for place in places]
        assert at == len(part.receive)
        assert sum(part.send_counts) == len(part.send)
        assert part.moved == sum(len(other.receive) for other in parts)


@examples(200)
@given(
    data=st.data(), ranks=st.integers(1, 4), capacity=st.integers(1, 30),
    batch_rows=st.integers(1, 6), routing=st.sampled_from(ROUTINGS),
)
def test_batches_are_those_of_one_list(
    data: st.DataObject, ranks: int, capacity: int, batch_rows: int, routing: str
) -> None:
    hosts = data.draw(hosts_of(ranks))
    quotas = [capacity] * ranks
    job = reference.Job(
        capacity=capacity, batch_rows=batch_rows, quotas=quotas, hosts=hosts, routing=routing
    )
    world = Ranks(
        capacity=capacity, quotas=quotas, hosts=hosts, batch_rows=batch_rows, routing=routing
    )
    untouched = False
    for _ in range(data.draw(st.integers(1, 20))):
        operation = data.draw(st.sampled_from(["sample", "sample", "sample", "flush", "empty"]))
        if operation == "empty":
            world.empty()
            job.empty()
            untouched = False
            continue
        quiet = data.draw(st.sampled_from([False, True, True]))
        staged = [0] * ranks if quiet else data.draw(st.lists(
            st.one_of(st.just(0), st.integers(0, 4), st.integers(0, 2 * capacity)),
            min_size=ranks, max_size=ranks,
        ))
        for rank, rows in enumerate(staged):
            job.staged[rank] += [0] * rows
        drafts = world.commit(staged)
        untouched = untouched and not any(staged)
        if operation == "flush" or world.directory.size == 0:
            job.commit()
            continue
        expected = job.sample()
        deliveries = world.deal()
        assert [delivery.indices for delivery in deliveries] == [
            [row.index for row in batch] for batch in expected
        ]
        if ranks > 1:
            assert {replay.late_rows for replay in world.replays} == {job.late_rows}
            if untouched:
                # Nothing was committed since the last batch: the draft is what is delivered.
                assert all(delivery.late is None for delivery in deliveries)
                if drafts[0] is not None:
                    assert drafts == [delivery.draft for delivery in deliveries]
        untouched = True
        assert {replay.batch for replay in world.replays} == {job.batch}


def filled(routing: str = "exchangeable") -> Ranks:
    world = Ranks(
        capacity=200, quotas=[100, 100], hosts=[0, 0], batch_rows=64, routing=routing
    )
    world.commit([60, 60])
    world.deal()
    return world


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_late_row_takes_the_place_of_the_draw_it_displaces(routing: str) -> None:
    world, twin = filled(routing), filled(routing)
    drafted = twin.deal()
    # Six more rows change some draws of the next batch, and nothing else of it.
    world.commit([3, 3])
    delivered = world.deal()
    changed = 0
    for before, after in zip(drafted, delivered, strict=True):
        for old, new in zip(before.indices, after.indices, strict=True):
            changed += old != new
            assert (new >= 120) == (old != new)
    assert changed == world.replays[0].late_rows > 0


def test_a_late_row_may_come_to_a_rank_that_does_not_hold_it() -> None:
    # The routing is that of the draft, although the new rows are all on rank 1.
    world = filled()
    world.commit([0, 40])
    deliveries = world.deal()
    holder = holders(world.directory)
    late = [index for index in deliveries[0].indices if index >= 120]
    assert late
    assert {holder[index] for index in late} == {1}


def test_several_commits_between_two_batches_have_one_draft() -> None:
    once, twice = filled(), filled()
    once.commit([5, 2])
    once_indices = [delivery.indices for delivery in once.deal()]
    # The same rows with the same holders, in two commits.
    twice.commit([5, 0])
    twice.commit([0, 2])
    assert [delivery.indices for delivery in twice.deal()] == once_indices
    assert once.replays[0].late_rows == twice.replays[0].late_rows


def test_after_clear_nothing_of_the_draft_is_left() -> None:
    world = filled()
    world.commit([1, 1])
    world.empty()
    world.commit([10, 10])
    deliveries = world.deal()
    assert min(min(delivery.indices) for delivery in deliveries) >= 122
    assert world.replays[0].late_rows == 0
    # Routed over what is there now: no row moves but the surplus.
    holder = holders(world.directory)
    drawn = [holder[index] for delivery in deliveries for index in delivery.indices]
    assert deliveries[0].draft.moved == abs(drawn.count(0) - 64)


@pytest.mark.parametrize("ranks", [1, 3])
def test_batches_that_are_known_ahead_are_planned_together(ranks: int) -> None:
    capacity = 50
    world = Ranks(
        capacity=capacity, quotas=[capacity] * ranks, hosts=[0] * ranks, batch_rows=16,
        routing="exchangeable",
    )
    job = reference.Job(
        capacity=capacity, batch_rows=16, quotas=[capacity] * ranks, hosts=[0] * ranks
    )
    plans = []
    for step in range(70):
        staged = [7 if step in (0, 3, 30, 31) else 0] * ranks
        for rank in range(ranks):
            job.staged[rank] += [0] * staged[rank]
        world.commit(staged)
        deliveries = [replay.deal() for replay in world.replays]
        assert [dealt(delivery).indices for delivery in deliveries] == [
            [row.index for row in batch] for batch in job.sample()
        ]
        plans.append(deliveries[0].ahead)
    # Few plans, though a batch that a commit has changed is planned alone.
    assert len({id(plan) for plan in plans}) < 30
    assert world.replays[0].late_rows == (job.late_rows if ranks > 1 else 0)
