"""Windows: what is delivered where a row of a batch is put together from several stored rows.

The rows of a window lie side by side in one record, as stored rows do in a block, so a batch of
windows is still one gather into one block, moves between ranks as one, and its fields are views: a
stack of frames is the same field of neighbouring rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from conduit.blocks import new_block, records_of
from conduit.fields import Field
from conduit.rows import Key, nested
from conduit.schema import Records, RowLayout, Schema

__all__ = ["BatchLayout", "Shown", "Views", "WindowLayout"]


class Views(Protocol):
    """The columns of one block as views."""

    def fresh(self) -> list[Tensor]:
        """New views ``[n, *shape]`` of all fields, in column order, which share no history."""
        ...


class BatchLayout(Protocol):
    """How a row of a batch lies in ``row_bytes`` bytes."""

    row_bytes: int
    tree: dict[str, Any]

    def block(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Uninitialised memory for ``rows`` of them: uint8 ``[rows, row_bytes]``."""
        ...

    def records(self, block: Tensor) -> Records:
        """``block`` as gathers see it."""
        ...

    def fields_of(self, block: Tensor) -> Views:
        """Its fields."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A field of a batch: column ``column`` of row ``first`` of each window or, where ``rows`` is
    given, of so many rows from that one on, with a dimension for them."""

    key: Key
    column: int
    first: int
    rows: int | None = None


class WindowLayout:
    """Windows of ``length`` rows of layout ``stored``, of which a batch has the fields ``shown``.
    """

    def __init__(self, stored: RowLayout, length: int, shown: Sequence[Shown]) -> None:
        self.stored, self.length, self.shown = stored, length, tuple(shown)
        self.row_bytes = length * stored.row_bytes
        self.tree = nested({field.key: i for i, field in enumerate(shown)})
        self.schema = Schema(tuple(
            Field(key=one.key, dtype=field.dtype, shape=_shape(one, field))
            for one in shown for field in [stored.columns[one.column].field]
        ))

    def block(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Uninitialised windows on ``device``, by default the CPU: uint8 ``[rows, row_bytes]``."""
        return new_block(rows, self.row_bytes, device)

    def records(self, block: Tensor) -> Records:
        """``block`` as gathers see it: opaque numpy records ``[n]`` on the CPU, else itself."""
        return records_of(block)

    def rows_of(self, windows: Records) -> Records:
        """The stored rows that the records of a contiguous block are made of."""
        if isinstance(windows, Tensor):
            return windows.view(-1, self.stored.row_bytes)
        return windows.view(f"V{self.stored.row_bytes}")

    def fields_of(self, block: Tensor) -> WindowViews:
        """The fields of ``block``."""
        return WindowViews(self, block)


class WindowViews:
    """The fields of one block of windows (contiguous uint8 ``[n, row_bytes]``) as views. Fields of
    a window may share rows."""

    def __init__(self, layout: WindowLayout, block: Tensor) -> None:
        self._storage, stored = block.untyped_storage(), layout.stored
        self._places: list[tuple[Tensor, int, tuple[int, ...], tuple[int, ...]]] = []
        for one in layout.shown:
            column = stored.columns[one.column]
            field, size = column.field, column.field.dtype.itemsize
            strides = [layout.row_bytes // size]
            if one.rows is not None:
                strides.append(stored.row_bytes // size)
            within = [math.prod(field.shape[i + 1 :]) for i in range(len(field.shape))]
            start = (one.first * stored.row_bytes + column.offset_bytes) // size
            with torch.inference_mode(False):
                like = torch.empty(0, dtype=field.dtype, device=block.device)
            self._places.append(
                (like, start, (len(block), *_shape(one, field)), (*strides, *within))
            )

    def fresh(self) -> list[Tensor]:
        """New views of all fields, in the order in which they are shown."""
        # Not views of one tensor, as autograd understands it: what a user does to one of them in
        # place is no business of the others.
        return [
            torch.empty_like(like).set_(self._storage, start, shape, strides)
            for like, start, shape, strides in self._places
        ]


def _shape(one: Shown, field: Field) -> tuple[int, ...]:
    return field.shape if one.rows is None else (one.rows, *field.shape)
