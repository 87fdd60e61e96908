"""Applying late columns: each rank's updates go to the holders of their rows, and into them."""

from __future__ import annotations

from collections.abc import Iterable

from conduit.edp.directory import Directory
from conduit.edp.updates import Update, Updates, decoded, encoded
from conduit.metrics import Counters
from conduit.sched.letters import Letters
from conduit.tiers.shard import AnyShard

__all__ = ["LateColumns"]

_WHAT = "sending late columns"


class LateColumns:
    """The late columns of one plane."""

    def __init__(
        self, *, updates: Updates, directory: Directory, shard: AnyShard, letters: Letters,
        rank: int, counters: Counters,
    ) -> None:
        self._updates, self._directory, self._shard = updates, directory, shard
        self._letters, self._rank, self._counters = letters, rank, counters

    def apply(self) -> None:
        """Collective. To be called after the new rows of the same commit have come."""
        live = [self._live(update) for update in self._updates.take()]
        if self._directory.ranks == 1:
            self._write(live)
            return
        holders = [
            self._directory.holders(self._directory.positions(update.indices)) for update in live
        ]
        for_rank = [
            [update.at((held == peer).nonzero()[0]) for update, held in
             zip(live, holders, strict=True) if (held == peer).any()]
            for peer in range(self._directory.ranks)
        ]
        # Every rank's in its turn, this rank's own too: who comes last, stays.
        letters = [
            encoded(updates) if peer != self._rank else encoded([])
            for peer, updates in enumerate(for_rank)
        ]
        for peer, data in enumerate(self._letters.send(letters, what=_WHAT)):
            mine = peer == self._rank
            self._write(for_rank[peer] if mine else decoded(data, self._shard.store.ring.layout))

    def _live(self, update: Update) -> Update:
        """Without rows that have left."""
        alive = (update.indices >= self._directory.begin).nonzero()[0]
        self._counters.rows_updated += len(alive)
        self._counters.updates_ignored += len(update.indices) - len(alive)
        return update.at(alive).last_of_each()

    def _write(self, updates: Iterable[Update]) -> None:
        for update in updates:
            slots = self._shard.rows_at(self._shard.slots(update.indices))
            for column, values in zip(update.columns, update.values, strict=True):
                self._shard.store.overwrite(slots, column, values)
