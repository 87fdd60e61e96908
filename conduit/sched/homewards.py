"""Sending rows home: what a commit places on other ranks than the one that staged it.

Finished rows go as they are. Items over steps take along the rows that their windows need, each
once, whatever the number of items that share it; and rows of open streams that both ranks had a
part in at the commit before are not sent again: both remember them, in the same order, until the
next commit, and keep them meanwhile.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from conduit.collectives.exchange import InFlight, RowExchange
from conduit.edp.directory import Directory
from conduit.edp.ingestion import Commit
from conduit.metrics import Counters
from conduit.sched.letters import Letters
from conduit.tiers.shard import Shard
from conduit.tiers.step_shard import StepShard

__all__ = ["Homewards", "ItemsHome", "RowsHome", "homewards_for"]

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

_WHAT = "sending rows home"


class Homewards(Protocol):
    """Moves what is staged, so that each rank has staged what it is to hold."""

    def move(self, plan: Commit, *, begin: int) -> None:
        """Collective. ``begin`` will be the oldest live index."""
        ...


def homewards_for(
    shard: Shard | StepShard, exchange: RowExchange, directory: Directory, letters: Letters, *,
    rank: int, counters: Counters,
) -> Homewards:
    """What fits the shard."""
    if isinstance(shard, Shard):
        return RowsHome(shard, exchange, rank=rank, counters=counters)
    return ItemsHome(shard, letters, directory, rank=rank, counters=counters)


class RowsHome:
    """Of a shard of finished rows."""

    def __init__(
        self, shard: Shard, exchange: RowExchange, *, rank: int, counters: Counters
    ) -> None:
        self._shard, self._exchange = shard, exchange
        self._rank, self._counters = rank, counters

    def move(self, plan: Commit, *, begin: int) -> None:
        here = plan.holders == self._rank
        self._shard.receive(
            counts=plan.counts[here], own=plan.sources[here] == self._rank,
            dropped=int(plan.dropped[self._rank]), arrivals=self._send(plan).wait,
        )

    def _send(self, plan: Commit) -> InFlight:
        """Sends rows beyond this rank's quota to their holders; others send some here."""
        rank, shard = self._rank, self._shard
        counts, out_counts = plan.sent_by(rank), plan.received_by(rank)
        outgoing = int(counts.sum())
        rows = self._exchange.outbox(outgoing, what=_WHAT)
        if outgoing:
            shard.copy_staged(int(plan.dropped[rank]) + plan.kept_by(rank), rows)
        self._counters.rows_sent_home += outgoing
        return self._exchange.begin(counts, out_counts, what=_WHAT)


class ItemsHome:
    """Of a shard of items over steps."""

    def __init__(
        self, shard: StepShard, letters: Letters, directory: Directory, *, rank: int,
        counters: Counters,
    ) -> None:
        self._shard, self._letters, self._directory = shard, letters, directory
        self._rank, self._counters = rank, counters
        self._last = -1

    def move(self, plan: Commit, *, begin: int) -> None:
        shard, rank = self._shard, self._rank
        shard.evict(begin)
        before = shard.pins
        # What was remembered at another commit than the one before, the others have forgotten, too.
        known = before if self._directory.commits == self._last + 1 else {}
        shard.pins, self._last = {}, self._directory.commits
        ready = shard.take_ready()
        first = int(plan.dropped[rank])
        stop = first + plan.kept_by(rank)
        ends = stop + plan.sent_by(rank).cumsum()
        self._counters.rows_sent_home += int(ends[-1]) - stop
        letters = []
        for peer, (begins, end) in enumerate(zip([stop, *ends[:-1]], ends, strict=True)):
            windows = ready[begins:end]
            letters.append(self._write(windows, peer, known) if len(windows) else _NOTHING)
        received = self._letters.send(letters, what=_WHAT)
        windows_from = {
            peer: self._read(letter, peer, known)
            for peer, letter in enumerate(received) if len(letter)
        }
        windows_from[rank] = ready[first:stop]
        here = plan.sources[(plan.holders == rank) & (plan.counts > 0)].tolist()
        shard.put_ready(np.concatenate([windows_from[source] for source in here] or [ready[:0]]))
        shard.rows.release(ready[:first])
        shard.rows.release(ready[stop:])
        for slots in before.values():
            shard.rows.release(slots)

    def _write(
        self, windows: Numbers, peer: int, known: dict[tuple[str, int], Numbers]
    ) -> Bytes:
        """A letter with items: how many they are, how many rows come with them and how many of all
        rows are to be remembered; of the items the rows, by number; which to remember; the rows."""
        shard = self._shard
        there = known.get(("sent", peer), _NO_SLOTS)
        needed = np.unique(windows)
        fresh = needed[~np.isin(needed, there)]
        rows = np.concatenate([there, fresh])
        order = rows.argsort(kind="stable")
        numbers = order[rows.searchsorted(windows.reshape(-1), sorter=order)]
        remembered = np.flatnonzero(np.isin(rows, shard.streams.settled))
        pins = shard.pins["sent", peer] = rows[remembered]
        shard.rows.need(pins)
        head = np.array([len(windows), len(fresh), len(remembered)])
        return np.concatenate([
            np.concatenate([head, numbers, remembered]).view(np.uint8),
            shard.store.read(fresh).cpu().numpy().reshape(-1),
        ])

    def _read(
        self, letter: Bytes, peer: int, known: dict[tuple[str, int], Numbers]
    ) -> Numbers:
        """The windows of the items in a letter, whose rows are stored."""
        shard, length = self._shard, self._shard.layout.length
        items, count, kept = letter[: 3 * 8].view(np.int64).tolist()
        numbers = letter[3 * 8 : (3 + items * length + kept) * 8].view(np.int64)
        start, row_bytes = (3 + len(numbers)) * 8, shard.layout.stored.row_bytes
        payload = letter[start : start + count * row_bytes].reshape(count, row_bytes)
        slots = shard.rows.take(count)
        if count:
            shard.store.write(slots, torch.from_numpy(payload))
        rows = np.concatenate([known.get(("got", peer), _NO_SLOTS), slots])
        windows = rows[numbers[: items * length]].reshape(items, length)
        pins = shard.pins["got", peer] = rows[numbers[items * length :]]
        shard.rows.need(windows)
        shard.rows.need(pins)
        return windows


_NOTHING = np.empty(0, dtype=np.uint8)
_NO_SLOTS = np.empty(0, dtype=np.int64)
