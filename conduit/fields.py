"""Fields of a row, and the dtypes that they can have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from conduit.rows import Key

__all__ = ["DTYPES", "NAMES", "Column", "Field"]

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_PLAIN = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _PLAIN + _FLOAT8 if hasattr(torch, name)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a row: its nested key, dtype and shape (without the batch dimension)."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A field's place in the packed row."""

    field: Field
    offset_bytes: int
