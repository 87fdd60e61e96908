"""What every network transport carries, and how it is asked to."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from conduit.collectives.boxes import Box

__all__ = ["Network", "Parcel", "Transfer"]


class Parcel(NamedTuple):
    """One rank's part in one exchange.

    Of the rows in ``box.rows`` rank p gets ``counts[p]`` from ``starts[p]`` on; from rank p come
    ``out_counts[p]``, which belong at ``out_starts[p]`` of ``inbox``. The network carries those of
    the ranks in ``far``. At most ``chunk_bytes`` between two ranks are one message; ``most_rows``,
    where it is known, is the largest of all ranks' counts, the same number on all of them.
    """

    box: Box
    counts: list[int]
    starts: list[int]
    inbox: Tensor
    out_counts: list[int]
    out_starts: list[int]
    far: list[int]
    chunk_bytes: int
    most_rows: int | None


class Transfer(Protocol):
    """A parcel on its way. What goes wrong is raised by ``finish``, one of ``TRANSPORT_ERRORS``.

    ``arrived_ns`` tells of ranks whose rows ``finish`` had to wait for when the last of them came,
    by the clock ``time.perf_counter_ns``: of none where the transport cannot tell ranks apart.
    """

    arrived_ns: dict[int, int]

    def issue(self) -> bool:
        """Sends the next chunk; False if there was none left."""
        ...

    def finish(self) -> None:
        """Returns when all rows have come. Those sent may still be on their way: the box has the
        works to wait for before it is filled again. All chunks must have been issued."""
        ...


class Network(Protocol):
    """A way for rows between ranks that share no memory. Adding one: this file's siblings, and a
    line in :mod:`conduit.collectives.choice`."""

    name: str

    def begin(self, parcel: Parcel) -> Transfer: ...
