"""The README's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import conduit

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)


def block_with(text: str) -> str:
    found, = (block for block in blocks("python") if text in block)
    return found


def setting() -> dict[str, object]:
    """What a reader has: a row, a policy that collects rows, a model and its update."""
    weight = torch.zeros(3, requires_grad=True)

    def collect(policy: object) -> dict[str, Tensor]:
        return {"observation": torch.randn(500, 3)}

    def update(batch: dict[str, Tensor]) -> Tensor:
        return (batch["observation"] @ weight).mean()

    return {
        "conduit": conduit, "example_row": {"observation": torch.zeros(3)}, "steps": 30,
        "collect": collect, "policy": None, "update": update, "weight": weight,
    }


def test_five_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code, scope = blocks("python")[0], setting()
    exec(code, scope)
    weight = scope["weight"]
    assert isinstance(weight, Tensor) and weight.grad is not None and weight.grad.any()
    assert "15,000 of 1,000,000" in capsys.readouterr().out


def test_what_is_exposed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weight = torch.ones(3, requires_grad=True)
    with conduit.ExperiencePlane({"x": torch.zeros(3)}, capacity=50, batch_size=4) as plane:
        for _ in range(3):
            plane.extend({"x": torch.ones(5, 3)})
            batch = plane.sample()
            assert batch is not None
        exec(block_with("plane.explain()"), {"plane": plane, "loss": (batch["x"] @ weight).mean()})
    assert "an iteration takes" in capsys.readouterr().out
    assert weight.grad is not None and "backward" in (tmp_path / "trace-0.json").read_text()


def test_rows_in_host_memory_and_on_disk(tmp_path: Path) -> None:
    code = block_with("conduit.Disk(").replace("/nvme", str(tmp_path))
    # No machine that runs tests has so much.
    for size in ("240GB", "64GB", "250GB"):
        code = code.replace(size, f"{size[:-2]}KB")
    scope = setting()
    exec(code + "print(plane.report().tiers)\nplane.close()", scope)
    assert not list(tmp_path.iterdir())


def test_steps_instead_of_transitions() -> None:
    step = {"observation": torch.zeros(5), "action": torch.zeros(2), "next": {
        "observation": torch.zeros(5), "reward": torch.zeros(1),
        "done": torch.zeros(1, dtype=torch.bool),
    }}

    def grid(row: dict[str, Any]) -> dict[str, Any]:
        return {
            key: grid(value) if isinstance(value, dict) else value.expand(8, 20, *value.shape)
            for key, value in row.items()
        }

    scope: dict[str, Any] = {"conduit": conduit, "example_step": step, "rollout": grid(step)}
    exec(block_with("conduit.Steps("), scope)
    assert scope["batch"]["observation"].shape == (256, 4, 5)
    assert len(scope["plane"]) == 8 * 17
    scope["plane"].close()


def test_a_placement_of_ones_own() -> None:
    scope = setting()
    exec(block_with("class Halves"), scope)
    halves = scope["Halves"]
    assert isinstance(halves, type)
    assert halves().quotas(capacity=10, ranks=4) == [5, 5, 0, 0]
    assert halves().quotas(capacity=11, ranks=1) == [11]


def test_commands_exist() -> None:
    for command in re.findall(r"\./(launch/\S+)", "\n".join(blocks("bash"))):
        assert (README.parent / command).stat().st_mode & 0o100, command
