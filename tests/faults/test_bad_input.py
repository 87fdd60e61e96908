"""Ranks that disagree, or were given nonsense: a clear error on every rank, at once, and nothing
is left half done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import conduit
from tests.faults.scripts import (
    EXAMPLES,
    TIMEOUT_S,
    Step,
    errors_of,
    names,
    rows_of,
    script,
)
from tests.spmd.cases import make_plane
from tests.spmd.ranks import Rank, Ranks

World = Callable[..., Ranks]

AFTER: list[Step] = [["extend", 1], ["sample"], ["flush"], ["agree", 1], ["close"], ["close"]]
"""What a plane that failed still answers."""

AGAIN: list[Step] = [["make"], ["extend", 10], ["sample"], ["close"]]
"""A plane that is made after another one was refused."""


def run(world: World, steps: list[list[Step]]) -> list[Any]:
    ranks = world(len(steps))
    ranks.start(script, each=[{"steps": own} for own in steps])
    return ranks.outcomes()


def check_closed(results: list[dict[str, Any]]) -> None:
    """The last steps were ``AFTER``: calls raise WorldError at once, closing is quick."""
    *calls, close, again = results[-len(AFTER) :]
    for call in calls:
        assert call["error"] == "WorldError" and "closed" in call["text"], call
        assert call["seconds"] < 0.5, call
    assert close["error"] is None and again["error"] is None, (close, again)
    assert close["seconds"] < 1 and again["seconds"] < 0.1, (close, again)


def check_again(results: list[dict[str, Any]]) -> None:
    """The last steps were ``AGAIN``."""
    assert [result["error"] for result in results[-len(AGAIN) :]] == [None] * len(AGAIN), results
    assert results[-2]["value"] == 8


@pytest.mark.parametrize(
    ("example", "field", "parts"),
    [
        ("dtype", "('next', 'reward')", ["float64[1]", "float32[1]"]),
        ("shape", "'observation'", ["float32[4]", "float32[5]"]),
        ("missing", "('next', 'reward')", ["float32[1]", "no such field"]),
        ("more", "'done'", ["float32[1]", "no such field"]),
    ],
)
def test_another_schema(world: World, example: str, field: str, parts: list[str]) -> None:
    outcomes = run(world, [
        [["make"], *AGAIN], [["make", {"example": example}], *AGAIN], [["make"], *AGAIN]
    ])
    for rank, outcome in enumerate(outcomes):
        refused = outcome.value[0]
        assert refused["error"] == "SchemaError", refused
        assert refused["field"] == field and field in refused["text"]
        assert all(part in refused["text"] for part in parts), refused
        assert names(refused["text"], 0 if rank == 1 else 1), refused
        assert refused["seconds"] < TIMEOUT_S
        check_again(outcome.value)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("capacity", {"capacity": 101}), ("batch_size", {"batch_size": 9}), ("seed", {"seed": 1}),
        ("routing", {"routing": "exchangeable"}), ("min_size", {"min_size": 3}),
        ("max_staleness", {"max_staleness": 1}), ("placement", {"placement": "central"}),
        ("staging", {"staging_rows": 51}), ("name", {"name": "another"}),
    ],
)
def test_other_arguments(world: World, field: str, other: dict[str, Any]) -> None:
    outcomes = run(world, [[["make"], *AGAIN], [["make"], *AGAIN], [["make", other], *AGAIN]])
    for outcome in outcomes:
        refused = outcome.value[0]
        assert refused["error"] == "DesyncError", refused
        assert refused["field"] == field and field in refused["text"]
        assert names(refused["text"], 0, 1, 2), "who has which value"
        assert refused["seconds"] < TIMEOUT_S
        check_again(outcome.value)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        ("WorldError", {"batch_size": 0}), ("WorldError", {"batch_size": "many"}),
        ("WorldError", {"routing": "random"}), ("CapacityError", {"capacity": "ten parsecs"}),
        ("CapacityError", {"capacity": 0}), ("CapacityError", {"min_size": 101}),
        ("CapacityError", {"capacity": 10**15}), ("CapacityError", {"staging_rows": 0}),
        ("CapacityError", {"capacity": 10**15, "placement": "central"}),
        ("CapacityError", {"placement": "short"}), ("WorldError", {"placement": "central 7"}),
        ("SchemaError", {"example": "empty"}), ("SchemaError", {"example": "text"}),
        ("SchemaError", {"example": "reserved"}), ("SchemaError", {"example": "no mapping"}),
    ],
)
def test_bad_arguments_on_one_rank(world: World, error: str, arguments: dict[str, Any]) -> None:
    """The rank itself learns what is wrong; the others, which rank to look at."""
    outcomes = run(world, [[["make"], *AGAIN], [["make", arguments], *AGAIN], [["make"], *AGAIN]])
    for rank, outcome in enumerate(outcomes):
        refused = outcome.value[0]
        assert refused["error"] == (error if rank == 1 else "WorldError"), refused
        assert rank == 1 or names(refused["text"], 1), refused
        assert refused["seconds"] < TIMEOUT_S
        check_again(outcome.value)


def test_a_bug_in_a_placement_on_one_rank(world: World) -> None:
    """The program's own exception comes out where it was raised; nobody waits for that rank."""
    outcomes = run(world, [
        [["make"], *AGAIN], [["make", {"placement": "broken"}], *AGAIN], [["make"], *AGAIN]
    ])
    for rank, outcome in enumerate(outcomes):
        refused = outcome.value[0]
        if rank == 1:
            assert refused["error"] == "ZeroDivisionError" or refused["known"], refused
        else:
            assert refused["error"] == "WorldError" and names(refused["text"], 1), refused
        assert refused["seconds"] < TIMEOUT_S
        check_again(outcome.value)


def test_the_same_bad_arguments_everywhere(world: World) -> None:
    outcomes = run(world, [[["make", {"capacity": 10**15, "placement": "central 1"}]]] * 2)
    for outcome in outcomes:
        (refused,) = outcome.value
        assert refused["known"] and refused["error"] in ("CapacityError", "WorldError"), refused
        assert refused["seconds"] < TIMEOUT_S


@pytest.mark.parametrize("device", ["cuda", "cuda:99", "meta", "no such thing"])
def test_a_device_that_is_not_there(world: World, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    outcomes = run(world, [[["make", {"device": device}], *AGAIN]] * 2)
    for outcome in outcomes:
        refused = outcome.value[0]
        assert refused["known"] and device in refused["text"], refused
        assert refused["seconds"] < TIMEOUT_S
        check_again(outcome.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [(["sample"], ["flush"]), (["agree", 1], ["sample"]), (["empty"], ["close"])],
)
def test_different_collective_calls(world: World, first: Step, second: Step) -> None:
    begin: list[Step] = [["make"], ["extend", 5], ["flush"]]
    outcomes = run(world, [
        [*begin, ["sleep", 0.3], first, *AFTER], [*begin, second, *AFTER], [*begin, first, *AFTER]
    ])
    for rank, outcome in enumerate(outcomes):
        at_fault = outcome.value[4 if rank == 0 else 3]
        assert at_fault["error"] == "DesyncError", at_fault
        for call, who in ((first, "ranks [0, 2]"), (second, "rank 1")):
            assert f"{who} called {call[0]} (call 3)" in at_fault["text"], at_fault
        assert at_fault["seconds"] < TIMEOUT_S
        if second != ["close"] or rank != 1:
            check_closed(outcome.value)


def test_different_calls_while_rows_are_on_their_way(world: World) -> None:
    """Rank 0 begins to fetch its next batch when the others have already closed their planes: they
    told what they called before."""
    begin: list[Step] = [["make"], ["extend", 20], ["sample"]]
    outcomes = run(world, [
        [*begin, ["late exchange", 1.0], ["sample"], *AFTER],
        [*begin, ["flush"], *AFTER], [*begin, ["sample"], *AFTER],
    ])
    for rank, outcome in enumerate(outcomes):
        at_fault = outcome.value[4 if rank == 0 else 3]
        assert at_fault["error"] == "DesyncError", at_fault
        assert "ranks [0, 2] called sample (call 3)" in at_fault["text"], at_fault
        assert at_fault["seconds"] < TIMEOUT_S
        check_closed(outcome.value)


def test_a_new_plane_after_a_failure(world: World) -> None:
    """The program's process group is as it was: all ranks can start afresh."""
    begin: list[Step] = [["make"], ["extend", 5], ["flush"]]
    outcomes = run(world, [
        [*begin, ["flush"], ["close"], *AGAIN], [*begin, ["sample"], ["close"], *AGAIN],
        [*begin, ["sample"], *AGAIN],
    ])
    for outcome in outcomes:
        assert outcome.value[3]["error"] == "DesyncError"
        check_again(outcome.value)


def test_one_call_too_many(world: World) -> None:
    """A rank that is one call ahead is caught at the first call that differs."""
    begin: list[Step] = [["make"], ["extend", 5], ["flush"]]
    outcomes = run(world, [
        [*begin, ["sample"], ["agree", 0], *AFTER],
        [*begin, ["sample"], ["sample"], *AFTER],
    ])
    for outcome in outcomes:
        assert outcome.value[3]["error"] is None
        assert outcome.value[4]["error"] == "DesyncError"
        assert "rank 0 called agree" in outcome.value[4]["text"]
        assert "rank 1 called sample" in outcome.value[4]["text"]
        check_closed(outcome.value)


def two_planes(rank: Rank) -> list[Any]:
    """One plane fails on all ranks while another one goes on."""
    with make_plane(rank, EXAMPLES["usual"], capacity=60, batch_rows=4, name="good") as good:
        bad = make_plane(rank, EXAMPLES["usual"], capacity=60, batch_rows=4, name="bad")
        seen: list[Any] = []
        for step in range(6):
            good.extend(rows_of("usual", 5))
            batch = good.sample()
            assert batch is not None
            seen.append(len(batch))
            if step == 2:
                try:
                    bad.flush() if rank.number == 1 else bad.agree(1)
                except conduit.DesyncError:
                    seen.append("DesyncError")
        bad.close()
        seen.append(len(good))
    return seen


def test_a_failure_concerns_one_plane(world: World) -> None:
    expected = [4, 4, 4, "DesyncError", 4, 4, 4, 60]
    assert world(3).run(two_planes) == [expected] * 3


def test_rows_that_cannot_be_staged_are_a_matter_of_one_rank(world: World) -> None:
    """Nothing of them is staged, the other ranks do not notice, and all goes on."""
    usual: list[Step] = [["make"], ["extend", 10], ["sample"], ["extend", 10], ["sample"], ["len"]]
    outcomes = run(world, [
        usual,
        [
            ["make"], ["extend", 10], ["extend", 41], ["extend", 3, "dtype"], ["sample"],
            ["extend", 51], ["extend", 10], ["sample"], ["len"], ["staged"],
        ],
        usual,
    ])
    for outcome in outcomes:
        assert [result["value"] for result in errors_of(outcome, "sample")] == [8, 8]
        assert [result["value"] for result in errors_of(outcome, "len")] == [60]
    odd = outcomes[1]
    refused = [result for result in errors_of(odd, "extend") if result["error"]]
    assert [result["error"] for result in refused] == [
        "CapacityError", "SchemaError", "CapacityError"
    ]
    assert "at most 40 more rows" in refused[0]["text"]
    assert "next" in refused[1]["text"] and "float64" in refused[1]["text"]
    assert errors_of(odd, "staged")[0]["value"] == 20
