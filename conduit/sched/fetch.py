"""Fetching rows into one block: those that lie here by a gather, the others by the exchange."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives.exchange import InFlight, RowExchange
from conduit.metrics import Counters
from conduit.schema import Records
from conduit.tiers.shard import AnyShard
from conduit.tiers.store import put

__all__ = ["Fetch", "Wanted"]

Numbers = NDArray[np.int64]


class Wanted(NamedTuple):
    """The rows of one block, and those that go elsewhere meanwhile.

    ``slots`` (int64 ``[rows]``) say where each row lies here; where a row comes from another rank
    any slot will do. ``places`` are the rows that do, by sending rank, ``send_slots`` the rows to
    send, by receiving rank, with as many for and from each rank as the counts (``[ranks]``) say.
    ``moved`` rows change ranks on all ranks together: when it is 0 every rank knows that there is
    nothing to exchange.
    """

    slots: Numbers
    places: Numbers
    receive_counts: Numbers
    send_slots: Numbers
    send_counts: Numbers
    moved: int


class Fetch:
    """Fetches one block after another; ``what`` it does this for is told in errors."""

    def __init__(
        self, shard: AnyShard, exchange: RowExchange, counters: Counters, *, what: str
    ) -> None:
        self._shard, self._exchange = shard, exchange
        self._counters, self._what = counters, what
        self._flight: InFlight | None = None
        self._out: Records
        self._places: Numbers

    def begin(self, wanted: Wanted, out: Records) -> None:
        """Collective. Sends what others want and gathers what lies here into ``out`` while rows
        from others are on their way. ``out`` is complete after ``finish``, which comes before the
        next ``begin``."""
        if wanted.moved:
            shard, outgoing = self._shard, len(wanted.send_slots)
            rows = self._exchange.outbox(outgoing, what=self._what)
            if outgoing:
                shard.gather(wanted.send_slots, shard.layout.records(rows))
            self._out, self._places = out, wanted.places
            self._flight = self._exchange.begin(
                wanted.send_counts, wanted.receive_counts, what=self._what
            )
            self._counters.rows_received += len(wanted.places)
        if len(wanted.slots):
            self._shard.gather(wanted.slots, out)

    @property
    def is_under_way(self) -> bool:
        """Whether rows of others are still to come."""
        return self._flight is not None

    def finish(self) -> None:
        """Waits for the rows of others and puts them in their places."""
        if self._flight is None:
            return
        self._flight.wait(self._put)
        self._flight = None

    def _put(self, rows: Tensor, start: int) -> None:
        places = self._places[start : start + len(rows)]
        put(self._shard.layout.records(rows), self._out, places)

    def abandon(self) -> None:
        """Gives up waiting, and the connections that an exchange in flight keeps open."""
        self._flight = None
