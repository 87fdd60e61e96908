"""Rows that carry a number in every field, so that a test sees at once whether a row is whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

__all__ = ["EXAMPLE", "assert_batch", "numbered"]

EXAMPLE = {
    "number": torch.tensor(0),
    "observation": torch.zeros(3),
    "pixels": torch.zeros(2, 5, dtype=torch.uint8),
    "odd": torch.tensor(False),
    "next": {"observation": torch.zeros(3), "reward": torch.zeros(1, dtype=torch.float64)},
    "nothing": torch.zeros(0),
}


def numbered(numbers: Sequence[int]) -> TensorDict:
    """Rows for these numbers."""
    n = torch.tensor(list(numbers), dtype=torch.int64)
    steps = torch.arange(10, dtype=torch.int64).reshape(2, 5)
    rows = {
        "number": n,
        "observation": torch.stack([n, n + 1, -n], 1).float(),
        "pixels": ((n[:, None, None] * 7 + steps) % 256).to(torch.uint8),
        "odd": n % 2 == 1,
        "next": {
            "observation": torch.stack([n + 2, n * 2, n * 3], 1).float(),
            "reward": (n[:, None] / 7).double(),
        },
        "nothing": torch.zeros(len(n), 0),
    }
    return TensorDict(rows, batch_size=[len(n)])


def assert_batch(batch: TensorDict | None, numbers: Sequence[int], indices: Sequence[int]) -> None:
    """The batch is exactly these rows, in this order."""
    assert batch is not None
    assert batch.batch_size == (len(numbers),)
    index = batch["index"]
    assert index.dtype == torch.int64
    assert index.tolist() == list(indices)
    assert batch["loss_scale"] == 1.0
    expected = numbered(numbers)
    keys = set(expected.keys(True, True))
    assert set(batch.keys(True, True)) == keys | {"index"}
    for key in keys:
        value, wanted = batch[key], expected[key]
        assert isinstance(value, Tensor)
        assert value.dtype == wanted.dtype
        assert torch.equal(value, wanted), key
