"""The plane on several ranks, which are threads of this process, against one list of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from conduit import (
    Balanced,
    CapacityError,
    Central,
    ConduitError,
    DesyncError,
    EmptyError,
    ExperiencePlane,
    Ingestion,
    SchemaError,
    WorldError,
)
from conduit.edp.routing import ROUTINGS
from conduit.sched.timeline import Timeline
from tests import reference
from tests.numbered import EXAMPLE, assert_batch, numbered
from tests.properties import examples, hosts_of
from tests.simulation import Simulation


class Fixed:
    """A placement with these quotas."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self.answer = quotas

    def quotas(self, *, capacity: int, ranks: int) -> Sequence[int]:
        return self.answer


def planes_of(world: Simulation, **options: Any) -> list[ExperiencePlane]:
    options = {"capacity": 100, "batch_size": 4, **options}
    return world.run(lambda rank: ExperiencePlane(EXAMPLE, **options))


def hidden(always: bool) -> Any:
    """Batches are always fetched on the lane, or never."""
    return mock.patch.object(Timeline, "hides", lambda *figures: always)


def sampled(world: Simulation, planes: list[ExperiencePlane]) -> list[TensorDict]:
    batches = world.run(lambda rank: planes[rank].sample())
    assert all(batch is not None for batch in batches)
    return batches  # type: ignore[return-value]


def numbers_of(batches: Sequence[TensorDict]) -> list[int]:
    return [number for batch in batches for number in batch["number"].tolist()]


def extend(planes: list[ExperiencePlane], counts: Sequence[int], made: int = 0) -> int:
    """Stages so many rows on every rank, numbered on; returns the next number."""
    for plane, rows in zip(planes, counts, strict=True):
        plane.extend(numbered(range(made, made + rows)))
        made += rows
    return made


# ---------------------------------------------------------------------- the same as one list


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(2, 5))
    capacity = draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["balanced", "central", "fixed"]))
    if kind == "balanced":
        placement: Any = Balanced()
    elif kind == "central":
        placement = Central(draw(st.integers(0, ranks - 1)))
    else:
        cuts = sorted(draw(st.lists(
            st.integers(0, capacity), min_size=ranks - 1, max_size=ranks - 1
        )))
        placement = Fixed([
            b - a + draw(st.integers(0, 5))
            for a, b in zip([0, *cuts], [*cuts, capacity], strict=True)
        ])
    return {
        "hosts": draw(hosts_of(ranks)),
        "capacity": capacity,
        "batch_size": draw(st.integers(1, 5)),
        "placement": placement,
        "routing": draw(st.sampled_from(ROUTINGS)),
        "staging_rows": draw(st.integers(1, 30)),
        "seed": draw(st.integers(0, 100)),
        "hidden": draw(st.booleans()),
        "max_staleness": draw(st.sampled_from([0, 0, 1, 3])),
    }


def job_of(world: dict[str, Any]) -> reference.Job:
    ranks = len(world["hosts"])
    quotas = world["placement"].quotas(capacity=world["capacity"], ranks=ranks)
    return reference.Job(
        capacity=world["capacity"], batch_rows=world["batch_size"], hosts=world["hosts"],
        quotas=[min(quota, world["capacity"]) for quota in quotas], routing=world["routing"],
        seed=world["seed"], hidden=world["hidden"], max_staleness=world["max_staleness"],
    )


@examples(90)
@given(world=worlds(), data=st.data())
def test_planes_are_one_list(world: dict[str, Any], data: st.DataObject) -> None:
    with hidden(world["hidden"]):
        check_planes_are_one_list(world, data)


def check_planes_are_one_list(world: dict[str, Any], data: st.DataObject) -> None:
    job, ranks = job_of(world), len(world["hosts"])
    staging_rows = world["staging_rows"]
    made = samples = 0
    kept: list[tuple[TensorDict, list[reference.LiveRow]]] = []
    with Simulation(world["hosts"]) as simulated:
        planes = planes_of(
            simulated, capacity=world["capacity"], batch_size=world["batch_size"],
            placement=world["placement"], routing=world["routing"], seed=world["seed"],
            max_staleness=world["max_staleness"],
            ingestion=Ingestion(staging_rows=staging_rows),
        )
        for _ in range(data.draw(st.integers(1, 20))):
            # Batches that follow one another without a commit are planned together.
            quiet = data.draw(st.sampled_from([False, True, True]))
            for rank in range(ranks):
                rows = 0 if quiet else data.draw(st.one_of(
                    st.just(0), st.integers(0, 5), st.integers(0, staging_rows)
                ))
                if len(job.staged[rank]) + rows <= staging_rows:
                    planes[rank].extend(numbered(range(made, made + rows)))
                    job.staged[rank] += range(made, made + rows)
                    made += rows
            operation = data.draw(st.sampled_from(["sample"] * 5 + ["flush", "empty", "agree"]))
            if operation == "agree":
                flags = data.draw(st.lists(
                    st.integers(-3, 3), min_size=ranks, max_size=ranks
                ))
                assert simulated.run(
                    lambda rank, flags=flags: planes[rank].agree(flags[rank])
                ) == [max(flags)] * ranks
                continue
            if operation == "empty":
                simulated.run(lambda rank: planes[rank].empty())
                job.empty()
            elif operation == "flush":
                simulated.run(lambda rank: planes[rank].flush())
                job.commit()
            else:
                job.commit()
                if not job.live:
                    errors = simulated.attempt(lambda rank: planes[rank].sample())
                    assert [type(error) for error in errors] == [EmptyError] * ranks
                    continue
                batches = sampled(simulated, planes)
                expected = job.sample()
                samples += 1
                for batch, rows_of_rank in zip(batches, expected, strict=True):
                    check(batch, rows_of_rank)
                    kept.append((batch, rows_of_rank))
            assert {len(plane) for plane in planes} == {len(job.live)}
            reports = [plane.report() for plane in planes]
            assert [report.shard_rows for report in reports] == job.held()
        for batch, rows_of_batch in kept:
            check(batch, rows_of_batch)
        for plane in planes:
            plane._deliveries.settle()  # counts what the lane has sent for a batch to come
        reports = [plane.report() for plane in planes]
        assert {report.late_rows for report in reports} == {job.late_rows}
        assert {report.samples for report in reports} == {samples}
        assert {report.rows_skipped for report in reports} == {job.skipped}
        assert sum(report.rows_sent_home for report in reports) == job.sent_home
        assert sum(report.rows_received for report in reports) == job.moved.total()
        # Every row that was sent was received, by whom it was sent to.
        sent = np.array([report.sent_rows for report in reports])
        assert (sent == np.array([report.received_rows for report in reports]).T).all()
        assert sent.sum() == job.moved.total() + job.sent_home
        assert np.trace(sent) == 0
        row_bytes = reports[0].row_bytes
        assert [report.sent_bytes for report in reports] == [
            tuple(rows * row_bytes for rows in report.sent_rows) for report in reports
        ]
        assert len({report.exchanges for report in reports}) == 1
        assert len({report.fences for report in reports}) == 1
        simulated.run(lambda rank: planes[rank].close())


def check(batch: TensorDict, rows: list[reference.LiveRow]) -> None:
    assert_batch(batch, [row.value for row in rows], [row.index for row in rows])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("placement", [Balanced(), Central(0), Fixed([7, 0, 43, 0, 0, 0])])
def test_the_global_batch_does_not_depend_on_the_ranks(routing: str, placement: Any) -> None:
    # The same rows, committed together, over 1, 2, 3 and 6 ranks: batches of 12 rows in all.
    rng = np.random.default_rng(0)
    commits = [int(rows) for rows in rng.integers(0, 4, 40)]
    found: list[list[Counter[int]]] = []
    for ranks in (1, 2, 3, 6):
        with Simulation([rank // 2 for rank in range(ranks)]) as world:
            fits = placement if not isinstance(placement, Fixed) else Fixed(
                [*placement.answer[:ranks], *[0] * (ranks - 6)][:ranks]
                if ranks > 2 else [50] + [0] * (ranks - 1)
            )
            planes = planes_of(
                world, capacity=50, batch_size=12 // ranks, routing=routing, placement=fits
            )
            made, batches = 0, []
            for commit, rows in enumerate(commits):
                # Contiguous blocks of the stream, of any size, to the ranks in their order.
                cuts = sorted(rng.integers(0, 6 * rows + 1, ranks - 1).tolist())
                counts = [
                    b - a for a, b in zip([0, *cuts], [*cuts, 6 * rows], strict=True)
                ]
                made = extend(planes, counts, made)
                if made and commit % 3:
                    batches.append(Counter(numbers_of(sampled(world, planes))))
                else:
                    world.run(lambda rank, planes=planes: planes[rank].flush())
            found.append(batches)
    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[0]) > 20


def test_ranks_learn_from_their_own_shards_first() -> None:
    with Simulation([0, 0, 0, 0]) as world:
        planes = planes_of(world, capacity=400, batch_size=32)
        extend(planes, [100] * 4)
        for _ in range(10):
            batches = sampled(world, planes)
            for rank, batch in enumerate(batches):
                own = (batch["number"] // 100 == rank).sum()
                drawn = sum(number // 100 == rank for number in numbers_of(batches))
                assert own == min(drawn, 32)
        moved = sum(plane.report().rows_received for plane in planes)
        assert 0 < moved < 0.12 * 10 * 4 * 32


def test_independent_routing_gives_every_rank_its_part_of_the_draws() -> None:
    with Simulation([0, 1, 2]) as world:
        planes = planes_of(world, capacity=90, batch_size=10, routing="independent")
        extend(planes, [30] * 3)
        for batch_number in range(5):
            positions = reference.positions(
                seed=0, name="experience", global_rows=30, capacity=90, batch=batch_number,
                size=90,
            )
            for rank, batch in enumerate(sampled(world, planes)):
                mine = positions[10 * rank : 10 * rank + 10]
                assert_batch(batch, mine, mine)


def test_where_rows_are_does_not_matter_for_what_is_drawn() -> None:
    found = []
    for placement in (Balanced(), Central(2), Fixed([1, 2, 97])):
        with Simulation([0, 0, 1]) as world:
            planes = planes_of(world, placement=placement, routing="independent")
            made, numbers = 0, []
            for _ in range(12):
                made = extend(planes, [5, 0, 9], made)
                numbers.append([
                    batch["number"].tolist() for batch in sampled(world, planes)
                ])
            found.append(numbers)
    assert found[0] == found[1] == found[2]


def test_nothing_moves_when_nothing_has_to() -> None:
    with Simulation([0, 0]) as world:
        planes = planes_of(world, capacity=20, placement=Central(0), batch_size=1)
        extend(planes, [10, 0])
        world.run(lambda rank: planes[rank].flush())
        assert [plane.report().exchanges for plane in planes] == [0, 0]
        sampled(world, planes)
        # Rank 0 has all rows: rank 1 needs one of the two.
        assert [plane.report().exchanges for plane in planes] == [1, 1]
        assert planes[1].report().received_rows == (1, 0)


# ---------------------------------------------------------------------------- bad configurations


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5}, {"capacity": 101}, {"seed": 1}, {"routing": "independent"},
        {"min_size": 1}, {"max_staleness": 1}, {"placement": Central(0)},
        {"ingestion": Ingestion(staging_rows=9)}, {"name": "other"},
    ],
    ids=str,
)
def test_ranks_with_other_arguments_are_named(options: dict[str, Any]) -> None:
    with Simulation([0, 0, 1]) as world:
        errors = world.attempt(lambda rank: ExperiencePlane(
            EXAMPLE, **{"capacity": 100, "batch_size": 4, **(options if rank == 1 else {})}
        ))
        named = {"ingestion": "staging"}
        [option] = options
        for error in errors:
            assert isinstance(error, DesyncError)
            assert error.field == named.get(option, option)
            assert "rank 1" in str(error)
            assert "ranks [0, 2]" in str(error)
            if isinstance(options[option], (int, str)):
                # What the user wrote, not what stands for it in the record.
                assert f"{options[option]!r} on rank 1" in str(error)


def test_ranks_with_other_schemas_are_told_the_field() -> None:
    other = {**EXAMPLE, "observation": torch.zeros(4)}
    with Simulation([0, 0]) as world:
        errors = world.attempt(lambda rank: ExperiencePlane(
            other if rank else EXAMPLE, capacity=100, batch_size=4
        ))
        for rank, error in enumerate(errors):
            assert isinstance(error, SchemaError)
            assert error.field == "'observation'"
            assert f"rank {1 - rank} has another schema" in str(error)
            assert f"float32[{3 + rank}] as here" in str(error)
            assert f"float32[{4 - rank}]" in str(error.got)


@pytest.mark.parametrize(
    "bad", [{"batch_size": 0}, {"capacity": "many"}, {"routing": "nearest"}], ids=str
)
def test_a_rank_with_bad_arguments_does_not_leave_the_others_waiting(bad: dict[str, Any]) -> None:
    with Simulation([0, 0, 0]) as world:
        errors = world.attempt(lambda rank: ExperiencePlane(
            EXAMPLE, **{"capacity": 100, "batch_size": 4, **(bad if rank == 2 else {})}
        ))
        for error in errors[:2]:
            assert isinstance(error, WorldError)
            assert "rank 2 failed before create" in str(error)
        assert isinstance(errors[2], ConduitError)
        assert "failed before" not in str(errors[2])


@pytest.mark.parametrize("example", [torch.zeros(3), {"a": torch.zeros(1), 1: torch.zeros(1)}])
def test_nor_does_a_rank_with_a_bad_example(example: Any) -> None:
    with Simulation([0, 0]) as world:
        errors = world.attempt(lambda rank: ExperiencePlane(
            example if rank else EXAMPLE, capacity=100, batch_size=4
        ))
        assert isinstance(errors[0], WorldError)
        assert isinstance(errors[1], SchemaError)


class Broken:
    """A placement of the user's with a mistake in it."""

    def quotas(self, *, capacity: int, ranks: int) -> Sequence[int]:
        raise ZeroDivisionError("in the user's code")


def test_nor_does_a_rank_with_a_broken_placement() -> None:
    with Simulation([0, 0]) as world:
        errors = world.attempt(lambda rank: ExperiencePlane(
            EXAMPLE, capacity=100, batch_size=4, placement=Broken() if rank else None
        ))
        assert isinstance(errors[0], WorldError)
        assert "rank 1 failed before create" in str(errors[0])
        assert "in the user's code" in repr(errors[1]) + repr(errors[1].__cause__)


# -------------------------------------------------------------------------- different calls


def test_ranks_that_call_different_things_are_named() -> None:
    with Simulation([0, 0, 0]) as world:
        planes = planes_of(world)
        extend(planes, [3, 3, 3])
        sampled(world, planes)
        calls = [planes[0].flush, planes[1].sample, planes[2].sample]
        for error in world.attempt(lambda rank: calls[rank]()):
            assert isinstance(error, DesyncError)
            assert "rank 0 called flush (call 3)" in str(error)
            assert "ranks [1, 2] called sample (call 3)" in str(error)
        # The planes are finished, and say why.
        for plane in planes:
            with pytest.raises(WorldError, match="called flush"):
                plane.sample()
            with pytest.raises(WorldError, match="is closed"):
                plane.extend(numbered([1]))
            plane.close()


def test_one_rank_that_stages_too_much_hinders_nobody() -> None:
    with Simulation([0, 0]) as world:
        planes = planes_of(world, ingestion=Ingestion(staging_rows=5))
        planes[0].extend(numbered(range(4)))
        with pytest.raises(CapacityError):
            planes[0].extend(numbered(range(50, 52)))
        planes[1].extend(numbered(range(4, 6)))
        world.run(lambda rank: planes[rank].flush())
        assert {len(plane) for plane in planes} == {6}
        assert set(numbers_of(sampled(world, planes))) <= set(range(6))


def test_a_flag_that_is_no_flag_hinders_nobody() -> None:
    with Simulation([0, 0]) as world:
        planes = planes_of(world)
        for flag in (1 << 70, "stop", None):
            with pytest.raises((ConduitError, TypeError, ValueError, OverflowError)):
                planes[0].agree(flag)  # type: ignore[arg-type]
        # The call was never made: the next one is the same on both ranks.
        assert world.run(lambda rank: planes[rank].agree(rank)) == [1, 1]


def test_all_ranks_get_none_or_an_error_alike() -> None:
    with Simulation([0, 0]) as world:
        planes = planes_of(world, min_size=5)
        planes[1].extend(numbered(range(4)))
        assert world.run(lambda rank: planes[rank].sample()) == [None, None]
        planes[0].extend(numbered([4]))
        assert len(sampled(world, planes)) == 2


def test_what_a_rank_does_to_its_batch_reaches_no_other() -> None:
    with Simulation([0, 0]) as world:
        planes, twins = planes_of(world), planes_of(world)
        for several in (planes, twins):
            extend(several, [40, 30])
        for _ in range(6):
            batches, expected = sampled(world, planes), sampled(world, twins)
            for batch, other in zip(batches, expected, strict=True):
                assert_batch(batch, other["number"].tolist(), other["index"].tolist())
                batch.zero_()
                batch["index"].fill_(-1)


def test_close_ends_the_plane_on_all_ranks() -> None:
    with Simulation([0, 0]) as world:
        planes = planes_of(world)
        extend(planes, [9, 9])
        batches = sampled(world, planes)
        numbers = numbers_of(batches)
        world.run(lambda rank: planes[rank].close())
        assert numbers_of(batches) == numbers
        for plane in planes:
            plane.close()
            with pytest.raises(WorldError, match="closed"):
                plane.flush()


def test_several_planes_share_a_world() -> None:
    with Simulation([0, 0]) as world:
        first, second = planes_of(world, name="first"), planes_of(world, name="second")
        extend(first, [9, 9])
        extend(second, [9, 9], 1000)
        for _ in range(5):
            assert max(numbers_of(sampled(world, first))) < 18
            assert min(numbers_of(sampled(world, second))) >= 1000


def test_a_call_that_is_cut_short_ends_the_plane() -> None:
    """The rank is out of step with the others, and knows it."""
    with Simulation([0, 0]) as world:
        planes = planes_of(world, capacity=100, batch_size=4)
        extend(planes, [20, 20])
        sampled(world, planes)

        def interrupted(rank: int) -> type[BaseException] | None:
            if rank == 0:
                planes[0]._shard.gather = mock.Mock(  # type: ignore[method-assign]
                    side_effect=KeyboardInterrupt
                )
            try:
                planes[rank].sample()
            except BaseException as error:
                world._abandon()  # nobody waits for this rank
                return type(error)
            return None

        assert world.run(interrupted)[0] is KeyboardInterrupt
        with pytest.raises(WorldError, match="cut short by KeyboardInterrupt"):
            planes[0].sample()
