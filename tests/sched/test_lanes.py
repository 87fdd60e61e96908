"""Every lane: work in order, tickets that wait, and failures that are kept."""

from __future__ import annotations

import contextlib
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


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Threads of lanes that an earlier test closed are on their way out."""
    deadline = time.monotonic() + 1
    while threads() and time.monotonic() < deadline:
        time.sleep(0.005)


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


def test_a_wait_returns_when_its_own_work_is_done_and_not_before() -> None:
    lane, release, returned = WorkerLane(Tracer()), threading.Event(), threading.Event()
    quick = lane.run("quick", lambda: None)
    slow = lane.run("slow", lambda: release.wait() and None)
    quick.wait()

    def waiting() -> None:
        slow.wait()
        returned.set()

    waiter = threading.Thread(target=waiting)
    waiter.start()
    assert not returned.wait(0.05)
    release.set()
    assert returned.wait(5)
    waiter.join()
    lane.close()


def test_every_wait_of_the_worker_tells_the_same_failure() -> None:
    """Again and again, and for work given before the failure as for work given after it."""
    lane = WorkerLane(Tracer())
    tickets = [lane.run("draw", lambda: None), lane.run("gather", boom), lane.run("exchange", boom)]
    for ticket in [*reversed(tickets), *tickets]:
        with pytest.raises(StageError, match="stage 'gather' failed") as caught:
            ticket.wait()
        assert caught.value is lane.failure
        assert isinstance(caught.value.__cause__, ValueError)
    lane.close()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, MemoryError])
def test_the_worker_keeps_whatever_is_raised(kind: type[BaseException]) -> None:
    def work() -> NoReturn:
        raise kind

    lane, before = WorkerLane(Tracer()), len(threads())
    with pytest.raises(StageError) as caught:
        lane.run("draw", work).wait()
    assert isinstance(caught.value.__cause__, kind)
    assert len(threads()) == before + 1, "its thread goes on"
    lane.close()
    assert ended(before)


@examples(60)
@given(program=st.lists(st.one_of(
    st.tuples(st.just("run"), st.sampled_from([0, 0, 0, 0, 0, 1])),
    st.tuples(st.just("wait"), st.integers(0, 30)),
), max_size=30))
def test_the_worker_does_what_a_list_would(program: list[tuple[str, int]]) -> None:
    """Work that is given, waits in any order and more than once, and now and then a failure."""
    lane, tickets, done, failed = WorkerLane(Tracer()), [], [], None
    for kind, number in program:
        if kind == "run":
            here = len(tickets)
            if failed is None and number:
                failed = here
            work = boom if number else lambda here=here: done.append(here)
            tickets.append(lane.run(f"work {here}", work))
        elif tickets:
            here = number % len(tickets)
            try:
                tickets[here].wait()
                assert failed is None or here < failed
                assert done[: here + 1] == list(range(here + 1))
            except StageError as error:
                assert error.stage == f"work {failed}"
    lane.close()
    for ticket in tickets:
        with contextlib.suppress(StageError):
            ticket.wait()
    assert done == list(range(len(tickets) if failed is None else failed))
    assert (lane.failure is None) is (failed is None)


def test_work_given_before_the_worker_is_closed_is_still_done() -> None:
    lane, release, done = WorkerLane(Tracer()), threading.Event(), []
    lane.run("waiting", lambda: release.wait() and None)
    last = lane.run("last", lambda: done.append(1))
    lane.close()
    lane.close()
    release.set()
    last.wait()
    assert done == [1]


def test_a_lane_that_is_dropped_while_it_works_ends_its_thread() -> None:
    before, release = len(threads()), threading.Event()
    lane = WorkerLane(Tracer())
    ticket = lane.run("waiting", lambda: release.wait() and None)
    del lane
    gc.collect()
    release.set()
    ticket.wait()
    assert ended(before)


def test_a_ticket_keeps_nothing_of_finished_work() -> None:
    class Thing: ...

    lane, thing = WorkerLane(Tracer()), Thing()
    seen = weakref.ref(thing)
    ticket = lane.run("stage", lambda thing=thing: None)
    del thing
    ticket.wait()
    deadline = time.monotonic() + 5
    while seen() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen() is None
    lane.close()


class Owner:
    """Has a lane and gives it its own methods, as a plane does."""

    def __init__(self) -> None:
        self.lane = WorkerLane(Tracer())

    def fails(self) -> None:
        raise ValueError("boom")

    def works(self) -> None: ...


@pytest.mark.parametrize("stage", [
    "works",
    "fails",
])
def test_an_owner_that_is_dropped_ends_the_thread_of_its_lane(stage: str) -> None:
    before, owner = len(threads()), Owner()
    seen = weakref.ref(owner)
    ticket = owner.lane.run(stage, getattr(owner, stage))
    with contextlib.suppress(StageError):
        ticket.wait()
    lane = weakref.ref(owner.lane)
    del owner, ticket
    gc.collect()
    try:
        assert seen() is None
        assert ended(before)
    finally:
        if (left := lane()) is not None:
            left.close()


def test_a_wait_for_work_given_to_a_closed_lane_ends() -> None:
    lane = WorkerLane(Tracer())
    lane.run("first", lambda: None).wait()
    lane.close()
    try:
        ticket = lane.run("late", lambda: None)
    except Exception:
        return
    returned = threading.Event()

    def waiting() -> None:
        with contextlib.suppress(StageError):
            ticket.wait()
        returned.set()

    threading.Thread(target=waiting, daemon=True).start()
    assert returned.wait(2)


@pytest.mark.parametrize("error", [
    KeyboardInterrupt(), RuntimeError("mine"), WorldError("gone", rank=3), SystemExit(2),
], ids=repr)
def test_what_did_not_happen_on_a_lane_is_raised_as_it_is(error: BaseException) -> None:
    world = World(
        rank=3, size=1, device=torch.device("cpu"), timeout=timedelta(seconds=1),
        hosts=np.zeros(1, dtype=np.int64),
    )
    with pytest.raises(type(error)) as caught:
        raise_told(world, error)
    assert caught.value is error
