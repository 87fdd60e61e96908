"""The memory tier: rows go in and out by slot, and what cannot fit is refused beforehand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import conduit.tiers.memory
from conduit.errors import CapacityError
from conduit.schema import RowLayout, Schema
from conduit.tiers.memory import MemoryTier, available_bytes
from tests.properties import examples

CPU = torch.device("cpu")
LAYOUT = RowLayout(Schema.from_example({"x": torch.zeros(5), "done": torch.tensor(False)}))


def tier_of(rows: int, all_rows: int | None = None) -> MemoryTier:
    return MemoryTier(LAYOUT, rows=rows, all_rows=all_rows or rows, device=CPU)


@examples(100)
@given(data=st.data(), rows=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_rows_come_back_from_their_slots(data: st.DataObject, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tier = tier_of(rows)
    model = rng.integers(0, 256, (rows, LAYOUT.row_bytes), dtype=np.uint8)
    tier.write(np.arange(rows), torch.from_numpy(model.copy()))
    for _ in range(3):
        written = data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows))
        fresh = rng.integers(0, 256, (len(written), LAYOUT.row_bytes), dtype=np.uint8)
        tier.write(np.array(written, dtype=np.int64), torch.from_numpy(fresh))
        for slot, row in zip(written, fresh, strict=True):
            model[slot] = row
        slots = data.draw(st.lists(st.integers(0, rows - 1), max_size=3 * rows))
        out = LAYOUT.block(len(slots))
        tier.gather(np.array(slots, dtype=np.int64), LAYOUT.records(out))
        assert out.tolist() == [model[slot].tolist() for slot in slots]
    assert tier.block.tolist() == model.tolist()


def test_a_gather_into_a_part_of_a_block_leaves_the_rest() -> None:
    tier = tier_of(4)
    tier.block.fill_(7)
    out = LAYOUT.block(5)
    out.fill_(9)
    tier.gather(np.array([3, 0]), LAYOUT.records(out[1:3]))
    assert [row.unique().tolist() for row in out] == [[9], [7], [7], [9], [9]]


def test_a_tier_knows_its_size_and_name() -> None:
    tier = tier_of(12)
    assert tier.name == "host"
    assert tier.nbytes == 12 * LAYOUT.row_bytes
    assert tier.block.shape == (12, LAYOUT.row_bytes)
    tier.close()
    assert tier.nbytes == 0
    tier.close()


def test_what_cannot_fit_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conduit.tiers.memory, "available_bytes", lambda device: 1000)
    fits = 1000 // LAYOUT.row_bytes
    assert tier_of(fits).nbytes <= 1000
    with pytest.raises(CapacityError, match="host tier cannot hold") as caught:
        tier_of(fits + 1)
    assert "factor" in str(caught.value.cure)
    # Ranks of one host allocate from the same memory.
    assert tier_of(1, all_rows=fits).nbytes == LAYOUT.row_bytes
    with pytest.raises(CapacityError, match="host tier cannot hold"):
        tier_of(1, all_rows=fits + 1)


def test_a_petabyte_is_refused() -> None:
    with pytest.raises(CapacityError, match="cannot hold"):
        tier_of(10**15 // LAYOUT.row_bytes)


def test_available_memory_is_believable() -> None:
    assert 0 < available_bytes(CPU) < 1 << 50
