"""Collective calls: each begins with a control exchange, and a failure is final for the plane."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NoReturn

from conduit.collectives.control import STAGES, Control, Gathered, Operation
from conduit.collectives.watch import BrokenCallError
from conduit.collectives.world import World
from conduit.edp.directory import Directory
from conduit.edp.updates import Updates
from conduit.errors import ConduitError, WorldError
from conduit.sched.lanes import Lane, StageError, raise_told
from conduit.sched.timeline import CALL, Timeline
from conduit.tiers.shard import AnyShard

__all__ = ["Calls"]


class Calls:
    """The calls of one plane. ``let_go`` are called once, when one has failed: lanes of other ranks
    may wait for something from here."""

    def __init__(
        self, *, control: Control, world: World, directory: Directory, shard: AnyShard, lane: Lane,
        timeline: Timeline, updates: Updates, name: str,
    ) -> None:
        self._control, self._world, self._name = control, world, name
        self._directory, self._shard = directory, shard
        self._lane, self._timeline, self._updates = lane, timeline, updates
        self._failed: StageError | None = None
        self.failure: ConduitError | None = None
        self.closed = False
        self.let_go: list[Callable[[], None]] = []

    def check_open(self) -> None:
        """Raises WorldError if the plane was closed or has failed."""
        if self.closed or self.failure is not None:
            raise WorldError(
                f"plane {self._name!r} is closed", rank=self._world.rank,
                cure=f"It failed: {self.failure}" if self.failure else "Make a new one",
            ) from self.failure

    def talk(self, operation: Operation, value: int = 0) -> Gathered:
        """Collective. ``begin`` and ``finish``."""
        self.begin(operation, value)
        return self.finish()

    def begin(self, operation: Operation, value: int = 0) -> None:
        """Sends this rank's control record, which says if a stage of its lane has failed."""
        self.check_open()
        directory = self._directory
        failure = self._failed = self._lane.failure
        if failure is not None and isinstance(failure.__cause__, BrokenCallError):
            self.give_up(failure)
        try:
            self._control.begin(
                operation, staged=self._shard.staged, value=value, directory_end=directory.end,
                directory_state=zlib.crc32(directory.held.data) if self._world.size > 1 else 0,
                failed=STAGES.index(failure.stage) + 2 if failure is not None else 0,
                step_us=self._timeline.step_us, fetch_us=self._timeline.fetch_us,
                updates=self._updates.rows,
            )
        except ConduitError as error:
            self.give_up(error)

    def finish(self) -> Gathered:
        """What all ranks brought along."""
        try:
            with self._timeline.span("control", CALL):
                return self._control.finish()
        except BaseException as error:
            # Others have just been told what failed here, and now it is raised. (What fails on the
            # lane only now does so because another rank has given up.)
            self.give_up(self._failed or error)

    def give_up(self, error: BaseException) -> NoReturn:
        """Raises what the user is to see of ``error``. The plane is finished: a call that was cut
        short leaves this rank out of step."""
        try:
            raise_told(self._world, error)
        except BaseException as told:
            if isinstance(told, ConduitError):
                self.failure = told
            elif self._world.size > 1:
                self.failure = WorldError(
                    f"a call was cut short by {type(told).__name__}", rank=self._world.rank
                )
            if self.failure is not None:
                for let_go in self.let_go:
                    let_go()
                self.let_go = []
                if not isinstance(told, ConduitError):
                    # Only this rank knows: others learn it from its connections.
                    self._control.close()
                    self._world.close()
            raise
