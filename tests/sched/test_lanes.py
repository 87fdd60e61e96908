"""Every lane: work in order, tickets that wait, and failures that are kept."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit.collectives.watch import BrokenCallError
from conduit.collectives.world import World
from conduit.errors import CapacityError, WorldError
from conduit.sched.lanes import Lane, StageError, StreamLane, WorkerLane, lane_for, raise_told
from conduit.tracing import Tracer
from tests.properties import examples

Make = Callable[[Tracer], Lane]

lanes = pytest.mark.parametrize("make", [
    pytest.param(WorkerLane, id="worker"),
    pytest.param(
        lambda tracer: StreamLane(torch.device("cuda", 0), tracer), id="stream",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "conduit lane"]


def ended(before: int) -> bool:
    deadline = time.monotonic() + 5
    while len(threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(threads()) <= before


def boom() -> NoReturn:
    raise ValueError("boom")


@lanes
def test_work_is_done_in_order_when_a_wait_returns(make: Make) -> None:
    @examples(30)
    @given(waits=st.lists(st.booleans(), max_size=12), slow=st.integers(0, 11))
    def check(waits: list[bool], slow: int) -> None:
        lane, done, tickets = make(Tracer()), [], []
        for number, wait in enumerate(waits):
            def work(number: int = number) -> None:
                time.sleep(0.002 * (number == slow))
                done.append(number)

            tickets.append(lane.run("stage", work))
            if wait:
                tickets[-1].wait()
                assert done == list(range(number + 1))
        for ticket in reversed(tickets):
            ticket.wait()
        assert done == list(range(len(waits)))
        lane.close()

    check()


@lanes
def test_a_failure_is_kept_and_names_its_stage(make: Make) -> None:
    lane, done = make(Tracer()), []
    fine = lane.run("first", lambda: done.append(1))
    fine.wait()
    assert lane.failure is None
    with pytest.raises(StageError, match="stage 'second' failed") as caught:
        lane.run("second", boom).wait()
    assert isinstance(caught.value.__cause__, ValueError) and caught.value.stage == "second"
    assert lane.failure is caught.value
    with pytest.raises(StageError, match="second"):
        lane.run("third", lambda: done.append(3)).wait()
    assert done == [1], "what comes after a failure is not begun"
    lane.close()


@lanes
def test_spans_have_the_names_of_stages(make: Make) -> None:
    tracer = Tracer()
    lane = make(tracer)
    lane.run("gather", lambda: time.sleep(0.01)).wait()
    (span,) = tracer.spans
    assert (span.name, span.lane) == ("gather", lane.name)
    assert span.end_ns - span.begin_ns >= 10_000_000
    lane.close()


def test_the_worker_starts_with_the_first_work_and_ends_when_closed_or_dropped() -> None:
    before = len(threads())
    lane = WorkerLane(Tracer())
    assert len(threads()) == before
    release = threading.Event()
    lane.run("waiting", release.wait)
    assert len(threads()) == before + 1
    begun = time.monotonic()
    lane.close()
    assert time.monotonic() - begun < 1, "closing does not wait for what is running"
    release.set()
    assert ended(before)
    dropped = WorkerLane(Tracer())
    dropped.run("nothing", lambda: None).wait()
    del dropped
    gc.collect()
    assert ended(before)


def test_the_worker_keeps_nothing_of_finished_work() -> None:
    class Thing:
        def work(self) -> None: ...

    lane, thing = WorkerLane(Tracer()), Thing()
    seen = weakref.ref(thing)
    lane.run("stage", thing.work).wait()
    del thing
    deadline = time.monotonic() + 5
    while seen() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen() is None
    lane.close()


def test_what_the_user_sees_of_a_failure() -> None:
    world = World(
        rank=3, size=1, device=torch.device("cpu"), timeout=timedelta(seconds=1),
        hosts=np.zeros(1, dtype=np.int64),
    )
    stage = StageError("gather")
    stage.__cause__ = ValueError("boom")
    with pytest.raises(WorldError, match="stage 'gather' of the next batch failed: ValueError: bo"
                       ) as caught:
        raise_told(world, stage)
    assert caught.value.__cause__ is stage.__cause__ and "rank 3" in str(caught.value)
    for broken in (BrokenCallError("exchanging rows", RuntimeError("reset by peer")), None):
        other = broken
        if other is None:
            stage.__cause__ = BrokenCallError("exchanging rows", RuntimeError("reset by peer"))
            with pytest.raises(WorldError, match="exchanging rows"):
                raise_told(world, stage)
            continue
        with pytest.raises(WorldError, match="exchanging rows"):
            raise_told(world, other)
    mine = CapacityError("full", rank=3)
    with pytest.raises(CapacityError) as same:
        raise_told(world, mine)
    assert same.value is mine


def test_the_lane_of_the_cpu_is_a_thread() -> None:
    assert isinstance(lane_for(torch.device("cpu"), Tracer()), WorkerLane)
