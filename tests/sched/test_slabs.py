"""Slabs: a batch that somebody holds in any way never changes, and one that nobody holds is used
again."""

from __future__ import annotations

import copy
import gc
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import conduit.sched.slabs
from conduit import ExperiencePlane
from conduit.sched.slabs import (
    LANE,
    POOL,
    USER,
    Slab,
    SlabPool,
    counts_are_reliable,
    use_count,
)
from conduit.schema import RowLayout, Schema
from tests.numbered import EXAMPLE, assert_batch, numbered

CPU = torch.device("cpu")
LAYOUT = RowLayout(Schema.from_example(EXAMPLE))
ROWS = 6


def filled_plane() -> ExperiencePlane:
    plane = ExperiencePlane(EXAMPLE, capacity=500, batch_size=ROWS)
    plane.extend(numbered(range(500)))
    plane.flush()
    return plane


def sampled(plane: ExperiencePlane) -> TensorDict:
    batch = plane.sample()
    assert batch is not None
    return batch


def pool_of() -> SlabPool:
    return SlabPool(LAYOUT, ROWS, CPU)


# ------------------------------------------------------------------------ ways to hold a batch


def saved_by_autograd(batch: TensorDict) -> object:
    weight = torch.ones(3, requires_grad=True)
    loss = (batch["observation"] * weight).sum()
    expected = batch["observation"].sum(0).clone()

    def backward() -> Tensor:
        loss.backward(retain_graph=True)
        assert weight.grad is not None
        found, weight.grad = weight.grad, None
        assert torch.equal(found, expected)
        return found

    return backward


def in_a_queue(batch: TensorDict) -> object:
    waiting: queue.Queue[Tensor] = queue.Queue()
    waiting.put(batch["pixels"])
    return waiting


def in_a_thread(batch: TensorDict) -> object:
    """Held by nothing but a frame of another thread."""
    asked: queue.Queue[bool] = queue.Queue()
    answers: queue.Queue[Tensor] = queue.Queue()

    def hold(value: Tensor) -> None:
        while asked.get():
            answers.put(value.clone())

    thread = threading.Thread(target=hold, args=(batch["number"],), daemon=True)
    thread.start()

    def look() -> Tensor:
        asked.put(True)
        return answers.get(timeout=10)

    return look


HOLDERS: dict[str, Callable[[TensorDict], Any]] = {
    "batch": lambda batch: batch,
    "field": lambda batch: batch["observation"],
    "nested": lambda batch: batch["next"],
    "slice": lambda batch: batch["observation"][2:4],
    "item": lambda batch: batch["next", "reward"][1],
    "row": lambda batch: batch[3],
    "batch slice": lambda batch: batch[1:5:2],
    "columns": lambda batch: batch["pixels"][:, 1, ::2],
    "transposed": lambda batch: batch["pixels"].mT,
    "expanded": lambda batch: batch["number"][:, None].expand(-1, 4),
    "detached": lambda batch: batch["observation"].detach(),
    "data": lambda batch: batch["observation"].data,
    "parameter": lambda batch: torch.nn.Parameter(batch["observation"]),
    "alias": lambda batch: batch["observation"].view_as(batch["observation"]),
    "dtype view": lambda batch: batch["observation"].view(torch.int32),
    "bytes": lambda batch: batch["number"][:, None].view(torch.uint8),
    "strided": lambda batch: batch["number"].as_strided((2,), (1,)),
    "numpy": lambda batch: batch["observation"].numpy(),
    "numpy slice": lambda batch: batch["pixels"].numpy()[1:3],
    "asarray": lambda batch: np.asarray(batch["number"]),
    "memoryview": lambda batch: memoryview(batch["number"].numpy()),
    "dlpack": lambda batch: torch.from_dlpack(batch["observation"]),
    "dlpack capsule": lambda batch: torch.from_dlpack(
        torch.utils.dlpack.to_dlpack(batch["observation"])
    ),
    "numpy dlpack": lambda batch: np.from_dlpack(batch["number"]),
    "storage": lambda batch: torch.tensor([], dtype=torch.uint8).set_(
        batch["number"].untyped_storage()
    ),
    "autograd": saved_by_autograd,
    "queue": in_a_queue,
    "thread": in_a_thread,
    "list": lambda batch: [batch["number"][i] for i in range(3)],
    "shallow copy": lambda batch: copy.copy(batch),
    "reshaped": lambda batch: batch.view(2, 3),
    "flattened": lambda batch: batch.flatten_keys("."),
    "closure": lambda batch: (lambda value: lambda: value)(batch["odd"]),
}


def frozen(held: Any) -> list[Any]:
    """What is seen through ``held`` now, copied."""
    if isinstance(held, Tensor):
        return [held.detach().clone()]
    if isinstance(held, np.ndarray):
        return [held.copy()]
    if isinstance(held, memoryview):
        return [held.tobytes()]
    if isinstance(held, TensorDict):
        return [held[key].clone() for key in held.keys(True, True)]
    if isinstance(held, queue.Queue):
        return [held.queue[0].clone()]
    if isinstance(held, list):
        return [item.clone() for item in held]
    assert callable(held)
    return [held().clone()]


def equal(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, Tensor)
        else np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("how", HOLDERS)
def test_what_is_held_never_changes(how: str) -> None:
    plane = filled_plane()
    held = HOLDERS[how](sampled(plane))
    before = frozen(held)
    for _ in range(50):
        sampled(plane)
        assert equal(frozen(held), before)


@pytest.mark.parametrize("how", [how for how in HOLDERS if how != "thread"])
def test_what_is_dropped_is_used_again(how: str) -> None:
    plane = filled_plane()
    for _ in range(20):
        held = HOLDERS[how](sampled(plane))
        # At once, without waiting for the garbage collector.
        del held
    sampled(plane)
    assert plane.report().fresh_slabs == 1


def test_two_batches_in_turn_need_two_slabs() -> None:
    # The usual loop: the next batch comes while the last one still has its name.
    plane = filled_plane()
    batch = sampled(plane)
    for _ in range(30):
        numbers, indices = batch["number"].tolist(), batch["index"].tolist()
        following = sampled(plane)
        assert_batch(batch, numbers, indices)
        batch = following
    assert plane.report().fresh_slabs == 2


def test_a_window_of_batches_is_kept_whole() -> None:
    plane = filled_plane()
    window: list[tuple[TensorDict, list[int], list[int]]] = []
    for _ in range(60):
        batch = sampled(plane)
        window.append((batch, batch["number"].tolist(), batch["index"].tolist()))
        del window[:-7]
        for kept, numbers, indices in window:
            assert_batch(kept, numbers, indices)


def test_a_kept_batch_outlives_its_plane() -> None:
    plane = filled_plane()
    batch = sampled(plane)
    numbers, indices = batch["number"].tolist(), batch["index"].tolist()
    plane.close()
    del plane
    gc.collect()
    other = filled_plane()
    for _ in range(10):
        sampled(other)
    assert_batch(batch, numbers, indices)


MOVED = """
import gc, mmap
import torch
from conduit import ExperiencePlane

def plane_and_batch():
    plane = ExperiencePlane({"x": torch.zeros(3)}, capacity=64, batch_size=4)
    plane.extend({"x": torch.arange(192.0).reshape(64, 3)})
    return plane, plane.sample()

def check_later_batches(plane):
    kept = []
    for _ in range(20):
        batch = plane.sample()
        kept.append((batch, batch["x"].clone()))
        rows = batch["x"]
        assert torch.equal(rows[:, 0], 3.0 * batch["index"]), "later batches are not what was drawn"
        assert torch.equal(rows[:, 2], rows[:, 0] + 2), "later batches are not what was drawn"
    assert all(torch.equal(batch["x"], copy) for batch, copy in kept)

plane, batch = plane_and_batch()
storage = batch["x"].untyped_storage()
# What a queue of torch.multiprocessing does with a tensor: the storage moves to shared memory.
handle, size = storage._share_fd_cpu_()
seen = mmap.mmap(handle, size)
before = bytes(seen)
del batch, storage
gc.collect()
check_later_batches(plane)
assert bytes(seen) == before, "the other process saw its batch change"
print("sent", flush=True)

def resized(resize, *size):
    # Torch may refuse: what a numpy array looks at keeps its size.
    try:
        resize(*size)
    except RuntimeError as error:
        assert "not resizable" in str(error)

plane, batch = plane_and_batch()
resized(batch["x"].untyped_storage().resize_, 0)
del batch
check_later_batches(plane)
print("freed", flush=True)

plane, batch = plane_and_batch()
resized(batch["x"].resize_, 100_000, 3)
del batch
check_later_batches(plane)
print("grown", flush=True)
"""


def test_a_batch_whose_memory_moved_is_not_used_again() -> None:
    # In a process of its own: writing to memory that is gone may take the process with it.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MOVED], capture_output=True, text=True, timeout=90,
        check=False,
    )
    assert (done.stdout.split(), done.returncode) == (["sent", "freed", "grown"], 0), done.stderr


# ------------------------------------------------------------------------------------ the pool


def test_a_pool_gives_what_nobody_holds() -> None:
    pool = pool_of()
    first = pool.take()
    assert pool.take() is first
    views = first.views.fresh()
    second = pool.take()
    assert second is not first
    assert second.block.data_ptr() != first.block.data_ptr()
    del views
    assert pool.take() is first
    assert pool.fresh == 2


def test_a_pool_forgets_slabs_that_stay_held() -> None:
    pool = pool_of()
    held = [pool.take().views.fresh() for _ in range(12)]
    assert pool.fresh == 12
    assert len({views[0].data_ptr() for views in held}) == 12
    held.clear()
    kept = [pool.take().views.fresh() for _ in range(4)]
    again = pool.fresh
    assert again < 12 + 4
    del kept
    for _ in range(10):
        pool.take()
    assert pool.fresh == again


def test_clearing_a_pool_frees_only_what_nobody_holds() -> None:
    pool = pool_of()
    slab = pool.take()
    slab.block.fill_(3)
    views = slab.views.fresh()
    pool.clear()
    del slab
    gc.collect()
    assert pool.take().views.fresh()[0].data_ptr() != views[0].data_ptr()
    assert (views[0].view(torch.uint8) == 3).all()


def test_a_slab_is_free_when_only_the_pool_has_it() -> None:
    slab = Slab(LAYOUT, ROWS, CPU)
    assert slab.is_free()
    for make in (slab.views.fresh, lambda: slab.block[1:], lambda: slab.block.numpy()):
        view = make()
        assert not slab.is_free()
        del view
        assert slab.is_free()


# -------------------------------------------------------------------- counts, and without them


def test_counts_are_reliable_here() -> None:
    assert counts_are_reliable(), "without this every batch needs fresh memory"


def test_use_count_sees_every_view() -> None:
    block = torch.zeros(4, 16, dtype=torch.uint8)
    pointer = block.untyped_storage()._cdata
    own = use_count(pointer)
    views: list[object] = []
    for make in (lambda: block[1:], lambda: block.view(torch.float32), lambda: block.numpy(),
                 lambda: block.detach(), lambda: block[1:].__dlpack__()):
        views.append(make())
        assert use_count(pointer) == own + len(views)
    while views:
        views.pop()
        assert use_count(pointer) == own + len(views)


@pytest.fixture
def unreliable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduit.sched.slabs, "counts_are_reliable", lambda: False)


@pytest.mark.usefixtures("unreliable")
def test_without_counts_every_batch_has_fresh_memory() -> None:
    pool = pool_of()
    first = pool.take()
    assert pool.take() is not first
    plane = filled_plane()
    pointers = []
    kept = []
    for _ in range(12):
        batch = sampled(plane)
        numbers = batch["number"].tolist()
        assert_batch(batch, numbers, batch["index"].tolist())
        pointers.append(batch["number"].data_ptr())
        kept.append((batch, numbers))
    assert len(set(pointers)) == 12
    assert plane.report().fresh_slabs == 12
    for batch, numbers in kept:
        assert batch["number"].tolist() == numbers


@pytest.mark.usefixtures("unreliable")
def test_without_counts_batches_are_the_same() -> None:
    plane = filled_plane()
    without = [sampled(plane)["number"].tolist() for _ in range(10)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conduit.sched.slabs, "counts_are_reliable", lambda: True)
        plane = filled_plane()
        assert [sampled(plane)["number"].tolist() for _ in range(10)] == without


def test_the_self_test_sees_a_count_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = counts_are_reliable.__wrapped__
    assert verdict()
    monkeypatch.setattr(conduit.sched.slabs, "use_count", lambda pointer: 1)
    assert not verdict()
    calls = iter(range(1000))
    monkeypatch.setattr(conduit.sched.slabs, "use_count", lambda pointer: next(calls))
    assert not verdict()
    monkeypatch.undo()
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert not verdict()
    # Asked again, the answer of this process is the one it gave at first.
    assert counts_are_reliable()


def test_a_plane_works_where_torch_has_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    monkeypatch.setattr(
        conduit.sched.slabs, "counts_are_reliable", counts_are_reliable.__wrapped__
    )
    plane = filled_plane()
    kept = [sampled(plane) for _ in range(6)]
    for batch in kept:
        assert_batch(batch, batch["number"].tolist(), batch["index"].tolist())
    assert plane.report().fresh_slabs == 6


def test_a_slab_has_one_owner_and_is_poisoned_when_it_comes_back() -> None:
    assert conduit.sched.slabs.CHECKED, "on in the tests"
    pool = pool_of()
    slab = pool.take()
    slab.give(POOL, LANE)
    with pytest.raises(AssertionError, match="a slab of the lane, not the user"):
        slab.give(USER, POOL)
    slab.give(LANE, USER)
    slab.block.fill_(1)
    assert pool.take() is slab
    assert slab.owner == POOL
    assert bool((slab.block == 0xDB).all())
