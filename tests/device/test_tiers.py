"""Tiers of a GPU, and shards over them and host memory: the same bytes as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import conduit
from tests.device.test_cuda import ALONE, SCHEMA, assert_same, program, settings
from tests.spmd.cases import play
from tests.tiers.contract import LAYOUT, check_tier
from tests.tiers.stores import store_of

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["device", "pinned", "host", "disk"])
def test_a_tier_does_what_tiers_do(name: str, tmp_path: Path) -> None:
    check_tier(name, CUDA, tmp_path)


@pytest.mark.parametrize("tiers", [
    ("device", "host"), ("pinned", "host"), ("device", "pinned", "host", "disk"),
])
def test_segments_move_and_rows_stay(tiers: tuple[str, ...], tmp_path: Path) -> None:
    store = store_of(LAYOUT, 640, folder=tmp_path, tiers=tiers, device=CUDA, segment_rows=64)
    rng = np.random.default_rng(1)
    model = rng.integers(0, 256, (640, LAYOUT.row_bytes), dtype=np.uint8)
    store.write(np.arange(640), torch.from_numpy(model.copy()).to(CUDA))
    for _ in range(200):
        assert store.move(int(rng.integers(10)), int(rng.integers(len(tiers))))
        some = rng.permutation(640)[:50]
        model[some] = rng.integers(0, 256, (50, LAYOUT.row_bytes), dtype=np.uint8)
        store.write(some, torch.from_numpy(model[some].copy()).to(CUDA))
        slots = rng.integers(0, 640, 100)
        assert (store.read(slots).cpu().numpy() == model[slots]).all()
    store.close()


@pytest.mark.parametrize("tiers", [
    [conduit.Device("40KB"), conduit.Host()], [conduit.Device("40KB"), conduit.Pinned()],
    [conduit.Host()], [conduit.Pinned()], "auto",
])
def test_a_shard_over_them_gives_the_same_batches(tiers: Any) -> None:
    operations = program(1, 60)
    results = [
        play(ALONE, schema=SCHEMA, operations=operations, plane=settings(
            device, batch_rows=64, **({"tiers": tiers} if device else {})
        )) for device in (None, "cuda")
    ]
    assert_same(*results)
