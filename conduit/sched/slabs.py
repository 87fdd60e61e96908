"""Slabs: the memory of delivered batches, used again only when nobody holds a view into it.

[Note: whose batch it is]
A batch belongs to the user, who may keep it, a slice of it, a numpy view, or have autograd keep it,
for as long as they like. Fresh memory for every batch would be safe and slow: page faults dominate
the gather of large rows. So slabs are pooled, and the storage's reference count says whether one is
free: every tensor on the storage counts, whoever made it (slices, dtype views, numpy and DLPack
views, tensors that autograd saved). What the pool itself holds is counted once, when the slab is
made; a slab is free when the count is back at that number.

Some batches of a slab are prepared at once: code that runs once between two gathers of megabytes
finds nothing in the caches and takes many times as long as in a loop.

On CUDA the next gather is issued on the stream of the caller, behind whatever that stream still
does with the old batch, as for memory from the caching allocator.

A slab has one owner at a time: the pool, the lane that fills it, the user. With the environment
variable CONDUIT_CHECKS set that is checked, and what the pool gets back is poisoned before anybody
else fills it: a view that the count did not see, or a row that nobody wrote, then shows.

The count is read through a function that torch does not document, so it is tested once per process
on a small slab. If it is missing or does not see a view, every batch gets fresh memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor

from conduit.windows import BatchLayout

__all__ = ["LANE", "POOL", "USER", "Slab", "SlabPool", "counts_are_reliable"]

POOL, LANE, USER = "pool", "lane", "user"
"""Owners of a slab."""

CHECKED = bool(os.environ.get("CONDUIT_CHECKS"))
POISON = 0xDB
_POOLED = 4
_PREPARED = 8

Prepare: TypeAlias = Callable[[list[Tensor]], TensorDict]


class Slab:
    """Packed rows of one batch, and batches prepared on them."""

    def __init__(self, layout: BatchLayout, rows: int, device: torch.device) -> None:
        self.block = layout.block(rows, device)
        self.records = layout.records(self.block)
        self.views = layout.fields_of(self.block)
        self._storage = self.block.untyped_storage()
        self._pointer = self._storage._cdata
        self._place = self.block.data_ptr(), self._storage.nbytes()
        self._own_references = use_count(self._pointer) if counts_are_reliable() else -1
        self.owner = POOL
        self._prepared: list[tuple[list[Tensor], TensorDict]] = []
        self._references_each = 0

    def is_free(self) -> bool:
        """Whether nobody but the pool holds a view, and the memory is still where it was.

        A batch's memory moves when the user shares it with other processes or resizes it.
        """
        return (
            use_count(self._pointer) == self._own_references
            and (self._storage.data_ptr(), self._storage.nbytes()) == self._place
        )

    def give(self, before: str, after: str) -> None:
        """Hands it from one owner to the next."""
        assert not CHECKED or self.owner == before, f"a slab of the {self.owner}, not the {before}"
        self.owner = after

    def batch(self, prepare: Prepare) -> tuple[list[Tensor], TensorDict]:
        """New views in column order, and what ``prepare`` makes of them. For a slab that is free.
        """
        if not self._prepared:
            count = _PREPARED if counts_are_reliable() else 1
            # A batch outlives the modes in which it was asked for.
            with torch.inference_mode(False), torch.enable_grad():
                for _ in range(count):
                    columns = self.views.fresh()
                    self._prepared.append((columns, prepare(columns)))
            if counts_are_reliable():
                references = use_count(self._pointer)
                self._references_each = (references - self._own_references) // count
                self._own_references = references
        self._own_references -= self._references_each
        return self._prepared.pop()


class SlabPool:
    """Hands out slabs of ``rows`` rows. ``fresh`` counts those that had to be allocated."""

    def __init__(self, layout: BatchLayout, rows: int, device: torch.device) -> None:
        self._layout, self._rows, self._device = layout, rows, device
        self._slabs: list[Slab] = []
        self._reuse = counts_are_reliable()
        self.fresh = 0

    def take(self) -> Slab:
        """A slab that nobody else can see."""
        for slab in self._slabs:
            if slab.is_free():
                if CHECKED:
                    slab.block.fill_(POISON)
                slab.owner = POOL
                return slab
        slab = Slab(self._layout, self._rows, self._device)
        self.fresh += 1
        if self._reuse:
            # The oldest is dropped from the pool, not freed: its views keep it alive.
            self._slabs = [*self._slabs[-(_POOLED - 1) :], slab]
        return slab

    def clear(self) -> None:
        self._slabs = []


def use_count(storage_pointer: int) -> int:
    """How many tensors and storages share the storage at this address."""
    count: int = torch._C._storage_Use_Count(storage_pointer)  # type: ignore[attr-defined]
    return count


@functools.cache
def counts_are_reliable() -> bool:
    """Self-test: does the reference count see each kind of view come and go?"""
    with torch.inference_mode(False), torch.enable_grad():
        return hasattr(torch._C, "_storage_Use_Count") and _every_view_counts()


def _every_view_counts() -> bool:
    block = torch.zeros(4, 16, dtype=torch.uint8, device="cpu")
    pointer = block.untyped_storage()._cdata
    own = use_count(pointer)

    def autograd() -> object:
        weight = torch.ones(4, requires_grad=True, device="cpu")
        return (block.view(torch.float32) * weight).sum()

    makers = (
        lambda: block[1:3],
        lambda: block.view(torch.float32),
        lambda: block.detach().as_strided((2,), (16,), 3),
        lambda: block[2:].numpy(),
        lambda: block[1:].__dlpack__(),
        autograd,
    )
    for make in makers:
        view = make()
        if use_count(pointer) == own:
            return False
        del view
        if use_count(pointer) != own:
            return False
    return True
