"""TorchRL's TensorDictReplayBuffer over a LazyMemmapStorage: each field a file that is mapped."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import ClassVar

from conduit.schema import Schema
from conduit.tools.bench.peers.torchrl_local import TorchRL, torchrl_data

__all__ = ["TorchRLMemmap"]


class TorchRLMemmap(TorchRL):
    """See :class:`~conduit.tools.bench.peers.peer.LocalPeer`. The files go with it."""

    on_disk: ClassVar[bool] = True

    def __init__(self, schema: Schema, *, rows: int, batch: int, folder: Path) -> None:
        super().__init__(schema, rows=rows, batch=batch, folder=folder)
        data = torchrl_data()
        files = tempfile.mkdtemp(prefix="torchrl-memmap-", dir=folder)
        weakref.finalize(self, shutil.rmtree, files, ignore_errors=True)
        self._buffer = data.TensorDictReplayBuffer(
            storage=data.LazyMemmapStorage(rows, scratch_dir=files), batch_size=batch
        )
