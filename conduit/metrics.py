"""What a plane did and what it cost: counters, and the report made of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["Counters", "Report"]


@dataclass(slots=True)
class Counters:
    """Counts since the plane was made; changed in place by the training thread only."""

    samples: int = 0
    commits: int = 0
    fences: int = 0
    rows_staged: int = 0
    rows_committed: int = 0
    rows_skipped: int = 0
    rows_sent_home: int = 0
    rows_updated: int = 0
    updates_ignored: int = 0
    rows_delivered: int = 0
    rows_received: int = 0
    blocked_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One rank's account. Rows and bytes are this rank's unless they say ``global``.

    ``blocked_ms`` is the time that the training thread spent in collective plane calls.
    ``rows_received`` of the ``rows_delivered`` to this learner came from other ranks;
    ``sent_rows`` and ``sent_bytes`` count what really went to each rank, deliveries and rows sent
    home alike. ``control`` is how control records travel and ``transports[r]`` how rows get to rank
    r; ``unshared_exchanges`` had to send rows to ranks of this host over the network, because the
    system had no shared memory left. ``slow_links`` are links into this rank that carry less than
    0.7 of what they did when the plane was made. ``late_rows`` counts draws of the global batch
    that a commit changed after they were drafted (0 in a world of one, which drafts nothing).
    ``tiers`` are the bytes of this rank's shard in each kind of memory, in the order in which they
    were given. ``fresh_slabs`` are batches that needed fresh memory, because earlier ones are kept
    by the user (or there were none).
    """

    name: str
    rank: int
    ranks: int
    hosts: int
    device: str
    routing: str
    rows: int
    capacity: int
    row_bytes: int
    shard_rows: int
    shard_bytes: int
    tiers: tuple[tuple[str, int], ...]
    directory_bytes: int
    samples: int
    commits: int
    fences: int
    rows_staged: int
    rows_committed: int
    rows_skipped: int
    rows_sent_home: int
    rows_updated: int
    updates_ignored: int
    rows_delivered: int
    rows_received: int
    late_rows: int
    exchanges: int
    unshared_exchanges: int
    sent_rows: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    received_rows: tuple[int, ...]
    control: str
    transports: tuple[str, ...]
    slow_links: tuple[str, ...]
    fresh_slabs: int
    blocked_ms: float

    def as_dict(self) -> dict[str, object]:
        """The report as plain values, for logging."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        moved = self.rows_received / self.rows_delivered if self.rows_delivered else 0.0
        per_sample = self.blocked_ms / self.samples if self.samples else 0.0
        lines = [
            f"plane {self.name!r}: rank {self.rank} of {self.ranks} on {self.hosts} host(s), "
            f"{self.device}, {self.routing} routing",
            f"  rows        {self.rows:,} of {self.capacity:,} (global), {self.row_bytes:,} bytes "
            f"each; {self.shard_rows:,} held here",
            f"  ingestion   {self.rows_staged:,} rows staged here, {self.rows_committed:,} "
            f"committed (global) in {self.commits:,} commits; {self.rows_sent_home:,} sent to "
            "other ranks",
            f"  delivery    {self.samples:,} batches, {self.rows_delivered:,} rows; "
            f"{self.rows_received:,} ({moved:.1%}) came from other ranks",
            f"  late rows   {self.late_rows:,} of the global batches",
            f"  sent        {sum(self.sent_rows):,} rows, {sum(self.sent_bytes) / 1e6:,.2f} MB in "
            f"{self.exchanges:,} exchanges",
            f"  transport   {_ways(self.transports)}; control by {self.control}"
            + (f"; {self.unshared_exchanges:,} exchanges found no shared memory"
               if self.unshared_exchanges else ""),
            *(f"  slow link   {link}" for link in self.slow_links),
            f"  memory      {(self.shard_bytes + self.directory_bytes) / 1e6:,.1f} MB "
            f"({', '.join(f'{name} {held / 1e6:,.1f} MB' for name, held in self.tiers)}); "
            f"{self.fresh_slabs:,} batches needed fresh memory",
            f"  blocked     {self.blocked_ms:,.1f} ms in plane calls, {per_sample:.3f} ms a batch",
        ]
        return "\n".join(lines)


def _ways(transports: tuple[str, ...]) -> str:
    """How rows get to other ranks, for people."""
    counts = {way: transports.count(way) for way in sorted(set(transports) - {"none"})}
    told = (f"{way} to {n} {'rank' if n == 1 else 'ranks'}" for way, n in counts.items())
    return ", ".join(told) or "none"
