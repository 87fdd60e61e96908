"""Rows as people hand them in: (nested) mappings and TensorDicts of tensors and numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from conduit.errors import SchemaError

__all__ = ["Key", "Rows", "as_tensor", "flat_rows", "nested", "public"]

Key: TypeAlias = tuple[str, ...]
Rows: TypeAlias = Mapping[Any, Any] | TensorDictBase


def public(key: Key) -> str | Key:
    """The key as people write it: ``"reward"``, or ``("next", "reward")`` when nested."""
    return key[0] if len(key) == 1 else key


def flat_rows(rows: Rows) -> dict[Key, Any]:
    """Every leaf of ``rows`` by its full key; tuple keys and nested mappings may be mixed.

    SchemaError if ``rows`` is no mapping, or a key is given twice.
    """
    if not isinstance(rows, (Mapping, TensorDictBase)):
        raise SchemaError(
            "rows come as a mapping of tensors", expected="a dict or TensorDict",
            got=type(rows).__name__,
        )
    flat: dict[Key, Any] = {}
    for key, value in _leaves(rows, ()):
        if key in flat:
            raise SchemaError("this key is used more than once", field=public(key))
        flat[key] = value
    return flat


def _leaves(node: Rows, prefix: Key) -> Iterator[tuple[Key, Any]]:
    for key, value in node.items():
        path = prefix + (key if isinstance(key, tuple) else (key,))
        if isinstance(value, (Mapping, TensorDictBase)):
            yield from _leaves(value, path)
        else:
            yield path, value


def nested(flat: Mapping[Key, Any]) -> dict[str, Any]:
    """The leaves of ``flat`` in nested dictionaries; SchemaError if a key is a prefix of another.
    """
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise SchemaError("this key is used more than once", field=public(key))
        if key[-1] in node:
            raise SchemaError("this key is used more than once", field=public(key))
        node[key[-1]] = value
    return tree


def as_tensor(key: Key, value: Any) -> Tensor:
    """``value`` as a dense tensor, or SchemaError naming ``key``."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            kind = "nested" if value.is_nested else value.layout
            raise SchemaError(
                "only dense tensors can be stored", field=public(key),
                expected="a strided tensor", got=f"a {kind} tensor",
            )
        return value
    if isinstance(value, (np.ndarray, np.generic, bool, int, float)):
        try:
            # A copy only where torch cannot take the array as it is.
            return torch.from_numpy(np.require(value, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:
            raise SchemaError(
                "torch has no such dtype", field=public(key), expected="a dtype that torch has",
                got=np.asarray(value).dtype,
            ) from error
    raise SchemaError(
        "only tensors can be stored", field=public(key), expected="a tensor",
        got=type(value).__name__,
        cure="Encode it as a fixed-size tensor, or leave it out of the rows",
    )
