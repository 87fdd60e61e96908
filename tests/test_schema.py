"""Schema and RowLayout: what a row holds, where its fields lie, and what is refused."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from conduit.blocks import BlockViews
from conduit.errors import SchemaError
from conduit.fields import DTYPES, Field
from conduit.schema import RowLayout, Schema
from tests.properties import examples, random_rows, raw, schemas

MIXED = Schema((
    Field(key=("observation",), dtype=torch.float32, shape=(3,)),
    Field(key=("action",), dtype=torch.int64, shape=()),
    Field(key=("next", "observation"), dtype=torch.float32, shape=(3,)),
    Field(key=("next", "done"), dtype=torch.bool, shape=(1,)),
))


def mixed_rows(rows: int) -> dict[str, Any]:
    """Rows of MIXED, as a user gives them."""
    return {
        "observation": torch.randn(rows, 3),
        "action": torch.arange(rows),
        "next": {"observation": torch.randn(rows, 3), "done": torch.zeros(rows, 1).bool()},
    }


# ------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (2, 0, 3)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    schema = Schema((Field(key=("x",), dtype=DTYPES[name], shape=shape),))
    layout = RowLayout(schema)
    rows = random_rows(schema, 64, np.random.default_rng(0))
    n, values = layout.check({"x": rows["x",]})
    block = layout.block(64)
    layout.pack(values, block)
    view = layout.views(block)["x",]
    assert n == 64
    assert view.shape == (64, *shape)
    assert view.dtype is DTYPES[name]
    assert raw(view) == raw(rows["x",])


def test_all_storable_dtypes_are_covered() -> None:
    expected = {
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    }
    assert set(DTYPES) == expected
    assert all(getattr(torch, name) is dtype for name, dtype in DTYPES.items())


def test_special_values_come_back() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45])
    signalling = torch.tensor([0x7F800001, -1, 0x7FC12345], dtype=torch.int32).view(torch.float32)
    sent = torch.cat([special, signalling])
    layout = RowLayout(Schema.from_example({"x": torch.tensor(0.0)}))
    block = layout.block(len(sent))
    layout.pack([sent], block)
    assert raw(layout.views(block)["x",]) == raw(sent)


@examples(150)
@given(schema=schemas(), rows=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_pack_and_views_round_trip(schema: Schema, rows: int, seed: int) -> None:
    layout = RowLayout(schema)
    given_rows = random_rows(schema, rows, np.random.default_rng(seed))
    n, values = layout.check(given_rows)
    assert n == rows
    block = layout.block(rows)
    block.fill_(0xAB)
    layout.pack(values, block)
    views = layout.views(block)
    assert set(views) == {field.key for field in schema.fields}
    for field in schema.fields:
        assert views[field.key].dtype is field.dtype
        assert views[field.key].shape == (rows, *field.shape)
        assert raw(views[field.key]) == raw(given_rows[field.key])


@examples(100)
@given(schema=schemas(), rows=st.integers(1, 4), first=st.integers(0, 3))
def test_every_row_of_every_view_is_aligned(schema: Schema, rows: int, first: int) -> None:
    layout = RowLayout(schema)
    # A part of a larger block, as the rows of a shard are.
    block = layout.block(first + rows)[first:]
    for views in (list(layout.views(block).values()), BlockViews(layout.columns, block).fresh()):
        for view in views:
            if view.numel():
                for row in view:
                    assert row.data_ptr() % view.dtype.itemsize == 0
    assert layout.row_bytes % 16 == 0


@examples(100)
@given(schema=schemas())
def test_the_layout_is_what_its_description_says(schema: Schema) -> None:
    layout = RowLayout(schema)
    fields = [column.field for column in layout.columns]
    assert sorted(fields, key=lambda f: f.key) == list(schema.fields)
    widths = [field.dtype.itemsize for field in fields]
    assert widths == sorted(widths, reverse=True)
    # One after the other, without gaps or overlaps.
    offset = 0
    for column in layout.columns:
        assert column.offset_bytes == offset
        offset += column.field.size_bytes
    # A multiple of 16, and whole cache lines where these take at most an eighth more.
    rounded = max(16, offset + -offset % 16)
    lines = max(64, offset + -offset % 64)
    assert layout.row_bytes == (lines if lines <= rounded * 9 / 8 else rounded)
    # Fields of one dtype are neighbours.
    dtypes = [field.dtype for field in fields]
    changes = sum(a is not b for a, b in pairwise(dtypes))
    assert changes == len(set(dtypes)) - 1
    # The tree has the column's number at the end of every key.
    for number, field in enumerate(fields):
        node: Any = layout.tree
        for part in field.key:
            node = node[part]
        assert node == number


def test_views_write_through() -> None:
    layout = RowLayout(MIXED)
    block = layout.block(4)
    layout.pack(layout.check(mixed_rows(4))[1], block)
    for views in (layout.views(block), layout.views(block)):
        views["next", "observation"][2, 1] = 7.5
        views["action",][3] = -9
    column = {c.field.key: c.offset_bytes for c in layout.columns}
    at = column["next", "observation"] + 4
    assert block[2, at : at + 4].view(torch.float32).item() == 7.5
    at = column["action",]
    assert block[3, at : at + 8].view(torch.int64).item() == -9
    assert layout.tensordict(block)["next", "observation"][2, 1] == 7.5


def test_pack_takes_what_requires_grad_and_any_strides() -> None:
    layout = RowLayout(Schema.from_example({"x": torch.zeros(3, 2)}))
    value = torch.randn(2, 3, 5, requires_grad=True).permute(2, 1, 0)
    block = layout.block(5)
    layout.pack(layout.check({"x": value})[1], block)
    view = layout.views(block)["x",]
    assert raw(view) == raw(value)
    assert not view.requires_grad
    layout.pack([torch.ones(1, 3, 2).expand(5, 3, 2)], block)
    assert (view == 1).all()


def test_pack_resolves_conjugate_and_negative_views() -> None:
    layout = RowLayout(Schema.from_example({"x": torch.zeros((), dtype=torch.complex64)}))
    value = torch.randn(4, dtype=torch.complex64)
    block = layout.block(4)
    layout.pack([value.conj()], block)
    assert layout.views(block)["x",].tolist() == [v.conjugate() for v in value.tolist()]
    layout = RowLayout(Schema.from_example({"x": torch.tensor(0.0)}))
    block = layout.block(4)
    layout.pack([value.conj().imag], block)
    assert layout.views(block)["x",].tolist() == [-v.imag for v in value.tolist()]


def test_a_layout_of_the_tensordict_has_the_nested_keys() -> None:
    layout = RowLayout(MIXED)
    rows = mixed_rows(3)
    block = layout.block(3)
    layout.pack(layout.check(rows)[1], block)
    found = layout.tensordict(block)
    assert found.batch_size == (3,)
    assert set(found.keys(True, True)) == {
        "observation", "action", ("next", "observation"), ("next", "done"),
    }
    assert (found == TensorDict(rows, batch_size=[3])).all()


# -------------------------------------------------------------------------------------- schema


def test_the_hash_is_stable() -> None:
    # Other machines, later versions and checkpoints rely on it.
    assert MIXED.description == (
        '[[["action"],"int64",[]],[["next","done"],"bool",[1]],'
        '[["next","observation"],"float32",[3]],[["observation"],"float32",[3]]]'
    )
    assert MIXED.hash == 4504380951266362119


@examples(60)
@given(schema=schemas(), seed=st.integers(0, 1000))
def test_the_order_of_fields_does_not_matter(schema: Schema, seed: int) -> None:
    shuffled = list(schema.fields)
    random.Random(seed).shuffle(shuffled)
    other = Schema(tuple(shuffled))
    assert other == schema
    assert other.hash == schema.hash
    assert other.description == schema.description
    assert 0 <= schema.hash < 1 << 63
    assert [c.offset_bytes for c in RowLayout(other).columns] == [
        c.offset_bytes for c in RowLayout(schema).columns
    ]


@examples(60)
@given(schema=schemas())
def test_a_description_describes_the_schema(schema: Schema) -> None:
    again = Schema.from_description(schema.description)
    assert again == schema
    assert again.hash == schema.hash
    json.loads(schema.description)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: Field(key=("other",), dtype=f.dtype, shape=f.shape),
        lambda f: Field(key=f.key, dtype=torch.float64, shape=f.shape),
        lambda f: Field(key=f.key, dtype=f.dtype, shape=(4,)),
        lambda f: Field(key=f.key, dtype=f.dtype, shape=(3, 1)),
    ],
    ids=["key", "dtype", "length", "dimensions"],
)
def test_any_difference_changes_the_hash(change: Callable[[Field], Field]) -> None:
    last = MIXED.fields[-1]
    other = Schema((*MIXED.fields[:-1], change(last)))
    assert other.hash != MIXED.hash
    assert other != MIXED


def test_keys_and_texts_are_written_as_people_write_them() -> None:
    assert MIXED.keys == ["action", ("next", "done"), ("next", "observation"), "observation"]
    assert MIXED.field_texts == {
        "'action'": "int64[]", "('next', 'done')": "bool[1]",
        "('next', 'observation')": "float32[3]", "'observation'": "float32[3]",
    }


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "{}", "[]", "1", "null", '"text"', "[1]", "[[1,2,3]]",
        '[[["a"],"float31",[]]]', '[[["a"],"float32",["x"]]]', '[[["a"],"float32"]]',
        '[[[1],"float32",[]]]', '[[[],"float32",[]]]', '[[["index"],"float32",[]]]',
        '[[["a"],"float32",[-1]]]', '[[["a"],"float32",[1.5]]]', '[[["a"],"float32",[NaN]]]',
        '[["abc","float32",[1]]]', '[[["a"],"float32",[]],[["a"],"int8",[]]]',
        "[" * 100_000,
    ],
    ids=lambda text: repr(text[:40]),
)
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        Schema.from_description(text)


# --------------------------------------------------------------------------------- from_example


def test_a_dict_is_read_as_one_row() -> None:
    schema = Schema.from_example({
        "observation": torch.zeros(3), "action": torch.tensor(0),
        "next": {"observation": torch.zeros(3)}, ("next", "done"): torch.zeros(1).bool(),
    })
    assert schema == MIXED


def test_a_tensordict_knows_what_a_row_is() -> None:
    rows = mixed_rows(4)
    assert Schema.from_example(TensorDict(rows, batch_size=[4])) == MIXED
    one = TensorDict(rows, batch_size=[4])[0]
    assert one.batch_size == ()
    assert Schema.from_example(one) == MIXED
    steps = TensorDict({"x": torch.zeros(2, 5, 3)}, batch_size=[2, 5])
    assert Schema.from_example(steps).fields[0].shape == (3,)


def test_batch_dims_say_what_a_row_is() -> None:
    assert Schema.from_example(mixed_rows(4), batch_dims=1) == MIXED
    assert Schema.from_example(
        TensorDict(mixed_rows(4), batch_size=[]), batch_dims=1
    ) == MIXED
    two = {"x": torch.zeros(2, 5, 3), "y": torch.zeros(2, 5)}
    assert [f.shape for f in Schema.from_example(two, batch_dims=2).fields] == [(3,), ()]
    with pytest.raises(SchemaError, match="too few dimensions") as caught:
        Schema.from_example(two, batch_dims=3)
    assert caught.value.field == "y"


def test_numpy_and_numbers_are_taken() -> None:
    schema = Schema.from_example({
        "a": np.zeros((2, 3), dtype=np.float32), "b": np.int16(3), "c": 1.5, "d": True, "e": 7,
        "f": np.zeros(2, dtype=np.complex64), "g": np.float16(1), "h": np.uint32(5),
    })
    assert [(f.dtype, f.shape) for f in schema.fields] == [
        (torch.float32, (2, 3)), (torch.int16, ()), (torch.float64, ()), (torch.bool, ()),
        (torch.int64, ()), (torch.complex64, (2,)), (torch.float16, ()), (torch.uint32, ()),
    ]


@pytest.mark.parametrize(
    "leaf", ["text", None, [1.0, 2.0], object(), np.array(["a"]), np.datetime64("2026-01-01")],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_is_no_tensor_is_refused_by_name(leaf: object) -> None:
    with pytest.raises(SchemaError) as caught:
        Schema.from_example({"x": torch.zeros(2), "next": {"info": leaf}})
    assert caught.value.field == ("next", "info")


def test_non_tensor_data_is_refused_by_name() -> None:
    rows = TensorDict({"x": torch.zeros(2), "info": NonTensorData("text")}, batch_size=[])
    with pytest.raises(SchemaError) as caught:
        Schema.from_example(rows)
    assert caught.value.field == "info"


@pytest.mark.parametrize("key", ["index", "loss_scale", "loss_weight", "priority_weight"])
def test_keys_of_the_plane_are_reserved(key: str) -> None:
    with pytest.raises(SchemaError, match="written by the plane") as caught:
        Schema.from_example({"x": torch.zeros(2), key: torch.zeros(1)})
    assert caught.value.field == key
    # Only at the top: a nested field of that name is nobody else's.
    assert Schema.from_example({"next": {key: torch.zeros(1)}}).keys == [("next", key)]


def test_bad_keys_are_refused() -> None:
    x = Field(key=("x",), dtype=torch.float32, shape=())
    with pytest.raises(SchemaError, match="more than once"):
        Schema((x, Field(key=("x",), dtype=torch.int8, shape=(2,))))
    with pytest.raises(SchemaError, match="more than once"):
        Schema((x, Field(key=("x", "y"), dtype=torch.int8, shape=())))
    with pytest.raises(SchemaError, match="more than once"):
        Schema.from_example({("next", "x"): torch.zeros(1), "next": {"x": torch.zeros(1)}})
    with pytest.raises(SchemaError, match="at least one field"):
        Schema.from_example({})
    with pytest.raises(SchemaError, match="strings"):
        Schema.from_example({1: torch.zeros(1)})
    with pytest.raises(SchemaError, match="strings"):
        Schema.from_example({"": torch.zeros(1)})
    with pytest.raises(SchemaError, match="strings"):
        Schema.from_example({1: torch.zeros(1), "x": torch.zeros(1)})


def test_dtypes_that_cannot_be_stored_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8)
    with pytest.raises(SchemaError, match="cannot be stored") as caught:
        Schema.from_example({"x": quantised})
    assert caught.value.field == "x"


@pytest.mark.parametrize("what", [torch.zeros(3), 5, None, "text", [torch.zeros(3)]], ids=repr)
def test_an_example_that_is_no_mapping_is_refused(what: Any) -> None:
    with pytest.raises(SchemaError):
        Schema.from_example(what)


@pytest.mark.parametrize("dtype", [np.longdouble, ">f4"], ids=str)
def test_numpy_dtypes_without_a_torch_dtype_are_refused(dtype: Any) -> None:
    with pytest.raises(SchemaError):
        Schema.from_example({"x": np.zeros(3, dtype=dtype)})


# ---------------------------------------------------------------------------------------- check


def check(rows: Any, schema: Schema = MIXED) -> tuple[int, list[torch.Tensor]]:
    return RowLayout(schema).check(rows)


def refused(rows: Any, schema: Schema = MIXED) -> SchemaError:
    with pytest.raises(SchemaError) as caught:
        check(rows, schema)
    return caught.value


def test_nested_tuple_and_mixed_keys_give_the_same_rows() -> None:
    rows = mixed_rows(4)
    flat = {
        "observation": rows["observation"], ("action",): rows["action"],
        ("next", "observation"): rows["next"]["observation"],
        ("next", "done"): rows["next"]["done"],
    }
    half = {
        "observation": rows["observation"], "action": rows["action"],
        "next": {"observation": rows["next"]["observation"]}, ("next", "done"):
        rows["next"]["done"],
    }
    part = {**rows, "next": TensorDict(rows["next"], batch_size=[4])}
    expected = [raw(value) for value in check(rows)[1]]
    for other in (flat, half, part, TensorDict(rows, batch_size=[4]),
                  TensorDict(rows, batch_size=[])):
        n, values = check(other)
        assert n == 4
        assert [raw(value) for value in values] == expected


def test_tuple_keys_below_a_nested_mapping() -> None:
    example = {"next": {("a", "b"): torch.zeros(2)}}
    schema = Schema.from_example(example)
    assert schema.keys == [("next", "a", "b")]
    n, _ = check({"next": {("a", "b"): torch.zeros(3, 2)}}, schema)
    assert n == 3


def test_an_empty_nested_mapping_holds_no_fields() -> None:
    schema = Schema.from_example({"x": torch.zeros(2), "info": {}})
    assert schema.keys == ["x"]
    assert check({"x": torch.zeros(3, 2), "info": {}}, schema)[0] == 3


def test_numpy_rows_are_taken() -> None:
    rows = mixed_rows(4)
    arrays = {
        "observation": rows["observation"].numpy(), "action": rows["action"].numpy(),
        "next": {key: value.numpy() for key, value in rows["next"].items()},
    }
    n, values = check(arrays)
    assert n == 4
    assert [raw(value) for value in values] == [raw(value) for value in check(rows)[1]]


def test_numpy_rows_of_any_strides_are_taken() -> None:
    schema = Schema.from_example({"x": torch.zeros(2)})
    frozen = np.arange(6, dtype=np.float32).reshape(3, 2)
    frozen.flags.writeable = False
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    backwards = np.arange(6, dtype=np.float32).reshape(3, 2)[::-1]
    for array in (frozen, wide, turned, backwards):
        _, values = check({"x": array}, schema)
        assert values[0].tolist() == array.tolist()


def test_no_rows_are_rows() -> None:
    assert check(mixed_rows(0))[0] == 0


def test_missing_and_unknown_fields_are_named() -> None:
    rows = mixed_rows(2)
    del rows["next"]["done"]
    error = refused(rows)
    assert error.field == ("next", "done")
    assert "missing" in error.what
    rows = mixed_rows(2)
    del rows["next"]
    assert refused(rows).field in ("next", ("next", "observation"), ("next", "done"))
    rows = mixed_rows(2)
    rows["info"] = torch.zeros(2)
    assert refused(rows).field == "info"
    rows = mixed_rows(2)
    rows["next"]["info"] = torch.zeros(2)
    error = refused(rows)
    assert error.field == ("next", "info")
    assert "unknown" in error.what
    assert refused(TensorDict(rows, batch_size=[2])).field == ("next", "info")
    rows = mixed_rows(2)
    rows["next"] = torch.zeros(2)
    assert refused(rows).field == "next"
    rows = mixed_rows(2)
    rows["action"] = {"x": torch.zeros(2)}
    assert refused(rows).field == "action"


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2), torch.zeros(2).int(), torch.zeros(2).bool(), 2 * [0], None],
    ids=["float32", "int32", "bool", "list", "None"],
)
def test_a_wrong_dtype_is_refused(wrong: Any) -> None:
    rows = mixed_rows(2)
    rows["action"] = wrong
    error = refused(rows)
    assert error.field == "action"
    if isinstance(wrong, torch.Tensor):
        assert error.expected is torch.int64
        assert error.got is wrong.dtype
        assert ".to(torch.int64)" in str(error)


@pytest.mark.parametrize(
    "shape", [(2, 4), (2, 3, 1), (2,), (3,), (2, 0), ()], ids=str
)
@pytest.mark.parametrize("key", ["observation", ("next", "observation")], ids=str)
def test_a_wrong_shape_is_refused(shape: tuple[int, ...], key: Any) -> None:
    rows = TensorDict(mixed_rows(2), batch_size=[])
    rows[key] = torch.zeros(shape)
    error = refused(rows)
    assert error.field == key
    assert error.expected == ("n", 3)
    assert error.got == shape


def test_a_scalar_that_is_no_batch_of_scalars_is_refused() -> None:
    schema = Schema.from_example({"reward": torch.tensor(0.0), "cost": torch.tensor(0.0)})
    error = refused({"reward": torch.tensor(0.0), "cost": torch.tensor(0.0)}, schema)
    assert error.field in ("reward", "cost")
    assert error.got == ()
    error = refused({"reward": torch.zeros(3), "cost": torch.tensor(0.0)}, schema)
    assert error.field in ("reward", "cost")
    error = refused({"reward": torch.tensor(0.0), "cost": torch.zeros(3)}, schema)
    assert error.field in ("reward", "cost")


def test_ragged_rows_are_refused() -> None:
    rows = mixed_rows(2)
    rows["next"]["observation"] = torch.zeros(5, 3)
    error = refused(rows)
    assert "ragged" in error.what
    assert error.field == ("next", "observation")
    assert "5" in str(error.got)
    assert "2" in str(error.expected)


def test_tensors_without_dense_data_are_refused() -> None:
    schema = Schema.from_example({"x": torch.zeros(3)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(3)])
        jagged = torch.nested.nested_tensor(
            [torch.zeros(3), torch.zeros(3)], layout=torch.jagged
        )
        csr = torch.zeros(2, 3).to_sparse_csr()
    sparse = torch.zeros(2, 3).to_sparse()
    for tensor in (sparse, csr, jagged, nested):
        assert refused({"x": tensor}, schema).field == "x"
        with pytest.raises(SchemaError) as caught:
            Schema.from_example({"x": tensor})
        assert caught.value.field == "x"
    error = refused({"x": torch.zeros(2, 3, device="meta")}, schema)
    assert error.field == "x"
    assert error.got == "meta"


@pytest.mark.parametrize("what", [torch.zeros(3), 5, None, "text", [torch.zeros(3)]], ids=repr)
def test_rows_that_are_no_mapping_are_refused(what: Any) -> None:
    refused(what)


def test_one_key_given_twice_is_refused() -> None:
    rows: dict[Any, Any] = mixed_rows(2)
    rows["next", "done"] = torch.ones(2, 1).bool()
    assert refused(rows).field == ("next", "done")


def test_a_key_that_is_also_a_prefix_is_refused() -> None:
    rows: dict[Any, Any] = mixed_rows(2)
    rows["next"] = torch.zeros(2)
    rows["next", "done"] = torch.zeros(2, 1).bool()
    refused(rows)


def test_one_row_is_a_batch_of_one() -> None:
    layout = RowLayout(MIXED)
    batch = TensorDict(mixed_rows(3), batch_size=[3])
    row = {"observation": batch["observation"][1].numpy(), "action": int(batch["action"][1]),
           "next": batch["next"][1]}
    n, values = layout.check(layout.one_row(row))
    assert n == 1
    for column, value in zip(layout.columns, values, strict=True):
        assert raw(value) == raw(batch[column.field.key][1:2])
