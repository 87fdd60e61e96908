"""A stage fails away from the training thread: every rank learns of it, and nothing hangs."""

from __future__ import annotations

import os
import signal
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
