"""TorchRL's TensorDictReplayBuffer over a LazyTensorStorage.

The storage that its documentation recommends for data in memory. No prefetching: it takes a second
thread, and hides nothing in a loop that only samples.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDict

from conduit.schema import Schema

__all__ = ["TorchRL", "torchrl_data"]


def torchrl_data() -> Any:
    """The module ``torchrl.data``, told to be quiet."""
    data = importlib.import_module("torchrl.data")
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    return data


class TorchRL:
    """See :class:`~conduit.tools.bench.peers.peer.LocalPeer`."""

    packages: ClassVar[tuple[str, ...]] = ("torchrl",)
    on_disk: ClassVar[bool] = False

    def __init__(self, schema: Schema, *, rows: int, batch: int, folder: Path) -> None:
        data = torchrl_data()
        self.version = str(importlib.import_module("torchrl").__version__)
        self._buffer = data.TensorDictReplayBuffer(
            storage=data.LazyTensorStorage(rows), batch_size=batch
        )

    def converted(self, rows: TensorDict) -> TensorDict:
        return rows

    def extend(self, rows: TensorDict) -> object:
        return self._buffer.extend(rows)

    def sample(self) -> object:
        return self._buffer.sample()
