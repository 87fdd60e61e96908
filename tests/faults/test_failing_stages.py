"""A stage fails away from the training thread: every rank learns of it, and nothing hangs."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import conduit
from conduit.sched.deliveries import Deliveries
from conduit.sched.fetch import Fetch
from conduit.sched.timeline import Timeline
from tests.faults.scripts import names
from tests.simulation import no_links
from tests.spmd.ranks import Rank, Ranks

World = Callable[..., Ranks]

TIMEOUT_S = 60.0
SOON_S = 15.0
"""Far below the deadline of calls."""

EXAMPLE = {"x": torch.zeros(64)}
STAGES = {"draw": (Deliveries, "_draw"), "gather": (Deliveries, "_gather"),
          "exchange": (Fetch, "finish")}


def lanes() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "conduit lane"]


def wait_for_no_lanes() -> float:
    begun = time.monotonic()
    while lanes() and time.monotonic() - begun < SOON_S:
        time.sleep(0.05)
    return time.monotonic() - begun


def plane_of(rank: Rank, apart: bool) -> conduit.ExperiencePlane:
    """Every batch is fetched on the lane."""
    Timeline.hides = staticmethod(lambda *figures: True)  # type: ignore[method-assign]
    if apart:
        conduit.collectives.world.host_identity = lambda: 1_000 + rank.number
    plane = conduit.ExperiencePlane(
        EXAMPLE, capacity=400, batch_size=32, routing="independent",
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    plane.extend({"x": torch.ones(50, 64)})
    for _ in range(3):
        plane.extend({"x": torch.ones(3, 64)})
        plane.sample()
    return plane


def failing(rank: Rank, *, stage: str, who: int, apart: bool, close: bool) -> dict[str, Any]:
    plane = plane_of(rank, apart)
    if rank.number == who:
        owner, method = STAGES[stage]
        original = getattr(owner, method)

        def boom(self: Any, *arguments: Any) -> None:
            if threading.current_thread().name == "conduit lane":
                raise ValueError("boom")
            original(self, *arguments)

        setattr(owner, method, boom)
    errors: list[str] = []
    seconds: list[float] = []
    for _ in range(4):
        begun = time.monotonic()
        try:
            plane.extend({"x": torch.ones(3, 64)})
            plane.sample()
            errors.append("")
        except conduit.ConduitError as error:
            errors.append(f"{type(error).__name__}: {error}; {error.__cause__!r}")
        seconds.append(time.monotonic() - begun)
    if close:
        plane.close()
    return {"errors": errors, "seconds": seconds, "until_ended": wait_for_no_lanes()}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("stage", "ranks"), [("draw", 2), ("gather", 3), ("exchange", 2)])
def test_every_rank_learns_which_stage_failed_where(
    world: World, stage: str, ranks: int, apart: bool
) -> None:
    pool = world(ranks)
    pool.start(failing, each=[
        {"stage": stage, "who": 1, "apart": apart, "close": rank != 1} for rank in range(ranks)
    ])
    for rank, outcome in enumerate(pool.outcomes()):
        assert outcome.error is None, outcome
        found = outcome.value
        told = next(text for text in found["errors"] if text)
        if rank == 1:
            assert told.startswith("WorldError") and f"stage '{stage}'" in told, found
            assert "ValueError('boom')" in told
        else:
            assert told.startswith("WorldError") and "rank 1" in told, found
            if stage != "exchange":
                assert f"stage '{stage}'" in told, found
        # The call after it failed, and those that follow find the plane closed.
        assert found["errors"][0] == "" and all(found["errors"][2:]), found
        assert max(found["seconds"]) < SOON_S and found["until_ended"] < SOON_S, found


def ending(rank: Rank, *, how: str, who: int) -> dict[str, Any]:
    plane = plane_of(rank, apart=True)
    if rank.number == who:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "drop":
            del plane
            return {"error": "", "until_ended": wait_for_no_lanes()}
        plane.close()
        return {"error": "", "until_ended": wait_for_no_lanes()}
    error = ""
    try:
        if how == "close":
            plane.close()
        else:
            plane.sample()
    except conduit.ConduitError as failure:
        error = f"{type(failure).__name__}: {failure}"
        plane.close()
    return {"error": error, "until_ended": wait_for_no_lanes()}


@pytest.mark.parametrize("how", ["kill", "drop", "close"])
def test_ranks_that_end_with_a_batch_on_its_way(world: World, how: str) -> None:
    pool = world(2)
    pool.start(ending, each=[{"how": how, "who": 1}] * 2)
    first, second = pool.outcomes()
    assert first.error is None, first
    assert first.value["until_ended"] < SOON_S
    if how == "close":
        assert first.value["error"] == ""
    else:
        assert first.value["error"].startswith("WorldError"), first.value
    if how != "kill":
        assert second.error is None and second.value["until_ended"] < SOON_S, second


def threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def leave(rank: Rank) -> None:
    """Ends as a program that is done."""
    sys.exit(0)


def check_all_leave(pool: Ranks, ranks: list[int]) -> None:
    pool.start(leave, ranks=ranks)
    pool.outcomes(ranks=ranks)
    assert [pool.exit_code(rank) for rank in ranks] == [0] * len(ranks)


def failing_at(rank: Rank, *, stage: str, who: list[int], batch: int) -> dict[str, Any]:
    """The stage fails when it works on this batch, on some ranks; then the program goes on."""
    plane = plane_of(rank, apart=False)
    owner, method = STAGES[stage]
    original, number = getattr(owner, method), 3

    def boom(self: Any) -> None:
        nonlocal number
        if threading.current_thread().name == "conduit lane":
            number += 1
            if number == batch:
                raise ValueError("boom")
        original(self)

    if rank.number in who:
        setattr(owner, method, boom)
    result: dict[str, Any] = {"error": ""}
    try:
        for sample in range(4, batch + 4):
            begun = time.monotonic()
            result["sample"] = sample
            plane.extend({"x": torch.ones(3, 64)})
            plane.sample()
    except conduit.ConduitError as error:
        result |= {"error": type(error).__name__, "text": str(error),
                   "cause": repr(error.__cause__), "seconds": time.monotonic() - begun}
    setattr(owner, method, original)
    return {**result, "until_ended": wait_for_no_lanes()}


@pytest.mark.parametrize(("stage", "ranks", "who"), [
    *((stage, ranks, who) for stage in STAGES for ranks, who in ((2, [0]), (3, [1]))),
    ("gather", 3, [0, 2]),
])
def test_the_fifth_batch_fails_and_every_program_ends(
    world: World, stage: str, ranks: int, who: list[int]
) -> None:
    """Nobody closes the plane: its thread ends all the same."""
    pool = world(ranks)
    pool.start(failing_at, stage=stage, who=who, batch=5)
    for rank, outcome in enumerate(pool.outcomes()):
        assert outcome.error is None, outcome
        found = outcome.value
        assert found["error"] == "WorldError" and found["seconds"] < SOON_S, found
        assert found["until_ended"] < 5, found
        if rank in who:
            assert f"stage '{stage}'" in found["text"] and "boom" in found["cause"], found
        elif stage != "exchange":
            assert f"stage '{stage}'" in found["text"] and names(found["text"], *who), found
        else:
            assert names(found["text"], *who) or "all other ranks are gone" in found["text"], found
    check_all_leave(pool, list(range(ranks)))


LARGE = {"image": torch.zeros(1 << 20)}


def ending_with_a_large_draft(rank: Rank, *, how: str, who: int, apart: bool) -> dict[str, Any]:
    """Some 10 MB are on their way between any two ranks when one ends."""
    Timeline.hides = staticmethod(lambda *figures: True)  # type: ignore[method-assign]
    if apart:
        conduit.collectives.world.host_identity = lambda: 1_000 + rank.number
        conduit.creation.links_at_start = no_links
    plane = conduit.ExperiencePlane(
        LARGE, capacity=18, batch_size=8, routing="independent",
        ingestion=conduit.Ingestion(staging_rows=6), timeout=timedelta(seconds=TIMEOUT_S),
    )
    plane.extend({"image": torch.zeros(6, 1 << 20)})
    plane.sample()
    assert plane._deliveries._due, "a batch is on its way"
    if rank.number == who:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(0)
    begun = time.monotonic()
    try:
        plane.sample()
        plane.sample()
    except conduit.ConduitError as error:
        return {"error": type(error).__name__, "text": str(error),
                "seconds": time.monotonic() - begun, "until_ended": wait_for_no_lanes()}
    return {"error": ""}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_rank_ends_while_a_large_batch_is_on_its_way(
    world: World, how: str, apart: bool
) -> None:
    pool = world(3)
    pool.start(ending_with_a_large_draft, how=how, who=1, apart=apart)
    for outcome in pool.outcomes(ranks=[0, 2]):
        assert outcome.error is None, outcome
        found = outcome.value
        assert found["error"] == "WorldError", found
        assert names(found["text"], 1) or "all other ranks are gone" in found["text"], found
        assert found["seconds"] < SOON_S and found["until_ended"] < 5, found
    assert pool.exit_code(1) == (-signal.SIGKILL if how == "kill" else 0)
    check_all_leave(pool, [0, 2])


def left_by(rank: Rank, *, how: str, apart: bool, planes: int) -> list[tuple[int, int]]:
    """What is taken after each of some planes was left with a batch on its way."""
    taken = []
    original = Deliveries._gather

    def boom(self: Deliveries) -> None:
        raise ValueError("boom")

    for _ in range(planes):
        plane = plane_of(rank, apart)
        if how == "fail and drop":
            Deliveries._gather = boom  # type: ignore[method-assign]
            plane._deliveries._lane.run("gather", plane._deliveries._gather)
            Deliveries._gather = original  # type: ignore[method-assign]
            time.sleep(0.1)
        if how == "close":
            plane.close()
        del plane
        gc.collect()
        deadline = time.monotonic() + 1
        while lanes() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)  # connections of a plane that is gone end when both sides have let go
        taken.append((len(lanes()), *threads_and_descriptors()))
    return taken


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("how", ["close", "drop", "fail and drop"])
def test_planes_that_are_left_with_a_batch_on_its_way_give_everything_back(
    world: World, how: str, apart: bool
) -> None:
    pool = world(2)
    pool.start(left_by, how=how, apart=apart, planes=3)
    for outcome in pool.outcomes():
        assert outcome.error is None, outcome
        assert [one[0] for one in outcome.value] == [0] * 3, outcome.value
        assert outcome.value[-1] == outcome.value[1], outcome.value
    check_all_leave(pool, [0, 1])


def interrupted(rank: Rank, *, who: int, stage: str) -> dict[str, Any]:
    """Control-C while the training thread waits for a stage of the lane."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    plane = plane_of(rank, apart=False)
    owner, method = STAGES[stage]
    original, begun, release = getattr(owner, method), threading.Event(), threading.Event()

    def slow(self: Any) -> None:
        if threading.current_thread().name == "conduit lane":
            begun.set()
            release.wait(20)
        original(self)

    def interrupt() -> None:
        begun.wait(20)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    result: dict[str, Any] = {"error": "", "batches": []}
    try:
        if rank.number == who:
            setattr(owner, method, slow)
            threading.Thread(target=interrupt, daemon=True).start()
        plane.sample()  # what follows this one is slow
        for _ in range(1 if rank.size == 1 else 3):
            since = time.monotonic()
            result["batches"].append(plane.sample()["index"].tolist())
    except (KeyboardInterrupt, conduit.ConduitError) as error:
        result |= {"error": type(error).__name__, "text": str(error),
                   "seconds": time.monotonic() - since}
    finally:
        release.set()
        setattr(owner, method, original)
        signal.signal(signal.SIGINT, usual)
    if rank.size == 1:
        result["batches"] += [plane.sample()["index"].tolist() for _ in range(5)]
    elif rank.number == who:
        time.sleep(5)  # lives on, and leaves the plane as it is: others are not to wait for it
    plane.close()
    return {**result, "until_ended": wait_for_no_lanes()}


@pytest.mark.parametrize("stage", ["gather", "exchange"])
def test_an_interrupt_ends_a_wait_and_the_others_learn_of_it(world: World, stage: str) -> None:
    pool = world(2)
    pool.start(interrupted, who=1, stage=stage)
    first, second = (outcome.value for outcome in pool.outcomes())
    assert second["error"] == "KeyboardInterrupt" and second["seconds"] < SOON_S, second
    assert first["error"] == "WorldError" and first["seconds"] < 4.5, first
    assert names(first["text"], 1) or "all other ranks are gone" in first["text"], first
    assert first["until_ended"] < 5 and second["until_ended"] < 5
    check_all_leave(pool, [0, 1])


def test_alone_a_program_goes_on_after_an_interrupt(world: World) -> None:
    """With the batches that it would have had."""
    pool = world(1)
    (stopped,) = pool.run(interrupted, who=0, stage="gather")
    (whole,) = pool.run(interrupted, who=9, stage="gather")
    assert stopped["error"] == "KeyboardInterrupt" and whole["error"] == ""
    assert stopped["batches"] == whole["batches"][: len(stopped["batches"])]
    assert stopped["until_ended"] < 5
