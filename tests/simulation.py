"""Several ranks in one process: every rank is a thread, and rows move through a list.

A :class:`Simulation` stands in for ``torch.distributed``: planes made inside it join a world of as
many ranks on as many hosts as the test likes, and all of the library above the collectives runs as
it does on real ranks. (Real process groups are tested elsewhere.) Threads run in lock step at every
collective call, so a test is as repeatable as a loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import conduit
from conduit import creation
from conduit.collectives import choice
from conduit.collectives.links import LinkMatrix
from conduit.collectives.world import RECORD_WORDS, World

__all__ = ["Simulation", "no_links"]

T = TypeVar("T")

_PATIENCE_S = 10.0


class Hub:
    """One process group: the calls that ranks made, until all have taken what came for them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._arrived = threading.Condition()
        self._calls: dict[int, dict[int, list[Tensor]]] = {}
        self._taken: dict[int, int] = {}
        self._mail: dict[tuple[int, int, int], list[Tensor]] = {}
        self._broken = False

    def put(self, number: int, rank: int, pieces: list[Tensor]) -> None:
        with self._arrived:
            self._calls.setdefault(number, {})[rank] = pieces
            self._arrived.notify_all()

    def take(self, number: int, rank: int) -> list[Tensor]:
        with self._arrived:
            calls = self._calls[number]
            self._arrived.wait_for(
                lambda: self._broken or len(calls) == self.size, _PATIENCE_S
            )
            if len(calls) < self.size:
                raise AssertionError(f"rank {rank} is alone in call {number}")
            came = [self._calls[number][peer][rank] for peer in range(self.size)]
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self.size:
                del self._calls[number], self._taken[number]
            return came

    def send(self, sender: int, receiver: int, tag: int, piece: Tensor) -> None:
        with self._arrived:
            self._mail.setdefault((sender, receiver, tag), []).append(piece)
            self._arrived.notify_all()

    def receive(self, sender: int, receiver: int, tag: int, number: int) -> Tensor:
        """What ``sender`` sent as its message ``number`` to ``receiver``."""
        with self._arrived:
            mail = self._mail.setdefault((sender, receiver, tag), [])
            self._arrived.wait_for(lambda: self._broken or len(mail) > number, _PATIENCE_S)
            if len(mail) <= number:
                raise AssertionError(f"rank {receiver} is alone in call {number} to {sender}")
            return mail[number]

    def abandon(self) -> None:
        """Another rank has failed: nobody waits for it."""
        with self._arrived:
            self._broken = True
            self._arrived.notify_all()


class Work:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._finish()
        return True


class Group:
    """A rank's end of a process group."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank = hub, rank
        self.calls = 0
        self._received: dict[tuple[int, int], int] = {}

    def size(self) -> int:
        return self.hub.size

    def send(self, pieces: list[Tensor], receiver: int, tag: int) -> Work:
        [piece] = pieces
        self.hub.send(self.rank, receiver, tag, piece.clone())
        return Work(lambda: None)

    def recv(self, pieces: list[Tensor], sender: int, tag: int) -> Work:
        [piece] = pieces
        number = self._received.get((sender, tag), 0)
        self._received[sender, tag] = number + 1

        def receive() -> None:
            came = self.hub.receive(sender, self.rank, tag, number)
            assert came.shape == piece.shape, "both ends of a transfer know how much comes"
            piece.copy_(came)

        return Work(receive)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: list[int], sizes: list[int]
    ) -> Work:
        return Work(self.all_to_all(output, source, output_sizes, sizes))

    def all_to_all(
        self, output: Tensor, source: Tensor, output_sizes: Sequence[int] | None,
        sizes: Sequence[int] | None,
    ) -> Callable[[], None]:
        """Sends; what is returned receives."""
        even = [len(source) // self.hub.size] * self.hub.size
        number, self.calls = self.calls, self.calls + 1
        self.hub.put(number, self.rank, list(source.clone().split(list(sizes or even))))

        def receive() -> None:
            came = self.hub.take(number, self.rank)
            assert [len(piece) for piece in came] == list(output_sizes or even), (
                "both ends of every transfer know how much comes"
            )
            output.copy_(torch.cat(came))

        return receive


def _all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None, group: Any = None, async_op: bool = False,
) -> Work | None:
    receive = group.all_to_all(output, input, output_split_sizes, input_split_sizes)
    if async_op:
        return Work(receive)
    receive()
    return None


def _measure_nothing(
    world: World, row_bytes: int, makers: dict[str, Any], *, rows: int
) -> dict[str, int]:
    return dict.fromkeys(makers, 0)


def no_links(world: World) -> LinkMatrix:
    """What is known of links without looking."""
    return LinkMatrix(hosts=tuple(world.hosts.tolist()))


def _no_windows(world: World, count: int, *, words: int) -> None:
    return None


class Simulation:
    """A world of ``len(hosts)`` ranks, rank r on host ``hosts[r]``. Use as a context manager.

    Ranks of a host share memory only if the simulation is told so: a rank that waits in shared
    memory does not notice before its deadline that the test has failed on another.
    """

    def __init__(self, hosts: Sequence[int], *, shared: bool = False) -> None:
        self.shared = shared
        numbers: dict[int, int] = {}
        self.hosts = [numbers.setdefault(host, len(numbers)) for host in hosts]
        self.size = len(self.hosts)
        self._who = threading.local()
        self._hubs: list[Hub] = []
        self._lock = threading.Lock()
        self._joined = [0] * self.size
        self._threads = ThreadPoolExecutor(self.size)
        self._patches: list[Any] = []

    def __enter__(self) -> Simulation:
        self._patches = [
            mock.patch.object(World, "join", self._join),
            mock.patch.object(choice, "measure", _measure_nothing),
            mock.patch.object(creation, "links_at_start", no_links),
            mock.patch.object(dist, "all_to_all_single", _all_to_all_single),
            mock.patch.object(dist, "is_initialized", lambda: True),
            mock.patch.object(dist, "destroy_process_group", lambda group=None: None),
        ]
        if not self.shared:
            self._patches.append(mock.patch.object(World, "open_windows", _no_windows))
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abandon()
        self._threads.shutdown()
        for patch in reversed(self._patches):
            patch.stop()

    def run(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` on every rank at once; raises what the lowest rank that failed by
        itself raised."""
        results = self.attempt(function)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if "is alone in call" not in str(failure):
                raise failure
        if failures:
            raise failures[0]
        return results  # type: ignore[return-value]

    def attempt(self, function: Callable[[int], T]) -> list[T | BaseException]:
        """``function(rank)`` on every rank at once: what it returned or raised."""
        def call(rank: int) -> T | BaseException:
            self._who.rank = rank
            try:
                return function(rank)
            except BaseException as error:
                # Ranks that wait for this one have waited long enough.
                self._abandon_unless_expected(error)
                return error

        return list(self._threads.map(call, range(self.size)))

    def _abandon_unless_expected(self, error: BaseException) -> None:
        if not isinstance(error, conduit.ConduitError):
            self._abandon()

    def _abandon(self) -> None:
        for hub in self._hubs:
            hub.abandon()

    def group(self) -> Group:
        """A process group, made by all ranks alike: this rank's end of it."""
        rank = self._who.rank
        with self._lock:
            number = self._joined[rank]
            self._joined[rank] += 1
            while len(self._hubs) <= number:
                self._hubs.append(Hub(self.size))
            return Group(self._hubs[number], rank)

    def _join(self, *, device: torch.device, timeout: timedelta, group: Any = None) -> World:
        rank = self._who.rank
        if self.size == 1:
            return World.alone(device, timeout)
        control, watch, data = (self.group() for _ in range(3))
        world = World(
            rank=rank, size=self.size, device=device, timeout=timeout,
            hosts=np.array(self.hosts, dtype=np.int64), control=control,  # type: ignore[arg-type]
            watch=watch, data=data,  # type: ignore[arg-type]
        )
        opened = world.open_windows(1, words=2 * (1 + self.size) * RECORD_WORDS)
        world.windows = opened[0] if opened else None
        world.add_lane(self.group())  # type: ignore[arg-type]
        return world

