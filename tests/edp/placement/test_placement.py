"""Placement policies, and the check of what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.edp.directory import Directory
from conduit.edp.ingestion import plan_commit
from conduit.edp.placement import Balanced, Central, checked_quotas
from conduit.errors import CapacityError, ConduitError, WorldError
from tests.properties import examples


class Fixed:
    """Answers what it was told."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def quotas(self, *, capacity: int, ranks: int) -> Sequence[int]:
        return self.answer  # type: ignore[no-any-return]


@examples(100)
@given(capacity=st.integers(1, 10**12), ranks=st.integers(1, 300))
def test_balanced_shares_are_equal(capacity: int, ranks: int) -> None:
    shares = Balanced().quotas(capacity=capacity, ranks=ranks)
    slack = capacity // ranks // 64 if ranks > 1 else 0
    assert len(shares) == ranks
    assert sum(shares) == capacity + ranks * slack
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


def test_new_rows_stay_where_they_are_produced_after_larger_blocks() -> None:
    """Blocks of 50 rows a rank fill the buffer; then 5 rows a rank replace 5 times as many."""
    quotas = checked_quotas(Balanced(), capacity=10_000, ranks=2)
    directory = Directory(capacity=10_000, ranks=2)
    sent = 0
    for staged in [50] * 100 + [5] * 2_000:
        plan = plan_commit(np.array([staged, staged]), directory, quotas)
        sent += int(plan.sent_by(0).sum() + plan.sent_by(1).sum())
        directory.append(plan.holders, plan.counts, skipped=plan.skipped, lost=plan.lost,
                         arriving=plan.arriving)
    assert sent == 0


@examples(50)
@given(capacity=st.integers(1, 10**12), ranks=st.integers(1, 300), data=st.data())
def test_central_holds_all_on_one_rank(
    capacity: int, ranks: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    shares = Central(rank).quotas(capacity=capacity, ranks=ranks)
    assert shares[rank] == capacity
    assert sum(shares) == capacity
    assert len(shares) == ranks


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_central_on_no_rank_is_refused(rank: int) -> None:
    with pytest.raises(WorldError, match="no rank of this world") as caught:
        Central(rank).quotas(capacity=10, ranks=4)
    assert caught.value.got == rank


def test_checked_quotas_are_integers_for_every_rank() -> None:
    found = checked_quotas(Fixed([3, 0, 9]), capacity=10, ranks=3)
    assert found.dtype == np.int64
    assert found.tolist() == [3, 0, 9]
    assert checked_quotas(Fixed((7, 7)), capacity=10, ranks=2).tolist() == [7, 7]
    assert checked_quotas(
        Fixed(np.array([7, 7], dtype=np.uint16)), capacity=10, ranks=2
    ).tolist() == [7, 7]
    assert checked_quotas(Balanced(), capacity=10, ranks=4).tolist() == [3, 3, 2, 2]


def test_no_rank_needs_room_for_more_than_the_buffer() -> None:
    assert checked_quotas(Fixed([50, 0]), capacity=10, ranks=2).tolist() == [10, 0]


@pytest.mark.parametrize(
    "answer",
    [
        [5, 4], [10], [10, 0, 0], [-1, 11], [5.0, 5.0], [[5, 5]], ["5", "5"], [True, True], [],
        10, None, [[5], [2, 3]],
    ],
    ids=str,
)
def test_unusable_quotas_are_refused(answer: Any) -> None:
    with pytest.raises(CapacityError):
        checked_quotas(Fixed(answer), capacity=10, ranks=2)


def test_what_is_no_placement_is_refused() -> None:
    with pytest.raises(ConduitError):
        checked_quotas("balanced", capacity=10, ranks=2)  # type: ignore[arg-type]
