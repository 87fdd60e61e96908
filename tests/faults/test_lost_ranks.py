"""Ranks that are late, stopped, killed or gone: the others learn who, within the deadline."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.scripts import TIMEOUT_S, Step, errors_of, names, script
from tests.faults.test_bad_input import AFTER, check_closed
from tests.spmd.ranks import Outcome, Ranks

World = Callable[..., Ranks]

GRACE_S = 5.0
"""What finding out who is missing may take on top of the deadline."""

BEGIN: list[Step] = [["make"], ["extend", 10], ["sample"]]


def begun(world: World, steps: list[list[Step]], *, apart: bool = False) -> Ranks:
    """A world that runs the scripts, ``BEGIN`` first. Ranks that are ``apart`` share no memory."""
    ranks = world(len(steps))
    ranks.start(script, each=[{"steps": BEGIN + own, "apart": apart} for own in steps])
    return ranks


on_one_host_and_apart = pytest.mark.parametrize("apart", [False, True])


def check_blamed(outcome: Outcome, error: str, *who: int, within_s: float) -> None:
    """The step after ``BEGIN`` failed in this way, and the plane is closed since then."""
    assert outcome.error is None, outcome
    assert [result["error"] for result in outcome.value[: len(BEGIN)]] == [None] * len(BEGIN)
    failed = next(result for result in outcome.value[len(BEGIN) :] if result["error"])
    assert failed["error"] == error and names(failed["text"], *who), failed
    assert failed["seconds"] < within_s, failed
    check_closed(outcome.value)


@pytest.mark.parametrize(
    ("call", "apart"),
    [(["sample"], True), (["sample"], False), (["flush"], True), (["agree", 1], False),
     (["empty"], False)],
)
def test_a_late_rank(world: World, call: Step, apart: bool) -> None:
    """It is named, and gets an error too when it comes at last."""
    ranks = begun(world, [
        [call, *AFTER], [["sleep", TIMEOUT_S + GRACE_S], call, *AFTER], [call, *AFTER]
    ], apart=apart)
    first, late, third = ranks.outcomes()
    for outcome in (first, third):
        check_blamed(outcome, "TimeoutError", 1, within_s=TIMEOUT_S + GRACE_S)
        failed = outcome.value[len(BEGIN)]
        assert failed["seconds"] > TIMEOUT_S - 0.5, "nobody is given up before the deadline"
        assert f"{call[0]} (call 3)" in failed["text"], failed
    failed = late.value[len(BEGIN) + 1]
    assert failed["error"] == "WorldError", failed
    assert "deadline" in failed["text"] or "late" in failed["text"], failed
    check_closed(late.value)


def test_two_late_ranks(world: World) -> None:
    late: list[Step] = [["sleep", TIMEOUT_S + GRACE_S]]
    ranks = begun(world, [[["sample"], *AFTER], late, [["sample"], *AFTER], late])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        check_blamed(outcome, "TimeoutError", 1, 3, within_s=TIMEOUT_S + GRACE_S)
    ranks.outcomes(ranks=[1, 3])


def test_ranks_that_wait_for_different_times(world: World) -> None:
    """Rank 2 comes two thirds of the deadline after rank 0; both blame rank 1 alone."""
    ranks = begun(world, [
        [["sample"], *AFTER], [["sleep", 2 * (TIMEOUT_S + GRACE_S)]],
        [["sleep", TIMEOUT_S * 2 / 3], ["sample"], *AFTER],
    ])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        check_blamed(outcome, "TimeoutError", 1, within_s=TIMEOUT_S + GRACE_S)
    ranks.outcomes(ranks=[1])


@pytest.mark.parametrize(("victim", "apart"), [(0, False), (1, True)])
def test_killed_between_calls(world: World, victim: int, apart: bool) -> None:
    """At once: a closed connection need not be waited for."""
    others = [rank for rank in range(3) if rank != victim]
    ranks = begun(world, [
        [["kill"]] if rank == victim else [["sleep", 0.5], ["sample"], *AFTER] for rank in range(3)
    ], apart=apart)
    for outcome in ranks.outcomes(ranks=others):
        check_blamed(outcome, "WorldError", victim, within_s=TIMEOUT_S)
    assert ranks.exit_code(victim) == -signal.SIGKILL


@on_one_host_and_apart
def test_killed_while_it_waits_in_a_call(world: World, apart: bool) -> None:
    """Rank 1 dies inside ``sample``, where rank 0 is waiting too; rank 2 comes afterwards."""
    ranks = begun(world, [
        [["sample"], *AFTER], [["sample"]], [["sleep", 2.0], ["sample"], *AFTER]
    ], apart=apart)
    time.sleep(1.0)
    os.kill(ranks.pids[1], signal.SIGKILL)
    for outcome in ranks.outcomes(ranks=[0, 2]):
        check_blamed(outcome, "WorldError", 1, within_s=TIMEOUT_S + GRACE_S)


@on_one_host_and_apart
def test_killed_in_the_exchange_of_rows(world: World, apart: bool) -> None:
    """After all ranks agreed on the call: rows are expected that will not come."""
    ranks = begun(world, [
        [["sample"], *AFTER], [["kill in exchange"], ["sample"]], [["sample"], *AFTER]
    ], apart=apart)
    for outcome in ranks.outcomes(ranks=[0, 2]):
        check_blamed(outcome, "WorldError", 1, within_s=TIMEOUT_S + GRACE_S)


def large(timeout_s: float) -> list[Step]:
    """Batches of which some 10 MB come from each other rank."""
    return [
        ["make", {"example": "large", "capacity": 18, "staging_rows": 6, "timeout_s": timeout_s}],
        ["extend", 6, "large"], ["flush"],
    ]


def test_killed_with_rows_half_sent(world: World) -> None:
    """Between hosts, far within the deadline: the connection closes in the middle of rows."""
    ranks = world(3)
    ranks.start(script, each=[
        {"steps": [*large(20), *own, ["sample"], *after], "apart": True}
        for own, after in (([], AFTER), ([["kill after sending"]], []), ([], AFTER))
    ])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        assert outcome.error is None, outcome
        [sample, _] = errors_of(outcome, "sample")
        assert sample["error"] == "WorldError" and names(sample["text"], 1), sample
        assert sample["seconds"] < 10, sample
        check_closed(outcome.value)


@pytest.mark.parametrize("signal_name", ["kill", "stop"])
def test_lost_in_an_all_to_all(world: World, signal_name: str) -> None:
    """It may tell only at the deadline, when others have given up too; but it tells."""
    ranks = world(3)
    ranks.start(script, each=[
        {"steps": [*large(TIMEOUT_S), *own, ["sample"], *after], "apart": True,
         "network": "all-to-all"}
        for own, after in (([], AFTER), ([[f"{signal_name} after sending"]], []), ([], AFTER))
    ])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        assert outcome.error is None, outcome
        [sample, _] = errors_of(outcome, "sample")
        assert sample["error"] in ("WorldError", "TimeoutError"), sample
        assert names(sample["text"], 1) or "all other ranks are gone" in sample["text"], sample
        assert sample["seconds"] < TIMEOUT_S + GRACE_S, sample
        check_closed(outcome.value)


def test_stopped_with_rows_half_sent(world: World) -> None:
    ranks = world(3)
    ranks.start(script, each=[
        {"steps": [*large(TIMEOUT_S), *own, ["sample"], *after], "apart": True}
        for own, after in (([], AFTER), ([["stop after sending"]], []), ([], AFTER))
    ])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        assert outcome.error is None, outcome
        [sample, _] = errors_of(outcome, "sample")
        assert sample["error"] == "TimeoutError" and names(sample["text"], 1), sample
        assert sample["seconds"] < TIMEOUT_S + GRACE_S, sample
        check_closed(outcome.value)


@on_one_host_and_apart
def test_killed_while_rows_are_sent_home(world: World, apart: bool) -> None:
    """In a commit: what was visible before stays the state where rows did not come. A rank that
    none were to come to learns of it in the next call."""
    central: list[Step] = [["make", {"placement": "central"}], ["extend", 10], ["flush"]]
    ranks = world(3)
    ranks.start(script, each=[
        {"steps": [*central, *own], "apart": apart} for own in (
            [["extend", 5], ["flush"], ["len"], *AFTER],
            [["extend", 5], ["kill in exchange"], ["flush"]],
            [["extend", 5], ["flush"], ["flush"], *AFTER],
        )
    ])
    holder, other = ranks.outcomes(ranks=[0, 2])
    for outcome in (holder, other):
        assert outcome.error is None, outcome
        flush = next(flush for flush in errors_of(outcome, "flush") if flush["error"])
        assert flush["error"] == "WorldError" and names(flush["text"], 1), flush
        check_closed(outcome.value)
    assert errors_of(holder, "flush")[1]["error"]
    assert errors_of(holder, "len")[0]["value"] == 30


def test_stopped(world: World) -> None:
    """A process that hangs keeps its connections: only the deadline tells."""
    ranks = begun(world, [[["sample"], *AFTER], [["stop"]], [["sample"], *AFTER]])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        check_blamed(outcome, "TimeoutError", 1, within_s=TIMEOUT_S + GRACE_S)


@on_one_host_and_apart
def test_stopped_in_the_exchange_of_rows(world: World, apart: bool) -> None:
    ranks = begun(world, [
        [["sample"], *AFTER], [["stop in exchange"], ["sample"]], [["sample"], *AFTER]
    ], apart=apart)
    for outcome in ranks.outcomes(ranks=[0, 2]):
        check_blamed(outcome, "TimeoutError", 1, within_s=TIMEOUT_S + GRACE_S)


def test_a_rank_that_ends_early(world: World) -> None:
    ranks = begun(world, [
        [["sample"], ["sample"], *AFTER], [["sample"], ["exit"]], [["sample"], ["sample"], *AFTER]
    ])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        check_blamed(outcome, "WorldError", 1, within_s=TIMEOUT_S + GRACE_S)
    assert ranks.exit_code(1) == 0


def test_a_rank_that_leaves_by_an_exception(world: World) -> None:
    """Its process goes on, without the plane: the others are not kept waiting for the deadline."""
    ranks = begun(world, [
        [["sample"], *AFTER], [["in with"], ["sleep", TIMEOUT_S + GRACE_S]], [["sample"], *AFTER]
    ])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        check_blamed(outcome, "WorldError", 1, within_s=TIMEOUT_S)
    ranks.outcomes(ranks=[1])


def test_a_rank_that_does_not_make_the_plane(world: World) -> None:
    """The first collective call of all: the constructor."""
    ranks = world(3)
    waits: list[Step] = [["sleep", TIMEOUT_S + GRACE_S]]
    ranks.start(script, each=[{"steps": [["make"]]}, {"steps": waits}, {"steps": [["make"]]}])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        (made,) = outcome.value
        assert made["known"], made
        assert made["error"] in ("TimeoutError", "WorldError") and names(made["text"], 1), made
        assert made["seconds"] < TIMEOUT_S + GRACE_S
    ranks.outcomes(ranks=[1])


def test_a_rank_is_killed_while_others_make_the_plane(world: World) -> None:
    ranks = world(3)
    ranks.start(script, each=[{"steps": [["make"]]}, {"steps": [["kill"]]}, {"steps": [["make"]]}])
    for outcome in ranks.outcomes(ranks=[0, 2]):
        (made,) = outcome.value
        assert made["known"], made
        assert made["seconds"] < TIMEOUT_S + GRACE_S


def test_survivors_end_with_an_error_and_no_abort(world: World) -> None:
    """Processes that stay behind end as a program with an exception does: no signal, no hang."""
    ranks = begun(world, [
        [["sample"], ["exit"]], [["kill"]], [["sample"], ["exit"]], [["sample"], ["exit"]]
    ])
    for outcome in ranks.outcomes():
        assert outcome.error == "died"
    codes: list[Any] = [ranks.exit_code(rank) for rank in range(4)]
    assert codes == [0, -signal.SIGKILL, 0, 0]


def test_two_ranks_one_killed(world: World) -> None:
    """The smallest world: all others are gone."""
    ranks = begun(world, [[["sample"], *AFTER], [["kill"]]])
    (outcome,) = ranks.outcomes(ranks=[0])
    assert outcome.value[len(BEGIN)]["error"] == "WorldError"
    assert "gone" in outcome.value[len(BEGIN)]["text"]
    assert outcome.value[len(BEGIN)]["seconds"] < TIMEOUT_S + GRACE_S
    check_closed(outcome.value)
