"""Batches fetched on a CUDA stream beside the learner's."""

from __future__ import annotations

import pytest
import torch

from tests.device.test_cuda import ALONE, DEVICE
from tests.spmd.cases import make_plane

EXAMPLE = {"x": torch.zeros(5_000), "number": torch.tensor(0)}


def rows(first: int, n: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(first, first + n, device=DEVICE)
    return {"x": numbers.float()[:, None].expand(-1, 5_000), "number": numbers}


def played(hidden: bool, max_staleness: int) -> list[tuple[list[int], list[int], bool]]:
    found = []
    with make_plane(
        ALONE, EXAMPLE, capacity=300, batch_rows=64, device=DEVICE, hidden=hidden,
        max_staleness=max_staleness,
    ) as plane:
        for step in range(60):
            plane.extend(rows(10 * step, 10))
            batch = plane.sample()
            assert batch is not None
            same = bool((batch["x"] == batch["number"].float()[:, None]).all())
            found.append((batch["index"].tolist(), batch["number"].tolist(), same))
        assert (plane._tracer.total_ns.get("gather", 0) > 0) is hidden
    return found


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_same_batches_as_within_the_call(max_staleness: int) -> None:
    hidden, within = (played(way, max_staleness) for way in (True, False))
    assert hidden == within
    assert all(same for _, _, same in hidden)


def test_a_batch_that_the_stream_still_reads_is_not_overwritten() -> None:
    """The user drops each batch while a long kernel that reads it has not begun yet."""
    sums, expected = [], []
    with make_plane(
        ALONE, EXAMPLE, capacity=300, batch_rows=64, device=DEVICE, hidden=True
    ) as plane:
        for step in range(40):
            plane.extend(rows(10 * step, 10))
            batch = plane.sample()
            assert batch is not None
            expected.append(batch["number"].double().sum())
            torch.cuda._sleep(20_000_000)
            sums.append(batch["x"].double().sum() / 5_000)
            del batch
    assert torch.equal(torch.stack(sums), torch.stack(expected))


def test_rows_are_not_overwritten_before_the_lane_has_read_them() -> None:
    """Extends follow at once upon the call that began to fetch the next batch."""
    with make_plane(
        ALONE, EXAMPLE, capacity=40, batch_rows=64, device=DEVICE, hidden=True, staging_rows=40
    ) as plane:
        first = 0
        for _ in range(60):
            plane.extend(rows(first, 30))
            first += 30
            batch = plane.sample()
            assert batch is not None
            assert torch.equal(batch["number"], batch["index"])
            assert bool((batch["x"] == batch["number"].float()[:, None]).all())
