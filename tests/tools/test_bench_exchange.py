"""``bench exchange``: fields, that the figures belong together, and that wrong rows are found."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit.__main__ import main
from conduit.collectives.exchange import InFlight
from conduit.tools.bench.patterns import PATTERNS, count_matrix
from tests.properties import examples
from tests.simulation import Simulation

FIELDS = {"pattern", "transport", "ranks", "bytes", "rows", "time_us", "algbw_gbps", "busbw_gbps",
          "raw_time_us", "vs_raw", "wrong"}

Launched = Callable[..., subprocess.CompletedProcess[str]]


def consistent(row: dict[str, Any]) -> None:
    assert row.keys() >= FIELDS
    assert row["bytes"] == row["rows"] * row["row_bytes"]
    moving_us = row["gather_time_us" if "shared" in row["transport"] else "time_us"]
    assert row["algbw_gbps"] == pytest.approx(row["bytes"] / moving_us / 1e3)
    assert row["busbw_gbps"] >= row["algbw_gbps"]
    assert row["wrong"] == 0
    if row["ranks"] > 1:
        assert row["vs_raw"] == pytest.approx(row["time_us"] / row["raw_time_us"], rel=0.01)


@pytest.mark.parametrize("transport", ["network", "shared"])
def test_parts_of_a_job(launched: Launched, transport: str) -> None:
    # The third rank is in neither part.
    done = launched("--", "bench", "exchange", "--min", "4K", "--max", "16K", "--pattern", "skewed",
                    "--ranks", "1,2", "--iterations", "2", "--transport", transport,
                    "--json", "-", ranks=3)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["args"]["transport"] == transport
    rows = found["results"]
    assert [row["ranks"] for row in rows] == [1, 1, 2, 2]
    for row in rows:
        consistent(row)
        assert row["pattern"] == "skewed"
        if row["ranks"] == 1:
            assert (row["transport"], row["bytes"], row["raw_time_us"]) == ("none", 0, None)
        elif transport == "shared":
            assert row["transport"] == "shared memory"
        else:
            assert row["transport"] in ("point-to-point", "all-to-all")
    assert [row["bytes"] for row in rows[2:]] == pytest.approx([4096, 16384], rel=0.1)


def test_wrong_rows_are_counted_and_told_by_the_exit_status(tmp_path: Path) -> None:
    wait = InFlight.wait

    def spoiling(flight: InFlight, take: Callable[[torch.Tensor, int], None]) -> None:
        def spoil(rows: torch.Tensor, start: int) -> None:
            rows = rows.clone()
            rows[0] ^= 1
            take(rows, start)

        wait(flight, spoil)

    target = tmp_path / "results.json"
    with (
        Simulation([0, 0]) as simulation, mock.patch.object(InFlight, "wait", spoiling),
        mock.patch("conduit.tools.bench.exchange.Job.join", lambda: _job(simulation)),
        mock.patch(
            "conduit.tools.bench.exchange.dist.new_group",
            lambda ranks, backend: simulation.group(),
        ),
    ):
        words = ["bench", "exchange", "--max", "4K", "--iterations", "1"]
        statuses = simulation.run(
            lambda rank: main([*words, *(["--json", str(target)] if rank == 0 else [])])
        )
    assert statuses == [1, 1]
    [row] = json.loads(target.read_text())["results"]
    assert row["wrong"] == 4  # a row on each rank, before and after


def _job(simulation: Simulation) -> Any:
    from conduit.tools.job import Job
    from tests.simulation import Group

    group = simulation.group()

    class SimulatedJob(Job):
        def barrier(self) -> None:
            self.largest(np.zeros(1, dtype=np.int64))

        def largest(self, values: np.ndarray) -> np.ndarray:
            return self._all(values).max(axis=0)

        def total(self, values: np.ndarray) -> np.ndarray:
            return self._all(values).sum(axis=0)

        def _all(self, values: np.ndarray) -> np.ndarray:
            sent = torch.from_numpy(np.concatenate([np.asarray(values).reshape(-1)] * self.ranks))
            received = torch.empty_like(sent)
            assert isinstance(self.group, Group)
            self.group.all_to_all(received, sent, None, None)()
            return received.numpy().reshape(self.ranks, *np.shape(values))

    return SimulatedJob(rank=group.rank, ranks=simulation.size, group=group, made=False)


@examples(60)
@given(
    pattern=st.sampled_from(PATTERNS), ranks=st.integers(1, 12), rows=st.integers(1, 100_000)
)
def test_patterns(pattern: str, ranks: int, rows: int) -> None:
    counts = count_matrix(pattern, ranks=ranks, rows=rows)
    assert counts.shape == (ranks, ranks) and counts.dtype == np.int64
    assert (counts >= 0).all() and (counts.diagonal() == 0).all()
    if ranks > 1:
        assert abs(counts.sum(axis=1).max() - rows) <= ranks
    if pattern == "uniform" and ranks > 1:
        assert len(set(counts[~np.eye(ranks, dtype=bool)].tolist())) == 1


def test_the_surplus_pattern_is_what_routing_leaves() -> None:
    """A rank has either too many rows or too few: nobody sends and receives."""
    counts = count_matrix("surplus", ranks=6, rows=10_000)
    assert ((counts.sum(axis=0) == 0) | (counts.sum(axis=1) == 0)).all()


def test_what_is_refused(refused: Callable[..., str]) -> None:
    assert "4K or 64M" in refused("bench", "exchange", "--min", "some")
    assert "larger" in refused("bench", "exchange", "--min", "1M", "--max", "4K")
    assert "1 rank" in refused("bench", "exchange", "--ranks", "2")
    assert "uniform" in refused("bench", "exchange", "--pattern", "random")
    if not torch.cuda.is_available():
        assert "no GPU" in refused("bench", "exchange", "--device", "cuda")
