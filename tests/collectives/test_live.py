"""Links that are told of by transfers: slow ones are named, in integers, and soon."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conduit.collectives.links import Capacity, Link, LinkMatrix
from conduit.collectives.live import LiveLinks, SlowLink
from tests.properties import examples

MEASURED, LATENCY_NS = 100_000_000, 50_000
ENOUGH_BYTES = 8 * LATENCY_NS * MEASURED // 10**9

MATRIX = LinkMatrix(
    hosts=(0, 1, 2), copies=(), gpus=(),
    capacities=3 * (Capacity(
        egress_bytes_per_s=MEASURED, ingress_bytes_per_s=MEASURED, egress_at_least=False,
        ingress_at_least=False, egress_spread_per_mille=0, ingress_spread_per_mille=0,
    ),),
    links=tuple(
        Link(source=a, target=b, bytes_per_s=MEASURED, latency_ns=LATENCY_NS, spread_per_mille=0)
        for a in range(3) for b in range(3) if a != b
    ),
)


def took_ns(amount_bytes: int, bytes_per_s: int) -> int:
    return LATENCY_NS + amount_bytes * 10**9 // bytes_per_s


def after(live: LiveLinks, bytes_per_s: int, times: int, amount: int = 1_000_000) -> LiveLinks:
    for _ in range(times):
        live.observed(0, 1, amount, took_ns(amount, bytes_per_s))
    return live


def test_a_link_that_degrades_is_named_and_recovers() -> None:
    live = LiveLinks(MATRIX)
    after(live, MEASURED // 2, 5)
    assert live.slow() == (), "not after a few slow transfers"
    after(live, MEASURED // 2, 2)
    (found,) = live.slow()
    assert (found.source, found.target, found.measured_bytes_per_s) == (0, 1, MEASURED)
    assert 0.65 * MEASURED < found.bytes_per_s == live.bytes_per_s(0, 1) < 0.7 * MEASURED
    assert live.bytes_per_s(1, 0) == MEASURED
    after(live, MEASURED, 20)
    assert live.slow() == ()


def test_the_threshold() -> None:
    live = after(LiveLinks(MATRIX), MEASURED * 8 // 10, 100)
    assert abs(live.bytes_per_s(0, 1) - MEASURED * 8 // 10) < MEASURED // 100
    assert live.slow() == () == live.slow(700)
    assert live.slow(900) == (SlowLink(
        source=0, target=1, bytes_per_s=live.bytes_per_s(0, 1), measured_bytes_per_s=MEASURED
    ),)


def test_small_transfers_say_nothing() -> None:
    live = after(LiveLinks(MATRIX), MEASURED // 100, 100, ENOUGH_BYTES - 1)
    assert live.bytes_per_s(0, 1) == MEASURED
    after(live, MEASURED // 100, 1, ENOUGH_BYTES)
    assert live.bytes_per_s(0, 1) < MEASURED


def test_a_clock_that_jumps_and_links_that_were_not_measured() -> None:
    live = LiveLinks(MATRIX)
    live.observed(0, 1, 10**6, -5)
    assert live.bytes_per_s(0, 1) <= MEASURED * 9 // 8
    live.observed(2, 2, 10**6, 1)
    assert live.bytes_per_s(2, 2) == 0 and live.slow() == ()


@given(transfers=st.lists(st.tuples(
    st.integers(0, 2), st.integers(0, 2), st.integers(0, 2**40), st.integers(0, 2**50)
)))
@examples(50)
def test_estimates_stay_within_what_was_seen(transfers: list[tuple[int, int, int, int]]) -> None:
    live, again = LiveLinks(MATRIX), LiveLinks(MATRIX)
    for transfer in transfers:
        live.observed(*transfer)
        again.observed(*transfer)
        now = live.bytes_per_s(*transfer[:2])
        assert type(now) is int and 0 <= now <= 2 * MEASURED
    assert live.slow() == again.slow()
    assert list(live.slow()) == sorted(live.slow(), key=lambda link: (link.source, link.target))
