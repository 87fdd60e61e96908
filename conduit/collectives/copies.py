"""What one rank copies between its own kinds of memory: the bandwidth of its tiers.

Medians of a few runs over blocks larger than a core's caches, after one that is not counted; on
CUDA with pinned host memory (as nvbandwidth does): pageable copies are staged and say little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from conduit.collectives.links import middle

__all__ = ["KINDS", "copy_figures"]

KINDS = (
    ("host", "host", "gather"), ("host", "host", "copy"), ("pinned", "device", "copy"),
    ("device", "pinned", "copy"), ("device", "device", "copy"),
)
"""Source, target and operation of every figure; those with ``device`` on CUDA only."""

_SMALL_BYTES, _ROW_BYTES = 4096, 4096
_REPEATS = 3

Figure = tuple[int, int, int]


def copy_figures(device: torch.device, size_bytes: int) -> list[Figure]:
    """Local. Bytes per second, latency in nanoseconds (of 4 KiB) and spread in per mille, for each
    of ``KINDS``, of blocks of ``size_bytes`` (whole 4 KiB); zeros where this rank has no such
    memory."""
    on_gpu = device.type == "cuda"
    figures = []
    for source, target, operation in KINDS:
        if "device" in (source, target) and not on_gpu:
            figures.append((0, 0, 0))
            continue
        where = {"host": torch.device("cpu"), "pinned": torch.device("cpu"), "device": device}
        call = _gather if operation == "gather" else _copy
        sources, targets = (
            [
                torch.ones(
                    size, dtype=torch.uint8, device=where[kind], pin_memory=kind == "pinned"
                ) for size in (_SMALL_BYTES, size_bytes)
            ] for kind in (source, target)
        )
        finish = (lambda: torch.cuda.synchronize(device)) if on_gpu else None
        small, large = (
            _times_ns(call(a, b), finish) for a, b in zip(sources, targets, strict=True)
        )
        median = middle(large)
        figures.append((
            size_bytes * 10**9 // median, middle(small), (large[-1] - large[0]) * 1000 // median
        ))
    return figures


def _copy(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _gather(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    """Picks all rows, once each, in an order that no prefetcher guesses."""
    rows, out = source.view(-1, _ROW_BYTES), target.view(-1, _ROW_BYTES)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return lambda: torch.index_select(rows, 0, order, out=out)


def _times_ns(call: Callable[[], object], finish: Callable[[], None] | None) -> list[int]:
    """In ascending order."""
    times = []
    for _ in range(_REPEATS + 1):
        begun = time.perf_counter_ns()
        call()
        if finish is not None:
            finish()
        times.append(max(time.perf_counter_ns() - begun, 1))
    return sorted(times[1:])
