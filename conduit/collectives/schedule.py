"""Which ranks measure their links in which round of the probe.

In a round every rank, and between hosts every host, has at most one partner, so that what a pair
measures is its own. Up to 64 ranks everyone on a host meets everyone else of it, and every host
every other host, by the circle method (a 1-factorisation of the complete graph, as for a chess
tournament). A larger job would need a round for each of its hosts; there host h meets the hosts
h xor 1, 2, 4, ... instead (the dimensions of a hypercube), each rank on its own rail: the rank with
the same number on the other host. That is 7 and 7 rounds for 128 hosts of 8 ranks, not 1,023.

What a host can send and receive altogether shows only when all of its ranks are at it, with enough
other hosts to take it: loaded rounds are stars, one host with all others, in groups of 8 hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BETWEEN", "FEW", "LOADED", "STAR_HOSTS", "WITHIN", "Round", "hypercube", "rounds",
           "tournament"]

FEW = 64
"""Up to so many contestants, everyone meets everyone."""

STAR_HOSTS = 8
"""Hosts of a star at most: seven hosts of about the same speed surely outdo the eighth."""

WITHIN, BETWEEN, LOADED = "within hosts", "between hosts", "loaded"

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Round:
    """Flows ``(source, target)`` between ranks, to be measured at once, and then all of them the
    other way round. ``kind`` is WITHIN, BETWEEN, or LOADED: of one host to all others of a group.
    """

    kind: str
    flows: tuple[Pair, ...]

    @property
    def reversed(self) -> tuple[Pair, ...]:
        return tuple((target, source) for source, target in self.flows)


def tournament(n: int) -> list[list[Pair]]:
    """Rounds in which each of n contestants meets each other one exactly once, and nobody two at a
    time: n - 1 rounds for an even n, else n (circle method: one stays, the others move on a place).
    """
    circle = list(range(n + n % 2))
    found = []
    for _ in range(len(circle) - 1 if n > 1 else 0):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        # With an odd n, who is to meet the one that does not exist has a break.
        found.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < n))
        circle[1:] = [circle[-1], *circle[1:-1]]
    return found


def hypercube(n: int) -> list[list[Pair]]:
    """One round for each power of two below n; everyone meets somebody, and chains of pairs join
    all, also where n is no power of two."""
    distances = [1 << bit for bit in range((n - 1).bit_length())] if n else []
    return [
        [(one, one ^ distance) for one in range(n) if one < one ^ distance < n]
        for distance in distances
    ]


def rounds(hosts: Sequence[int], *, short: bool = False) -> tuple[Round, ...]:
    """The rounds of a probe of ranks on ``hosts`` (``hosts[r]``: the host of rank r, from 0).

    ``short`` is for the start of a plane: one round within hosts, then the hypercube of hosts on
    the first rail (up to four hosts all pairs, which is a round more), and no loaded rounds.
    """
    by_host: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for rank, host in enumerate(hosts):
        by_host[host].append(rank)
    largest, n = max(map(len, by_host)), len(by_host)
    local, between = _meetings(largest, largest), _meetings(n, len(hosts))
    if short:
        local, between = hypercube(largest)[:1], tournament(n) if n <= 4 else hypercube(n)
    # Ranks of a host may share its network interface: all rails at once would share out what is
    # to be the figure of one pair. Where it takes sampling, every rank must have its turn.
    rails = largest if len(hosts) > FEW and not short else 1
    found = [
        Round(kind=WITHIN, flows=tuple(
            (ranks[a], ranks[b]) for ranks in by_host for a, b in pairs if b < len(ranks)
        )) for pairs in local
    ]
    found += [
        Round(kind=BETWEEN, flows=tuple(
            (one, other) for a, b in pairs
            for one, other in list(zip(by_host[a], by_host[b], strict=False))[:rails]
        )) for pairs in between
    ]
    return tuple(found if short else found + _stars(by_host))


def _meetings(contestants: int, ranks: int) -> list[list[Pair]]:
    return tournament(contestants) if ranks <= FEW else hypercube(contestants)


def _stars(by_host: list[list[int]]) -> list[Round]:
    """Each host in turn with the others of its group, groups side by side."""
    n = len(by_host)
    if n == 1:
        return []
    count = -(-n // STAR_HOSTS)
    groups = [list(range(first, n, count)) for first in range(count)]
    return [
        Round(kind=LOADED, flows=tuple(
            (rank, by_host[other][number % len(by_host[other])])
            for group in groups if turn < len(group)
            for other in group if other != group[turn]
            for number, rank in enumerate(by_host[group[turn]])
        )) for turn in range(max(map(len, groups)))
    ]
