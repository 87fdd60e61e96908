"""Rows as people hand them in, flattened and nested again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from conduit.errors import SchemaError
from conduit.rows import as_tensor, flat_rows, nested, public
from tests.properties import examples

TREES = st.recursive(
    st.integers(), lambda below: st.dictionaries(
        st.sampled_from("abcd"), below, min_size=1, max_size=3
    ), max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


def leaves(tree: Any, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= leaves(value, (*prefix, name))
        else:
            found[*prefix, name] = value
    return found


@examples(150)
@given(tree=TREES)
def test_flat_and_nested_are_inverse(tree: dict[str, Any]) -> None:
    flat = flat_rows(tree)
    assert flat == leaves(tree)
    assert nested(flat) == tree
    # The flat keys themselves are rows, too.
    assert flat_rows(flat) == flat


def test_tensordicts_and_mappings_may_be_mixed() -> None:
    x, y, z = torch.zeros(2), torch.ones(2), torch.zeros(2, 3)
    flat = flat_rows({
        "a": TensorDict({"x": x, "b": {"y": y}}, batch_size=[2]), ("a", "b", "z"): {"w": z},
    })
    assert {key: value.data_ptr() for key, value in flat.items()} == {
        ("a", "x"): x.data_ptr(), ("a", "b", "y"): y.data_ptr(),
        ("a", "b", "z", "w"): z.data_ptr(),
    }


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(SchemaError, match="more than once") as caught:
        flat_rows({("a", "b"): 1, "a": {"b": 2}})
    assert caught.value.field == ("a", "b")


@pytest.mark.parametrize("order", [1, -1])
def test_a_key_that_goes_on_is_refused(order: int) -> None:
    keys = [("a",), ("a", "b")][::order]
    with pytest.raises(SchemaError, match="more than once"):
        nested(dict.fromkeys(keys, 1))


@pytest.mark.parametrize("rows", [None, 3, "text", [1], torch.zeros(3)], ids=repr)
def test_what_is_no_mapping_is_refused(rows: Any) -> None:
    with pytest.raises(SchemaError, match="mapping"):
        flat_rows(rows)


def test_keys_as_people_write_them() -> None:
    assert public(("reward",)) == "reward"
    assert public(("next", "reward")) == ("next", "reward")


def test_tensors_and_arrays_are_not_copied() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    assert as_tensor(("x",), tensor) is tensor
    as_tensor(("x",), array)[1] = 5.0
    assert array.tolist() == [0.0, 5.0, 0.0]


def test_an_array_that_must_not_be_written_is_copied() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    made = as_tensor(("x",), array)
    made[1] = 5.0
    assert array.tolist() == [0.0, 0.0, 0.0]
