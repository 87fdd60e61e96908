"""The row exchange: packed rows from every rank to every rank, uneven counts, zeros too.

Only uint8 moves, which every c10d backend carries. Both ends have worked out the counts from the
directory before anything is sent (a Gloo receiver that expects fewer bytes than come aborts the
process, one that expects more keeps stale ones), and a rank's own rows never enter the exchange.

Rows are gathered once, into a box (see ``boxes.py``). Ranks of the same host read them there; all
others get them over the network, by one of the transports, straight from the box.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conduit.collectives.boxes import Box
from conduit.collectives.shared import Windows
from conduit.collectives.transports import Network, Parcel, PointToPoint, Transfer
from conduit.collectives.watch import raise_broken, raise_missing
from conduit.collectives.world import TRANSPORT_ERRORS, World
from conduit.errors import WorldError

__all__ = ["InFlight", "RowExchange", "Traffic"]

Counts = NDArray[np.int64]
Take = Callable[[Tensor, int], None]
Observe = Callable[[int, int, int, int], None]
Lost = Callable[[World, str, Exception], NoReturn]

_CHUNK_BYTES = 64 << 20
_UNSHARED_TAG = 100
_OBSERVED = 4


@dataclass(kw_only=True)
class Traffic:
    """What one rank really sent and received in its exchanges, int64 ``[ranks]`` each.

    ``unshared_calls`` are those whose rows went to this host's ranks over the network as well,
    for lack of shared memory.
    """

    ranks: int
    calls: int = 0
    unshared_calls: int = 0
    sent_rows: Counts = field(init=False)
    received_rows: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.sent_rows = np.zeros(self.ranks, dtype=np.int64)
        self.received_rows = np.zeros(self.ranks, dtype=np.int64)

    def __add__(self, other: Traffic) -> Traffic:
        both = Traffic(ranks=self.ranks, calls=self.calls + other.calls,
                       unshared_calls=self.unshared_calls + other.unshared_calls)
        both.sent_rows += self.sent_rows + other.sent_rows
        both.received_rows += self.received_rows + other.received_rows
        return both


class RowExchange:
    """One exchange after another, each begun by all ranks and finished by all.

    Its outgoing rows lie in ``windows``, where the ranks of this host share memory. They are
    replaced only when the others have read them, which they have once they come to the next
    exchange. ``observe`` is told what real transfers took: sending rank, receiving rank, bytes,
    nanoseconds. One ``on_lane`` raises BrokenCallError where others find out who is missing.
    """

    def __init__(
        self, world: World, row_bytes: int, *, windows: Windows | None = None,
        network: Network | None = None, observe: Observe | None = None, on_lane: bool = False,
    ) -> None:
        self._observe = observe
        self._world, self.row_bytes = world, row_bytes
        self._lost = raise_broken if on_lane else raise_missing
        self._network = network
        if network is None and world.data is not None:
            self._network = PointToPoint(world, tag=0)
        self.traffic = Traffic(ranks=world.size)
        self._box = Box(
            row_bytes, ranks=world.size, device=world.device, timeout=world.timeout,
            windows=windows, relayed=self._network is not None and self._network.name == "rail",
        )
        self._room = 0
        self._far = [
            peer for peer in range(world.size) if peer != world.rank and peer not in self._box.near
        ]
        self._inbox = torch.empty(0, row_bytes, dtype=torch.uint8, device=world.device)

    def outbox(self, rows: int, *, what: str) -> Tensor:
        """Room for the rows to send next, uint8 ``[rows, row_bytes]`` on the plane's device.

        To be filled in by receiving rank, before ``begin``. Raises TimeoutError or WorldError
        naming a rank that still reads what was there.
        """
        try:
            return self._box.reserve(rows)
        except TRANSPORT_ERRORS as error:
            self._lost(self._world, what, error)

    def begin(
        self, counts: Counts, out_counts: Counts, *, what: str, chunk_bytes: int | None = None,
        most_rows: int | None = None,
    ) -> InFlight:
        """Collective. Sends ``counts[p]`` rows of the outbox to rank p, int64 ``[ranks]``, in
        order; ``out_counts[p]`` come from rank p. Zeros allowed, 0 for the rank itself.

        With ``chunk_bytes`` only the first chunk, of so many bytes between any two ranks, is sent;
        the next ones by :meth:`InFlight.issue` or, at the latest, by ``wait``. Some transports send
        all rows as one chunk, unless they are told ``most_rows``: the largest of all counts of all
        ranks. Raises WorldError on counts that do not fit; whatever goes wrong with other ranks is
        raised by ``wait``.
        """
        world, rank = self._world, self._world.rank
        box = self._box
        sizes, out_sizes = counts.tolist(), out_counts.tolist()
        incoming = sum(out_sizes)
        for n, rows in ((sizes, box.count), (out_sizes, incoming)):
            if len(n) != world.size or sum(n) != rows or n[rank] or min(n) < 0:
                raise WorldError(
                    f"the counts of {what} do not fit the rows", rank=rank,
                    expected=f"{rows} rows in all and 0 for this rank", got=n,
                )
        if incoming > self._room:
            self._room = incoming + incoming // 4
            self._inbox = self._inbox.new_empty(self._room, self.row_bytes)
        begun_ns = time.perf_counter_ns()
        box.publish(sizes)
        parcel = Parcel(
            box=box, counts=sizes, starts=_starts(sizes), inbox=self._inbox[:incoming],
            out_counts=out_sizes, out_starts=_starts(out_sizes), far=self._far,
            chunk_bytes=chunk_bytes or _CHUNK_BYTES, most_rows=most_rows,
        )
        transfer = None
        failure = None
        try:
            if self._far:
                assert self._network is not None
                transfer = self._network.begin(parcel)
                while transfer.issue() and chunk_bytes is None:
                    pass
            if box.private:
                self._send_near(parcel)
        except TRANSPORT_ERRORS as error:
            # Told by ``wait``: until then the control record may say why others are gone.
            failure = error
        traffic = self.traffic
        traffic.calls += 1
        traffic.unshared_calls += box.private and len(box.near) > 0
        traffic.sent_rows += counts
        traffic.received_rows += out_counts
        return InFlight(
            world, parcel, transfer, failure, what, begun_ns, self._observe, self._lost
        )

    def _send_near(self, parcel: Parcel) -> None:
        """Sends what the ranks near would read in shared memory, if there were any left."""
        group, box = self._world.data, parcel.box
        for peer in box.near:
            start, count = parcel.starts[peer], parcel.counts[peer]
            if count:
                assert group is not None
                rows = box.rows[start : start + count]
                box.works.append(group.send([rows], peer, _UNSHARED_TAG))

    def transport(self, peer: int) -> str:
        """How rows get to ``peer``."""
        if peer == self._world.rank:
            return "none"
        if peer in self._box.near:
            return "shared memory"
        return "none" if self._network is None else self._network.name

    def close(self) -> None:
        """Local. Gives up the memory shared with others."""
        self._box.close()


class InFlight:
    """An exchange that has begun."""

    def __init__(
        self, world: World, parcel: Parcel, transfer: Transfer | None, failure: Exception | None,
        what: str, begun_ns: int, observe: Observe | None, lost: Lost,
    ) -> None:
        self._begun_ns, self._observe = begun_ns, observe
        self._world, self._parcel, self._transfer = world, parcel, transfer
        self._failure, self._what, self._lost = failure, what, lost

    def issue(self) -> bool:
        """Sends the next chunk; False if all are on their way."""
        try:
            return self._transfer is not None and self._transfer.issue()
        except TRANSPORT_ERRORS as error:
            self._failure = error
            return False

    def wait(self, take: Take) -> None:
        """Returns when all rows have come (on CUDA: makes the stream wait for that).

        Calls ``take(rows, start)`` for piece after piece of them: ``rows`` are those from number
        ``start`` on, of all that come here, by sending rank. They are valid during the call only.
        Raises TimeoutError or WorldError naming the ranks that did not come.
        """
        try:
            if self._failure is not None:
                raise self._failure
            transfer, parcel = self._transfer, self._parcel
            if transfer is not None:
                while transfer.issue():
                    pass
            if parcel.box.near:
                self._take_near(take)
            if transfer is not None:
                waiting_ns = time.perf_counter_ns()
                transfer.finish()
                if self._observe is not None:
                    self._tell(transfer.arrived_ns, waiting_ns, self._observe)
                if parcel.box.near:
                    self._take_far(take)
                elif len(parcel.inbox):
                    take(parcel.inbox, 0)
        except TRANSPORT_ERRORS as error:
            self._lost(self._world, self._what, error)
        self._parcel.box.done()

    def _tell(self, arrived_ns: dict[int, int], waiting_ns: int, observe: Observe) -> None:
        """What the transfer says about links. What went on before this rank came to wait, such as
        others being late, must have been the smaller part."""
        counts, row_bytes = self._parcel.out_counts, self._parcel.inbox.shape[1]
        for peer, now in arrived_ns.items():
            took_ns = now - self._begun_ns
            if _OBSERVED * (waiting_ns - self._begun_ns) < took_ns:
                # Rows that come from several ranks at once share this rank's way in: by the time
                # that those of one are here, as many have come from each of the others.
                shared = sum(min(counts[other], counts[peer]) for other in self._parcel.far)
                observe(peer, self._world.rank, shared * row_bytes, took_ns)

    def _take_near(self, take: Take) -> None:
        parcel, box = self._parcel, self._parcel.box
        senders = [peer for peer in box.near if parcel.out_counts[peer]]
        if not senders:
            return
        box.wait(senders)
        rank = self._world.rank
        for peer in senders:
            count = int(box.counts(peer)[rank])
            if count != parcel.out_counts[peer]:
                raise WorldError(
                    f"{self._world.told([peer])} sent another number of rows in {self._what}",
                    rank=rank, expected=parcel.out_counts[peer], got=count,
                    cure="This is a bug in Conduit, or ranks run different versions",
                )
            start = parcel.out_starts[peer]
            if box.is_private(peer):
                rows = parcel.inbox[start : start + count]
                assert self._world.data is not None
                self._world.data.recv([rows], peer, _UNSHARED_TAG).wait(self._world.timeout)
                take(rows, start)
            else:
                take(box.rows_of(peer, rank), start)

    def _take_far(self, take: Take) -> None:
        """What came over the network: rows of ranks that follow each other in one piece."""
        parcel = self._parcel
        begin = end = 0
        for peer in parcel.far:
            start, count = parcel.out_starts[peer], parcel.out_counts[peer]
            if start != end and end > begin:
                take(parcel.inbox[begin:end], begin)
            begin = begin if start == end else start
            end = start + count
        if end > begin:
            take(parcel.inbox[begin:end], begin)


def _starts(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]
