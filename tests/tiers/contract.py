"""What every tier does: checked by ``check_tier`` wherever the tier's memory can be had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from conduit.schema import RowLayout, Schema
from conduit.tiers.mapped import MappedRing
from conduit.tiers.tier import Ring, Tier
from tests.tiers.stores import tier_of

__all__ = ["LAYOUT", "check_tier"]

LAYOUT = RowLayout(Schema.from_example({"x": torch.zeros(13), "done": torch.tensor(False)}))
SEGMENTS, HELD = 7, 4


def check_tier(name: str, device: torch.device, folder: Path) -> None:
    """Rows go in and out by slot, in segments that come and go, and nothing else is touched."""
    ring = Ring(layout=LAYOUT, rows=7 * 64 - 5, segment_rows=64, device=device)
    assert ring.segments == SEGMENTS
    mapped = MappedRing(ring)
    tier = tier_of(name, ring, mapped, folder, HELD)
    rng = np.random.default_rng(5)
    model = rng.integers(0, 256, (SEGMENTS * 64, LAYOUT.row_bytes), dtype=np.uint8)
    try:
        assert (tier.name, tier.segments, tier.free) == (name, HELD, HELD)
        held: list[int] = []
        for step in range(60):
            if len(held) < HELD and (step < HELD or rng.random() < 0.5):
                segment = int(rng.choice([s for s in range(SEGMENTS) if s not in held]))
                tier.hold(segment)
                held.append(segment)
                slots = ring.slots(segment)
                tier.write(slots, rows_of(model[slots], device))
            elif len(held) > 1 and rng.random() < 0.5:
                tier.release(held.pop(int(rng.integers(len(held)))))
            assert tier.free == HELD - len(held)
            slots = np.concatenate([ring.slots(segment) for segment in held])
            some = rng.permutation(slots)[: rng.integers(0, 40)]
            model[some] = rng.integers(0, 256, (len(some), LAYOUT.row_bytes), dtype=np.uint8)
            tier.write(some, rows_of(model[some], device))
            check_gather(tier, rng.choice(slots, 50), model, device)
            check_gather(tier, slots, model, device)
        tier.sync()
        check_gather(tier, slots, model, device)
    finally:
        tier.close()
    assert tier.free == 0
    tier.close()
    assert not list(folder.iterdir())


def rows_of(rows: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(rows.copy()).to(device)


def check_gather(tier: Tier, slots: np.ndarray, model: np.ndarray, device: torch.device) -> None:
    """Into a slice of a block, of which the rest stays as it was."""
    block = LAYOUT.block(len(slots) + 5, device)
    block.fill_(0xA5)
    tier.gather(slots, LAYOUT.records(block[2 : 2 + len(slots)]))
    assert (block[2 : 2 + len(slots)].cpu().numpy() == model[slots]).all()
    assert (block[:2] == 0xA5).all() and (block[2 + len(slots) :] == 0xA5).all()
