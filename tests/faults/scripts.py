"""Scripts: what each rank of a test does, step by step, and what each step came to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

import conduit
import conduit.collectives.choice
import conduit.collectives.world
from conduit.collectives.exchange import InFlight, RowExchange
from conduit.edp.placement import Placement
from tests.simulation import no_links
from tests.spmd.ranks import Outcome, Rank

__all__ = ["EXAMPLES", "TIMEOUT_S", "Step", "errors_of", "names", "rows_of", "script"]

TIMEOUT_S = 3.0
"""The planes' deadline: long enough for a busy machine, short enough to be waited for."""

Step = list[Any]


class Short:
    """A placement that holds too little."""

    def quotas(self, *, capacity: int, ranks: int) -> Sequence[int]:
        return [0] * ranks


class Broken:
    """A placement with a bug of its own."""

    def quotas(self, *, capacity: int, ranks: int) -> Sequence[int]:
        return [capacity // (ranks - ranks)]


EXAMPLES: dict[str, Any] = {
    "usual": {"observation": torch.zeros(4), "next": {"reward": torch.zeros(1)}},
    "dtype": {"observation": torch.zeros(4), "next": {"reward": torch.zeros(1).double()}},
    "shape": {"observation": torch.zeros(5), "next": {"reward": torch.zeros(1)}},
    "missing": {"observation": torch.zeros(4)},
    "more": {
        "observation": torch.zeros(4), "next": {"reward": torch.zeros(1)}, "done": torch.zeros(1),
    },
    "empty": {}, "text": {"observation": "a string"}, "no mapping": torch.zeros(4),
    "reserved": {"index": torch.zeros(4)}, "large": {"image": torch.zeros(1 << 20)},
}
PLACEMENTS: dict[str, Placement | None] = {
    "balanced": None, "central": conduit.Central(0), "central 1": conduit.Central(1),
    "central 7": conduit.Central(7), "short": Short(), "broken": Broken(),
}


def _make(**given: Any) -> conduit.ExperiencePlane:
    arguments: dict[str, Any] = {
        "example": "usual", "capacity": 100, "batch_size": 8, "placement": "balanced",
        "staging_rows": 50, "routing": "independent", "timeout_s": TIMEOUT_S,
    } | given
    return conduit.ExperiencePlane(
        EXAMPLES[arguments.pop("example")],
        placement=PLACEMENTS[arguments.pop("placement")],
        ingestion=conduit.Ingestion(staging_rows=arguments.pop("staging_rows")),
        timeout=timedelta(seconds=arguments.pop("timeout_s")), **arguments,
    )


def rows_of(kind: str, n: int) -> Any:
    """``n`` rows of the example called ``kind``."""
    def expand(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: expand(sub) for key, sub in value.items()}
        return value.expand(n, *value.shape)

    return expand(EXAMPLES[kind])


def _in_exchange(number: int) -> None:
    """From now on this rank gets the signal when it comes to the exchange of rows: all ranks have
    said what they want, and the rows are on their way."""
    def struck(self: RowExchange, *arguments: Any, **more: Any) -> None:
        os.kill(os.getpid(), number)

    RowExchange.begin = struck  # type: ignore[method-assign]


def _after_exchange(number: int) -> None:
    """From now on this rank gets the signal as soon as it has begun to send rows: when they are
    many, some are at the receivers and some are not."""
    begin = RowExchange.begin

    def struck(self: RowExchange, *arguments: Any, **more: Any) -> InFlight:
        flight = begin(self, *arguments, **more)
        os.kill(os.getpid(), number)
        return flight

    RowExchange.begin = struck  # type: ignore[method-assign]


def _late_exchange(seconds: float) -> None:
    """From now on this rank comes so much later to the exchange of rows."""
    begin = RowExchange.begin

    def late(self: RowExchange, *arguments: Any, **more: Any) -> InFlight:
        time.sleep(seconds)
        return begin(self, *arguments, **more)

    RowExchange.begin = late  # type: ignore[method-assign]


def script(
    rank: Rank, *, steps: Sequence[Step], apart: bool = False, network: str = "point-to-point"
) -> list[dict[str, Any]]:
    """Does the steps one by one, whatever happens to each. For every step: what it returned, its
    error and the time it took. Ranks that are ``apart`` seem to be on different hosts, and
    send each other messages, unless it is said how else.

    ``["make", {...}]`` makes the plane with other arguments than usual; ``["in with"]`` leaves a
    with-block on the plane by an exception; names of the plane's methods call them.
    """
    plane: conduit.ExperiencePlane | None = None
    done = []
    if apart:
        conduit.collectives.world.host_identity = lambda: 1_000 + rank.number
        conduit.creation.links_at_start = no_links
        conduit.collectives.choice.measure = lambda world, row_bytes, makers, *, rows: {
            name: 1 if name == network else 9 for name in makers
        }
    for name, *arguments in steps:
        result: dict[str, Any] = {"step": name, "value": None, "error": None, "text": ""}
        begun = time.monotonic()
        try:
            if name == "make":
                plane = _make(**(arguments[0] if arguments else {}))
            elif name == "sleep":
                time.sleep(arguments[0])
            elif name == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif name == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif name == "kill in exchange":
                _in_exchange(signal.SIGKILL)
            elif name == "stop in exchange":
                _in_exchange(signal.SIGSTOP)
            elif name == "kill after sending":
                _after_exchange(signal.SIGKILL)
            elif name == "stop after sending":
                _after_exchange(signal.SIGSTOP)
            elif name == "late exchange":
                _late_exchange(arguments[0])
            elif name == "exit":
                sys.exit(0)
            else:
                assert plane is not None
                result["value"] = _do(plane, name, arguments)
        except Exception as error:
            result["error"], result["text"] = type(error).__name__, str(error)
            result["known"] = isinstance(error, conduit.ConduitError)
            result["field"] = getattr(error, "field", None)
        result["seconds"] = time.monotonic() - begun
        done.append(result)
    return done


def _do(plane: conduit.ExperiencePlane, name: str, arguments: Sequence[Any]) -> Any:
    if name == "extend":
        return plane.extend(rows_of(arguments[1] if len(arguments) > 1 else "usual", arguments[0]))
    if name == "sample":
        batch = plane.sample()
        return None if batch is None else len(batch)
    if name == "len":
        return len(plane)
    if name == "staged":
        return plane.report().rows_staged
    if name == "in with":
        with contextlib.suppress(KeyError), plane:
            raise KeyError("a bug in the program")
        return None
    return getattr(plane, name)(*arguments)


def errors_of(outcome: Outcome, step: str) -> list[dict[str, Any]]:
    """What came of every step called ``step``; the script itself must have come to its end."""
    assert outcome.error is None, outcome
    return [result for result in outcome.value if result["step"] == step]


def names(text: str, *ranks: int) -> bool:
    """Whether an error's text blames these ranks and no others."""
    named = {
        int(number)
        for found in re.findall(r"ranks? (\[[\d, ]+\]|\d+)", re.sub(r"^\[rank \d+\]", "", text))
        for number in re.findall(r"\d+", found)
    }
    return named == set(ranks)
