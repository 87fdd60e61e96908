"""How many examples property tests try, and the strategies that several of them share.

Runs are repeatable: the same examples every time. ``CONDUIT_EXAMPLES=20 pytest`` tries twenty times
as many, and other ones each time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from conduit.fields import DTYPES, Field
from conduit.schema import Schema

__all__ = ["examples", "hosts_of", "random_rows", "raw", "schemas"]

_TIMES = int(os.environ.get("CONDUIT_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """Settings of a property test that usually tries ``count`` examples."""
    return settings(max_examples=count * _TIMES, derandomize=_TIMES == 1)


def raw(tensor: Tensor) -> bytes:
    """The tensor's bytes in row-major order: equal for NaNs too, and for -0.0 against 0.0 not."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def random_rows(
    schema: Schema, rows: int, rng: np.random.Generator
) -> dict[tuple[str, ...], Tensor]:
    """Random bit patterns, so every kind of NaN and infinity too, as ``[rows, *shape]``."""
    return {f.key: _random_tensor(f.dtype, (rows, *f.shape), rng) for f in schema.fields}


def _random_tensor(
    dtype: torch.dtype, shape: Sequence[int], rng: np.random.Generator
) -> Tensor:
    items = int(np.prod(shape, dtype=np.int64))
    high = 2 if dtype is torch.bool else 256
    bits = torch.from_numpy(rng.integers(0, high, items * dtype.itemsize, dtype=np.uint8))
    # A tensor of its own, and aligned, however few the bytes are.
    made = torch.empty(shape, dtype=dtype)
    if items:
        made.reshape(-1).view(torch.uint8).copy_(bits)
    return made


@st.composite
def hosts_of(draw: st.DrawFn, ranks: int) -> list[int]:
    """Each rank's host; hosts are numbered in the order of their first ranks."""
    numbers: dict[int, int] = {}
    chosen = draw(st.lists(st.integers(0, ranks - 1), min_size=ranks, max_size=ranks))
    return [numbers.setdefault(host, len(numbers)) for host in chosen]


_NAMES = st.sampled_from(["action", "done", "next", "observation", "reward", "é", "a b"])
_KEYS = st.lists(_NAMES, min_size=1, max_size=3).map(tuple)
_SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Schemas with any keys that fit together, any dtypes, scalars and fields of size zero."""
    keys: list[tuple[str, ...]] = []
    for key in draw(st.lists(_KEYS, min_size=1, max_size=8, unique=True)):
        if all(key[: len(k)] != k and k[: len(key)] != key for k in keys):
            keys.append(key)
    return Schema(tuple(
        Field(key=key, dtype=draw(st.sampled_from(list(DTYPES.values()))), shape=draw(_SHAPES))
        for key in keys
    ))
