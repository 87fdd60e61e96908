"""``bench sample``: fields, peers, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conduit.schema import Field, Schema
from conduit.tools.bench import sample
from conduit.tools.bench.peers import LOCAL_PEERS

TINY = ("--rounds", "2", "--round-ms", "1")
FIELDS = {"schema", "sampler", "batch", "operation", "us", "floor_us", "vs_floor", "peer",
          "peer_us", "vs_peer"}

Measured = Callable[..., dict[str, Any]]
Refused = Callable[..., str]


def test_rows_of_the_results(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    found = measured("bench", "sample", "--schema", "mujoco", "--rows", "3000", "--batch", "16,64",
                     "--peer", "none", *TINY)
    assert (found["world"], found["hosts"], found["device"]) == (1, 1, "cpu")
    results = found["results"]
    assert [(row["operation"], row["batch"]) for row in results] == [
        ("sample", 16), ("extend", 64), ("extend", 1024), ("sample", 64),
    ]
    for row in results:
        assert row.keys() >= FIELDS
        assert row["schema"] == "mujoco" and row["sampler"] == "uniform"
        assert row["us"] > 0 and row["floor_us"] > 0 and row["vs_floor"] > 0
        assert (row["us_after_extend"] is None) == (row["operation"] == "extend")
        assert row["peer"] is None and row["peer_us"] is None and row["vs_peer"] is None
    text = capsys.readouterr().out
    assert "# conduit bench sample" in text and "vs_floor" in text
    assert torch.get_num_threads() == threads


def test_a_buffer_smaller_than_a_chunk(measured: Measured) -> None:
    found = measured("bench", "sample", "--schema", "mujoco", "--rows", "10", "--batch", "4",
                     "--peer", "none", *TINY)
    assert len(found["results"]) == 3


def test_a_schema_from_a_file(measured: Measured, tmp_path: Path) -> None:
    schema = Schema((
        Field(key=("a", "b"), dtype=torch.bfloat16, shape=(3,)),
        Field(key=("scalar",), dtype=torch.int64, shape=()),
        Field(key=("flag",), dtype=torch.bool, shape=(2,)),
    ))
    path = tmp_path / "schema.json"
    path.write_text(schema.description)
    found = measured("bench", "sample", "--schema", str(path), "--rows", "100", "--batch", "4",
                     "--peer", "none", *TINY)
    assert found["results"][0]["row_bytes"] == 16


@pytest.mark.parametrize("peer", LOCAL_PEERS)
def test_peers(peer: str, measured: Measured) -> None:
    pytest.importorskip(LOCAL_PEERS[peer].packages[0])
    for schema in ("mujoco", "atari"):
        found = measured("bench", "sample", "--schema", schema, "--rows", "200", "--batch", "8",
                         "--peer", peer, *TINY)
        assert [row["peer"] for row in found["results"]] == [peer] * 3
        assert all(row["peer_us"] > 0 and row["vs_peer"] > 0 for row in found["results"])


@pytest.mark.parametrize("peer", LOCAL_PEERS)
def test_a_peer_that_is_not_installed(peer: str, refused: Refused) -> None:
    if importlib.util.find_spec(LOCAL_PEERS[peer].packages[0]):
        pytest.skip("installed here")
    line = refused("bench", "sample", "--schema", "mujoco", "--peer", peer)
    assert f"peer '{peer}' is not installed" in line and "pip install" in line


def test_what_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("bench", "sample", "--schema", "mujoco")
    assert "uniform" in refused(*words, "--sampler", "prioritized")
    assert "torchrl, cpprb" in refused(*words, "--peer", "zzz")
    monkeypatch.setattr(sample, "host_bytes", lambda: (10_000_000, 10_000_000))
    line = refused(*words, "--rows", "1000000", "--peer", "none")
    assert "give --rows" in line


def test_under_torchrun_the_first_rank_measures_alone(
    launched: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = launched("bench", "sample", "--schema", "mujoco", "--rows", "500", "--batch", "8",
                    "--peer", "none", "--json", "-", *TINY, ranks=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world"] == 1
