"""The control exchange among ranks that are threads of this process."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from conduit.collectives.control import FINGERPRINT, Control, Operation
from conduit.collectives.world import World
from conduit.errors import DesyncError, WorldError
from tests.simulation import Simulation

CPU = torch.device("cpu")
ALIKE = {name: 100 + i for i, name in enumerate(FINGERPRINT)}


def controls_of(world: Simulation, other: dict[int, dict[str, int]] | None = None) -> list[Control]:
    """A control exchange per rank; ``other[rank]`` is what is different there."""
    other = other or {}
    return world.run(lambda rank: Control(
        World.join(device=CPU, timeout=timedelta(seconds=5)), {**ALIKE, **other.get(rank, {})}
    ))


def test_every_rank_gets_what_every_rank_brought() -> None:
    with Simulation([0, 0, 1]) as world:
        controls = controls_of(world)
        for call in range(1, 4):
            results = world.run(lambda rank, call=call: controls[rank].exchange(
                Operation.SAMPLE, staged=10 * call + rank, value=-rank, step_us=5 + rank,
                fetch_us=50 * rank,
            ))
            for got in results:
                assert got.staged.tolist() == [10 * call, 10 * call + 1, 10 * call + 2]
                assert got.value.tolist() == [0, -1, -2]
                assert (got.step_us.tolist(), got.fetch_us.tolist()) == ([5, 6, 7], [0, 50, 100])
            assert {control.number for control in controls} == {call}


def test_what_was_got_is_not_changed_by_the_next_exchange() -> None:
    with Simulation([0, 0]) as world:
        controls = controls_of(world)
        first = world.run(lambda rank: controls[rank].exchange(Operation.FLUSH, staged=rank))
        world.run(lambda rank: controls[rank].exchange(Operation.FLUSH, staged=50))
        assert [got.staged.tolist() for got in first] == [[0, 1], [0, 1]]


def test_nobody_waits_before_finish() -> None:
    with Simulation([0, 0]) as world:
        controls = controls_of(world)
        begun = threading.Event()

        def call(rank: int) -> list[int]:
            # Rank 1 comes only after rank 0 has begun and gone on.
            assert rank == 0 or begun.wait(10)
            controls[rank].begin(Operation.AGREE, value=rank + 7)
            begun.set()
            values: list[int] = controls[rank].finish().value.tolist()
            return values

        assert world.run(call) == [[7, 8], [7, 8]]


def test_alone_there_is_nobody_to_ask() -> None:
    world = World(
        rank=0, size=1, device=CPU, timeout=timedelta(seconds=5), hosts=torch.zeros(1).numpy()
    )
    control = Control(world, ALIKE)
    got = control.exchange(Operation.SAMPLE, staged=3, value=9)
    assert (got.staged.tolist(), got.value.tolist()) == ([3], [9])


def refused(world: Simulation, controls: list[Control], *calls: dict[str, Any]) -> list[Any]:
    return world.attempt(lambda rank: controls[rank].exchange(
        calls[rank].get("operation", Operation.SAMPLE),
        **{key: value for key, value in calls[rank].items() if key != "operation"},
    ))


@pytest.mark.parametrize("field", FINGERPRINT)
def test_a_difference_in_configuration_is_named(field: str) -> None:
    with Simulation([0, 0, 0]) as world:
        controls = controls_of(world, {1: {field: 5}})
        for rank, error in enumerate(refused(world, controls, {}, {}, {})):
            assert isinstance(error, DesyncError)
            assert error.field == field
            assert error.rank == rank
            assert f"ranks [0, 2] {ALIKE[field]}" in str(error.got)
            assert "rank 1 5" in str(error.got)
            assert "same arguments" in str(error)


@pytest.mark.parametrize("field", ["directory_end", "directory_state"])
def test_a_difference_in_the_directory_is_named(field: str) -> None:
    with Simulation([0, 0]) as world:
        controls = controls_of(world)
        for error in refused(world, controls, {field: 1}, {field: 2}):
            assert isinstance(error, DesyncError)
            assert error.field == field
            assert "same arguments" not in str(error)


def test_different_calls_are_named() -> None:
    with Simulation([0, 0, 0]) as world:
        controls = controls_of(world)
        for error in refused(
            world, controls, {}, {"operation": Operation.FLUSH}, {"operation": Operation.CLOSE}
        ):
            assert isinstance(error, DesyncError)
            for told in ("rank 0 called sample (call 1)", "rank 1 called flush (call 1)",
                         "rank 2 called close (call 1)"):
                assert told in str(error)


def test_a_rank_that_missed_a_call_is_named() -> None:
    with Simulation([0, 0]) as world:
        controls = controls_of(world)
        controls[1].number += 1
        for error in refused(world, controls, {}, {}):
            assert isinstance(error, DesyncError)
            assert "rank 0 called sample (call 1)" in str(error)
            assert "rank 1 called sample (call 2)" in str(error)


def test_an_operation_of_another_version_is_told_by_number() -> None:
    with Simulation([0, 0]) as world:
        controls = controls_of(world)

        class Later:
            name = "LATER"

            def __int__(self) -> int:
                return 99

            __index__ = __int__

        for error in refused(world, controls, {}, {"operation": Later()}):
            assert isinstance(error, DesyncError)
            assert "rank 1 called operation 99" in str(error)


def test_a_failure_is_told_before_any_difference() -> None:
    with Simulation([0, 0, 0]) as world:
        controls = controls_of(world, {1: dict.fromkeys(FINGERPRINT, 0)})
        for error in refused(world, controls, {}, {"failed": True}, {}):
            assert isinstance(error, WorldError)
            assert "rank 1 failed before sample (call 1)" in str(error)


def test_texts_of_all_ranks() -> None:
    texts = ["", "one", "π and more " * 100, '[["a"]]']
    with Simulation([0, 0, 1, 1]) as world:
        controls = controls_of(world)
        assert world.run(lambda rank: controls[rank].gather_text(texts[rank])) == [texts] * 4
        assert world.run(lambda rank: controls[rank].gather_text("")) == [[""] * 4] * 4
