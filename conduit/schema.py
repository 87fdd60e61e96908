"""Schema and RowLayout: what a row holds, and where each field sits in the packed row.

A row's fields lie together in one aligned record, so that a batch is one gather of rows however
many fields it has, the gathered block can be sent as it is, and the fields of a batch are strided
views on the block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from conduit.blocks import BlockViews, BlockWriter, Records, new_block, records_of
from conduit.errors import SchemaError
from conduit.fields import DTYPES, NAMES, Column, Field
from conduit.rows import Key, Rows, as_tensor, flat_rows, nested, public

__all__ = ["Field", "Key", "Records", "RowLayout", "Rows", "Schema"]

ROW_ALIGNMENT_BYTES = 16
"""Rows start on multiples of the widest dtype, which is also what CUDA vector loads want."""

CACHE_LINE_BYTES = 64

HEAVY_BYTES = 1 << 10
"""From this size on a field is a group of its own."""

RESERVED = frozenset({"index", "loss_scale", "loss_weight", "priority_weight"})
"""Top-level keys that the plane itself writes into a batch."""


@dataclass(frozen=True)
class Schema:
    """Names, dtypes and shapes of a row's fields, in the order of their keys.

    Make one with :meth:`from_example`, or give the fields. Raises SchemaError for an empty schema,
    a key used twice or both as field and as prefix, a reserved key, and a dtype that cannot be
    packed.
    """

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        if not self.fields:
            raise SchemaError("a schema needs at least one field", cure="Give an example row")
        for field in self.fields:
            _check_field(field)
        fields = sorted(self.fields, key=lambda field: field.key)
        for field, following in pairwise(fields):
            # In the order of keys, what repeats or continues a key comes right after it.
            if following.key[: len(field.key)] == field.key:
                raise SchemaError("this key is used more than once", field=public(field.key))
        object.__setattr__(self, "fields", tuple(fields))

    @classmethod
    def from_example(cls, example: Rows, *, batch_dims: int | None = None) -> Schema:
        """The schema of ``example``.

        ``batch_dims`` says how many leading dimensions are not part of a row. A TensorDict knows
        (its ``batch_size``); a plain mapping is read as one row unless told otherwise. Values are
        tensors or numpy arrays; nested mappings, TensorDicts and tuple keys may be mixed. Raises
        SchemaError naming every leaf that is not a tensor.
        """
        if batch_dims is None:
            batch_dims = example.batch_dims if isinstance(example, TensorDictBase) else 0
        fields = []
        for key, value in flat_rows(example).items():
            tensor = as_tensor(key, value)
            if tensor.dim() < batch_dims:
                raise SchemaError(
                    "too few dimensions", field=public(key),
                    expected=f"{batch_dims} batch dimensions", got=tuple(tensor.shape),
                )
            shape = tuple(tensor.shape[batch_dims:])
            fields.append(Field(key=key, dtype=tensor.dtype, shape=shape))
        return cls(tuple(fields))

    @property
    def keys(self) -> list[str | Key]:
        """The fields' keys, as ``TensorDict.select`` takes them."""
        return [public(field.key) for field in self.fields]

    @cached_property
    def description(self) -> str:
        """Canonical JSON: equal exactly when the schemas are equal, on any machine."""
        rows = [[list(f.key), NAMES[f.dtype], list(f.shape)] for f in self.fields]
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def from_description(cls, text: str) -> Schema:
        """The schema that ``description`` describes; SchemaError if the text is not one."""
        try:
            fields = []
            for key, name, shape in json.loads(text):
                if not (isinstance(key, list) and all(_is_size(n) for n in shape)):
                    raise ValueError(key, shape)
                fields.append(Field(key=tuple(key), dtype=DTYPES[name], shape=tuple(shape)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SchemaError("not a schema description", got=text[:80]) from error
        return cls(tuple(fields))

    @property
    def field_texts(self) -> dict[str, str]:
        """Each field's key and what it holds, for people: ``{"('next', 'reward')": "float32[1]"}``.
        """
        return {
            repr(public(f.key)): f"{NAMES[f.dtype]}{list(f.shape)}" for f in self.fields
        }

    @cached_property
    def hash(self) -> int:
        """A stable 63-bit hash of the description."""
        digest = hashlib.sha256(self.description.encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def _check_field(field: Field) -> None:
    key = field.key
    if not key or not all(isinstance(part, str) and part for part in key):
        raise SchemaError(
            "keys are strings or tuples of strings", field=key, got=key,
            expected="a key such as 'reward' or ('next', 'reward')",
        )
    if key[0] in RESERVED:
        raise SchemaError(
            "this key is written by the plane", field=public(key), cure="Rename the field"
        )
    if field.dtype not in NAMES:
        raise SchemaError(
            "this dtype cannot be stored", field=public(key),
            expected="one of " + ", ".join(DTYPES), got=field.dtype,
        )


def _is_size(number: object) -> bool:
    return type(number) is int and number >= 0


class RowLayout:
    """Where each field of a schema sits in a packed row of ``row_bytes`` bytes.

    Fields are ordered by itemsize (widest first), then dtype, then key: every offset is a multiple
    of the field's itemsize without padding, and fields of one dtype are neighbours. Fields of 1 KiB
    and more come after the others, each a group of its own that begins at a multiple of 16 bytes,
    so that a batch can do without it. A row is a multiple of 16 bytes, so any view of any row is
    aligned on CPU and GPU; where it costs at most an eighth more, rows are whole cache lines, which
    makes gathers about 10% faster.

    ``columns`` are the fields in that order, ``tree`` the nested keys with the column's number at
    each leaf.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        order = sorted(
            schema.fields, key=lambda f: (
                f.size_bytes >= HEAVY_BYTES, -f.dtype.itemsize, NAMES[f.dtype], f.key
            )
        )
        columns, offset, starts = [], 0, [0]
        for field in order:
            if field.size_bytes >= HEAVY_BYTES:
                offset += -offset % ROW_ALIGNMENT_BYTES
                starts.append(offset)
            columns.append(Column(field=field, offset_bytes=offset))
            offset += field.size_bytes
        self.columns: tuple[Column, ...] = tuple(columns)
        self.row_bytes = _row_bytes(offset)
        # Without light fields the first heavy one is the first group.
        self._groups = list(pairwise([*dict.fromkeys(starts), self.row_bytes]))
        self._expected = [(column.field.dtype, column.field.shape) for column in columns]
        self.tree = nested({column.field.key: i for i, column in enumerate(columns)})

    def group_of(self, column: int) -> tuple[int, int]:
        """From which byte of a row to which the group goes that a column is in."""
        offset = self.columns[column].offset_bytes
        return next((group for group in self._groups if offset < group[1]), self._groups[-1])

    def block(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Uninitialised packed rows on ``device``, by default the CPU: uint8 ``[rows, row_bytes]``.
        """
        return new_block(rows, self.row_bytes, device)

    def records(self, block: Tensor) -> Records:
        """``block`` as gathers see it: opaque numpy records ``[n]`` on the CPU, else itself."""
        return records_of(block)

    def fields_of(self, block: Tensor) -> BlockViews:
        """The columns of ``block`` as views to be made again and again."""
        return BlockViews(self.columns, block)

    def views(self, block: Tensor) -> dict[Key, Tensor]:
        """Each field of ``block`` (contiguous uint8 ``[n, row_bytes]``) as a view ``[n, *shape]``.

        Nothing is copied; writing to a view writes to the block.
        """
        columns = self.fields_of(block).fresh()
        return {c.field.key: view for c, view in zip(self.columns, columns, strict=True)}

    def tensordict(self, block: Tensor) -> TensorDict:
        """The rows of ``block`` as a TensorDict of views."""
        return TensorDict(nested(self.views(block)), batch_size=[len(block)])

    def check(self, rows: Rows) -> tuple[int, list[Tensor]]:
        """The number of rows and the fields' tensors in column order, or SchemaError.

        Every key must be there and no other; every tensor must be ``[n, *shape]`` of the field's
        dtype with one and the same n.
        """
        values: list[Any] = [None] * len(self.columns)
        if not (isinstance(rows, (Mapping, TensorDictBase)) and self._found(rows, values)):
            self._search(flat_rows(rows), values)
        for i, value in enumerate(values):
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                values[i] = as_tensor(self.columns[i].field.key, value)
        try:
            shape = values[0].shape
            n = shape[0] if len(shape) else -1
            for i, (dtype, row_shape) in enumerate(self._expected):
                value = values[i]
                if value.dtype is not dtype or value.shape != (n, *row_shape) or value.is_meta:
                    self._refuse(self.columns[i].field, value, n)
        except RuntimeError:
            # Torch refuses to tell the shape of a nested tensor: say which field it is.
            for column, value in zip(self.columns, values, strict=True):
                as_tensor(column.field.key, value)
            raise
        return n, values

    def _found(self, rows: Rows, values: list[Any]) -> bool:
        """Fills in ``values`` if ``rows`` are nested just as the schema is: the usual case."""
        pending: list[tuple[Any, Mapping[str, Any]]] = [(rows, self.tree)]
        for node, tree in pending:
            items = dict(node.items())
            if len(items) != len(tree):
                return False
            for name, sub in tree.items():
                value = items.get(name)
                if type(sub) is int:
                    values[sub] = value
                elif isinstance(value, (Mapping, TensorDictBase)):
                    pending.append((value, sub))
                else:
                    return False
                if value is None:
                    return False
        return True

    def _search(self, rows: Mapping[Key, Any], values: list[Any]) -> None:
        """Fills in ``values`` from the leaves of ``rows``, or says what is wrong with their keys.
        """
        known = {column.field.key: i for i, column in enumerate(self.columns)}
        got = [public(key) for key in rows]
        nested(rows)
        for key in known:
            leaf = next((key[:i] for i in range(1, len(key)) if key[:i] in rows), None)
            if leaf is not None:
                raise SchemaError(
                    "nested fields expected", field=public(leaf),
                    expected=f"a mapping with {key[len(leaf)]!r}", got=type(rows[leaf]).__name__,
                )
            if rows.get(key) is None:
                raise SchemaError(
                    "missing field", field=public(key), expected=self.schema.keys, got=got,
                    cure="Add it to the rows, or leave it out of the example",
                )
        for key, value in rows.items():
            if key not in known:
                raise SchemaError(
                    "unknown field", field=public(key), expected=self.schema.keys, got=got,
                    cure="Leave it out, for a TensorDict with .select(*plane.schema.keys)",
                )
            values[known[key]] = value

    def _refuse(self, field: Field, value: Tensor, n: int) -> NoReturn:
        key, shape = public(field.key), tuple(value.shape)
        if len(shape) > 0 and shape[1:] == field.shape and shape[0] != n and n >= 0:
            first = self.columns[0].field
            raise SchemaError(
                "ragged rows", field=key, got=f"{shape[0]} rows",
                expected=f"{n} rows, as in field {public(first.key)!r}",
            )
        if shape != (n, *field.shape):
            raise SchemaError(
                "wrong shape", field=key, expected=("n", *field.shape), got=shape,
                cure="extend takes [n, *row shape], add takes one row; an example that is a plain "
                "dict is read as one row (for a batch of rows give a TensorDict with its "
                "batch_size)",
            )
        if value.dtype is not field.dtype:
            raise SchemaError(
                "wrong dtype", field=key, expected=field.dtype, got=value.dtype,
                cure=f"Convert it with .to({field.dtype})",
            )
        raise SchemaError(
            "a tensor without data", field=key, expected="a tensor on a real device", got="meta"
        )

    def one_row(self, row: Rows) -> dict[Key, Tensor]:
        """``row`` (tensors ``[*shape]``) as a batch of one, to be checked like any other."""
        return {key: as_tensor(key, value).unsqueeze(0) for key, value in flat_rows(row).items()}

    def pack(self, values: Sequence[Tensor], out: Tensor) -> None:
        """Copies checked ``values`` (column order, each ``[n, *shape]``) into ``out``.

        ``out`` is contiguous uint8 ``[n, row_bytes]``.
        """
        BlockWriter(self.columns, out).write(values, 0, len(out))


def _row_bytes(payload_bytes: int) -> int:
    def rounded(unit: int) -> int:
        return max(-(-payload_bytes // unit), 1) * unit

    narrow, wide = rounded(ROW_ALIGNMENT_BYTES), rounded(CACHE_LINE_BYTES)
    return wide if 8 * wide <= 9 * narrow else narrow
