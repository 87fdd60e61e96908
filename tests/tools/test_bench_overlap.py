"""``bench overlap`` and ``trace``: stages, figures that belong together, and a picture."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import conduit.__main__ as command_line
from conduit.plane import ExperiencePlane
from conduit.tools.bench import learner, overlap
from conduit.tools.job import Job

FIELDS = {"stage", "iteration_ms", "null_iteration_ms", "exposed_ms", "blocked_ms", "bytes_moved",
          "busiest_bytes", "late_rows", "routing", "batch", "rows", "produce", "iterations",
          "step_ms", "reduce_mb", "schema", "row_bytes"}
STAGES = ["central", "sharded", "exchangeable", "overlapped", "late_rows"]
SMALL = ("bench", "overlap", "--schema", "mujoco", "--rows", "1500", "--batch", "32",
         "--iterations", "8", "--produce", "3", "--step-ms", "2")

Measured = Callable[..., dict[str, Any]]
Launched = Callable[..., subprocess.CompletedProcess[str]]


def consistent(found: dict[str, Any], stages: list[str]) -> dict[str, dict[str, Any]]:
    rows = {row["stage"]: row for row in found["results"]}
    assert [row["stage"] for row in found["results"]] == stages
    for row in rows.values():
        assert row.keys() >= FIELDS
        assert row["exposed_ms"] == pytest.approx(
            row["iteration_ms"] - row["null_iteration_ms"], abs=0.002
        )
        assert row["null_iteration_ms"] > 1 and row["blocked_ms"] > 0
    first, last = found["results"][0], found["results"][-1]
    if first["exposed_ms"] > 0:
        assert found["summary"]["exposed_reduction"] == pytest.approx(
            1 - last["exposed_ms"] / first["exposed_ms"], abs=0.01
        )
    else:  # as can be where there is little to expose and the machine does something else too
        assert found["summary"]["exposed_reduction"] is None
    assert found["summary"]["iteration_reduction"] == pytest.approx(
        1 - last["iteration_ms"] / first["iteration_ms"], abs=0.01
    )
    return rows


def test_alone(measured: Measured) -> None:
    rows = consistent(measured(*SMALL), STAGES)
    assert {row["bytes_moved"] for row in rows.values()} == {0}


def test_two_ranks_and_a_picture(launched: Launched, tmp_path: Path) -> None:
    done = launched(*SMALL, "--reduce", "0.1", "--trace", str(tmp_path / "t"), "--json", "-",
                    ranks=2)
    assert done.returncode == 0, done.stderr
    rows = consistent(json.loads(done.stdout), STAGES)
    assert 0 < rows["exchangeable"]["bytes_moved"] < rows["sharded"]["bytes_moved"] / 3
    # The same draws, whatever hides them.
    assert rows["late_rows"]["late_rows"] == rows["exchangeable"]["late_rows"]
    assert rows["overlapped"]["late_rows"] == 0
    files = [str(tmp_path / f"t-late_rows-{rank}.json") for rank in range(2)]
    merged, picture = tmp_path / "merged.json", tmp_path / "picture.png"
    assert command_line.main(["trace", *files, "--merge", str(merged)]) == 0
    assert len(json.loads(merged.read_text())["traceEvents"]) > 100
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, of the extra cli")
    assert command_line.main(["trace", str(merged), "--png", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_independent_routing_leaves_out_what_is_not(measured: Measured) -> None:
    found = measured(*SMALL, "--routing", "independent", "--compute", "cpu")
    consistent(found, ["central", "sharded", "overlapped", "late_rows"])


@pytest.mark.parametrize("produce", [3, 512, 1_000])
def test_the_buffer_is_full_from_the_first_iteration(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, produce: int
) -> None:
    sizes = []

    class Watched(ExperiencePlane):
        def sample(self, *, contiguous: bool = False) -> Any:
            sizes.append(len(self))
            return super().sample(contiguous=contiguous)

    monkeypatch.setattr(overlap, "ExperiencePlane", Watched)
    measured(*SMALL, "--rows", "3000", "--iterations", "1", "--produce", str(produce))
    assert set(sizes) == {3_000}


def test_a_disturbed_calibration_finds_the_undisturbed_step(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock by which a product takes 100 us, and every fourth time the machine is away."""
    clock = SimpleNamespace(ns=0, calls=0)

    def multiply(_: learner.Learner, products: int) -> None:
        clock.calls += 1
        clock.ns += 100_000 * products + (20_000_000 if clock.calls % 4 == 0 else 0)

    monkeypatch.setattr(learner, "time", SimpleNamespace(perf_counter_ns=lambda: clock.ns))
    monkeypatch.setattr(learner.Learner, "_multiply", multiply)
    job = Job(rank=0, ranks=1, group=None, made=False)
    busy = learner.Learner(job, step_ms=10, compute="cpu", reduce_bytes=0)
    clock.calls, begun = 0, clock.ns
    busy.step()
    assert clock.ns - begun == pytest.approx(10_000_000, rel=0.02)


@pytest.mark.parametrize(("first_ms", "last_ms", "reduction"), [
    (4.0, 1.0, 0.75), (2.0, 3.0, -0.5), (2.0, -0.1, 1.05), (0.0, 0.1, None), (-0.1, 0.1, None),
])
def test_nothing_is_no_reduction(first_ms: float, last_ms: float, reduction: float | None) -> None:
    assert overlap._reduction(first_ms, last_ms) == reduction


@pytest.mark.parametrize("wrong", [
    ("--step-ms", "0"), ("--step-ms", "nan"), ("--step-ms", "inf"), ("--reduce", "-1"),
    ("--reduce", "nan"), ("--rows", "100000000000"), ("--produce", "30000000000"),
    ("--compute", "gpu"), ("--trace", "/nowhere/at/all"),
])
def test_bad_usage(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([*SMALL, *wrong]) == 2
    assert capsys.readouterr().err


def test_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "none.json": None, "text.json": "no", "other.json": "[1]",
        "foreign.json": '{"traceEvents": [{"ph": "X", "name": "a"}]}',
        "empty.json": '{"traceEvents": []}',
    }
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        assert command_line.main(["trace", str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        assert name in told or "no spans" in told
