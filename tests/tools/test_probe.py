"""``probe``: fields, files, and schedules of jobs that do not exist."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conduit.collectives.links import LinkMatrix

FIELDS = {"kind", "source", "target", "direction", "latency_us", "bandwidth_gbps", "spread"}


def test_alone(measured: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    target = tmp_path / "links.json"
    found = measured("probe", "--save", str(target))
    assert (found["world"], found["hosts"], found["backend"]) == (1, 1, "none")
    for row in found["results"]:
        assert row.keys() >= FIELDS
        assert (row["kind"], row["rank"]) == ("tier", 0)
        assert 0.05 < row["bandwidth_gbps"] < 10_000
    matrix = LinkMatrix.load(target)
    assert (matrix.hosts, matrix.links, matrix.capacities) == ((0,), (), ())
    assert len(matrix.copies) == len(found["results"]) >= 2


def test_two_ranks(
    launched: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    target = tmp_path / "links.json"
    done = launched("probe", "--save", str(target), "--json", "-", ranks=2)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["world"], found["hosts"], found["backend"]) == (2, 1, "gloo")
    assert Counter(row["kind"] for row in found["results"]) == {"tier": 4, "link": 2}
    matrix = LinkMatrix.load(target)
    for row in found["results"]:
        assert row.keys() >= FIELDS
        if row["kind"] == "link":
            pair = row["source"], row["target"]
            assert row["bandwidth_gbps"] == matrix.bandwidth[pair] / 1e9 > 0.01
            assert row["latency_us"] == matrix.latency_ns[pair] / 1e3 > 1
            assert row["direction"] == "within_host"


def test_a_schedule_needs_no_ranks(
    measured: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured("probe", "--schedule", "1024", "--hosts", "128")
    assert (found["world"], found["hosts"]) == (1024, 128)
    assert Counter(row["kind"] for row in found["results"]) == {
        "within hosts": 7, "between hosts": 7, "loaded": 8,
    }
    text = capsys.readouterr().out
    assert "7 rounds between hosts" in text and "0-512 1-513" in text
    slow = measured("probe", "--schedule", "4", "--hosts", "4", "--bandwidth-gbps", "0.001")
    assert slow["results"][0]["ms"] > 1.05 * found["results"][0]["ms"]


def test_what_is_refused(refused: Callable[..., str]) -> None:
    assert "multiple of --hosts" in refused("probe", "--schedule", "9", "--hosts", "2")
    assert "above 0" in refused("probe", "--schedule", "4", "--bandwidth-gbps", "0")
    assert "at least 1" in refused("probe", "--schedule", "0")
    assert "directory that exists" in refused("probe", "--save", "/no/such/links.json")
