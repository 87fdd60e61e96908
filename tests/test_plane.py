"""The plane in a world of one, against one list of rows."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

import conduit
from conduit import (
    CapacityError,
    ConduitError,
    EmptyError,
    ExperiencePlane,
    Ingestion,
    Schema,
    SchemaError,
    WorldError,
)
from tests import reference
from tests.numbered import EXAMPLE, assert_batch, numbered
from tests.properties import examples


def plane_of(capacity: int | str = 100, batch_size: int = 8, **options: Any) -> ExperiencePlane:
    return ExperiencePlane(EXAMPLE, capacity=capacity, batch_size=batch_size, **options)


def job_of(capacity: int = 100, batch_size: int = 8, **options: Any) -> reference.Job:
    return reference.Job(
        capacity=capacity, batch_rows=batch_size, quotas=[capacity], hosts=[0], **options
    )


def filled(rows: int = 100, **options: Any) -> ExperiencePlane:
    plane = plane_of(**options)
    plane.extend(numbered(range(rows)))
    plane.flush()
    return plane


def sampled(plane: ExperiencePlane) -> TensorDict:
    batch = plane.sample()
    assert batch is not None
    return batch


def numbers_of(batch: TensorDict) -> list[int]:
    numbers: list[int] = batch["number"].tolist()
    return numbers


# ---------------------------------------------------------------------- the same as one list


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 6)),
        st.tuples(st.just("extend"), st.integers(0, 40)),
        st.tuples(st.sampled_from(["add", "flush", "sample", "sample", "empty", "agree"]),
                  st.just(0)),
    ),
    max_size=30,
)


@examples(200)
@given(
    operations=OPERATIONS, capacity=st.integers(1, 30), batch_size=st.integers(1, 9),
    staging_rows=st.integers(1, 40), min_size=st.integers(0, 12),
    seed=st.integers(-5, 1 << 40), contiguous=st.booleans(),
)
def test_a_plane_is_a_list(
    operations: list[tuple[str, int]], capacity: int, batch_size: int, staging_rows: int,
    min_size: int, seed: int, contiguous: bool,
) -> None:
    min_size = min(min_size, capacity)
    plane = plane_of(
        capacity, batch_size, ingestion=Ingestion(staging_rows=staging_rows), min_size=min_size,
        seed=seed,
    )
    job = job_of(capacity, batch_size, seed=seed)
    made = 0
    kept: list[tuple[TensorDict, list[reference.LiveRow]]] = []
    for operation, rows in operations:
        visible = len(job.live)
        if operation in ("extend", "add"):
            rows = rows if operation == "extend" else 1
            numbers = list(range(made, made + rows))
            made += rows
            fits = len(job.staged[0]) + rows <= staging_rows
            try:
                if operation == "extend":
                    plane.extend(numbered(numbers))
                else:
                    plane.add(numbered(numbers)[0])
            except CapacityError:
                assert not fits
            else:
                assert fits
                job.staged[0] += numbers
            assert len(plane) == visible, "rows become visible at the next collective"
        elif operation == "flush":
            plane.flush()
            job.commit()
        elif operation == "empty":
            plane.empty()
            job.empty()
        elif operation == "agree":
            assert plane.agree(rows) == rows
            assert len(plane) == visible, "an agreement commits nothing"
        else:
            job.commit()
            size = len(job.live)
            if size == 0 and min_size == 0:
                with pytest.raises(EmptyError):
                    plane.sample()
            elif size < min_size:
                assert plane.sample(contiguous=contiguous) is None
            else:
                batch = plane.sample(contiguous=contiguous)
                [expected] = job.sample()
                assert batch is not None
                kept.append((batch, expected))
                check(batch, expected)
        if operation in ("flush", "sample", "empty"):
            assert len(plane) == len(job.live)
    # Batches are the caller's: none has changed since.
    for batch, expected in kept:
        check(batch, expected)
    report = plane.report()
    assert report.rows == report.shard_rows == len(job.live)
    assert report.rows_skipped == job.skipped
    assert report.samples == len(kept)
    plane.close()
    for batch, expected in kept:
        check(batch, expected)


def check(batch: TensorDict, expected: list[reference.LiveRow]) -> None:
    assert_batch(batch, [row.value for row in expected], [row.index for row in expected])


@examples(40)
@given(
    pieces=st.lists(st.integers(0, 9), min_size=1, max_size=12), capacity=st.integers(1, 40)
)
def test_how_rows_are_cut_into_calls_does_not_matter(pieces: list[int], capacity: int) -> None:
    whole, cut, single = plane_of(capacity), plane_of(capacity), plane_of(capacity)
    rows = sum(pieces)
    whole.extend(numbered(range(rows)))
    start = 0
    for piece in pieces:
        cut.extend(numbered(range(start, start + piece)))
        start += piece
    for number in range(rows):
        single.add(numbered([number])[0])
    if rows == 0:
        return
    for _ in range(3):
        batches = [sampled(plane) for plane in (whole, cut, single)]
        assert len({tuple(numbers_of(batch)) for batch in batches}) == 1
        assert len({tuple(batch["index"].tolist()) for batch in batches}) == 1


def test_oldest_rows_leave_first() -> None:
    plane = plane_of(capacity=10, batch_size=200)
    for start in range(0, 51, 3):
        plane.extend(numbered(range(start, start + 3)))
        batch = sampled(plane)
        live = range(max(start + 3 - 10, 0), start + 3)
        # 200 draws of 10 rows: all of them come, but for one chance in 10^8.
        assert set(numbers_of(batch)) == set(live)
        assert batch["index"].tolist() == numbers_of(batch)


def test_a_commit_larger_than_the_buffer_keeps_the_last_rows() -> None:
    plane = plane_of(capacity=10, batch_size=200)
    plane.extend(numbered(range(7)))
    plane.flush()
    plane.extend(numbered(range(7, 100)))
    batch = sampled(plane)
    assert set(numbers_of(batch)) == set(range(90, 100))
    assert batch["index"].tolist() == numbers_of(batch)
    assert len(plane) == 10
    assert plane.report().rows_skipped == 83
    plane.extend(numbered([100]))
    assert set(numbers_of(sampled(plane))) == set(range(91, 101))


def test_rows_are_drawn_with_replacement_and_uniformly() -> None:
    plane = filled(rows=32, capacity=32, batch_size=1000)
    counts = np.zeros(32)
    for _ in range(30):
        counts += np.bincount(numbers_of(sampled(plane)), minlength=32)
    expected = 30_000 / 32
    # Six standard deviations.
    assert (abs(counts - expected) < 6 * expected**0.5).all()


def test_seed_and_name_make_the_draws() -> None:
    def drawn(**options: Any) -> list[int]:
        plane = filled(**options)
        return [number for _ in range(5) for number in numbers_of(sampled(plane))]

    same = drawn(seed=3)
    assert drawn(seed=3) == same
    assert drawn(seed=3, ingestion=Ingestion(staging_rows=100), max_staleness=2) == same
    assert drawn(seed=4) != same
    assert drawn(seed=3, name="other") != same


def test_successive_batches_differ() -> None:
    plane = filled()
    batches = {tuple(numbers_of(sampled(plane))) for _ in range(20)}
    assert len(batches) == 20


def test_planes_do_not_know_each_other() -> None:
    first, second = plane_of(seed=1), plane_of(seed=2)
    first.extend(numbered(range(50)))
    second.extend(numbered(range(1000, 1050)))
    for _ in range(5):
        assert max(numbers_of(sampled(first))) < 50
        assert min(numbers_of(sampled(second))) >= 1000


# -------------------------------------------------------------------- extend, add and staging


def test_all_ways_to_write_rows_are_equal() -> None:
    rows = numbered(range(20))
    nested = {**dict(rows.items()), "next": rows["next"].to_dict()}
    ways: list[Any] = [
        rows, rows.to_dict(), nested,
        {key: rows[key] for key in rows.keys(True, True)},
        {key: rows[key].numpy() for key in rows.keys(True, True)},
        TensorDict(rows.to_dict(), batch_size=[]),
    ]
    found = []
    for way in ways:
        plane = plane_of()
        plane.extend(way)
        found.append(numbers_of(sampled(plane)))
        assert_batch(sampled(plane), *expected_second_batch())
    assert all(numbers == found[0] for numbers in found)


def expected_second_batch() -> tuple[list[int], list[int]]:
    job = job_of()
    job.staged[0] += list(range(20))
    job.sample()
    [rows] = job.sample()
    return [row.value for row in rows], [row.index for row in rows]


def test_an_example_of_any_kind_gives_the_same_plane() -> None:
    schema = Schema.from_example(EXAMPLE)
    for example in (EXAMPLE, numbered(range(5)), numbered([1])[0], schema):
        plane = ExperiencePlane(example, capacity=100, batch_size=8)
        assert plane.schema == schema
        assert len(plane) == 0
        plane.extend(numbered(range(20)))
        sampled(plane)
        assert_batch(sampled(plane), *expected_second_batch())


def test_extend_copies() -> None:
    plane = plane_of()
    rows = numbered(range(30))
    plane.extend(rows)
    for key in rows.keys(True, True):
        rows[key].fill_(0)
    batch = sampled(plane)
    assert_batch(batch, numbers_of(batch), batch["index"].tolist())
    assert max(numbers_of(batch)) > 0


def test_rows_of_a_graph_are_taken_without_it() -> None:
    plane = ExperiencePlane({"x": torch.zeros(2)}, capacity=10, batch_size=4)
    weight = torch.ones(2, requires_grad=True)
    plane.extend({"x": weight * torch.arange(6.0)[:, None]})
    plane.add({"x": weight * 7})
    batch = sampled(plane)
    assert not batch["x"].requires_grad


def test_a_batch_can_be_put_back() -> None:
    plane = filled()
    batch = sampled(plane)
    plane.extend(batch.select(*plane.schema.keys))
    plane.flush()
    assert len(plane) == 100
    with pytest.raises(SchemaError) as caught:
        plane.extend(batch)
    assert caught.value.field in ("index", "loss_scale")
    assert "select" in str(caught.value)


def test_refused_rows_are_not_staged() -> None:
    plane = plane_of()
    plane.extend(numbered(range(5)))
    bad = numbered(range(5, 9)).to_dict()
    bad["next"]["reward"] = bad["next"]["reward"].float()
    with pytest.raises(SchemaError) as caught:
        plane.extend(bad)
    assert caught.value.field == ("next", "reward")
    with pytest.raises(SchemaError):
        plane.add(numbered(range(2)))
    with pytest.raises(SchemaError):
        plane.extend(numbered([1])[0])
    plane.flush()
    assert len(plane) == 5
    assert set(numbers_of(sampled(plane))) <= set(range(5))


def test_staging_is_bounded_exactly() -> None:
    plane = plane_of(ingestion=Ingestion(staging_rows=10))
    plane.extend(numbered(range(7)))
    with pytest.raises(CapacityError, match="cannot be staged") as caught:
        plane.extend(numbered(range(100, 104)))
    assert "flush" in str(caught.value)
    plane.extend(numbered(range(7, 10)))
    with pytest.raises(CapacityError):
        plane.add(numbered([100])[0])
    plane.extend(numbered([]))
    plane.flush()
    assert len(plane) == 10
    # And the plane goes on, with all of its staging.
    plane.extend(numbered(range(10, 20)))
    for _ in range(10):
        assert set(numbers_of(sampled(plane))) <= set(range(20))
    assert len(plane) == 20


def test_staging_by_default() -> None:
    plane = plane_of(capacity=100)
    plane.extend(numbered(range(1024)))
    with pytest.raises(CapacityError):
        plane.add(numbered([0])[0])
    plane = plane_of(capacity=16_000)
    plane.extend(numbered(range(2000)))
    with pytest.raises(CapacityError):
        plane.add(numbered([0])[0])


def test_no_rows_are_rows() -> None:
    plane = filled(rows=10)
    plane.extend(numbered([]))
    plane.extend(numbered([]).to_dict())
    plane.flush()
    assert len(plane) == 10
    assert plane.report().commits == 1


@pytest.mark.parametrize(
    "rows", [torch.zeros(3), [1, 2], None, 5, "text", {}, {"number": torch.zeros(3)}], ids=repr
)
def test_what_is_no_row_is_refused(rows: Any) -> None:
    plane = filled(rows=10)
    with pytest.raises(SchemaError):
        plane.extend(rows)
    with pytest.raises(SchemaError):
        plane.add(rows)
    plane.flush()
    assert len(plane) == 10


# -------------------------------------------------------------------- sample, empty and agree


def test_an_empty_plane_says_so_and_goes_on() -> None:
    plane = plane_of()
    for _ in range(2):
        with pytest.raises(EmptyError, match="no rows"):
            plane.sample()
    plane.extend(numbered(range(3)))
    assert set(numbers_of(sampled(plane))) <= {0, 1, 2}
    plane.empty()
    assert len(plane) == 0
    with pytest.raises(EmptyError):
        plane.sample()


def test_below_min_size_there_is_no_batch() -> None:
    plane = plane_of(min_size=10)
    assert plane.sample() is None
    plane.extend(numbered(range(9)))
    assert plane.sample() is None
    assert len(plane) == 9
    plane.add(numbered([9])[0])
    assert plane.sample() is not None
    plane.empty()
    assert plane.sample() is None


def test_none_does_not_use_up_a_batch() -> None:
    patient, other = plane_of(min_size=5), plane_of()
    assert patient.sample() is None
    for plane in (patient, other):
        plane.extend(numbered(range(20)))
    assert numbers_of(sampled(patient)) == numbers_of(sampled(other))


def test_empty_forgets_what_is_staged_too() -> None:
    plane = filled(rows=20)
    plane.extend(numbered(range(20, 30)))
    plane.empty()
    plane.extend(numbered(range(500, 503)))
    batch = sampled(plane)
    assert set(numbers_of(batch)) <= {500, 501, 502}
    # Logical indices go on.
    assert batch["index"].min() >= 20
    assert (batch["index"] - 20 == batch["number"] - 500).all()
    assert len(plane) == 3


def test_agree() -> None:
    plane = plane_of()
    assert plane.agree(True) == 1
    assert plane.agree(False) == 0
    assert plane.agree(-7) == -7
    assert plane.agree(1 << 40) == 1 << 40
    assert isinstance(plane.agree(3), int)


def test_a_contiguous_batch_is_contiguous_and_equal() -> None:
    strided, copied = filled(), filled()
    for _ in range(3):
        batch, other = strided.sample(), copied.sample(contiguous=True)
        assert batch is not None and other is not None
        for key in other.keys(True, True):
            assert other[key].is_contiguous()
            other[key].view(-1)
            assert torch.equal(batch[key], other[key])
        assert other["loss_scale"] == 1.0
        assert other.batch_size == batch.batch_size
    assert not strided.sample()["observation"].is_contiguous()  # type: ignore[index]


@pytest.mark.parametrize("batch_size", [1, 2, 7, 64])
@pytest.mark.parametrize(
    "example",
    [
        {"x": torch.tensor(True)}, {"x": torch.zeros(1).bool()}, {"x": torch.zeros(0)},
        {"x": torch.tensor(0, dtype=torch.int8), "y": torch.zeros(3, dtype=torch.complex128)},
        {"a": {"b": {"c": torch.zeros(2, dtype=torch.float16)}}},
    ],
    ids=lambda example: str(Schema.from_example(example).field_texts),
)
def test_small_rows_and_batches(example: Any, batch_size: int) -> None:
    plane = ExperiencePlane(example, capacity=5, batch_size=batch_size)
    for _ in range(4):
        plane.add(example)
        batch = sampled(plane)
        assert batch.batch_size == (batch_size,)
        for field in plane.schema.fields:
            assert batch[field.key].shape == (batch_size, *field.shape)
            assert batch[field.key].dtype == field.dtype
            expected = TensorDict(example, batch_size=[])[field.key]
            assert torch.equal(batch[field.key], expected.expand(batch_size, *field.shape))


def test_a_buffer_of_one_row() -> None:
    plane = plane_of(capacity=1, batch_size=3)
    for number in range(5):
        plane.add(numbered([number])[0])
        assert_batch(sampled(plane), [number] * 3, [number] * 3)


# -------------------------------------------------------------------- the batch as TensorDict


def test_operations_on_a_batch() -> None:
    batch = sampled(filled())
    numbers = numbers_of(batch)
    indices = batch["index"].tolist()
    assert_batch(batch.clone(), numbers, indices)
    assert_batch(batch.to("cpu"), numbers, indices)
    assert_batch(batch.contiguous(), numbers, indices)
    assert_batch(batch[2:5], numbers[2:5], indices[2:5])
    assert_batch(batch[torch.tensor([3, 0, 3])], [numbers[i] for i in (3, 0, 3)],
                 [indices[i] for i in (3, 0, 3)])
    odd = batch["odd"]
    assert_batch(
        batch[odd], [n for n in numbers if n % 2], [i for i, n in zip(indices, numbers,
                                                                      strict=True) if n % 2],
    )
    first, second = batch.split(4)
    assert_batch(first, numbers[:4], indices[:4])
    assert_batch(torch.cat([second, first]), numbers[4:] + numbers[:4],
                 indices[4:] + indices[:4])
    assert batch.reshape(2, 4)["number"].tolist() == [numbers[:4], numbers[4:]]
    assert torch.stack([first, second])["number"].tolist() == [numbers[:4], numbers[4:]]
    assert batch.to(torch.float64)["observation"].dtype == torch.float64
    assert batch["next", "reward"].shape == (8, 1)
    assert batch["next"].batch_size == (8,)
    assert batch.device == torch.device("cpu")
    assert batch.apply(lambda x: x + 1)["number"].tolist() == [n + 1 for n in numbers]
    assert batch.flatten_keys(".")["next.reward"].shape == (8, 1)
    assert not batch.is_locked


def test_a_batch_takes_new_entries() -> None:
    batch = sampled(filled())
    batch["advantage"] = torch.zeros(8)
    batch["next", "value"] = torch.ones(8, 1)
    batch.update({"number": torch.zeros(8, dtype=torch.int64)})
    assert set(batch["next"].keys()) == {"observation", "reward", "value"}
    later = sampled(filled())
    assert "advantage" not in later.keys()  # noqa: SIM118 - `in` of a TensorDict means values
    assert set(later["next"].keys()) == {"observation", "reward"}


def test_the_loss_scale_is_a_number() -> None:
    batch = sampled(filled())
    assert isinstance(batch["loss_scale"], float)
    loss = torch.ones(3, requires_grad=True).sum()
    (loss * batch["loss_scale"]).backward()
    assert batch[:3]["loss_scale"] == 1.0
    assert batch.clone()["loss_scale"] == 1.0


CHANGES: dict[str, Callable[[TensorDict], object]] = {
    "fields": lambda batch: [batch[k].fill_(1) for k in batch.select("number", "odd", "next")
                             .keys(True, True)],
    "zero": lambda batch: batch.zero_(),
    "index": lambda batch: batch["index"].fill_(-5),
    "delete": lambda batch: [batch.pop(key) for key in list(batch.keys())],
    "replace": lambda batch: batch.update({"number": torch.zeros(8, dtype=torch.int64)}),
    "scale": lambda batch: batch.set("loss_scale", NonTensorData(5.0, batch_size=[8])),
    "scale in place": lambda batch: batch.set_("loss_scale", NonTensorData(5.0, batch_size=[8])),
    "scale by update": lambda batch: batch.update_(
        TensorDict({"loss_scale": NonTensorData(5.0, batch_size=[8])}, batch_size=[8])
    ),
    "copy": lambda batch: batch.copy_(
        batch.clone().set("loss_scale", NonTensorData(5.0, batch_size=[8]))
    ),
    "lock": lambda batch: batch.lock_(),
    "shape": lambda batch: batch.batch_size == batch["number"].unsqueeze_(1).shape,
    "data": lambda batch: setattr(batch["number"], "data", torch.zeros(8, dtype=torch.int64)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_batch_reaches_no_other(change: str) -> None:
    plane, job = filled(), job_of()
    job.staged[0] += list(range(100))
    kept = sampled(plane)
    [kept_rows] = job.sample()
    for _ in range(8):
        CHANGES[change](sampled(plane))
        job.sample()
        batch = sampled(plane)
        [rows] = job.sample()
        check(batch, rows)
    check(kept, kept_rows)


def test_gradients_of_a_batch_stay_with_it() -> None:
    plane = filled()
    for _ in range(6):
        batch = sampled(plane)
        assert not batch["observation"].requires_grad
        assert batch["observation"].grad is None
        observation = batch["observation"].requires_grad_()
        (observation * 3).sum().backward()
        assert torch.equal(observation.grad, torch.full_like(observation, 3))
        assert observation.is_leaf
        del batch, observation


@pytest.mark.parametrize("moment", ["made", "filled", "first batch", "later batch"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=lambda m: m.__name__)
def test_a_plane_used_without_gradients_still_trains(mode: Any, moment: str) -> None:
    # An evaluation, or a policy that collects, runs in such a mode; training does not.
    def during(when: str) -> Any:
        return mode() if when == moment else contextlib.nullcontext()

    with during("made"):
        plane = plane_of()
    with during("filled"):
        plane.extend(numbered(range(50)))
        plane.flush()
    with during("first batch"):
        sampled(plane)
    plane.extend(numbered(range(50, 60)))
    for _ in range(3):
        batch = sampled(plane)
        weight = torch.ones(3, requires_grad=True)
        (batch["observation"] * weight).sum().backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, batch["observation"].sum(0))
        batch["observation"].zero_()
        with during("later batch"):
            batch = sampled(plane)
        assert_batch(batch, numbers_of(batch), batch["index"].tolist())


def test_the_default_device_of_torch_does_not_matter() -> None:
    rows, more = numbered(range(50)), numbered(range(50, 60))
    expected = filled(rows=50)
    # As after torch.set_default_device("cuda"), on machines without CUDA too.
    with torch.device("meta"):
        plane = plane_of()
        plane.extend(rows)
        plane.flush()
        batches = [sampled(plane) for _ in range(3)]
        plane.extend(more)
        batches.append(sampled(plane))
    for batch in batches[:3]:
        assert numbers_of(batch) == numbers_of(sampled(expected))
    for batch in batches:
        assert_batch(batch, numbers_of(batch), batch["index"].tolist())


# ----------------------------------------------------------------------------------- arguments


ROW_BYTES = conduit.RowLayout(Schema.from_example(EXAMPLE)).row_bytes


@pytest.mark.parametrize(
    ("capacity", "size_bytes"),
    [
        ("1MB", 10**6), ("1mb", 10**6), (" 1 MB ", 10**6), ("100kB", 10**5), ("1.5MB", 1_500_000),
        ("1MiB", 2**20), ("3KiB", 3 * 2**10), ("500B", 500), ("0.001GB", 10**6),
        ("0.0009765625GiB", 2**20), ("0.000001TB", 10**6),
    ],
)
def test_capacity_in_bytes(capacity: str, size_bytes: int) -> None:
    plane = plane_of(capacity)
    assert plane.capacity == size_bytes // ROW_BYTES
    assert plane.report().capacity == plane.capacity
    plane.extend(numbered(range(min(plane.capacity, 1000))))
    plane.flush()
    assert len(plane) == min(plane.capacity, 1000)


@pytest.mark.parametrize(
    "capacity",
    [0, -1, 1.5, None, "", "1", "MB", "-1MB", "1XB", "1e3MB", "0MB", "1B", "5iB", "1 M B", "1,5MB",
     "nan", b"1MB", [100]],
    ids=repr,
)
def test_capacities_that_mean_nothing_are_refused(capacity: Any) -> None:
    with pytest.raises(CapacityError):
        plane_of(capacity)


@pytest.mark.parametrize("capacity", [10**12, "900TB"])
def test_a_capacity_beyond_memory_is_refused(capacity: Any) -> None:
    with pytest.raises(CapacityError, match="tiers cannot hold"):
        plane_of(capacity)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, WorldError), ({"batch_size": -3}, WorldError),
        ({"batch_size": 2.0}, WorldError), ({"batch_size": None}, WorldError),
        ({"min_size": -1}, WorldError), ({"min_size": 1.0}, WorldError),
        ({"min_size": 101}, CapacityError), ({"max_staleness": -1}, WorldError),
        ({"routing": "nearest"}, WorldError), ({"routing": None}, WorldError),
        ({"device": "meta"}, WorldError), ({"device": "nonsense"}, ConduitError),
        ({"ingestion": Ingestion(staging_rows=0)}, CapacityError),
        ({"ingestion": Ingestion(staging_rows=2.5)}, ConduitError),  # type: ignore[arg-type]
        ({"placement": conduit.Central(1)}, WorldError),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(
    options: dict[str, Any], error: type[ConduitError]
) -> None:
    with pytest.raises(error):
        plane_of(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_is_refused() -> None:
    with pytest.raises(ConduitError):
        plane_of(device="cuda")


def test_a_group_without_a_job_is_refused() -> None:
    with pytest.raises(WorldError, match="init_process_group"):
        plane_of(group=object())


def test_integers_of_numpy_are_integers() -> None:
    plane = plane_of(
        capacity=np.int64(100),  # type: ignore[arg-type]
        batch_size=np.int32(8), min_size=np.int64(3),
        ingestion=Ingestion(staging_rows=np.int64(20)),  # type: ignore[arg-type]
    )
    assert plane.capacity == 100
    plane.extend(numbered(range(20)))
    assert sampled(plane).batch_size == (8,)


def test_a_plane_tells_what_it_is() -> None:
    plane = plane_of(capacity=77, batch_size=5, min_size=3, name="replay")
    assert (plane.capacity, plane.batch_size, plane.min_size) == (77, 5, 3)
    assert (plane.rank, plane.ranks, plane.name) == (0, 1, "replay")
    assert plane.schema == Schema.from_example(EXAMPLE)
    assert conduit.__version__


# --------------------------------------------------------------------------- the end of a plane


CALLS: dict[str, Callable[[ExperiencePlane], object]] = {
    "extend": lambda plane: plane.extend(numbered([1])),
    "extend nothing": lambda plane: plane.extend(numbered([])),
    "add": lambda plane: plane.add(numbered([1])[0]),
    "sample": lambda plane: plane.sample(),
    "flush": lambda plane: plane.flush(),
    "agree": lambda plane: plane.agree(1),
    "empty": lambda plane: plane.empty(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_plane_says_so(call: str) -> None:
    plane = filled()
    plane.close()
    with pytest.raises(WorldError, match="'experience' is closed"):
        CALLS[call](plane)
    plane.close()


def test_after_close_batches_and_figures_stay() -> None:
    plane = filled()
    batch = sampled(plane)
    numbers, indices = numbers_of(batch), batch["index"].tolist()
    plane.close()
    plane.close()
    assert len(plane) == 100
    report = plane.report()
    assert report.samples == 1
    assert report.shard_bytes == 0
    del plane
    gc.collect()
    assert_batch(batch, numbers, indices)


def test_staged_rows_do_not_hinder_close() -> None:
    plane = filled()
    plane.extend(numbered(range(5)))
    plane.close()


def test_a_plane_is_a_context() -> None:
    with plane_of() as plane:
        plane.extend(numbered(range(10)))
        batch = sampled(plane)
    with pytest.raises(WorldError, match="closed"):
        plane.flush()
    assert_batch(batch, numbers_of(batch), batch["index"].tolist())
    with plane_of() as plane:
        plane.close()


def test_an_error_inside_the_context_comes_through() -> None:
    with pytest.raises(KeyError, match="mine"), plane_of() as plane:
        raise KeyError("mine")
    with pytest.raises(WorldError, match="closed"):
        plane.sample()
    plane.close()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs Linux to see a process's memory"
)
def test_close_gives_the_memory_back() -> None:
    plane = ExperiencePlane(
        {"x": torch.zeros(1 << 14)}, capacity=1600, batch_size=2,
        ingestion=Ingestion(staging_rows=200),
    )
    rows = {"x": torch.ones(200, 1 << 14)}
    for _ in range(10):
        plane.extend(rows)
        plane.flush()
    batch = sampled(plane)
    held = plane.report().shard_bytes
    assert held > 100 << 20
    before = resident_bytes()
    plane.close()
    # The plane itself is still there: it need not be forgotten to free what it held.
    freed = before - resident_bytes()
    assert freed > held * 0.8
    assert (batch["x"] == 1).all()


# ------------------------------------------------------------------------------------ report


def test_the_report_counts() -> None:
    plane = plane_of(capacity=20, batch_size=4, name="counted")
    before = plane.report()
    assert (before.samples, before.commits, before.rows, before.rows_staged) == (0, 0, 0, 0)
    plane.extend(numbered(range(15)))
    assert plane.report().rows_staged == 15
    assert plane.report().rows_committed == 0
    plane.flush()
    plane.flush()
    for _ in range(3):
        plane.sample()
    plane.extend(numbered(range(15, 45)))
    plane.sample()
    report = plane.report()
    assert report.name == "counted"
    assert (report.rank, report.ranks, report.hosts, report.device) == (0, 1, 1, "cpu")
    assert report.routing == "exchangeable"
    assert (report.rows, report.capacity, report.shard_rows) == (20, 20, 20)
    assert report.row_bytes == ROW_BYTES
    assert report.shard_bytes >= 20 * ROW_BYTES
    assert report.directory_bytes == 20
    assert (report.samples, report.commits, report.fences) == (4, 2, 0)
    assert (report.rows_staged, report.rows_committed, report.rows_skipped) == (45, 45, 10)
    assert (report.rows_delivered, report.rows_received, report.rows_sent_home) == (16, 0, 0)
    assert (report.exchanges, report.late_rows) == (0, 0)
    assert report.sent_rows == report.sent_bytes == report.received_rows == (0,)
    assert report.fresh_slabs == 1
    assert report.blocked_ms > 0
    assert before.samples == 0, "a report is an account of its time"


def test_blocked_time_is_the_time_in_collective_calls() -> None:
    plane = filled()
    before = plane.report().blocked_ms
    plane.extend(numbered(range(100)))
    assert plane.report().blocked_ms == before
    plane.flush()
    flushed = plane.report().blocked_ms
    assert flushed > before
    plane.sample()
    assert plane.report().blocked_ms > flushed


@pytest.mark.parametrize("overlap", [False, True])
def test_who_keeps_batches_pays_for_them(overlap: bool) -> None:
    plane = filled(overlap=overlap)
    for _ in range(20):
        plane.sample()
    assert plane.report().fresh_slabs <= 1 + overlap
    kept = [sampled(plane) for _ in range(10)]
    copies = [batch.clone() for batch in kept]
    fresh = plane.report().fresh_slabs
    assert fresh >= 10
    for _ in range(50):
        plane.sample()
    for batch, copy in zip(kept, copies, strict=True):
        assert_batch(batch, numbers_of(copy), copy["index"].tolist())
    # One more where the next batch is fetched while both the last and the one before are in use.
    assert plane.report().fresh_slabs <= fresh + 1 + overlap


def test_a_plane_that_is_dropped_gives_its_memory_back_at_once() -> None:
    plane = filled()
    gone = weakref.ref(plane._shard)
    gc.disable()
    try:
        del plane
        assert gone() is None, "nothing of a plane waits for the garbage collector"
    finally:
        gc.enable()


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_batch_outlives_the_mode_in_which_it_was_asked_for(contiguous: bool) -> None:
    plane = filled()
    with torch.inference_mode():
        batch = plane.sample(contiguous=contiguous)
    assert batch is not None
    assert not any(value.is_inference() for value in batch.values(True, True)
                   if isinstance(value, torch.Tensor))
    weight = torch.ones(100, requires_grad=True)
    weight[batch["index"]].sum().backward()
    (batch["observation"] * torch.ones(1, requires_grad=True)).sum().backward()
