"""Which NCCL group carries rows between GPUs: the learner's, or one of the plane's own.

Kernels of two NCCL communicators that wait for each other's ranks deadlock when GPUs launch them in
different orders. A rank that issues on one communicator alone cannot get the order wrong, so rows
travel on the group that reduces gradients, ahead of them: issued before ``sample`` returns, they
come before whatever the learner issues. NCCL 2.26 can keep the launch order of several
communicators itself; who has set NCCL_LAUNCH_ORDER_IMPLICIT=1 for that gets a group of the plane's
own, and so does a job whose group is not of NCCL, since then nobody else issues on one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

__all__ = ["shares_group", "warn_of_one_queue"]

_ORDERED_SINCE = (2, 26)


def shares_group(
    environment: Mapping[str, str], version: tuple[int, ...], *, job_has_nccl: bool
) -> bool:
    """Whether rows travel on the job's NCCL group, for NCCL ``version`` such as (2, 27, 3)."""
    ordered = environment.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1" and version >= _ORDERED_SINCE
    return job_has_nccl and not ordered


def warn_of_one_queue(environment: Mapping[str, str]) -> None:
    """Warns where the driver puts all streams into one queue: nothing overlaps there."""
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the streams of this process into one hardware "
            "queue: fetching batches does not overlap with the learner. Unset it, or expect "
            "exposed time as with overlap=False",
            stacklevel=4,
        )
