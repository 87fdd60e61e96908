"""Planes whose next batch is gathered on a CUDA stream: what they deliver, alone and over NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.device.test_cuda import (
    ALONE,
    DEVICE,
    SCHEMA,
    assert_same,
    play_on_device,
    program,
    settings,
)
from tests.spmd.cases import make_plane, play
from tests.spmd.ranks import Ranks


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_the_same_bytes_with_and_without_overlap(max_staleness: int, keep: bool) -> None:
    """Of a buffer that fills, wraps around and is emptied, on the GPU as on the CPU."""
    results = [
        play(
            ALONE, schema=SCHEMA, operations=program(4, 60), keep=keep,
            plane=settings(
                device, batch_rows=64, hidden=hidden, overlap=hidden, max_staleness=max_staleness
            ),
        )
        for device, hidden in ((DEVICE, True), (DEVICE, False), (None, True))
    ]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("routing", ["exchangeable", "independent"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_same_bytes_over_nccl(routing: str, max_staleness: int) -> None:
    """By rank and position."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    arguments: dict[str, Any] = {"schema": SCHEMA, "operations": program(5, 40)}
    results = []
    for hidden in (True, False):
        world = Ranks(2, grouped=False)
        try:
            results.append(world.run(play_on_device, **arguments, plane=settings(
                DEVICE, batch_rows=32, routing=routing, hidden=hidden, overlap=hidden,
                max_staleness=max_staleness,
            )))
        finally:
            world.close()
    for one, other in zip(*results, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("own_stream", [False, True])
def test_what_a_long_kernel_still_reads_is_not_gathered_over(own_stream: bool) -> None:
    """On the default stream as on one of the user's, and though the batch is dropped at once."""
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    found, expected = [], []
    with make_plane(
        ALONE, {"x": torch.zeros(4_000)}, capacity=400, batch_rows=128, device=DEVICE, hidden=True
    ) as plane, torch.cuda.stream(stream):
        for step in range(30):
            numbers = torch.arange(20 * step, 20 * step + 20, device=DEVICE).float()
            plane.extend({"x": numbers[:, None].expand(-1, 4_000)})
            batch = plane.sample()
            assert batch is not None
            expected.append(batch["index"].cpu())
            torch.cuda._sleep(30_000_000)
            found.append(batch["x"][:, ::999].clone())
            del batch
        assert plane.report().fresh_slabs < 30, "blocks are used again"
    torch.cuda.synchronize()
    for rows, index in zip(found, expected, strict=True):
        assert torch.equal(rows.cpu(), index.float()[:, None].expand(-1, rows.shape[1]))


ROW = {"x": torch.zeros(5_000), "number": torch.tensor(0)}


def rows(first: int, n: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(first, first + n, device=DEVICE)
    return {"x": numbers.float()[:, None].expand(-1, 5_000), "number": numbers}


def test_rows_are_not_overwritten_before_the_lane_has_read_them() -> None:
    """Extends follow at once upon the call that began to fetch the next batch."""
    with make_plane(
        ALONE, ROW, capacity=40, batch_rows=64, device=DEVICE, hidden=True, staging_rows=40
    ) as plane:
        first = 0
        for _ in range(60):
            plane.extend(rows(first, 30))
            first += 30
            batch = plane.sample()
            assert batch is not None
            assert torch.equal(batch["number"], batch["index"])
            assert bool((batch["x"] == batch["number"].float()[:, None]).all())
