"""Decisions that ranks make alike, and what is said when they do not."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from conduit.collectives.agreement import Decisions, differing
from conduit.collectives.control import FINGERPRINT, Control, Operation
from conduit.collectives.world import World
from conduit.errors import DesyncError
from tests.simulation import Simulation


def told(ranks: list[int]) -> str:
    return f"ranks {ranks}"


def test_the_hash_is_of_what_was_decided_and_not_of_when() -> None:
    one, other = Decisions(), Decisions()
    assert one.hash == other.hash == 0
    one.decide("plan", "a")
    one.decide("transport", "b")
    other.decide("transport", "x")
    other.decide("plan", "a")
    assert one.hash != other.hash
    other.decide("transport", "b")
    assert one.hash == other.hash
    assert 0 <= one.hash < 1 << 63


def test_the_odd_ranks_are_named_first() -> None:
    texts = ["a: 'x'\nb: 'y'", "a: 'x'\nb: 'z: 1'", "a: 'x'\nb: 'y'"]
    assert differing(texts, told) == ("b", "ranks [1] 'z: 1'; ranks [0, 2] 'y'")
    assert differing(["a: 'x'", "", "a: 'x'"], told) == ("a", "ranks [1] nothing; ranks [0, 2] 'x'")


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_that_decided_differently_is_named_on_all(shared: bool) -> None:
    with Simulation([0, 0, 0], shared=shared) as simulation:
        controls = simulation.run(lambda rank: Control(
            World.join(device=torch.device("cpu"), timeout=timedelta(seconds=10)),
            dict.fromkeys(FINGERPRINT, 1),
        ))
        for rank, control in enumerate(controls):
            control.decisions.decide("plan", "equal")
            control.decisions.decide("transport", "rail" if rank == 1 else "point-to-point")
        for rank, error in enumerate(simulation.attempt(
            lambda rank: controls[rank].exchange(Operation.FLUSH)
        )):
            assert isinstance(error, DesyncError)
            assert (error.rank, error.field) == (rank, "transport")
            assert error.got == "rank 1 'rail'; ranks [0, 2] 'point-to-point'"
