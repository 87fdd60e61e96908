"""Who measures whom in which round: everybody once, and nobody twice at a time."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.collectives.schedule import (
    BETWEEN,
    FEW,
    LOADED,
    STAR_HOSTS,
    WITHIN,
    Round,
    hypercube,
    rounds,
    tournament,
)
from tests.properties import examples, hosts_of


def contestants_once(pairs: list[tuple[int, int]]) -> None:
    assert max(Counter(one for pair in pairs for one in pair).values(), default=0) <= 1


def of_kind(schedule: tuple[Round, ...], kind: str) -> list[Round]:
    return [turn for turn in schedule if turn.kind == kind]


@given(n=st.integers(0, 40))
@examples(41)
def test_a_tournament(n: int) -> None:
    found = tournament(n)
    for pairs in found:
        contestants_once(pairs)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(n), 2))
    assert len(found) == (n - 1 + n % 2 if n > 1 else 0)


@given(n=st.integers(0, 100))
@examples(60)
def test_a_hypercube(n: int) -> None:
    found = hypercube(n)
    for pairs in found:
        contestants_once(pairs)
    assert len(found) == max(n - 1, 0).bit_length()
    reached = {0}
    # Chains of pairs join all, whatever n is.
    for _ in range(n):
        reached |= {b for pairs in found for pair in pairs if set(pair) & reached for b in pair}
    assert reached == set(range(max(n, 1)))


@given(data=st.data(), ranks=st.integers(1, 40))
@examples(60)
def test_up_to_64_ranks(data: st.DataObject, ranks: int) -> None:
    hosts = data.draw(hosts_of(ranks))
    schedule = rounds(hosts)
    within, between, loaded = (of_kind(schedule, kind) for kind in (WITHIN, BETWEEN, LOADED))
    assert list(schedule) == [*within, *between, *loaded]
    for turn in (*within, *between):
        contestants_once(list(turn.flows))
    for turn in between:
        contestants_once([(hosts[a], hosts[b]) for a, b in turn.flows])
    assert sorted(tuple(sorted(flow)) for turn in within for flow in turn.flows) == [
        (a, b) for a, b in combinations(range(ranks), 2) if hosts[a] == hosts[b]
    ]
    assert sorted(
        tuple(sorted((hosts[a], hosts[b]))) for turn in between for a, b in turn.flows
    ) == list(combinations(range(max(hosts) + 1), 2))


@given(data=st.data(), ranks=st.integers(1, 40))
@examples(60)
def test_loaded_rounds(data: st.DataObject, ranks: int) -> None:
    hosts = data.draw(hosts_of(ranks))
    count = max(hosts) + 1
    turns = of_kind(rounds(hosts), LOADED)
    assert (len(turns) > 0) == (count > 1)
    hubs: list[int] = []
    for turn in turns:
        stars: dict[int, set[int]] = {}
        for source, target in turn.flows:
            stars.setdefault(hosts[source], set()).add(hosts[target])
        sources = Counter(source for source, _ in turn.flows)
        for hub, others in stars.items():
            assert min(count, STAR_HOSTS // 2) - 1 <= len(others) < STAR_HOSTS
            # All of the hub's ranks are at it, each with every other host.
            for rank, host in enumerate(hosts):
                assert host != hub or sources[rank] == len(others)
        everyone = [*stars, *(other for others in stars.values() for other in others)]
        assert len(everyone) == len(set(everyone)), "no host is in two stars"
        hubs += stars
    assert sorted(hubs) == (list(range(count)) if count > 1 else [])


def test_the_other_way() -> None:
    turn = Round(kind=BETWEEN, flows=((0, 2), (3, 1)))
    assert turn.reversed == ((2, 0), (1, 3))


def test_128_hosts_of_8_ranks() -> None:
    hosts = [rank // 8 for rank in range(1024)]
    schedule = rounds(hosts)
    assert Counter(turn.kind for turn in schedule) == {WITHIN: 7, BETWEEN: 7, LOADED: 8}
    for turn in of_kind(schedule, WITHIN) + of_kind(schedule, BETWEEN):
        contestants_once(list(turn.flows))
        assert len(turn.flows) == 512, "nobody idles"
    for distance, turn in zip((1, 2, 4, 8, 16, 32, 64), of_kind(schedule, BETWEEN), strict=True):
        assert all(b - a == 8 * distance for a, b in turn.flows), "everybody on its rail"


@pytest.mark.parametrize("hosts, kinds", [
    ([0], {}), ([0, 0], {WITHIN: 1}), ([0, 1], {BETWEEN: 1}), ([0, 1, 2, 3], {BETWEEN: 3}),
    ([rank // 8 for rank in range(1024)], {WITHIN: 1, BETWEEN: 7}),
    (list(range(FEW)), {BETWEEN: 6}),
])
def test_short(hosts: list[int], kinds: dict[str, int]) -> None:
    schedule = rounds(hosts, short=True)
    assert Counter(turn.kind for turn in schedule) == kinds
    for turn in of_kind(schedule, BETWEEN):
        contestants_once([(hosts[a], hosts[b]) for a, b in turn.flows])
