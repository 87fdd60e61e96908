"""Routing: which learner gets which row of the global batch.

For a loss that is an equal-weight mean over rows it does not matter which learner gets which row.
*Exchangeable* routing therefore hands each learner rows of its own shard first and moves only the
surplus, about 0.4 / sqrt(batch) of the rows when shards are equal. *Independent* routing gives
learner r the r-th equal part of the draws, whoever holds them. Both are functions of the replicated
directory alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROUTINGS", "Transfers", "route", "transfers"]

ROUTINGS = ("exchangeable", "independent")

Ranks = NDArray[np.unsignedinteger]
Draws = NDArray[np.int64]


def route(routing: str, holders: Ranks, hosts: NDArray[np.int64], batch_rows: int) -> Ranks:
    """The learner of every draw, ``[ranks * batch_rows]``, in the dtype of ``holders``.

    ``holders`` is the holder of every draw, ``hosts`` (int64 ``[ranks]``) each rank's host.
    Every learner gets exactly ``batch_rows`` draws.
    """
    ranks = len(hosts)
    if routing == "independent":
        return np.repeat(np.arange(ranks, dtype=holders.dtype), batch_rows)
    counts = np.bincount(holders, minlength=ranks)
    surplus = counts - batch_rows
    if np.count_nonzero(surplus) == 0:
        return holders
    # A holder keeps its first batch_rows draws; `moved` are the others, by holder, then draw.
    order = holders.argsort(kind="stable")
    ends = counts.cumsum().tolist()
    moved = np.concatenate([
        order[end - rows : end] for end, rows in zip(ends, surplus.tolist(), strict=True)
        if rows > 0
    ])
    seats = np.arange(ranks).repeat(np.maximum(-surplus, 0))
    learners = holders.copy()
    if np.count_nonzero(hosts != hosts[0]):
        near, near_seats = _within_hosts(hosts[holders[moved]], hosts[seats])
        learners[moved[near]] = seats[near_seats]
        moved, seats = np.delete(moved, near), np.delete(seats, near_seats)
    learners[moved] = seats
    return learners


def _within_hosts(
    draw_hosts: NDArray[np.int64], seat_hosts: NDArray[np.int64]
) -> tuple[Draws, Draws]:
    """Pairs the k-th draw of a host with its k-th seat: numbers of the draws and of the seats."""
    draws, seats = np.argsort(draw_hosts, kind="stable"), np.argsort(seat_hosts, kind="stable")
    hosts = int(max(draw_hosts.max(), seat_hosts.max())) + 1
    give = np.bincount(draw_hosts, minlength=hosts)
    take = np.bincount(seat_hosts, minlength=hosts)
    both = np.minimum(give, take)
    return draws[_first(give, both)], seats[_first(take, both)]


def _first(sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> Draws:
    """Numbers of the first ``counts[i]`` items of each group, groups of ``sizes`` in a row."""
    starts, ends = np.cumsum(sizes) - sizes, np.cumsum(counts)
    shift = np.repeat(starts - (ends - counts), counts)
    return shift + np.arange(len(shift))


class Transfers(NamedTuple):
    """One rank's part in a delivery. ``mine`` are its draws, in draw order: position i of its
    batch is draw ``mine[i]``.

    ``send`` are draws held here for others, by learner then draw; ``receive`` positions of the
    batch whose rows come from others, by holder then draw. ``moved`` rows change ranks in the
    whole job: when it is 0 all ranks know that there is nothing to exchange.
    """

    mine: Draws
    send: Draws
    send_counts: NDArray[np.int64]
    receive: Draws
    receive_counts: NDArray[np.int64]
    moved: int


def transfers(learners: Ranks, holders: Ranks, rank: int, ranks: int) -> Transfers:
    """What ``rank`` sends and receives when draw j goes from ``holders[j]`` to ``learners[j]``."""
    # Methods of arrays instead of numpy's functions: half the time on arrays as small as these.
    mine = (learners == rank).nonzero()[0]
    sources = holders[mine]
    receive = (sources != rank).nonzero()[0]
    sources = sources[receive]
    send = (holders == rank).nonzero()[0]
    targets = learners[send]
    away = (targets != rank).nonzero()[0]
    send, targets = send[away], targets[away]
    if ranks > 2:
        receive = receive[sources.argsort(kind="stable")]
        send = send[targets.argsort(kind="stable")]
    return Transfers(
        mine=mine,
        send=send, send_counts=np.bincount(targets, minlength=ranks),
        receive=receive, receive_counts=np.bincount(sources, minlength=ranks),
        moved=int(np.count_nonzero(learners != holders)),
    )
