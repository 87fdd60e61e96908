"""Planes whose rows and batches lie on a GPU: the same bytes as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

import conduit
from tests.spmd.cases import Rows, make_plane, play
from tests.spmd.ranks import Rank, Ranks
from tests.spmd.rows import DTYPES, FieldSpec

DEVICE = "cuda"
ALONE = Rank(0, 1)

SCHEMA: Sequence[FieldSpec] = [
    *([[dtype], dtype, [3]] for dtype in DTYPES), [["next", "scalar"], "float32", []],
    [["next", "image"], "uint8", [2, 5, 7]], [["next", "nothing"], "float32", [0]],
]


def program(seed: int, steps: int) -> list[list[Any]]:
    """Fills and wraps the buffer, with large commits, flushes and a fresh start in between."""
    random = np.random.default_rng(seed)
    operations: list[list[Any]] = []
    for step in range(steps):
        most = 200 if step % 10 == 9 else 12
        operations.append(["extend", random.integers(0, most, 4).tolist()])
        operations.append(["empty" if step == 33 else "flush" if step % 7 == 6 else "sample"])
    return operations


def settings(device: str | None, **more: Any) -> dict[str, Any]:
    """Of a plane of 300 rows; also where ``play`` leaves nothing to the default."""
    return {"capacity": 300, "min_size": 20, "seed": 3, "device": device} | more


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["sizes"] == other["sizes"]
    for a, b in zip(one["samples"], other["samples"], strict=True):
        if isinstance(a, dict):
            assert a["index"].tobytes() == b["index"].tobytes()
            assert a["rows"].tobytes() == b["rows"].tobytes()
        else:
            assert a == b


@pytest.mark.parametrize("keep", [False, True])
def test_the_same_bytes_as_on_the_cpu(keep: bool) -> None:
    operations = program(1, 60)
    results = [
        play(
            ALONE, schema=SCHEMA, operations=operations, keep=keep,
            plane=settings(device, batch_rows=64),
        )
        for device in (None, DEVICE)
    ]
    assert_same(*results)
    assert sum(isinstance(sample, dict) for sample in results[0]["samples"]) > 40


def on_device(batch: TensorDictBase) -> bool:
    leaves = [
        leaf for leaf in batch.values(include_nested=True, leaves_only=True)
        if isinstance(leaf, torch.Tensor)
    ]
    return len(leaves) > 1 and all(leaf.device.type == DEVICE for leaf in leaves)


@pytest.mark.parametrize("source", ["cpu", DEVICE])
def test_batches_lie_on_the_device(source: str) -> None:
    """Wherever the rows were when they were staged; a program may write over them at once."""
    rows = Rows([[["number"], "int64", [5]], [["next", "reward"], "float32", []]])
    with make_plane(ALONE, rows.schema, capacity=100, batch_rows=32, device=DEVICE) as plane:
        number = torch.empty(10, 5, dtype=torch.int64, device=source)
        for step in range(20):
            number[:] = torch.arange(step * 10, step * 10 + 10, device=source)[:, None]
            reward = torch.full((10,), float(step), device=source)
            plane.extend({"number": number, ("next", "reward"): reward})
            number.fill_(-1)
            batch = plane.sample(contiguous=step % 2 == 0)
            assert batch is not None and on_device(batch)
            assert torch.equal(batch["number"], batch["index"][:, None].expand(-1, 5))
            assert torch.equal(batch["next", "reward"], (batch["index"] // 10).float())
        assert plane.report().device.startswith(DEVICE)


def test_kept_batches_never_change() -> None:
    """Also a slice of one, a product that autograd keeps for backward, and work that is still in
    the stream when the batch is dropped."""
    weight = torch.full((1,), 2.0, device=DEVICE, requires_grad=True)
    kept, losses, sums = [], [], []
    example = {"x": torch.zeros(2_000)}
    with make_plane(ALONE, example, capacity=500, batch_rows=256, device=DEVICE) as plane:
        for step in range(60):
            first = step * 20
            values = torch.arange(first, first + 20, device=DEVICE).float()
            plane.extend({"x": values[:, None].expand(-1, 2_000)})
            batch = plane.sample()
            assert batch is not None
            if step % 3 == 0:
                kept.append((batch["x"][5:50], batch["index"][5:50].clone()))
            elif step % 3 == 1:
                losses.append(((batch["x"] * weight).mean(), batch["index"].double().mean()))
            else:
                # Long enough that the next gather is issued while this is still running.
                total = batch["x"]
                for _ in range(20):
                    total = total * 1.0 + batch["x"] * 0.0
                sums.append((total[:, 7].clone(), batch["index"].clone()))
            del batch
        fresh = plane.report().fresh_slabs
    for x, index in kept:
        assert torch.equal(x, index[:, None].float().expand(-1, 2_000))
    for loss, mean in losses:
        weight.grad = None
        loss.backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad[0].double(), mean, rtol=1e-4, atol=1e-2)
    for column, index in sums:
        assert torch.equal(column, index.float())
    assert len(kept) + len(losses) <= fresh < 60, "dropped batches are used again"


def test_the_shard_must_fit_the_device() -> None:
    with pytest.raises(conduit.CapacityError, match="device"):
        make_plane(ALONE, {"x": torch.zeros(1_000)}, capacity=10**12, batch_rows=4, device=DEVICE)


def play_on_device(rank: Rank, **arguments: Any) -> dict[str, Any]:
    """``play`` on the GPU that this rank was given."""
    torch.cuda.set_device(rank.number)
    return play(rank, **arguments)


@pytest.mark.parametrize("routing", ["exchangeable", "independent"])
@pytest.mark.parametrize("placement", ["balanced", "central"])
def test_two_ranks_over_nccl(routing: str, placement: str) -> None:
    """By rank and position the same as over Gloo."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    arguments: dict[str, Any] = {"schema": SCHEMA, "operations": program(2, 40)}
    results = []
    for device, function in ((None, play), (DEVICE, play_on_device)):
        world = Ranks(2, grouped=False)
        try:
            results.append(world.run(function, **arguments, plane=settings(
                device, batch_rows=32, routing=routing, placement=placement, quotas=[0, 300]
            )))
        finally:
            world.close()
    for one, other in zip(*results, strict=True):
        assert_same(one, other)
