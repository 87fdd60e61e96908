"""Draws: equal to the slow reference, uniform, independent, and stable under writes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.edp.draws import UniformDraws
from tests import reference
from tests.properties import examples

SIZES = st.one_of(
    st.integers(1, 40), st.integers(1, 1 << 20),
    st.integers(0, 30).map(lambda bits: 1 << bits),
    st.integers(1, 30).map(lambda bits: (1 << bits) - 1),
    st.integers(0, 30).map(lambda bits: (1 << bits) + 1),
)


def draws(
    *, seed: int = 0, name: str = "experience", global_rows: int = 256, capacity: int = 1 << 20
) -> UniformDraws:
    return UniformDraws(seed=seed, name=name, global_rows=global_rows, capacity=capacity)


def p_value(statistic: float, freedom: int) -> float:
    """Of a chi-square statistic, from Wilson and Hilferty's normal approximation."""
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


def chi_square(counts: np.ndarray) -> float:
    """The p-value of counts that should be equal."""
    expected = counts.sum() / counts.size
    return p_value(float(((counts - expected) ** 2).sum() / expected), counts.size - 1)


# ----------------------------------------------------------------------------- the exact values


def test_the_reference_is_the_published_generator() -> None:
    # Known answers of Random123 for philox4x64-10, and of the SplitMix64 of its authors.
    assert reference.philox4x64(0, (0, 0)) == (
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    )
    ones = (1 << 64) - 1
    assert reference.philox4x64((1 << 256) - 1, (ones, ones)) == (
        0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0,
    )
    assert [reference.splitmix64(1234567, n) for n in (1, 2, 3)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423,
    ]


def test_known_draws() -> None:
    # Checkpoints and recorded runs rely on these never changing.
    assert draws(global_rows=8).positions(0, 1000).tolist() == [
        806, 783, 897, 38, 158, 180, 970, 430,
    ]
    assert draws(global_rows=8).positions(3, 37).tolist() == [
        36, 30, 4, 29, 11, 25, 26, 2,
    ]
    assert draws(seed=7, name="other", global_rows=8).positions(3, 37).tolist() == [
        5, 8, 23, 22, 18, 32, 13, 29,
    ]
    large = draws(global_rows=4, capacity=1 << 40)
    assert large.positions(2, (1 << 39) + 5).tolist() == [
        35889042780, 386426176700, 286421765464, 248562941539,
    ]


@examples(250)
@given(
    seed=st.integers(-(2**63), 2**70), name=st.text(max_size=8), global_rows=st.integers(1, 70),
    batch=st.one_of(st.integers(0, 50), st.integers(0, 10**9)), size=SIZES, data=st.data(),
)
def test_draws_are_those_of_the_reference(
    seed: int, name: str, global_rows: int, batch: int, size: int, data: st.DataObject
) -> None:
    capacity = data.draw(st.sampled_from([size, size + 1, 2 * size, 1 << 32]))
    made = draws(seed=seed, name=name, global_rows=global_rows, capacity=capacity)
    found = made.positions(batch, size)
    assert found.dtype == np.int64
    assert found.tolist() == reference.positions(
        seed=seed, name=name, global_rows=global_rows, capacity=capacity, batch=batch, size=size
    )


@examples(100)
@given(
    global_rows=st.integers(1, 40), batch=st.integers(0, 10**6),
    size=st.one_of(SIZES, st.integers(1, 1 << 41), st.sampled_from([1 << 40, (1 << 40) + 1])),
    above=st.integers(1, 1 << 40),
)
def test_draws_of_large_buffers_are_those_of_the_reference(
    global_rows: int, batch: int, size: int, above: int
) -> None:
    capacity = max(1 << 32, size) + above
    found = draws(global_rows=global_rows, capacity=capacity).positions(batch, size)
    assert found.tolist() == reference.positions(
        seed=0, name="experience", global_rows=global_rows, capacity=capacity, batch=batch,
        size=size,
    )


@pytest.mark.parametrize("capacity", [(1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 45])
def test_draws_around_the_change_to_wide_pieces(capacity: int) -> None:
    found = draws(capacity=capacity).positions(5, capacity)
    assert found.tolist() == reference.positions(
        seed=0, name="experience", global_rows=256, capacity=capacity, batch=5, size=capacity
    )
    assert found.max() > capacity // 2 > found.min()


def test_many_rejections_take_the_reference_path() -> None:
    # Just above a power of two nearly half of all candidates are rejected, again and again.
    for size in (3, 33, 65, (1 << 20) + 1):
        found = draws(global_rows=3000).positions(1, size)
        assert found.tolist() == reference.positions(
            seed=0, name="experience", global_rows=3000, capacity=1 << 20, batch=1, size=size
        )


# ------------------------------------------------------------------------ blocks and their order


@examples(100)
@given(
    global_rows=st.integers(1, 50),
    calls=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([1, 5, 8, 37, 64, 100, 1000])),
        min_size=1, max_size=25,
    ),
)
def test_the_order_of_calls_does_not_matter(
    global_rows: int, calls: list[tuple[int, int]]
) -> None:
    shared = draws(global_rows=global_rows)
    for batch, size in calls:
        single = draws(global_rows=global_rows).positions(batch, size)
        assert shared.positions(batch, size).tolist() == single.tolist()


@pytest.mark.parametrize("capacity", [1 << 20, 1 << 33])
def test_batches_made_ahead_are_those_made_alone(capacity: int) -> None:
    shared = draws(global_rows=100, capacity=capacity)
    longest = 0
    for batch in range(60):
        size = 1000 if batch < 40 else 1000 + batch
        ahead = shared.ahead(batch, size)
        longest = max(longest, len(ahead))
        for later, row in enumerate(ahead):
            alone = draws(global_rows=100, capacity=capacity).positions(batch + later, size)
            assert row.tolist() == alone.tolist()
    assert longest > 8


def test_a_size_that_lasts_is_resolved_in_few_passes() -> None:
    shared = draws(global_rows=256)
    blocks = {id(shared.ahead(batch, 777).base) for batch in range(64)}
    assert len(blocks) <= 8


# -------------------------------------------------------------------------- statistical quality


@pytest.mark.parametrize("size", [2, 3, 7, 64, 100, 1000, 1025, 2047])
def test_positions_are_uniform(size: int) -> None:
    made = draws(global_rows=1024)
    found = np.concatenate([made.positions(batch, size) for batch in range(100)])
    assert 0 <= found.min() <= found.max() < size
    assert chi_square(np.bincount(found, minlength=size)) > 1e-6


@pytest.mark.parametrize("capacity", [1 << 20, 1 << 34])
@pytest.mark.parametrize("position", [0, 1, 31])
def test_every_draw_of_a_batch_is_uniform_over_batches(capacity: int, position: int) -> None:
    made = draws(global_rows=32, capacity=capacity)
    found = np.array([made.positions(batch, 33)[position] for batch in range(8000)])
    assert chi_square(np.bincount(found, minlength=33)) > 1e-6


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("capacity", [1 << 20, 1 << 34])
def test_neighbouring_draws_are_independent(lag: int, capacity: int) -> None:
    made = draws(global_rows=2048, capacity=capacity)
    size = 33
    pairs = np.zeros(size * size)
    for batch in range(50):
        found = made.positions(batch, size)
        pairs += np.bincount(found[:-lag] * size + found[lag:], minlength=size * size)
    assert chi_square(pairs) > 1e-6


def test_the_same_draw_of_successive_batches_is_independent() -> None:
    made = draws(global_rows=2048)
    size = 33
    found = [made.positions(batch, size) for batch in range(51)]
    pairs = np.concatenate([a * size + b for a, b in pairwise(found)])
    assert chi_square(np.bincount(pairs, minlength=size * size)) > 1e-6


def test_a_rejected_draw_does_not_depend_on_what_was_rejected() -> None:
    # 16 of 32 first candidates are rejected at size 17: their replacements must be uniform, for
    # each of the rejected candidates.
    made, wide = draws(global_rows=4096), draws(global_rows=4096)
    table = np.zeros((32, 17))
    for batch in range(40):
        first, found = wide.positions(batch, 32), made.positions(batch, 17)
        assert (found[first < 17] == first[first < 17]).all()
        rejected = first >= 17
        np.add.at(table, (first[rejected], found[rejected]), 1)
    assert (table[:17] == 0).all()
    for row in table[17:]:
        assert chi_square(row) > 1e-6


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"name": "other"}, {"global_rows": 2001}], ids=str
)
def test_other_planes_draw_independently(other: dict[str, Any]) -> None:
    first, second = draws(global_rows=2000), draws(**{"global_rows": 2000, **other})
    size = 20
    pairs = np.concatenate([
        first.positions(batch, size)[:2000] * size + second.positions(batch, size)[:2000]
        for batch in range(20)
    ])
    assert chi_square(np.bincount(pairs, minlength=size * size)) > 1e-6


# ------------------------------------------------------------------------------ write stability


@examples(100)
@given(
    batch=st.integers(0, 1000), bits=st.integers(1, 20), data=st.data(),
    capacity=st.sampled_from([1 << 20, 1 << 35]),
)
def test_a_draw_that_changes_takes_a_new_row(
    batch: int, bits: int, data: st.DataObject, capacity: int
) -> None:
    # Within a power of two. Exactly: no draw changes but to a row that is new.
    low, high = (1 << bits - 1) + 1, 1 << bits
    old = data.draw(st.integers(low, high))
    new = data.draw(st.integers(old, high))
    made = draws(global_rows=300, capacity=capacity)
    before, after = made.positions(batch, old), made.positions(batch, new)
    changed = before != after
    assert (after[changed] >= old).all()
    assert ((after >= old) == changed).all()


@pytest.mark.parametrize(("old", "more"), [(600, 6), (600, 60), (1000, 24), (513, 511)])
def test_few_draws_change(old: int, more: int) -> None:
    made = draws(global_rows=1000)
    changed = sum(
        int((made.positions(batch, old) != made.positions(batch, old + more)).sum())
        for batch in range(100)
    )
    share = more / (old + more)
    spread = math.sqrt(100_000 * share * (1 - share))
    assert abs(changed - 100_000 * share) < 5 * spread


def test_crossing_a_power_of_two_keeps_about_half() -> None:
    # One bit more decides: those that have it are drawn anew among the new rows or rejected.
    made = draws(global_rows=1000)
    before, after = made.positions(0, 1024), made.positions(0, 1030)
    kept = float((before == after).mean())
    assert 0.4 < kept < 0.6
