"""Which transport carries rows between hosts: measured once, decided by all ranks alike.

A plane whose ranks share one host has nothing to choose: rows never touch the network. Between
hosts Gloo's all-to-all runs some links half-duplex where messages between pairs use both
directions, on others it is the quickest, and several ranks a host may do best by rail. So each
candidate moves the same bytes a few times, in turn, and the one whose slowest rank is quickest
wins. Ranks compare the times that all of them measured, as integers, and confirm the decision with
the next control record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from conduit.collectives.agreement import Decisions
from conduit.collectives.exchange import Observe, RowExchange
from conduit.collectives.shared import Windows
from conduit.collectives.transports import AllToAll, Network, PointToPoint, Rail
from conduit.collectives.watch import raise_missing
from conduit.collectives.world import TRANSPORT_ERRORS, World
from conduit.errors import WorldError

Maker: TypeAlias = Callable[[World, int], Network]

__all__ = ["TRANSPORTS", "candidates", "measure", "open_exchanges"]

TRANSPORTS = ("auto", "network", "shared", PointToPoint.name, AllToAll.name, Rail.name)

_TRIAL_TAG = 99
_REPEATS = 8
_TRIAL_BYTES = 1 << 20
"""What a rank sends at most in one trial: 40 ms at 200 Mbit."""


def open_exchanges(
    world: World, row_bytes: int, *, count: int, trial_rows: int, decisions: Decisions,
    transport: str = "auto", observe: Observe | None = None,
) -> list[RowExchange]:
    """Collective. ``count`` exchanges; the first is for the lane.

    ``trial_rows`` is how many rows a rank sends in a typical exchange. ``transport`` is "network"
    for ranks that share no memory even where they could, or the name of the transport between
    hosts, which is then not chosen by trial. Raises WorldError if that is not possible here.
    """
    try:
        return _open(world, row_bytes, count, trial_rows, decisions, transport, observe)
    except TRANSPORT_ERRORS as error:
        raise_missing(world, "making the plane", error)


def _open(
    world: World, row_bytes: int, count: int, trial_rows: int, decisions: Decisions,
    transport: str, observe: Observe | None,
) -> list[RowExchange]:
    windows: list[Windows] | None = None
    if transport != "network" and world.device.type == "cpu" and world.size > 1:
        windows = world.open_windows(count, words=1 + world.size)
    makers = candidates(world, shared=windows is not None)
    if transport in TRANSPORTS[3:] and makers:
        if transport not in makers:
            raise WorldError(
                "rows cannot be carried like this here", rank=world.rank, got=transport,
                expected=" or ".join(makers),
                cure="rail needs several hosts that share memory within them, all-to-all hosts of "
                "one rank each (or transport='network')",
            )
        makers = {transport: makers[transport]}
    times = dict.fromkeys(makers, 0)
    # Where all is shared nothing is far, and any of them will do.
    if len(makers) > 1 and (windows is None or world.hosts.max() > 0):
        times = measure(world, row_bytes, makers, rows=trial_rows)
    # Of equals the first.
    chosen = min(times, key=lambda name: times[name]) if times else "none"
    decisions.decide("transport", f"{chosen} of {times} us")
    return [
        RowExchange(
            where, row_bytes, windows=windows[i] if windows is not None else None,
            network=makers[chosen](where, i) if makers else None, observe=observe, on_lane=i == 0,
        ) for i, where in enumerate([world.lane or world, *[world] * (count - 1)])
    ]


def candidates(world: World, *, shared: bool) -> dict[str, Maker]:
    """What can carry rows over the network, by name, each made for a world and a tag."""
    if world.size == 1:
        return {}
    if world.device.type == "cuda":
        return {AllToAll.name: lambda where, tag: AllToAll(where)}
    makers: dict[str, Maker] = {
        PointToPoint.name: lambda where, tag: PointToPoint(where, tag=tag)
    }
    if not shared:
        makers[AllToAll.name] = lambda where, tag: AllToAll(where)
    elif Rail.is_possible(world):
        makers[Rail.name] = lambda where, tag: Rail(where, tag=tag)
    return makers


def measure(
    world: World, row_bytes: int, makers: dict[str, Maker], *, rows: int
) -> dict[str, int]:
    """Collective. Microseconds that each candidate takes to send ``rows`` rows a rank, evenly to
    all other ranks: the same on all ranks. In each run the slowest rank counts, and of all runs the
    lower quartile: what disturbs a run makes it longer."""
    rows = max(min(rows, _TRIAL_BYTES // row_bytes), 1)
    counts = np.full(world.size, -(-rows // max(world.size - 1, 1)))
    counts[world.rank] = 0
    windows = None
    if Rail.name in makers:
        windows = world.open_windows(len(makers), words=1 + world.size)
    exchanges = {
        name: RowExchange(
            world, row_bytes, windows=None if windows is None else windows[i],
            network=make(world, _TRIAL_TAG),
        ) for i, (name, make) in enumerate(makers.items())
    }
    taken: dict[str, list[int]] = {name: [] for name in makers}
    for _ in range(1 + _REPEATS):  # the first run opens connections
        for name, exchange in exchanges.items():
            _meet(world, 0)
            begun = time.perf_counter_ns()
            exchange.outbox(int(counts.sum()), what="choosing a transport").zero_()
            exchange.begin(counts, counts, what="choosing a transport").wait(_look_at)
            taken[name].append(_meet(world, (time.perf_counter_ns() - begun) // 1000))
    for exchange in exchanges.values():
        exchange.close()
    return {name: sorted(times[1:])[_REPEATS // 4] for name, times in taken.items()}


def _meet(world: World, value: int) -> int:
    """Collective. The largest ``value`` of all ranks."""
    sent = torch.full((world.size,), value, dtype=torch.int64, device="cpu")
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=world.control)
    return int(received.max())


def _look_at(rows: torch.Tensor, start: int) -> None:
    """What there is to do with the rows of a trial."""
