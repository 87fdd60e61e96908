"""Blocks: views on packed rows, and fields written into them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import conduit.blocks
from conduit.blocks import BlockViews, BlockWriter
from conduit.fields import Field
from conduit.schema import RowLayout, Schema
from tests.properties import examples, random_rows, raw, schemas


@examples(100)
@given(schema=schemas(), rows=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
def test_block_views_are_the_views_of_the_layout(schema: Schema, rows: int, seed: int) -> None:
    layout = RowLayout(schema)
    block = layout.block(rows)
    layout.pack(layout.check(random_rows(schema, rows, np.random.default_rng(seed)))[1], block)
    maker = BlockViews(layout.columns, block)
    expected = layout.views(block)
    for _ in range(2):
        for column, view in zip(layout.columns, maker.fresh(), strict=True):
            field = column.field
            other = expected[field.key]
            assert view.shape == other.shape == (rows, *field.shape)
            assert view.dtype is other.dtype is field.dtype
            assert raw(view) == raw(other)
            if view.numel():
                assert view.data_ptr() == other.data_ptr()
                assert view.data_ptr() == block.data_ptr() + column.offset_bytes
                assert view.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()


@examples(60)
@given(
    schema=schemas(), rows=st.integers(1, 6), data=st.data(), seed=st.integers(0, 2**32 - 1),
    joint_bytes=st.sampled_from([0, 40, 1 << 20]),
)
def test_writing_a_part_changes_that_part_only(
    schema: Schema, rows: int, data: st.DataObject, seed: int, joint_bytes: int
) -> None:
    layout = RowLayout(schema)
    rng = np.random.default_rng(seed)
    block = layout.block(rows)
    before = layout.check(random_rows(schema, rows, rng))[1]
    layout.pack(before, block)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    written = layout.check(random_rows(schema, stop - start, rng))[1]
    # Few bytes are joined before they are written, many are not: it must not show.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conduit.blocks, "_JOINT_BYTES", joint_bytes)
        maker = BlockWriter(layout.columns, block)
        maker.write(layout.check(random_rows(schema, rows, rng))[1], 0, rows)
        maker.write(before, 0, rows)
        maker.write(written, start, stop)
    for i, view in enumerate(BlockViews(layout.columns, block).fresh()):
        for row in range(rows):
            inside = start <= row < stop
            expected = written[i][row - start] if inside else before[i][row]
            assert raw(view[row]) == raw(expected)


def test_views_have_no_autograd_history_with_each_other() -> None:
    layout = RowLayout(Schema((
        Field(key=("x",), dtype=torch.float32, shape=(3,)),
        Field(key=("y",), dtype=torch.int64, shape=()),
    )))
    maker = BlockViews(layout.columns, layout.block(2))
    first, second = maker.fresh(), maker.fresh()
    first[1].requires_grad_()
    assert not any(view.requires_grad for view in second)
    assert not any(view.requires_grad for view in maker.fresh())


def test_views_can_be_changed_in_place_by_what_requires_grad() -> None:
    layout = RowLayout(Schema((
        Field(key=("x",), dtype=torch.float32, shape=(3,)),
        Field(key=("y",), dtype=torch.float32, shape=()),
    )))
    views = BlockViews(layout.columns, layout.block(2).zero_())
    weight = torch.full((3,), 2.0, requires_grad=True)
    x, y = views.fresh()
    x.add_(weight)
    x.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0, 2.0]
    assert not y.requires_grad
    again, _ = views.fresh()
    assert again.is_leaf and not again.requires_grad and again.tolist() == [[2.0] * 3] * 2
    # What autograd saved of one batch is not disturbed by another's in-place operations.
    product = (again * weight).sum()
    views.fresh()[1].add_(1)
    product.backward()


@examples(60)
@given(
    schema=schemas(), rows=st.integers(0, 6), seed=st.integers(0, 2**32 - 1), data=st.data(),
    joint_bytes=st.sampled_from([0, 1 << 20]),
)
def test_fields_of_any_strides_are_written(
    schema: Schema, rows: int, seed: int, data: st.DataObject, joint_bytes: int
) -> None:
    layout = RowLayout(schema)
    values = layout.check(random_rows(schema, rows, np.random.default_rng(seed)))[1]

    def spread(value: Tensor) -> Tensor:
        """The same numbers, with gaps or in another order of dimensions."""
        how = data.draw(st.sampled_from(["as it is", "gaps", "turned", "last apart"]))
        if how == "gaps":
            return torch.stack([value, value])[0] if rows == 0 else torch.stack(
                [value, value], dim=1
            )[:, 0]
        if how == "turned":
            order = tuple(reversed(range(value.dim())))
            return value.permute(order).contiguous().permute(order)
        if how == "last apart":
            return torch.stack([value, value], dim=-1)[..., 0]
        return value

    block = layout.block(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conduit.blocks, "_JOINT_BYTES", joint_bytes)
        BlockWriter(layout.columns, block).write([spread(value) for value in values], 0, rows)
    for view, value in zip(BlockViews(layout.columns, block).fresh(), values, strict=True):
        assert raw(view) == raw(value)


@pytest.mark.parametrize("joint_bytes", [0, 1 << 20])
def test_lazily_negated_and_conjugated_fields_are_written(
    monkeypatch: pytest.MonkeyPatch, joint_bytes: int
) -> None:
    monkeypatch.setattr(conduit.blocks, "_JOINT_BYTES", joint_bytes)
    layout = RowLayout(Schema((
        Field(key=("z",), dtype=torch.complex64, shape=(3,)),
        Field(key=("x",), dtype=torch.float32, shape=(3,)),
        Field(key=("y",), dtype=torch.float64, shape=(3,)),
    )))
    z = torch.randn(5, 3, dtype=torch.complex64).conj()
    x, y = z.imag, torch.randn(5, 3, dtype=torch.complex128).conj().imag
    assert z.is_conj() and x.is_neg() and y.is_neg()
    block = layout.block(5)
    layout.pack(layout.check({"z": z, "x": x, "y": y})[1], block)
    views = layout.views(block)
    assert torch.equal(views["z",], z.resolve_conj())
    assert torch.equal(views["x",], x.resolve_neg())
    assert torch.equal(views["y",], y.resolve_neg())


@examples(60)
@given(schema=schemas(), rows=st.integers(0, 6), seed=st.integers(0, 2**32 - 1))
def test_padding_of_small_rows_is_zero(schema: Schema, rows: int, seed: int) -> None:
    layout = RowLayout(schema)
    block = layout.block(rows).fill_(0xAB)
    writer = BlockWriter(layout.columns, block)
    for n in (rows, rows // 2):
        values = layout.check(random_rows(schema, n, np.random.default_rng(seed)))[1]
        writer.write(values, 0, n)
    used = sum(field.size_bytes for field in schema.fields)
    assert not block[:, used:].any()


def test_writing_reads_no_gradient_and_leaves_none() -> None:
    layout = RowLayout(Schema((
        Field(key=("x",), dtype=torch.float32, shape=(3,)),
        Field(key=("y",), dtype=torch.float16, shape=(1,)),
    )))
    block = layout.block(2)
    x = torch.randn(2, 3, requires_grad=True)
    y = torch.randn(2, 1, dtype=torch.float16, requires_grad=True)
    with torch.inference_mode():
        layout.pack([x, y], block)
    layout.pack([x, y], block)
    assert not block.requires_grad and not block.is_inference()
    assert torch.equal(layout.views(block)["x",], x.detach())


@pytest.mark.parametrize("joint_bytes", [0, 1 << 20])
def test_few_and_many_bytes_are_packed_alike(
    joint_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conduit.blocks, "_JOINT_BYTES", joint_bytes)
    schema = Schema.from_example({
        "x": torch.zeros(3, 2), "y": torch.tensor(0.0), "z": torch.zeros(1), "n": torch.zeros(0, 4),
        "turned": torch.zeros(1), "plain": torch.zeros(4), "part": torch.zeros(3),
        "backwards": torch.zeros(3),
    })
    layout = RowLayout(schema)
    rows = {
        "x": torch.randn(2, 3, 5, requires_grad=True).permute(2, 1, 0),
        "y": torch.randn(5, dtype=torch.complex64).conj().imag,
        "z": torch.randn(1, 1, requires_grad=True).expand(5, 1), "n": torch.zeros(5, 0, 4),
        "turned": torch.randn(1, 5).T, "plain": torch.randn(5, 4, requires_grad=True),
        "part": torch.randn(5, 9)[:, 2:5], "backwards": torch.randn(5, 3).flip(0),
    }
    block = layout.block(5)
    layout.pack(layout.check(rows)[1], block)
    for key, view in layout.views(block).items():
        assert torch.equal(view, rows[key[0]])
        assert not view.requires_grad


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16])
def test_fields_that_begin_between_words_are_written(dtype: torch.dtype) -> None:
    layout = RowLayout(Schema((Field(key=("x",), dtype=dtype, shape=(4,)),)))
    many = torch.arange(70).remainder(2).to(dtype)
    for value in (many[1:21].view(5, 4), many.view(10, 7)[3:4, :4], many[3:7].view(1, 4)):
        block = layout.block(len(value))
        layout.pack([value], block)
        assert torch.equal(layout.views(block)["x",], value)
