"""What the library must compute, written as plainly as possible and without regard to speed.

Nothing here uses vectorised arithmetic, and nothing is shared with the library: rows are Python
integers, a buffer is a list, a commit is a loop over rows. Tests compare the library with these
functions exactly.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "Job",
    "LiveRow",
    "greedy_fill",
    "matched",
    "philox4x64",
    "placed",
    "positions",
    "routed",
    "splitmix64",
]

WORD = 1 << 64


# -------------------------------------------------------------------------------------- draws


def philox4x64(counter: int, key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 of Salmon et al. (2011), of a 256-bit counter and a 128-bit key."""
    words = [(counter >> (64 * i)) % WORD for i in range(4)]
    first, second = key
    for _ in range(10):
        left = 0xD2E7470EE14C6C93 * words[0]
        right = 0xCA5A826395121157 * words[2]
        words = [
            (right >> 64) ^ words[1] ^ first, right % WORD,
            (left >> 64) ^ words[3] ^ second, left % WORD,
        ]
        first = (first + 0x9E3779B97F4A7C15) % WORD
        second = (second + 0xBB67AE8584CAA73B) % WORD
    return words[0], words[1], words[2], words[3]


def splitmix64(start: int, output: int) -> int:
    """Output number ``output`` (from 1) of SplitMix64 started at ``start``."""
    z = (start + output * 0x9E3779B97F4A7C15) % WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
    return z ^ (z >> 31)


def positions(
    *, seed: int, name: str, global_rows: int, capacity: int, batch: int, size: int
) -> list[int]:
    """Positions of all draws of one batch, draw by draw and candidate by candidate."""
    digest = hashlib.sha256(f"conduit draws {seed} {global_rows} {name}".encode()).digest()
    key = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
    start = int.from_bytes(digest[16:24], "little")
    bits = 32 if capacity <= 1 << 32 else 64
    draws_a_counter = 256 // bits
    counters = 0
    while counters * draws_a_counter < global_rows:
        counters += 1
    pieces: list[int] = []
    for i in range(counters):
        # A generator counts up before it makes its first four words.
        for word in philox4x64(batch * counters + i + 1, key):
            pieces += [word % (1 << 32), word >> 32] if bits == 32 else [word]
    power = 1
    while power < size:
        power *= 2
    found = []
    for draw in range(global_rows):
        piece, attempt = pieces[draw], 0
        candidate = piece % power
        while candidate >= size:
            attempt += 1
            number = start + batch * global_rows + draw
            candidate = splitmix64((piece << 32) + number, attempt) % power
        found.append(candidate)
    return found


# ----------------------------------------------------------------------------------- ingestion


def greedy_fill(free: Sequence[int], rows: int) -> list[int]:
    """Rows that each rank gets when each row goes to the one with most room, lowest rank first."""
    left, given = list(free), [0] * len(free)
    for _ in range(rows):
        most = max(left)
        assert most > 0, "no room left"
        rank = left.index(most)
        left[rank] -= 1
        given[rank] += 1
    return given


def matched(give: Sequence[int], take: Sequence[int]) -> list[tuple[int, int]]:
    """(giver, taker) of every row when both sides are counted off in rank order."""
    givers = [rank for rank, rows in enumerate(give) for _ in range(rows)]
    takers = [rank for rank, rows in enumerate(take) for _ in range(rows)]
    assert len(givers) == len(takers)
    return list(zip(givers, takers, strict=True))


@dataclass(frozen=True)
class Placed:
    """What one commit does, row by row.

    ``homes[r]`` are the holders of the rows that rank r staged, in order; None for a row that is
    dropped because the commit is larger than the buffer.
    """

    homes: list[list[int | None]]
    lost: list[int]


def placed(
    staged: Sequence[int], live_holders: Sequence[int], quotas: Sequence[int], capacity: int
) -> Placed:
    """Places the rows of a commit one by one. ``live_holders`` are holders, oldest row first."""
    ranks = len(staged)
    arrivals = [rank for rank in range(ranks) for _ in range(staged[rank])]
    dropped = max(len(arrivals) - capacity, 0)
    arriving = arrivals[dropped:]
    leaving = max(len(live_holders) + len(arriving) - capacity, 0)
    lost = [list(live_holders[:leaving]).count(rank) for rank in range(ranks)]
    held = [list(live_holders[leaving:]).count(rank) for rank in range(ranks)]
    # A rank keeps its own rows while it has room; the last ones are too many.
    homes: list[list[int | None]] = [[] for _ in range(ranks)]
    surplus = [0] * ranks
    for number, rank in enumerate(arrivals):
        if number < dropped:
            homes[rank].append(None)
        elif held[rank] < quotas[rank]:
            held[rank] += 1
            homes[rank].append(rank)
        else:
            surplus[rank] += 1
    room = [max(quotas[rank] - held[rank], 0) for rank in range(ranks)]
    for giver, taker in matched(surplus, greedy_fill(room, sum(surplus))):
        homes[giver].append(taker)
    return Placed(homes=homes, lost=lost)


# ------------------------------------------------------------------------------------ delivery


def routed(
    routing: str, holders: Sequence[int], hosts: Sequence[int], batch_rows: int
) -> list[int]:
    """The learner of every draw."""
    ranks = len(hosts)
    if routing == "independent":
        return [draw // batch_rows for draw in range(len(holders))]
    assert routing == "exchangeable"
    learners: list[int | None] = [None] * len(holders)
    room = [batch_rows] * ranks
    for draw, holder in enumerate(holders):
        if room[holder]:
            learners[draw] = holder
            room[holder] -= 1
    seats = [rank for rank in range(ranks) for _ in range(room[rank])]
    waiting = sorted(
        (draw for draw in range(len(holders)) if learners[draw] is None),
        key=lambda draw: (holders[draw], draw),
    )
    # First to a learner on the holder's host, then to whoever has room.
    for anywhere in (False, True):
        for draw in list(waiting):
            for seat in seats:
                if anywhere or hosts[seat] == hosts[holders[draw]]:
                    learners[draw] = seat
                    seats.remove(seat)
                    waiting.remove(draw)
                    break
    assert not waiting
    return [learner for learner in learners if learner is not None]


# ------------------------------------------------------------------------------- the whole job


@dataclass(frozen=True)
class LiveRow:
    """A row of the buffer: its logical index, what the test stored, and the rank that has it."""

    index: int
    value: int
    holder: int


@dataclass
class Job:
    """A plane on several ranks as one list of rows. Values of rows are integers.

    ``live`` are the rows, oldest first; ``staged[r]`` the values that rank r staged; ``batch`` the
    number of the next batch. ``sample`` returns for every rank its rows in order. A draft is
    fetched before the first commit after it was made, or ``hidden`` at once, what is late in it
    when it is delivered, unless no more than ``max_staleness`` commits came after it; ``moved[a,
    b]`` counts the rows that b fetches from a.
    """

    capacity: int
    batch_rows: int
    quotas: Sequence[int]
    hosts: Sequence[int]
    routing: str = "exchangeable"
    seed: int = 0
    name: str = "experience"
    hidden: bool = False
    max_staleness: int = 0
    live: list[LiveRow] = field(default_factory=list)
    end: int = 0
    origin: int = 0
    batch: int = 0
    late_rows: int = 0
    sent_home: int = 0
    skipped: int = 0
    moved: Counter[tuple[int, int]] = field(default_factory=Counter)
    staged: list[list[int]] = field(init=False)
    _draft: tuple[list[LiveRow], list[int]] | None = None
    _fetched: bool = False
    _ignored: int = 0

    def __post_init__(self) -> None:
        self.staged = [[] for _ in self.quotas]

    def commit(self) -> None:
        """Rows get indices in rank order; the oldest leave; every row finds its holder."""
        if self._draft is not None and not self._fetched:
            self._fetch(*self._draft)
            self._fetched = True
        self._ignored += any(self.staged)
        plan = placed(
            [len(rows) for rows in self.staged], [row.holder for row in self.live], self.quotas,
            self.capacity,
        )
        for rank, (values, homes) in enumerate(zip(self.staged, plan.homes, strict=True)):
            for value, home in zip(values, homes, strict=True):
                if home is None:
                    self.skipped += 1
                else:
                    self.live.append(LiveRow(index=self.end, value=value, holder=home))
                    self.sent_home += home != rank
                self.end += 1
            values.clear()
        self.live = self.live[-self.capacity :]

    def empty(self) -> None:
        for values in self.staged:
            values.clear()
        self.live, self.origin, self._draft = [], self.end, None

    def draws(self) -> list[LiveRow]:
        """The rows of the next global batch, in draw order."""
        ring = {(row.index - self.origin) % self.capacity: row for row in self.live}
        found = positions(
            seed=self.seed, name=self.name, global_rows=self.batch_rows * len(self.quotas),
            capacity=self.capacity, batch=self.batch, size=len(self.live),
        )
        return [ring[position] for position in found]

    def sample(self) -> list[list[LiveRow]]:
        self.commit()
        rows = self.draws()
        if self._draft is None:
            learners = self._route(rows)
            self._fetch(rows, learners)
        elif self._ignored <= self.max_staleness:
            rows, learners = self._draft
        else:
            drafted, learners = self._draft
            late = [
                (new, learner) for old, new, learner in zip(drafted, rows, learners, strict=True)
                if old.index != new.index
            ]
            self.late_rows += len(late)
            self._fetch([row for row, _ in late], [learner for _, learner in late])
        self.batch += 1
        # The next batch is drafted over what is committed now.
        following = self.draws()
        self._draft, self._fetched = (following, self._route(following)), self.hidden
        self._ignored = 0
        if self.hidden:
            self._fetch(*self._draft)
        return [
            [row for row, learner in zip(rows, learners, strict=True) if learner == rank]
            for rank in range(len(self.quotas))
        ]

    def held(self) -> list[int]:
        return [sum(row.holder == rank for row in self.live) for rank in range(len(self.quotas))]

    def _fetch(self, rows: Sequence[LiveRow], learners: Sequence[int]) -> None:
        self.moved.update(
            (row.holder, learner) for row, learner in zip(rows, learners, strict=True)
            if row.holder != learner
        )

    def _route(self, rows: Sequence[LiveRow]) -> list[int]:
        return routed(self.routing, [row.holder for row in rows], self.hosts, self.batch_rows)
