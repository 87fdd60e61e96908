"""Errors: what was wrong, what came, what was expected and the cure, in words and as attributes."""

from __future__ import annotations

import builtins
import pickle

import pytest

import conduit
from conduit import errors
from conduit.errors import ConduitError, SchemaError

KINDS = [getattr(errors, name) for name in errors.__all__]


def test_all_errors_can_be_caught_as_one() -> None:
    assert len(KINDS) >= 7
    for kind in KINDS:
        assert issubclass(kind, ConduitError)
        assert getattr(conduit, kind.__name__) is kind
        with pytest.raises(ConduitError):
            raise kind("something")
    assert not issubclass(ConduitError, (ValueError, OSError))


def test_errors_are_the_kinds_that_programs_expect() -> None:
    assert issubclass(errors.TimeoutError, builtins.TimeoutError)
    assert issubclass(errors.SchemaError, ValueError)


@pytest.mark.parametrize("kind", KINDS)
def test_the_message_has_all_parts(kind: type[ConduitError]) -> None:
    error = kind(
        "wrong dtype", rank=3, field=("next", "reward"), expected="float32", got="float64",
        cure="Convert it",
    )
    assert str(error) == (
        "[rank 3] wrong dtype: field ('next', 'reward'): expected float32, got float64. Convert it"
    )
    assert (error.what, error.rank, error.field) == ("wrong dtype", 3, ("next", "reward"))
    assert (error.expected, error.got, error.cure) == ("float32", "float64", "Convert it")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "it"), ({"rank": 0}, "[rank 0] it"), ({"field": "x"}, "it: field 'x'"),
        ({"got": 0}, "it: expected None, got 0"), ({"cure": "Stop"}, "it. Stop"),
        ({"expected": 1, "got": 2}, "it: expected 1, got 2"),
    ],
    ids=str,
)
def test_parts_that_are_missing_are_left_out(parts: dict[str, object], message: str) -> None:
    assert str(ConduitError("it", **parts)) == message  # type: ignore[arg-type]


def test_an_error_comes_through_a_queue_between_processes() -> None:
    # Data loaders and launchers send errors from process to process.
    error = SchemaError("wrong dtype", rank=3, field="x", expected=1, got=2, cure="Convert it")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is SchemaError
    assert str(again) == str(error)
    assert (again.rank, again.field, again.cure) == (3, "x", "Convert it")
