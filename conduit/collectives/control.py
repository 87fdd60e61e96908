"""The control exchange: one record from every rank to every rank begins every collective call.

[Note: agreement]
Every rank sends every other the same record of integers: which call this is, what the plane was
configured with, what the directory looks like, and what the rank brings along. Whatever has to be
equal on all ranks is then computed from the gathered records, by the same integer arithmetic
everywhere. A difference in the part that must be equal is a DesyncError on every rank, since every
rank sees the same records; a rank that does not come is named by the watch (see ``watch.py``).
Either way the plane is finished: a Gloo group is dead after a timeout.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from conduit.collectives.agreement import Decisions, differing
from conduit.collectives.carriers import carrier_for
from conduit.collectives.watch import raise_missing
from conduit.collectives.world import TRANSPORT_ERRORS, World
from conduit.errors import DesyncError, WorldError

__all__ = ["FINGERPRINT", "STAGES", "Control", "Gathered", "Operation"]

Counts = NDArray[np.int64]

FORMAT = 6
"""Changes whenever the meaning of the record does: ranks of different versions must not mix."""


class Operation(IntEnum):
    """Collective calls of a plane."""

    CREATE = 1
    SAMPLE = 2
    FLUSH = 3
    EMPTY = 4
    AGREE = 5
    FENCE = 6
    CLOSE = 7


FINGERPRINT = (
    "batch_size", "capacity", "schema", "seed", "routing", "max_staleness", "min_size",
    "placement", "staging", "steps", "name", "overlap", "tiers",
)
"""Configuration that must be equal on all ranks."""

AGREED = (
    "format", *FINGERPRINT, "operation", "number", "directory_end", "directory_state", "decisions",
)
FIELDS = (*AGREED, "staged", "failed", "value", "step_us", "fetch_us", "updates")
_OPERATION, _NUMBER = FIELDS.index("operation"), FIELDS.index("number")
_STAGED, _FAILED, _VALUE, _STEP, _FETCH, _UPDATES = range(len(AGREED), len(FIELDS))

STAGES = ("draw", "gather", "exchange")
"""What a rank can have failed in on its lane, before the call: see :mod:`conduit.sched.stages`."""


class Gathered(NamedTuple):
    """What all ranks brought along, int64 ``[ranks]`` each: rows staged, a value of the call, the
    learner's time before the call and the time that the last batch took, in microseconds, and rows
    of which late columns are staged."""

    staged: Counts
    value: Counts
    step_us: Counts
    fetch_us: Counts
    updates: Counts


class Control:
    """The control exchange of one plane. ``number`` counts its collective calls; ``decisions`` are
    what this rank computed that all ranks must have computed alike; ``transport`` is how records
    travel."""

    def __init__(self, world: World, fingerprint: dict[str, int]) -> None:
        self._world = world
        self.number = 0
        self.decisions = Decisions()
        self._record = np.zeros(len(FIELDS), dtype=np.int64)
        self._record[:_OPERATION] = (FORMAT, *(fingerprint[name] for name in FINGERPRINT))
        self._carrier = carrier_for(world, len(FIELDS)) if world.size > 1 else None
        self.transport = self._carrier.name if self._carrier is not None else "none"

    def close(self) -> None:
        """Local. Lets go of the connections."""
        self._carrier = None

    def exchange(self, operation: Operation, **brought: int) -> Gathered:
        """``begin`` and ``finish`` in one."""
        self.begin(operation, **brought)
        return self.finish()

    def begin(
        self, operation: Operation, *, staged: int = 0, value: int = 0, failed: int = 0,
        directory_end: int = 0, directory_state: int = 0, step_us: int = 0, fetch_us: int = 0,
        updates: int = 0,
    ) -> None:
        """Sends this rank's record; what needs no answer can be done before ``finish``.

        ``failed`` is 0, 1 for a failure in the call itself, or 2 more than the number of the stage
        in which this rank failed before it.
        """
        # Filled in before the call counts: a value that is no int64 raises here, and is no call.
        self._record[_OPERATION:] = (
            operation, self.number + 1, directory_end, directory_state, self.decisions.hash,
            staged, failed, value, step_us, fetch_us, updates,
        )
        self.number += 1
        self._operation = operation
        if self._carrier is not None:
            try:
                self._carrier.begin(self._record)
            except TRANSPORT_ERRORS as error:
                raise_missing(self._world, self._call(), error)

    def finish(self) -> Gathered:
        """What all ranks brought along.

        Raises DesyncError when ranks differ in anything they must agree on, TimeoutError or
        WorldError when one does not come, WorldError when one says that it ``failed``.
        """
        if self._world.size == 1:
            return _gathered(self._record[None])
        assert self._carrier is not None
        try:
            got = self._carrier.finish()
        except TRANSPORT_ERRORS as error:
            raise_missing(self._world, self._call(), error)
        if np.count_nonzero(got[:, _FAILED]):
            who = np.flatnonzero(got[:, _FAILED]).tolist()
            stages = {STAGES[code - 2] for code in got[who, _FAILED].tolist() if code > 1}
            where = f" in stage {', '.join(map(repr, sorted(stages)))}" if stages else ""
            raise WorldError(
                f"{self._world.told(who)} failed{where} before {self._call()}",
                rank=self._world.rank, cure="See the error raised there",
            )
        agreed = got[:, :_STAGED]
        if np.count_nonzero(agreed != agreed[0]):
            self._refuse(agreed)
        return _gathered(got)

    def _call(self) -> str:
        return f"{self._operation.name.lower()} (call {self.number})"

    def _refuse(self, agreed: NDArray[np.int64]) -> NoReturn:
        rank = self._world.rank
        calls: dict[str, list[int]] = {}
        for peer, record in enumerate(agreed):
            name = _operation_name(int(record[_OPERATION]))
            calls.setdefault(f"{name} (call {record[_NUMBER]})", []).append(peer)
        if len(calls) > 1:
            told = "; ".join(
                f"{self._world.told(ranks)} called {call}" for call, ranks in calls.items()
            )
            raise DesyncError(
                f"ranks made different collective calls: {told}", rank=rank,
                cure="Make the same collective calls in the same order on every rank: never guard "
                "them with something that differs between ranks",
            )
        column = int(np.flatnonzero((agreed != agreed[0]).any(axis=0))[0])
        if AGREED[column] == "decisions":
            self._refuse_decisions()
        values: dict[int, list[int]] = {}
        for peer, value in enumerate(agreed[:, column].tolist()):
            values.setdefault(value, []).append(peer)
        told = "; ".join(f"{self._world.told(ranks)} {value}" for value, ranks in values.items())
        raise DesyncError(
            f"ranks disagree on {AGREED[column]}", rank=rank, field=AGREED[column],
            expected="one value on all ranks", got=told,
            cure="Give every rank the same arguments" if AGREED[column] in FINGERPRINT else
            "This is a bug in Conduit, or ranks run different versions",
        )

    def _refuse_decisions(self) -> NoReturn:
        """Collective. Says which decision differs, and on which ranks."""
        field, told = differing(self.gather_text(self.decisions.text), self._world.told)
        raise DesyncError(
            f"ranks decided differently on {field}", rank=self._world.rank, field=field,
            expected="one decision on all ranks", got=told,
            cure="Decisions follow from figures that all ranks share: if a policy of your own "
            "makes them, use nothing in it that differs between ranks",
        )

    def swap(self, mine: Counts) -> Counts:
        """Collective. What each rank has for this one, of the integers (``[ranks]``) that each has
        for each. Raises TimeoutError or WorldError when a rank does not come."""
        got = np.empty_like(mine)
        try:
            self._all_to_all(got, mine)
        except TRANSPORT_ERRORS as error:
            raise_missing(self._world, self._call(), error)
        return got

    def gather_text(self, text: str) -> list[str]:
        """Every rank's ``text``. Collective; for error messages, not for the hot path."""
        world = self._world
        data = text.encode()
        mine = np.full(world.size, len(data))
        lengths = np.empty_like(mine)
        self._all_to_all(lengths, mine)
        width = max(int(lengths.max()), 1)
        sent = np.zeros((world.size, width), dtype=np.uint8)
        sent[:, : len(data)] = np.frombuffer(data, dtype=np.uint8)
        got = np.empty_like(sent)
        self._all_to_all(got, sent)
        return [got[peer, : lengths[peer]].tobytes().decode() for peer in range(world.size)]

    def _all_to_all(self, out: NDArray[Any], sent: NDArray[Any]) -> None:
        dist.all_to_all_single(
            torch.from_numpy(out), torch.from_numpy(sent), group=self._world.control
        )


def _gathered(records: NDArray[np.int64]) -> Gathered:
    kept = records[:, _STAGED:].T.copy()
    return Gathered(kept[0], *kept[_VALUE - _STAGED :])


def _operation_name(code: int) -> str:
    try:
        return Operation(code).name.lower()
    except ValueError:
        return f"operation {code}"
