"""Rows whose bytes follow from their number, for both sides of a multi-rank test.

Every row that a program produces has a *serial* number, counted over all streams. Its bytes are a
hash of serial, field and byte, so that a row that is torn, shifted or taken for another one shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["FieldSpec", "Serials", "content", "field_bytes", "row_content"]

FieldSpec: TypeAlias = Sequence[Any]
"""A field as JSON carries it: [key parts, dtype's name, shape]."""

Serials: TypeAlias = NDArray[np.int64]

_ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "int16": 2, "uint16": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}
DTYPES = tuple(_ITEM_BYTES)


def field_bytes(spec: FieldSpec) -> int:
    return _ITEM_BYTES[spec[1]] * int(np.prod(spec[2], dtype=np.int64))


def content(spec: FieldSpec, number: int, serials: Serials) -> NDArray[np.uint8]:
    """The bytes of field ``number`` of rows ``serials``: ``[rows, bytes]``."""
    at = np.arange(field_bytes(spec), dtype=np.uint64) + np.uint64(1009 * (number + 1))
    with np.errstate(over="ignore"):
        mixed = (serials.astype(np.uint64)[:, None] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed ^ at * np.uint64(0xD1342543DE82EF95)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
    values = (mixed >> np.uint64(53)).astype(np.uint8)
    if spec[1] == "bool":
        values &= np.uint8(1)
    return values


def row_content(schema: Sequence[FieldSpec], serials: Serials) -> NDArray[np.uint8]:
    """The bytes of whole rows, field by field: ``[rows, bytes]``."""
    fields = [content(spec, number, serials) for number, spec in enumerate(schema)]
    return np.concatenate(fields, axis=1)
