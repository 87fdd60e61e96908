"""Routing: which learner gets which row of the global batch.

For a loss that is an equal-weight mean over rows it does not matter which learner gets which row.
*Exchangeable* routing therefore hands each learner rows of its own shard first and moves only the
surplus, about 0.4 / sqrt(batch) of the rows when shards are equal. *Independent* routing gives
learner r the r-th equal part of the draws, whoever holds them. Both are functions of the replicated
directory alone.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    if (counts == batch_rows).all():
        return holders
    order = np.argsort(holders, kind="stable")
    surplus = np.maximum(counts - batch_rows, 0)
    missing = np.maximum(batch_rows - counts, 0)
    # A holder keeps its first batch_rows draws; `moved` are the others, by holder, then draw.
    starts = np.cumsum(counts) - counts
    moved = order[_ranges(starts + np.minimum(counts, batch_rows), surplus)]
    givers = np.repeat(np.arange(ranks), surplus)
    seats = np.repeat(np.arange(ranks), missing)
    learners = holders.copy()
    if len(np.unique(hosts)) > 1:
        # First within each host: the k-th surplus draw of a host gets its k-th free seat.
        host_of_draw, host_of_seat = hosts[givers], hosts[seats]
        by_host = np.argsort(host_of_draw, kind="stable")
        seats_by_host = np.argsort(host_of_seat, kind="stable")
        length = int(hosts.max()) + 1
        give = np.bincount(host_of_draw, minlength=length)
        take = np.bincount(host_of_seat, minlength=length)
        both = np.minimum(give, take)
        near = by_host[_ranges(np.cumsum(give) - give, both)]
        near_seats = seats_by_host[_ranges(np.cumsum(take) - take, both)]
        learners[moved[near]] = seats[near_seats]
        moved, seats = np.delete(moved, near), np.delete(seats, near_seats)
    learners[moved] = seats
    return learners


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The concatenation of ``range(start, start + count)``."""
    ends = np.cumsum(counts)
    shift = np.repeat(starts - (ends - counts), counts)
    return shift + np.arange(len(shift))


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfers:
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
    mine = np.flatnonzero(learners == rank)
    from_others = holders[mine]
    receive = np.flatnonzero(from_others != rank)
    sources = from_others[receive]
    receive = receive[np.argsort(sources, kind="stable")]
    crossing = learners != holders
    send = np.flatnonzero((holders == rank) & crossing)
    targets = learners[send]
    send = send[np.argsort(targets, kind="stable")]
    return Transfers(
        mine=mine,
        send=send, send_counts=np.bincount(targets, minlength=ranks),
        receive=receive, receive_counts=np.bincount(sources, minlength=ranks),
        moved=int(np.count_nonzero(crossing)),
    )
