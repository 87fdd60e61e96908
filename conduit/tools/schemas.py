"""Schemas by name or from a file, and random rows of any schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from conduit.errors import SchemaError
from conduit.fields import DTYPES, Field
from conduit.schema import RowLayout, Schema
from conduit.tools.arguments import UsageError

__all__ = ["NamedSchema", "named_schema", "random_rows"]

_DEFAULT_ROWS = 1_000_000
_DEFAULT_BYTES = 1_150_000_000


def _field(dtype: str, shape: tuple[int, ...], *key: str) -> Field:
    return Field(key=key, dtype=DTYPES[dtype], shape=shape)


_MUJOCO = Schema((
    _field("float32", (17,), "observation"),
    _field("float32", (6,), "action"),
    _field("float32", (17,), "next", "observation"),
    _field("float32", (1,), "next", "reward"),
    _field("bool", (1,), "next", "done"),
    _field("bool", (1,), "next", "terminated"),
    _field("bool", (1,), "done"),
))
_ATARI = Schema((
    _field("uint8", (4, 84, 84), "observation"),
    _field("int64", (1,), "action"),
    _field("uint8", (4, 84, 84), "next", "observation"),
    _field("float32", (1,), "next", "reward"),
    _field("bool", (1,), "next", "done"),
))
_SCHEMAS = {"mujoco": _MUJOCO, "atari": _ATARI}
_NOT_YET = {"tokens": "its fields are jagged, and rows of unequal length cannot be stored yet"}


@dataclass(frozen=True, kw_only=True)
class NamedSchema:
    """A schema, the name it was asked for by, and how many rows of it to take by default."""

    name: str
    schema: Schema
    layout: RowLayout
    default_rows: int

    @property
    def text(self) -> str:
        return (f"schema {self.name}: {len(self.schema.fields)} fields, "
                f"{self.layout.row_bytes:,} bytes a row")


def named_schema(name: str) -> NamedSchema:
    """The schema called ``name``, or described (as ``Schema.description`` does) in that file."""
    if name in _NOT_YET:
        raise UsageError(f"schema {name!r} cannot be used: {_NOT_YET[name]}; "
                         f"take {' or '.join(_SCHEMAS)}")
    schema = _SCHEMAS.get(name) or _from_file(name)
    layout = RowLayout(schema)
    rows = min(_DEFAULT_BYTES // layout.row_bytes, _DEFAULT_ROWS)
    # One significant digit: 20,000 rows rather than 20,367.
    unit = 10 ** (len(str(rows)) - 1)
    return NamedSchema(
        name=name, schema=schema, layout=layout, default_rows=max(rows // unit * unit, 1)
    )


def _from_file(name: str) -> Schema:
    try:
        return Schema.from_description(Path(name).read_text())
    except OSError as error:
        raise UsageError(
            f"no schema and no readable file is called {name!r}: give {', '.join(_SCHEMAS)} or a "
            "file with the JSON of Schema.description"
        ) from error
    except (SchemaError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{name!r} does not describe a schema: write Schema.description there, such as "
            '[["reward"],"float32",[1]] in a list'
        ) from error


def random_rows(schema: Schema, rows: int, *, seed: int) -> TensorDict:
    """``rows`` rows of random values: no page of them is all zeros."""
    generator = torch.Generator().manual_seed(seed)
    made = TensorDict({}, batch_size=[rows])
    for field in schema.fields:
        made[field.key] = _random(field, (rows, *field.shape), generator)
    return made


def _random(field: Field, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if field.dtype is torch.bool:
        return torch.randint(2, shape, dtype=torch.uint8, generator=generator).bool()
    if field.dtype in (torch.float32, torch.float64):
        return torch.rand(shape, dtype=field.dtype, generator=generator)
    octets = torch.randint(
        256, (shape[0], field.size_bytes), dtype=torch.uint8, generator=generator
    )
    return octets.view(field.dtype).view(shape)
