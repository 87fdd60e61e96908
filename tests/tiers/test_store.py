"""The store against a list of rows: whatever is written, and wherever segments are moved meanwhile,
a gather gives the rows that were written last."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit.errors import CapacityError
from conduit.schema import Records
from conduit.tiers.address import Replacement
from conduit.tiers.mapped import MappedRing
from conduit.tiers.shard import Shard, ring_rows
from conduit.tiers.slab import SlabTier
from conduit.tiers.split import UNMEASURED
from conduit.tiers.store import Store
from conduit.tiers.tier import Ring, Slots
from tests.properties import examples
from tests.tiers import test_shard as shards
from tests.tiers.contract import LAYOUT
from tests.tiers.stores import CPU, TIERS, block_of, store_of, tier_of

SEGMENTS, SIZE = 5, 64
ROWS = SEGMENTS * SIZE
ALL = np.arange(ROWS)


class Slab(SlabTier):
    """Memory at an address of its own, as tiers of a GPU have it, on the CPU."""

    name = "slab"

    def __init__(self, ring: Ring, segments: int) -> None:
        block = ring.layout.block(segments * ring.segment_rows)
        super().__init__(ring, segments, block)

    def gather(self, slots: Slots, out: Records) -> None:
        records = self._ring.layout.records(self.block)
        out[:] = records[self.rows_at(slots).numpy()]  # type: ignore[index]


def opened(
    names: Sequence[str], counts: Sequence[int], rooms: Sequence[int], folder: Path
) -> Store:
    """A store of ``SEGMENTS`` segments: ``counts`` of them in tiers with such ``rooms``."""
    ring = Ring(layout=LAYOUT, rows=ROWS, segment_rows=SIZE, device=CPU)
    mapped = None if set(names) == {"slab"} else MappedRing(ring)
    tiers = []
    for name, room in zip(names, rooms, strict=True):
        if name == "slab":
            tiers.append(Slab(ring, room))
        else:
            assert mapped is not None
            tiers.append(tier_of(name, ring, mapped, folder, room))
    return Store(ring, tiers, counts, [UNMEASURED] * len(tiers), mapped)


def random_bytes(rng: np.random.Generator, rows: int, columns: int | None = None) -> np.ndarray:
    return rng.integers(0, 256, (rows, columns or LAYOUT.row_bytes), dtype=np.uint8)


def filled(store: Store, rng: np.random.Generator) -> np.ndarray:
    """Rows that are now in all slots, with padding as packing leaves it."""
    model = random_bytes(rng, ROWS)
    model[:, sum(column.field.size_bytes for column in LAYOUT.columns) :] = 0
    store.write(ALL, torch.from_numpy(model.copy()))
    return model


def fields_of(rows: int, rng: np.random.Generator) -> tuple[list[torch.Tensor], np.ndarray]:
    """Fields to pack, in the order of the columns, and the bytes of their rows."""
    fields = [
        torch.from_numpy(random_bytes(rng, rows, 52)).view(torch.float32),
        torch.from_numpy(rng.integers(0, 2, rows).astype(np.bool_)),
    ]
    block = LAYOUT.block(rows)
    LAYOUT.pack(fields, block)
    return fields, block.numpy()


def assert_holds(store: Store, model: np.ndarray, slots: np.ndarray = ALL) -> None:
    """Read at these slots, into a part of a block of which the rest stays as it was."""
    block = torch.full((len(slots) + 2, LAYOUT.row_bytes), 0xA5, dtype=torch.uint8)
    store.gather(slots, LAYOUT.records(block[1 : 1 + len(slots)]))
    assert (block[1 : 1 + len(slots)].numpy() == model[slots]).all()
    assert (block[0] == 0xA5).all() and (block[-1] == 0xA5).all()


# ---------------------------------------------------------------------------------- one by one


@examples(150)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_a_store_is_a_list(data: st.DataObject, seed: int) -> None:
    names = data.draw(st.sampled_from([
        ("host",), ("slab",), TIERS, ("disk", "host"), ("slab", "host"), ("shared", "slab", "disk"),
    ]))
    counts, left = [], SEGMENTS
    for _ in names[1:]:
        counts.append(data.draw(st.integers(0, left)))
        left -= counts[-1]
    counts = [left, *counts]
    rooms = [count + data.draw(st.integers(0, 3)) for count in counts]
    where = np.repeat(np.arange(len(names)), counts).tolist()
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        store = opened(names, counts, rooms, Path(folder))
        try:
            model = filled(store, rng)
            for step in data.draw(st.lists(
                st.sampled_from(["write", "pack", "overwrite", "read", "move", "move"]), max_size=25
            )):
                do(step, store, model, where, rooms, rng)
                assert [held // store.ring.segment_bytes for _, held in store.held_bytes()] == [
                    where.count(tier) for tier in range(len(names))
                ]
                assert_holds(store, model, rng.integers(0, ROWS, 20))
            assert_holds(store, model)
            store.sync()
        finally:
            store.close()
        assert list(Path(folder).iterdir()) == []


def do(
    step: str, store: Store, model: np.ndarray, where: list[int], rooms: Sequence[int],
    rng: np.random.Generator,
) -> None:
    """One step, in the store and in the model."""
    slots = rng.permutation(ROWS)[: rng.integers(0, 40)]
    if step == "write":
        model[slots] = random_bytes(rng, len(slots))
        store.write(slots, torch.from_numpy(model[slots]))
    elif step == "overwrite":
        column = int(rng.integers(len(LAYOUT.columns)))
        place = LAYOUT.columns[column]
        first, size = place.offset_bytes, place.field.size_bytes
        values = random_bytes(rng, len(slots), size)
        model[slots, first : first + size] = values
        store.overwrite(slots, column, torch.from_numpy(values))
    elif step == "pack":
        start = int(rng.integers(ROWS))
        rows = int(rng.integers(1, min(2 * SIZE, ROWS - start) + 1))
        fields, packed = fields_of(rows, rng)
        model[start : start + rows] = packed
        store.pack(fields, start, rows)
    elif step == "read":
        assert (store.read(slots).numpy() == model[slots]).all()
    else:
        segment, tier = int(rng.integers(SEGMENTS)), int(rng.integers(len(rooms)))
        if tier != where[segment] and where.count(tier) == rooms[tier]:
            with pytest.raises(CapacityError, match=f"the {store.tiers[tier].name} tier is full"):
                store.move(segment, tier)
        else:
            assert store.move(segment, tier)
            where[segment] = tier


@examples(60)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_a_shard_is_a_list_wherever_its_rows_are(data: st.DataObject, seed: int) -> None:
    quota, staging = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 90))
    names = data.draw(st.sampled_from([("host", "shared", "disk"), ("disk", "host")]))
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        store = store_of(
            shards.LAYOUT, ring_rows(quota, staging), folder=Path(folder), tiers=names
        )
        shard = Shard(shards.LAYOUT, store, quota_rows=quota, staging_rows=staging)
        model = shards.Model()

        def moved() -> None:
            for _ in range(rng.integers(3)):
                segment, tier = rng.integers(store.ring.segments), rng.integers(len(names))
                assert store.move(int(segment), int(tier))

        try:
            for _ in range(data.draw(st.integers(1, 8))):
                moved()
                for _ in range(2):
                    rows = data.draw(st.integers(0, staging - len(model.staged)))
                    shards.stage(shard, model, rows)
                    moved()
                case = data.draw(shards.commit_cases(len(model.staged), len(model.live), quota))
                shards.apply(shard, model, case)
                moved()
                shards.assert_holds(shard, model)
        finally:
            shard.close()


# ------------------------------------------------------------------------------- all at a time


def write_row(store: Store, slot: int, row: np.ndarray) -> None:
    store.write(np.array([slot]), torch.from_numpy(row[None].copy()))


def overwrite_row(store: Store, slot: int, row: np.ndarray) -> None:
    for column, place in enumerate(LAYOUT.columns):
        end = place.offset_bytes + place.field.size_bytes
        store.overwrite(
            np.array([slot]), column, torch.from_numpy(row[None, place.offset_bytes : end].copy())
        )


def pack_row(store: Store, slot: int, row: np.ndarray) -> None:
    views = LAYOUT.views(torch.from_numpy(row[None].copy()))
    store.pack([views[column.field.key] for column in LAYOUT.columns], slot, 1)


WRITES = [write_row, overwrite_row, pack_row]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("target", ["shared", "disk"])
def test_a_move_is_given_up_for_a_write(
    write: Callable[[Store, int, np.ndarray], None], target: str, tmp_path: Path
) -> None:
    """Written while its segment was copied: what is in the copy is out of date."""
    store = opened(("host", target), (SEGMENTS, 0), (SEGMENTS, SEGMENTS), tmp_path)
    rng = np.random.default_rng(3)
    model = filled(store, rng)
    copied = store.tiers[1].copied  # type: ignore[union-attr]
    for slot in (2 * SIZE, 3 * SIZE - 1, 2 * SIZE - 1, 3 * SIZE):
        (row,) = fields_of(1, rng)[1]

        def written_meanwhile(segment: int, slot: int = slot, row: np.ndarray = row) -> Replacement:
            copy: Replacement = copied(segment)
            write(store, slot, row)
            return copy

        model[slot] = row
        with mock.patch.object(store.tiers[1], "copied", written_meanwhile):
            done = store.move(2, 1)
        assert done is (slot // SIZE != 2), "other segments may be written"
        assert_holds(store, model)
        assert [held for _, held in store.held_bytes()][1] == done * store.ring.segment_bytes
        assert store.move(2, 1) and store.move(2, 0)
        assert_holds(store, model)
    store.close()


def test_a_move_that_the_kernel_refuses_changes_nothing(tmp_path: Path) -> None:
    store = opened(("host", "disk"), (SEGMENTS, 0), (SEGMENTS, SEGMENTS), tmp_path)
    model = filled(store, np.random.default_rng(3))
    held, mappings = store.held_bytes(), len(Path("/proc/self/maps").read_text().splitlines())
    refused = OSError(12, "Cannot allocate memory")
    for _ in range(10):
        with (
            mock.patch.object(Replacement, "put", side_effect=refused),
            pytest.raises(OSError, match="Cannot allocate memory"),
        ):
            store.move(2, 1)
    assert store.held_bytes() == held
    assert len(Path("/proc/self/maps").read_text().splitlines()) < mappings + 5
    assert_holds(store, model)
    assert store.move(2, 1)
    assert_holds(store, model)
    store.close()


@pytest.mark.parametrize("names", [("host", "shared", "disk"), ("slab", "host", "disk")])
def test_moving_reading_and_writing_at_once(names: tuple[str, ...], tmp_path: Path) -> None:
    """One thread moves segments to and fro, one reads rows that stay as they are, and this one
    writes the rows between them."""
    store = opened(names, (SEGMENTS, 0, 0), (SEGMENTS,) * 3, tmp_path)
    model = filled(store, np.random.default_rng(0))
    packed = ALL[ALL % SIZE >= SIZE - 8]
    others = np.setdiff1d(ALL, packed)
    steady, written = others[::2], others[1::2]
    stop = threading.Event()
    counts = {"moved": 0, "given up": 0, "read": 0}
    errors: list[BaseException] = []

    def until_stopped(step: Callable[[np.random.Generator], None], seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                step(rng)
        except BaseException as error:
            errors.append(error)
            stop.set()

    def move(rng: np.random.Generator) -> None:
        done = store.move(int(rng.integers(SEGMENTS)), int(rng.integers(len(names))))
        counts["moved" if done else "given up"] += 1

    def read(rng: np.random.Generator) -> None:
        assert_holds(store, model, rng.choice(steady, 100))
        counts["read"] += 1

    threads = [threading.Thread(target=until_stopped, args=(step, seed))
               for seed, step in enumerate((move, read), 1)]
    for thread in threads:
        thread.start()
    rng, deadline, wrote = np.random.default_rng(9), time.monotonic() + 1.2, 0
    try:
        while not stop.is_set() and time.monotonic() < deadline:
            slots = rng.permutation(written)[:8]
            if wrote % 3 == 2:
                slots = packed[8 * rng.integers(SEGMENTS) :][:8]
            fields, rows = fields_of(8, rng)
            model[slots] = rows
            if wrote % 3 == 0:
                store.write(slots, torch.from_numpy(rows))
            elif wrote % 3 == 1:
                for slot, row in zip(slots.tolist(), rows, strict=True):
                    overwrite_row(store, slot, row)
            else:
                store.pack(fields, int(slots[0]), 8)
            wrote += 1
            assert_holds(store, model, np.concatenate([slots, rng.choice(written, 20)]))
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert not errors, errors
    assert_holds(store, model)
    assert counts["moved"] > 20 and counts["read"] > 20 and wrote > 20, (counts, wrote)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_waits_for_a_move_and_leaves_views_alone(tmp_path: Path) -> None:
    store = opened(TIERS, (2, 2, 1), (SEGMENTS,) * 3, tmp_path)
    model = filled(store, np.random.default_rng(0))
    view: Any = LAYOUT.records(block_of(store))
    begun, go_on = threading.Event(), threading.Event()
    copied = store.tiers[2].copied  # type: ignore[union-attr]

    def slowly(segment: int) -> Replacement:
        copy: Replacement = copied(segment)
        begun.set()
        assert go_on.wait(20)
        return copy

    with mock.patch.object(store.tiers[2], "copied", slowly):
        mover = threading.Thread(target=store.move, args=(0, 2))
        mover.start()
        assert begun.wait(20)
        closer = threading.Thread(target=store.close)
        closer.start()
        closer.join(0.05)
        assert closer.is_alive(), "it waits"
        go_on.set()
        for thread in (mover, closer):
            thread.join(20)
            assert not thread.is_alive()
    assert list(tmp_path.iterdir()) == [] and store.nbytes == 0
    assert view.tobytes() == model.tobytes(), "who still has a view can read it"
    store.close()
