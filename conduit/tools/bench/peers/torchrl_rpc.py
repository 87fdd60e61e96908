"""TorchRL's RemoteTensorDictReplayBuffer: one buffer in the first rank's process, served by RPC.

[Note: a fair and a quiet peer]
The first rank holds all rows and samples by a plain call; every other rank samples through
``torch.distributed.rpc`` as TorchRL's example does. RPC shares the processes with the plane, so it
must not disturb it while it is idle: TensorPipe's default transport between processes of one host
waits in a busy loop (a third to half of a core for each process, also when nothing is asked), so
TCP (``uv``) is used, which on a machine with few cores is also the faster one for the peer.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from tensordict import TensorDict

from conduit.tools.bench.peers.torchrl_local import torchrl_data
from conduit.tools.job import Job

__all__ = ["TorchRLRemote"]

_SERVED: dict[str, Any] = {}


def _reference() -> Any:
    """Runs on the first rank: the reference that others sample through."""
    return _SERVED["reference"]


class TorchRLRemote:
    """Collective to make and to close. ``chunks`` fill the buffer; only the first rank uses them.
    """

    packages: ClassVar[tuple[str, ...]] = ("torchrl",)
    name = "torchrl-rpc"

    def __init__(
        self, job: Job, *, rows: int, batch: int, chunks: Callable[[], Iterator[TensorDict]]
    ) -> None:
        data = torchrl_data()
        self.version = str(importlib.import_module("torchrl").__version__)
        self._rpc: Any = importlib.import_module("torch.distributed.rpc")
        options = self._rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=max(job.ranks, 4), rpc_timeout=300, _transports=["uv"]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._rpc.init_rpc(
                f"rank{job.rank}", rank=job.rank, world_size=job.ranks,
                rpc_backend_options=options,
            )
        self._sample, self._batch = data.RemoteTensorDictReplayBuffer.sample, batch
        self._is_owner = job.rank == 0
        if self._is_owner:
            self._buffer = data.RemoteTensorDictReplayBuffer(
                storage=data.LazyTensorStorage(rows), batch_size=batch
            )
            filled = 0
            for chunk in chunks():
                self._buffer.extend(chunk[: rows - filled])
                filled += len(chunk)
                if filled >= rows:
                    break
            _SERVED["reference"] = self._rpc.RRef(self._buffer)
        job.barrier()
        self._remote = None if self._is_owner else self._rpc.rpc_sync("rank0", _reference)

    def sample(self) -> object:
        """A batch for this rank."""
        if self._is_owner:
            return self._buffer.sample(self._batch)
        return self._rpc.rpc_sync("rank0", self._sample, args=(self._remote, self._batch))

    def close(self, *, graceful: bool) -> None:
        """A graceful end waits for the other ranks, which may not come after a failure."""
        self._remote = None
        _SERVED.clear()
        self._rpc.shutdown(graceful=graceful)
