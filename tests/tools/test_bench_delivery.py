"""``bench delivery``: fields, and that the figures belong together."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

FIELDS = {"schema", "routing", "batch", "us", "rows_per_s", "rows_delivered", "rows_moved",
          "bytes_moved", "moved_share", "small_collective_us", "gather_us", "transfer_us",
          "fixed_us", "fixed_collectives"}

Measured = Callable[..., dict[str, Any]]
Launched = Callable[..., subprocess.CompletedProcess[str]]


def consistent(row: dict[str, Any], ranks: int) -> None:
    assert row.keys() >= FIELDS
    assert row["rows_delivered"] == ranks * row["batch"] * row["iterations"]
    assert row["bytes_moved"] == row["rows_moved"] * row["row_bytes"]
    assert row["moved_share"] == pytest.approx(row["rows_moved"] / row["rows_delivered"])
    assert row["rows_per_s"] == pytest.approx(ranks * row["batch"] / row["us"] * 1e6, rel=1e-3)
    assert row["fixed_us"] == pytest.approx(row["us"] - row["transfer_us"], abs=0.01)
    assert row["us_min"] <= row["us"] <= row["us_p99"]


def test_alone(measured: Measured) -> None:
    found = measured("bench", "delivery", "--schema", "mujoco", "--rows", "2000", "--batch", "16",
                     "--iterations", "10", "--produce", "3000")
    (row,) = found["results"]
    consistent(row, 1)
    assert (found["world"], found["backend"]) == (1, "none")
    assert row["rows_moved"] == 0
    assert row["small_collective_us"] is None and row["fixed_collectives"] is None


def test_two_ranks(launched: Launched) -> None:
    done = launched("bench", "delivery", "--schema", "mujoco", "--rows", "3000", "--batch", "64",
                    "--iterations", "20", "--produce", "2", "--json", "-", ranks=2)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["world"], found["hosts"], found["backend"]) == (2, 1, "gloo")
    (row,) = found["results"]
    consistent(row, 2)
    assert row["routing"] == "exchangeable"
    assert 0.001 < row["moved_share"] < 0.2
    assert row["small_collective_us"] > 0 and row["transfer_us"] > row["gather_us"]


def test_the_peer_across_processes(launched: Launched) -> None:
    pytest.importorskip("torchrl")
    done = launched("bench", "delivery", "--schema", "mujoco", "--rows", "2000", "--batch", "64",
                    "--routing", "independent", "--iterations", "5", "--peer", "torchrl-rpc",
                    "--json", "-", ranks=2)
    assert done.returncode == 0, done.stderr
    everyone, one = json.loads(done.stdout)["results"]
    assert (everyone["peer_learners"], one["peer_learners"]) == (2, 1)
    for row in (everyone, one):
        consistent(row, 2)
        assert row["routing"] == "independent" and 0.4 < row["moved_share"] < 0.6
        assert row["peer"] == "torchrl-rpc" and row["peer_us"] > 0 and row["vs_peer"] > 0


def test_what_is_refused(refused: Callable[..., str]) -> None:
    words = ("bench", "delivery", "--schema", "mujoco")
    assert "exchangeable" in refused(*words, "--routing", "nearest")
    line = refused(*words, "--peer", "torchrl-rpc")
    assert "second rank" in line or "not installed" in line
