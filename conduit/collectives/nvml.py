"""What NVML knows of a GPU's connections: facts to label measurements with, never in their place.

NVML numbers the GPUs of the machine whatever CUDA_VISIBLE_DEVICES says, so a GPU is found by its
UUID. It cannot be initialised on machines without a driver: then there are no facts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

try:
    import pynvml
except ImportError:  # a build of torch for other accelerators may come without it
    pynvml = None

__all__ = ["NOTHING", "gpu_facts"]

NOTHING = (-1, -1, -1, -1, -1)

_READ = 0
"""NVML_P2P_CAPS_INDEX_READ, which in some releases of pynvml is a tuple by mistake."""

_NODE_SCOPE = 0
"""NVML_AFFINITY_SCOPE_NODE."""

_NODE_WORDS = 16


def gpu_facts(device: torch.device) -> tuple[int, int, int, int, int]:
    """Local. NVLinks that are up, PCIe generation and width (those possible: an idle link is slower
    for now), NUMA node of the host memory nearby, and how many other GPUs of this process it can
    read; -1 for each that NVML does not say."""
    if device.type != "cuda" or pynvml is None:
        return NOTHING
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return NOTHING
    try:
        handle = _handle(torch.cuda.current_device() if device.index is None else device.index)
        others = [
            other for other in map(_handle, range(torch.cuda.device_count()))
            if pynvml.nvmlDeviceGetIndex(other) != pynvml.nvmlDeviceGetIndex(handle)
        ]
        return (
            _asked(lambda: _nvlinks(handle)),
            _asked(lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            _asked(lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
            _asked(lambda: _numa_node(handle)),
            _asked(lambda: sum(_readable(handle, other) for other in others)),
        )
    except pynvml.NVMLError:
        return NOTHING
    finally:
        pynvml.nvmlShutdown()


def _handle(index: int) -> Any:
    """Of the GPU that torch calls ``index``. Raises NVMLError, for MIG slices among others."""
    return pynvml.nvmlDeviceGetHandleByUUID(
        f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    )


def _asked(question: Callable[[], int]) -> int:
    try:
        return question()
    except pynvml.NVMLError:
        return -1


def _nvlinks(handle: Any) -> int:
    up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        # Links that a GPU does not have are errors.
        with contextlib.suppress(pynvml.NVMLError):
            up += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
    return up


def _numa_node(handle: Any) -> int:
    words = pynvml.nvmlDeviceGetMemoryAffinity(handle, _NODE_WORDS, _NODE_SCOPE)
    nodes = sum(int(word) << 64 * place for place, word in enumerate(words))
    return (nodes & -nodes).bit_length() - 1


def _readable(handle: Any, other: Any) -> bool:
    status = pynvml.nvmlDeviceGetP2PStatus(handle, other, _READ)
    return bool(status == pynvml.NVML_P2P_STATUS_OK)
