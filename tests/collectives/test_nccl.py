"""Which NCCL group rows travel on."""

from __future__ import annotations

import warnings

import pytest

from conduit.collectives.nccl import shares_group, warn_of_one_queue

ORDERED = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


@pytest.mark.parametrize(("environment", "version", "job_has_nccl", "shared"), [
    ({}, (2, 27, 3), True, True),
    ({}, (2, 27, 3), False, False),
    (ORDERED, (2, 27, 3), True, False),
    (ORDERED, (2, 26, 0), True, False),
    (ORDERED, (2, 25, 9), True, True),
    (ORDERED, (2, 25, 9), False, False),
    ({"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, (2, 27, 3), True, True),
])
def test_an_own_group_only_where_launch_order_is_kept(
    environment: dict[str, str], version: tuple[int, ...], job_has_nccl: bool, shared: bool
) -> None:
    assert shares_group(environment, version, job_has_nccl=job_has_nccl) is shared


def test_one_hardware_queue_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        warn_of_one_queue({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_one_queue({"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
        warn_of_one_queue({})
