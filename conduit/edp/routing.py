"""Routing: which learner gets which row of the global batch.

For a loss that is an equal-weight mean over rows it does not matter which learner gets which row.
*Exchangeable* routing therefore hands each learner rows of its own shard first and moves only the
surplus, about 0.4 / sqrt(batch) of the rows when shards are equal. *Independent* routing gives
learner r the r-th equal part of the draws, whoever holds them. Both are functions of the replicated
directory alone.

Everything here works on several batches at once (all that are known until the next commit), since
numpy's cost for arrays as small as one batch is all in the calls. Arrays of draws are ``[batches,
draws]``; where their elements are numbered, it is across all batches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ROUTINGS", "Transfers", "route", "transfers", "typical_moves"]

ROUTINGS = ("exchangeable", "independent")

Ranks = NDArray[np.unsignedinteger[Any]]
Numbers = NDArray[np.int64]


def route(routing: str, holders: Ranks, hosts: Numbers, batch_rows: int) -> Ranks:
    """The learner of every draw, ``[batches, ranks * batch_rows]`` like ``holders``.

    ``holders`` is the holder of every draw, ``hosts`` (int64 ``[ranks]``) each rank's host. In
    every batch every learner gets exactly ``batch_rows`` draws.
    """
    batches, ranks = len(holders), len(hosts)
    if routing == "independent":
        learners = np.arange(ranks, dtype=holders.dtype).repeat(batch_rows)
        return np.broadcast_to(learners, holders.shape)
    # Ranks of different batches are different groups. A batch has as many surplus draws as free
    # seats, so that pairing both in order never pairs across batches.
    groups = holders.reshape(-1)
    if batches > 1:
        first_groups = np.arange(0, batches * ranks, ranks, dtype=np.uint16)
        groups = (holders + first_groups[:, None]).reshape(-1)
    counts = np.bincount(groups, minlength=batches * ranks)
    surplus = counts - batch_rows
    if np.count_nonzero(surplus) == 0:
        return holders
    # A holder keeps its first batch_rows draws; `moved` are the others, by holder, then draw.
    order = groups.argsort(kind="stable")
    kept = np.minimum(counts, batch_rows)
    moved = order[_spans(counts.cumsum() - counts + kept, counts - kept)]
    seats = np.arange(batches * ranks).repeat(batch_rows - kept)
    learners = holders.reshape(-1).copy()
    if np.count_nonzero(hosts != hosts[0]):
        group_hosts = (hosts + np.arange(batches)[:, None] * ranks).reshape(-1)
        near, near_seats = _within_hosts(group_hosts[groups[moved]], group_hosts[seats])
        learners[moved[near]] = seats[near_seats] % ranks
        moved, seats = np.delete(moved, near), np.delete(seats, near_seats)
    learners[moved] = seats % ranks
    return learners.reshape(holders.shape)


def typical_moves(routing: str, batch_rows: int, ranks: int) -> int:
    """How many rows a rank sends for one batch, on average, when shards are equal."""
    if routing == "independent":
        return batch_rows * (ranks - 1) // ranks
    return 2 * math.isqrt(batch_rows) // 5 if ranks > 1 else 0


def _within_hosts(draw_hosts: Numbers, seat_hosts: Numbers) -> tuple[Numbers, Numbers]:
    """Pairs the k-th draw of a host with its k-th seat: numbers of the draws and of the seats."""
    draws, seats = draw_hosts.argsort(kind="stable"), seat_hosts.argsort(kind="stable")
    hosts = int(max(draw_hosts.max(), seat_hosts.max())) + 1
    give = np.bincount(draw_hosts, minlength=hosts)
    take = np.bincount(seat_hosts, minlength=hosts)
    both = np.minimum(give, take)
    near, near_seats = _spans(give.cumsum() - give, both), _spans(take.cumsum() - take, both)
    return draws[near], seats[near_seats]


def _spans(starts: Numbers, counts: Numbers) -> Numbers:
    """The concatenation of ``range(start, start + count)``."""
    ends = counts.cumsum()
    numbers = (starts - ends + counts).repeat(counts)
    numbers += np.arange(len(numbers))
    return numbers


class Transfers(NamedTuple):
    """One rank's part in some deliveries.

    ``mine`` (``[batches, batch_rows]``) are the numbers of its draws, in draw order: position i of
    its batch b is draw ``mine[b, i]``. ``send`` are numbers of draws held here for others, by
    batch, learner and draw; ``receive`` numbers of positions whose rows come from others, by batch,
    holder and draw. Batch b has those from ``send_bounds[b]`` to ``send_bounds[b + 1]``, likewise
    for ``receive``, and ``send_counts[b]`` and ``receive_counts[b]`` of them (int64 ``[ranks]``)
    for and from each rank. In all, ``moved[b]`` rows change ranks: when it is 0 every rank knows
    that there is nothing to exchange.
    """

    mine: Numbers
    send: Numbers
    send_bounds: list[int]
    send_counts: Numbers
    receive: Numbers
    receive_bounds: list[int]
    receive_counts: Numbers
    moved: list[int]


def transfers(learners: Ranks, holders: Ranks, rank: int, ranks: int) -> Transfers:
    """What ``rank`` sends and receives when each draw goes from its holder to its learner."""
    batches, draws = holders.shape
    flat_learners, flat_holders = learners.reshape(-1), holders.reshape(-1)
    mine = (flat_learners == rank).nonzero()[0]
    sources = flat_holders[mine]
    receive = (sources != rank).nonzero()[0]
    send = (flat_holders == rank).nonzero()[0]
    targets = flat_learners[send]
    away = (targets != rank).nonzero()[0]
    send, send_bounds, send_counts = _by_peer(send[away], draws, targets[away], batches, ranks)
    receive, receive_bounds, receive_counts = _by_peer(
        receive, draws // ranks, sources[receive], batches, ranks
    )
    return Transfers(
        mine=mine.reshape(batches, -1),
        send=send, send_bounds=send_bounds, send_counts=send_counts,
        receive=receive, receive_bounds=receive_bounds, receive_counts=receive_counts,
        moved=np.count_nonzero(learners != holders, axis=1).tolist(),
    )


def _by_peer(
    numbers: Numbers, length: int, peers: Ranks, batches: int, ranks: int
) -> tuple[Numbers, list[int], Numbers]:
    """``numbers`` (``length`` to a batch) by batch and peer, each batch's bounds, the counts."""
    keys: NDArray[Any] = peers
    if batches > 1:
        keys = numbers // length * ranks + peers
    if ranks > 2:
        numbers = numbers[keys.argsort(kind="stable")]
    counts = np.bincount(keys, minlength=batches * ranks).reshape(batches, ranks)
    return numbers, [0, *counts.sum(axis=1).cumsum().tolist()], counts
