"""Lanes: where work of the plane runs beside the learner's.

[Note: lanes]
A lane runs what it is given one after the other, in order, beside the training thread: on the CPU a
worker thread, on CUDA a stream. Everything above is the same code for both: it gives work to a lane
and gets a ticket, and before it uses what the work made, or changes what the work reads, it waits
for the ticket. On a worker thread that makes the training thread wait; on a stream it makes the
*current stream* wait for an event, and the training thread goes on.

The worker thread has a process group of its own: two threads that issue collectives on one Gloo
group mix up payloads without any error. NCCL work is issued from the training thread, inside plane
calls, where all ranks come to it in the same order.

What a stage raises is kept. Later work of the lane is not begun, and every wait raises
:class:`StageError`, which names the stage; the plane tells the other ranks in its next call. What
the frames of its traceback refer to is let go, or the thread would keep the plane alive.

A program that ends with work on a lane waits for it for some seconds: a daemon thread that comes
back from Gloo while Python is being taken apart takes the process with it.

No memory is handed to a stream by ``record_stream``: a stream lane waits, before each piece of
work, for what the current stream has to do until then, so whatever the user's kernels still read
is finished before the lane writes to it.
"""

from __future__ import annotations

import atexit
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, NoReturn, Protocol

import torch

from conduit.collectives.watch import BrokenCallError, raise_missing
from conduit.collectives.world import World
from conduit.errors import WorldError
from conduit.tracing import Tracer

__all__ = ["Lane", "StageError", "StreamLane", "Ticket", "WorkerLane", "lane_for", "raise_told"]

Work = Callable[[], None]

_ENDING_S = 5.0


class StageError(Exception):
    """A stage of a lane failed; its exception is the cause."""

    def __init__(self, stage: str) -> None:
        super().__init__(f"stage {stage!r} failed")
        self.stage = stage


class Ticket(Protocol):
    """Stands for work that was given to a lane."""

    def wait(self) -> None:
        """Returns when the work is done, or makes the current stream wait for that. Raises
        StageError if it, or earlier work of the lane, failed."""
        ...


class Lane(Protocol):
    """Runs work in order beside the training thread, which alone calls this."""

    name: str

    @property
    def failure(self) -> StageError | None:
        """What failed first."""
        ...

    def run(self, stage: str, work: Work) -> Ticket:
        """Runs ``work`` after all that was given before."""
        ...

    def close(self) -> None:
        """Takes no more work, and does not wait for what is running."""
        ...


def raise_told(world: World, error: BaseException) -> NoReturn:
    """Raises, on the training thread, what the user is to see of ``error``."""
    cause = error.__cause__ if isinstance(error, StageError) else error
    if isinstance(cause, BrokenCallError):
        raise_missing(world, cause.call, cause.cause)
    if isinstance(error, StageError):
        raise WorldError(
            f"stage {error.stage!r} of the next batch failed: {type(cause).__name__}: {cause}",
            rank=world.rank, cure="The plane is closed: mend the cause and start anew",
        ) from cause
    raise error


def lane_for(device: torch.device, tracer: Tracer) -> Lane:
    """The lane for work on this device."""
    return StreamLane(device, tracer) if device.type == "cuda" else WorkerLane(tracer)


class _Piece(NamedTuple):
    stage: str
    work: Work
    over: threading.Lock


class WorkerLane:
    """A thread, started with the first work."""

    name = "worker thread"

    def __init__(self, tracer: Tracer) -> None:
        self._state = _State(tracer)
        self._started = False
        # The thread knows the queue, not the lane: a lane that is dropped ends its thread.
        self._end = weakref.finalize(self, self._state.queue.put, None)

    @property
    def failure(self) -> StageError | None:
        return self._state.failure

    def run(self, stage: str, work: Work) -> Ticket:
        if not self._end.alive:
            raise RuntimeError("work for a lane that was closed")
        if not self._started:
            thread = threading.Thread(target=self._state.loop, name="conduit lane", daemon=True)
            thread.start()
            _threads[thread] = self._state
            self._started = True
        over = threading.Lock()
        over.acquire()
        self._state.queue.put(_Piece(stage, work, over))
        return _Done(self._state, over)

    def close(self) -> None:
        self._end()


class _State:
    """What the lane and its thread share."""

    def __init__(self, tracer: Tracer) -> None:
        self.queue: SimpleQueue[_Piece | None] = SimpleQueue()
        self.failure: StageError | None = None
        self._tracer = tracer

    def loop(self) -> None:
        while (piece := self.queue.get()) is not None:
            if self.failure is None:
                try:
                    with self._tracer.span(piece.stage, WorkerLane.name):
                        piece.work()
                except BaseException as error:
                    failure = StageError(piece.stage)
                    failure.__cause__ = error
                    _let_go_of_locals(error)
                    self.failure = failure
            piece.over.release()
            del piece  # or it would keep the plane alive until the next one


_threads: weakref.WeakKeyDictionary[threading.Thread, _State] = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """Lets threads of lanes finish what they do, as long as that takes no longer than usual."""
    threads = list(_threads.items())
    for _, state in threads:
        state.queue.put(None)
    deadline = time.monotonic() + _ENDING_S
    for thread, _ in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _let_go_of_locals(error: BaseException | None) -> None:
    """Of the frames in the tracebacks of an error and of those that led to it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Done:
    def __init__(self, state: _State, over: threading.Lock) -> None:
        self._state, self._over = state, over

    def wait(self) -> None:
        with self._over:
            pass
        if self._state.failure is not None:
            raise self._state.failure


class StreamLane:
    """A CUDA stream. Work is issued at once, by the caller."""

    name = "CUDA stream"

    def __init__(self, device: torch.device, tracer: Tracer) -> None:
        self._device, self._tracer = device, tracer
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._failure: StageError | None = None

    @property
    def failure(self) -> StageError | None:
        return self._failure

    def run(self, stage: str, work: Work) -> Ticket:
        if self._failure is not None:
            raise self._failure
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with self._tracer.span(stage, self.name), torch.cuda.stream(self._stream):
                work()
        except Exception as error:
            self._failure = StageError(stage)
            raise self._failure from error
        return _Recorded(self, self._stream.record_event(), self._device)

    def close(self) -> None:
        """The stream ends by itself."""


class _Recorded:
    def __init__(self, lane: StreamLane, event: torch.cuda.Event, device: torch.device) -> None:
        self._lane, self._event, self._device = lane, event, device

    def wait(self) -> None:
        if self._lane.failure is not None:
            raise self._lane.failure
        torch.cuda.current_stream(self._device).wait_event(self._event)
