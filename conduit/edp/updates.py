"""Late columns: values of rows that are already in the buffer, on their way to the rows' holders.

They are staged like new rows and applied by the next commit, after its new rows have come, in the
order of ranks and of calls: of several values for one field of a row the last one stays. Rows that
have left by then are ignored and counted.

What travels is a list of blocks, one for each ``update`` call: numbers (how many rows and fields,
which fields), the rows' logical indices, then field after field. Everything begins at multiples of
eight bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conduit.errors import SchemaError
from conduit.rows import Key, Rows, flat_rows, public
from conduit.schema import RowLayout, Schema

__all__ = ["Update", "Updates", "decoded", "encoded"]

Index = NDArray[np.int64]
_WORD = 8


class Update(NamedTuple):
    """Values for rows: ``columns`` are numbers of fields in the layout, ``values[i]`` (contiguous
    uint8 ``[rows, bytes]``) the bytes of field ``columns[i]`` for the rows at logical ``indices``.
    """

    indices: Index
    columns: list[int]
    values: list[Tensor]

    def at(self, places: Index) -> Update:
        """Those of some rows."""
        chosen = torch.from_numpy(places)
        return Update(self.indices[places], self.columns, [v[chosen] for v in self.values])

    def last_of_each(self) -> Update:
        """Without rows that come again later in it."""
        backwards = self.indices[::-1]
        _, firsts = np.unique(backwards, return_index=True)
        if len(firsts) == len(backwards):
            return self
        return self.at(np.sort(len(backwards) - 1 - firsts))


class Updates:
    """The updates staged on this rank."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._numbers = {c.field.key: i for i, c in enumerate(layout.columns)}
        self._layouts: dict[tuple[Key, ...], RowLayout] = {}
        self.staged: list[Update] = []

    @property
    def rows(self) -> int:
        """Rows of all that is staged."""
        return sum(len(update.indices) for update in self.staged)

    def stage(self, index: Any, values: Rows, *, end: int) -> None:
        """Stages values for the rows at logical ``index`` (int64 ``[n]``, each below ``end``).
        Raises SchemaError, and stages nothing then."""
        indices = _checked_index(index, end)
        flat = flat_rows(values)
        unknown = [key for key in flat if key not in self._numbers]
        if unknown or not flat:
            raise SchemaError(
                "unknown field" if unknown else "no field to update",
                field=public(unknown[0]) if unknown else None, got=[public(key) for key in flat],
                expected=f"some of {self._layout.schema.keys}",
            )
        layout = self._part(tuple(flat))
        n, tensors = layout.check(flat)
        if n != len(indices):
            raise SchemaError("ragged rows", field="index", expected=f"{n} rows, as in the values",
                              got=f"{len(indices)} rows")
        if n:
            self.staged.append(Update(
                indices, [self._numbers[column.field.key] for column in layout.columns],
                [_bytes_of(tensor, n) for tensor in tensors],
            ))

    def take(self) -> list[Update]:
        """All that is staged, which then no longer is."""
        staged, self.staged = self.staged, []
        return staged

    def _part(self, keys: tuple[Key, ...]) -> RowLayout:
        """The layout of some fields only."""
        if keys not in self._layouts:
            fields = {column.field.key: column.field for column in self._layout.columns}
            self._layouts[keys] = RowLayout(Schema(tuple(fields[key] for key in keys)))
        return self._layouts[keys]


def _checked_index(index: Any, end: int) -> Index:
    found = index.detach().cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    if found.ndim != 1 or found.dtype != np.int64:
        raise SchemaError(
            "logical indices expected", field="index", expected="int64 [n], as in batch['index']",
            got=f"{found.dtype} {list(found.shape)}",
        )
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < end:
        raise SchemaError("there never was such a row", field="index",
                          expected=f"0 to {end - 1}", got=f"{found.min()} to {found.max()}")
    return found.copy()


def _bytes_of(tensor: Tensor, rows: int) -> Tensor:
    """A copy of its bytes: uint8 ``[rows, bytes]``."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    own = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    own.copy_(plain)
    return own.reshape(rows, -1).view(torch.uint8) if own.numel() else own.new_empty(
        (rows, 0), dtype=torch.uint8
    )


def encoded(updates: Sequence[Update]) -> NDArray[np.uint8]:
    """The blocks of ``updates``, one after the other."""
    parts: list[NDArray[np.uint8]] = []
    for update in updates:
        head = [len(update.indices), len(update.columns), *update.columns]
        parts += [np.array(head, dtype=np.int64).view(np.uint8), update.indices.view(np.uint8)]
        for values in update.values:
            raw = values.numpy().reshape(-1)
            parts += [raw, np.zeros(-len(raw) % _WORD, dtype=np.uint8)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)


def decoded(data: NDArray[np.uint8], layout: RowLayout) -> Iterator[Update]:
    """The updates in ``data``, which ends with zeros or with the last block."""
    at = 0

    def numbers(count: int) -> Index:
        nonlocal at
        at += count * _WORD
        return data[at - count * _WORD : at].view(np.int64)

    while at + 2 * _WORD <= len(data):
        rows, fields = numbers(2).tolist()
        if rows == 0:
            return
        columns = numbers(fields).tolist()
        indices = numbers(rows).copy()
        values = []
        for column in columns:
            nbytes = rows * layout.columns[column].field.size_bytes
            values.append(torch.from_numpy(data[at : at + nbytes].copy()).view(rows, -1)
                          if nbytes else torch.empty(rows, 0, dtype=torch.uint8))
            at += nbytes + -nbytes % _WORD
        yield Update(indices, columns, values)
