"""cpprb's ReplayBuffer, in C++ over numpy arrays.

Rows go in and batches come out as numpy arrays, which is what it is best at: no conversion to or
from torch is timed.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from conduit.schema import Field, Key, Schema
from conduit.tools.bench.peers.peer import PeerError

__all__ = ["Cpprb"]


class Cpprb:
    """See :class:`~conduit.tools.bench.peers.peer.LocalPeer`."""

    packages: ClassVar[tuple[str, ...]] = ("cpprb",)
    on_disk: ClassVar[bool] = False

    def __init__(self, schema: Schema, *, rows: int, batch: int, folder: Path) -> None:
        self.version = version("cpprb")
        self._rows, self._batch = rows, batch
        self._keys: dict[str, Key] = {".".join(field.key): field.key for field in schema.fields}
        module: Any = importlib.import_module("cpprb")
        self._buffer = module.ReplayBuffer(rows, {
            ".".join(field.key): {"shape": field.shape or 1, "dtype": _dtype(field)}
            for field in schema.fields
        })

    def converted(self, rows: TensorDict) -> dict[str, NDArray[Any]]:
        # It refuses more rows at once than it holds, and takes a scalar field as a column of one.
        values = {name: rows[key][-self._rows :] for name, key in self._keys.items()}
        return {
            name: value.reshape(len(value), *(value.shape[1:] or (1,))).numpy()
            for name, value in values.items()
        }

    def extend(self, rows: dict[str, NDArray[Any]]) -> object:
        return self._buffer.add(**rows)

    def sample(self) -> object:
        return self._buffer.sample(self._batch)


def _dtype(field: Field) -> np.dtype[Any]:
    try:
        return torch.empty(0, dtype=field.dtype).numpy().dtype
    except TypeError as error:
        raise PeerError(f"cpprb cannot hold {field.dtype} (field {field.key})") from error
