"""The collective calls of a plane as a program sees them on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import conduit
from tests.spmd.cases import make_plane
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank

EXAMPLE = {"x": torch.zeros(3), "next": {"reward": torch.zeros(1)}}


def rows(n: int, value: float = 0.0) -> dict[str, Any]:
    return {"x": torch.full((n, 3), value), "next": {"reward": torch.full((n, 1), value)}}


def below_min_size(rank: Rank) -> list[Any]:
    """Only the last rank produces, 3 rows a step; the buffer is large enough from step 3 on."""
    rank.jitter(1, 2.0)
    seen: list[Any] = []
    with make_plane(rank, EXAMPLE, capacity=50, batch_rows=4, min_size=10) as plane:
        for _ in range(6):
            if rank.number == rank.size - 1:
                plane.extend(rows(3))
            rank.pause()
            size_before = len(plane)
            batch = plane.sample()
            seen.append([size_before, None if batch is None else len(batch), len(plane)])
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_below_min_size_every_rank_gets_none(pools: Pools, ranks: int) -> None:
    expected = [
        [0, None, 3], [3, None, 6], [6, None, 9], [9, 4, 12], [12, 4, 15], [15, 4, 18]
    ]
    assert pools[ranks].run(below_min_size) == [expected] * ranks


def empty_at_first(rank: Rank) -> list[Any]:
    seen: list[Any] = []
    with make_plane(rank, EXAMPLE, capacity=50, batch_rows=4) as plane:
        for step in range(6):
            if step == 2 and rank.number == 0:
                plane.extend(rows(5))
            if step == 4:
                # What was staged is forgotten too.
                plane.extend(rows(2))
                plane.empty()
            try:
                batch = plane.sample()
                assert batch is not None
                seen.append(sorted(set(batch["index"].tolist())) <= list(range(5)) or "strange")
            except conduit.EmptyError as error:
                assert error.rank == rank.number and "extend" in str(error)
                seen.append("EmptyError")
        plane.extend(rows(1))
        batch = plane.sample()
        assert batch is not None
        # Logical indices go on after empty(): the five rows before it are never meant again.
        seen.append(min(batch["index"].tolist()) >= 5)
    return seen


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_empty_buffer_is_an_error_everywhere_and_no_failure(pools: Pools, ranks: int) -> None:
    expected = ["EmptyError"] * 2 + [True] * 2 + ["EmptyError"] * 2 + [True]
    for seen in pools[ranks].run(empty_at_first):
        # Which of the five rows a rank gets is up to the draws.
        assert [one if one == "EmptyError" else bool(one) for one in seen] == expected


def agreements(rank: Rank) -> list[int]:
    rank.jitter(2, 2.0)
    with make_plane(rank, EXAMPLE, capacity=50, batch_rows=4) as plane:
        plane.extend(rows(3))
        found = []
        for flag in (
            rank.number, -rank.number, rank.number == 1, False, -(2**63) + rank.number,
            2**63 - 1 - rank.number,
        ):
            rank.pause()
            found.append(plane.agree(flag))
        # It commits nothing.
        assert len(plane) == 0
        plane.flush()
        assert len(plane) == 3 * rank.size
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_agree_is_the_largest_flag(pools: Pools, ranks: int) -> None:
    last = ranks - 1
    expected = [last, 0, 1, 0, -(2**63) + last, 2**63 - 1]
    assert pools[ranks].run(agreements) == [expected] * ranks


def accounts(rank: Rank) -> dict[str, Any]:
    rank.jitter(3, 1.0)
    with make_plane(
        rank, EXAMPLE, capacity=40, batch_rows=8, hosts=[0, 1, 0, 1], name="accounted"
    ) as plane:
        for step in range(10):
            plane.extend(rows(2 * rank.number + step % 2))
            plane.sample()
        batches = [plane.sample() for _ in range(3)]
        assert all(isinstance(batch, TensorDict) for batch in batches)
        report = plane.report()
        assert "accounted" in str(report) and f"rank {rank.number} of 4" in str(report)
    # What it was can still be read.
    assert plane.report().as_dict() == report.as_dict() | {
        "shard_bytes": 0, "tiers": (("host", 0),), "blocked_ms": plane.report().blocked_ms,
    }
    return report.as_dict()


def test_the_reports_of_all_ranks_add_up(pools: Pools) -> None:
    reports = pools[4].run(accounts)
    for number, report in enumerate(reports):
        assert (report["rank"], report["ranks"], report["hosts"]) == (number, 4, 2)
        assert report["rows"] == 40 and report["samples"] == 13
        assert report["rows_delivered"] == 13 * 8
        assert report["rows_staged"] == 20 * number + 5
        assert report["rows_committed"] == 20 * 6 + 20
        assert report["late_rows"] == reports[0]["late_rows"] > 0
        assert report["exchanges"] == reports[0]["exchanges"] > 0
        assert report["blocked_ms"] > 0
    assert sum(report["shard_rows"] for report in reports) == 40
    assert sum(report["rows_staged"] for report in reports) == reports[0]["rows_committed"]


def uneven_batches(rank: Rank) -> list[int]:
    """Rows of a batch: fields, index and scale belong to the same rows and are in one order."""
    with make_plane(rank, EXAMPLE, capacity=64, batch_rows=16) as plane:
        plane.extend(rows(0))
        if rank.number == 1:
            plane.add({"x": torch.zeros(3), ("next", "reward"): torch.zeros(1)})
            plane.extend(rows(20, 1.0))
        batch = plane.sample()
        assert batch is not None and batch.batch_size == (16,)
        assert batch["index"].dtype is torch.int64 and batch["loss_scale"] == 1.0
        assert torch.equal(batch["next", "reward"][:, 0], (batch["index"] > 0).float())
        assert plane.ranks == rank.size and plane.rank == rank.number
        assert (plane.capacity, plane.batch_size, plane.min_size) == (64, 16, 0)
        return list(batch["index"].tolist())


def test_a_rank_may_produce_nothing(pools: Pools) -> None:
    for batch in pools[4].run(uneven_batches):
        assert set(batch) <= set(range(21))


def kept_batches(rank: Rank) -> int:
    """Keeps every batch over many commits and exchanges, and looks at all of them at the end."""
    rank.jitter(4, 0.5)
    kept = []
    example = {"number": torch.zeros(40, dtype=torch.int64)}
    with make_plane(
        rank, example, capacity=60, batch_rows=32, routing="independent", staging_rows=10
    ) as plane:
        made = 0
        for step in range(50):
            by_rank = [(step + r) % 5 or 1 for r in range(rank.size)]
            n, first = by_rank[rank.number], made + sum(by_rank[: rank.number])
            made += sum(by_rank)
            plane.extend({"number": torch.arange(first, first + n)[:, None].expand(n, 40)})
            rank.pause()
            batch = plane.sample()
            assert batch is not None
            # A slice alone must keep the batch as it is, too.
            kept.append((batch["number"][3:9], batch["index"][3:9].clone()))
            if step % 2:
                kept.append((batch["number"], batch["index"]))
    for number, index in kept:
        assert torch.equal(number, index[:, None].expand(-1, 40))
    return len(kept)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_kept_batches_never_change(pools: Pools, ranks: int) -> None:
    assert pools[ranks].run(kept_batches) == [75] * ranks


def signs_of_zero(rank: Rank) -> list[bool]:
    """Whether zeros of a batch are negative, as they were when they were staged."""
    seen = []
    with make_plane(rank, {"x": torch.zeros(4)}, capacity=50, batch_rows=8) as plane:
        plane.extend({"x": torch.full((10, 4), -0.0)})
        for contiguous in (False, True):
            batch = plane.sample(contiguous=contiguous)
            assert batch is not None and (batch["x"] == 0).all()
            seen.append(bool(batch["x"].signbit().all()))
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_negative_zeros_stay_negative(pools: Pools, ranks: int) -> None:
    assert pools[ranks].run(signs_of_zero) == [[True, True]] * ranks
