"""BatchMaker: the cheap way to make a batch gives what TensorDict's constructor gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from torch import Tensor

import conduit.sched.batch
from conduit.blocks import BlockViews
from conduit.sched.batch import BatchMaker
from conduit.schema import RowLayout, Schema
from tests.numbered import EXAMPLE, assert_batch, numbered
from tests.properties import examples, random_rows, raw, schemas

CPU = torch.device("cpu")


def made(schema: Schema, rows: int, seed: int = 0) -> tuple[TensorDict, dict[Any, Tensor]]:
    layout = RowLayout(schema)
    values = random_rows(schema, rows, np.random.default_rng(seed))
    block = layout.block(rows)
    layout.pack(layout.check(values)[1], block)
    maker = BatchMaker(layout.tree, rows=rows, device=CPU)
    batch = maker.make(
        BlockViews(layout.columns, block).fresh(), np.arange(rows) * 10, loss_scale=1.0
    )
    return batch, values


@examples(100)
@given(schema=schemas(), rows=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
def test_a_batch_is_the_tensordict_of_its_rows(schema: Schema, rows: int, seed: int) -> None:
    batch, values = made(schema, rows, seed)
    assert batch.batch_size == (rows,)
    assert batch.device == CPU
    for key, value in values.items():
        assert raw(batch[key]) == raw(value)
        # Every level knows its batch size.
        for depth in range(1, len(key)):
            assert batch[key[:depth]].batch_size == (rows,)
            assert batch[key[:depth]].device == CPU
    assert set(batch.keys(True, True)) == {*schema.keys, "index"}
    assert batch["index"].tolist() == [10 * row for row in range(rows)]
    assert batch["loss_scale"] == 1.0


@pytest.mark.parametrize("works", [True, False])
def test_both_ways_are_equal(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduit.sched.batch, "_unsafe_works", lambda: works)
    monkeypatch.setattr(conduit.sched.batch, "_twins_work", lambda: works)
    layout = RowLayout(Schema.from_example(EXAMPLE))
    block = layout.block(4)
    layout.pack(layout.check(numbered(range(4)))[1], block)
    maker = BatchMaker(layout.tree, rows=4, device=CPU)
    batch = maker.make(BlockViews(layout.columns, block).fresh(), np.arange(4), loss_scale=1.0)
    assert_batch(batch, range(4), range(4))
    for copy in (batch.clone(), batch.to("cpu"), batch[:], torch.cat([batch[:1], batch[1:]])):
        assert_batch(copy, range(4), range(4))
    assert batch["next"].batch_size == (4,)
    assert not batch.is_locked


def test_the_unsafe_way_is_used_here() -> None:
    assert conduit.sched.batch._unsafe_works()
    assert conduit.sched.batch._twins_work()


def test_twins_that_share_their_value_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduit.sched.batch, "_twin", lambda data: data)
    assert not conduit.sched.batch._twins_work()
    monkeypatch.setattr(
        conduit.sched.batch, "_twin", lambda data: NonTensorData(3.0, batch_size=[2])
    )
    assert not conduit.sched.batch._twins_work()
    monkeypatch.setattr(conduit.sched.batch, "_twin", lambda data: data.no_such_thing)
    assert not conduit.sched.batch._twins_work()


def test_a_tensordict_without_the_unsafe_way_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorDict, "_new_unsafe", lambda fields, **options: TensorDict({}, [2]))
    assert not conduit.sched.batch._unsafe_works()
    monkeypatch.setattr(
        TensorDict, "_new_unsafe", lambda fields: TensorDict(fields, batch_size=[2])
    )
    assert not conduit.sched.batch._unsafe_works()
    monkeypatch.undo()
    monkeypatch.delattr(TensorDict, "_new_unsafe")
    assert not conduit.sched.batch._unsafe_works()


@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
def test_every_batch_has_its_own_scale(scale: float) -> None:
    layout = RowLayout(Schema.from_example(EXAMPLE))
    maker = BatchMaker(layout.tree, rows=2, device=CPU)
    views = BlockViews(layout.columns, layout.block(2))
    for value in (1.0, scale, 1.0, scale):
        batch = maker.make(views.fresh(), np.arange(2), loss_scale=value)
        assert batch["loss_scale"] == value
        assert isinstance(batch["loss_scale"], float)
