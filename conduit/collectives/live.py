"""Links kept current from real transfers: a link that has become slower than measured is noticed.

Bookkeeping of one rank, integers only; what ranks do about it they agree on elsewhere. A transfer
that waited for others on the same link looks slow too, so a figure moves by an eighth of the way
at a time (the gain of TCP's estimate of round trips, RFC 6298): a link at half its figure is named
after seven transfers.
"""

from __future__ import annotations

from dataclasses import dataclass

from conduit.collectives.links import LinkMatrix

__all__ = ["LiveLinks", "SlowLink"]

_GAIN = 8
_LATENCIES = 8


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A link from rank ``source`` to rank ``target``: what it carries now, and what was measured.
    """

    source: int
    target: int
    bytes_per_s: int
    measured_bytes_per_s: int

    def __str__(self) -> str:
        return (
            f"rank {self.source} to rank {self.target}: {self.bytes_per_s / 1e6:,.1f} MB/s, "
            f"{self.measured_bytes_per_s / 1e6:,.1f} when measured"
        )


class LiveLinks:
    """Estimates of the links that are told of, starting from ``matrix``."""

    def __init__(self, matrix: LinkMatrix) -> None:
        self.matrix = matrix
        self._now: dict[tuple[int, int], int] = {}

    def observed(self, source: int, target: int, amount_bytes: int, took_ns: int) -> None:
        """Local. A transfer of so many bytes took so long. One whose bytes would take less than 8
        latencies on the link as measured tells nothing of its bandwidth and is ignored."""
        measured = int(self.matrix.bandwidth[source, target])
        latency_ns = int(self.matrix.latency_ns[source, target])
        if measured == 0 or amount_bytes * 10**9 < _LATENCIES * latency_ns * measured:
            return
        # Not below what the link needs at its best: a clock that jumps makes no link faster.
        seen = amount_bytes * 10**9 // max(took_ns - latency_ns, 1)
        now = self._now.get((source, target), measured)
        self._now[source, target] = now + (min(seen, 2 * measured) - now) // _GAIN

    def bytes_per_s(self, source: int, target: int) -> int:
        """The link's bandwidth as far as is known."""
        measured = int(self.matrix.bandwidth[source, target])
        return self._now.get((source, target), measured)

    def slow(self, below_per_mille: int = 700) -> tuple[SlowLink, ...]:
        """Links below so many thousandths of what was measured, by source and target."""
        return tuple(
            SlowLink(source=source, target=target, bytes_per_s=now, measured_bytes_per_s=measured)
            for (source, target), now in sorted(self._now.items())
            if now * 1000 < below_per_mille * (measured := int(
                self.matrix.bandwidth[source, target]
            ))
        )
