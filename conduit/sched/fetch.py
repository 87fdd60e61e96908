"""Fetching rows into one block: those that lie here by a gather, the others by the exchange."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives.exchange import InFlight, RowExchange
from conduit.metrics import Counters
from conduit.schema import Records
from conduit.tiers.shard import Shard

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
        self, shard: Shard, exchange: RowExchange, counters: Counters, *, what: str
    ) -> None:
        self._shard, self._exchange = shard, exchange
        self._counters, self._what = counters, what
        self._outbox, self._inbox = _Box(shard), _Box(shard)
        self._flight: InFlight | None = None
        self._out: Records
        self._places: Numbers

    def begin(self, wanted: Wanted, out: Records) -> None:
        """Collective. Sends what others want and gathers what lies here into ``out`` while rows
        from others are on their way. ``out`` is complete after ``finish``, which comes before the
        next ``begin``."""
        if wanted.moved:
            outgoing, incoming = len(wanted.send_slots), len(wanted.places)
            self._outbox.reserve(outgoing)
            self._inbox.reserve(incoming)
            if outgoing:
                self._shard.gather(wanted.send_slots, self._outbox.records[:outgoing])
            self._out, self._places = out, wanted.places
            self._flight = self._exchange.begin(
                self._outbox.block[:outgoing], wanted.send_counts,
                self._inbox.block[:incoming], wanted.receive_counts, what=self._what,
            )
            self._counters.rows_received += incoming
        if len(wanted.slots):
            self._shard.gather(wanted.slots, out)

    def finish(self) -> None:
        """Waits for the rows of others and puts them in their places."""
        if self._flight is None:
            return
        self._flight.wait()
        self._flight = None
        count = len(self._places)
        if count:
            put(self._inbox.records[:count], self._out, self._places)

    def abandon(self) -> None:
        """Gives up waiting, and the connections that an exchange in flight keeps open."""
        self._flight = None


def put(rows: Records, out: Records, places: Numbers) -> None:
    """Copies ``rows`` to ``places`` in ``out``."""
    if isinstance(out, Tensor):
        assert isinstance(rows, Tensor)
        out.index_copy_(0, torch.from_numpy(places).to(out.device), rows)
    else:
        out[places] = rows


class _Box:
    """Memory for rows on their way, which grows with what is asked of it."""

    def __init__(self, shard: Shard) -> None:
        self._layout, self._device = shard.layout, shard.tier.device
        self._rows = -1
        self.reserve(0)

    def reserve(self, rows: int) -> None:
        """Makes room for ``rows`` rows, in ``block`` and seen as ``records``."""
        if rows > self._rows:
            self._rows = 2 * rows
            self.block = self._layout.block(self._rows, self._device)
            self.records = self._layout.records(self.block)
