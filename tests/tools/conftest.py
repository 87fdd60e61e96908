"""The command line, run in this process, and in fresh ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conduit.__main__ import main

Document = dict[str, Any]

COMMON = {"command", "conduit", "torch", "world", "hosts", "backend", "device", "when", "machine",
          "args", "results"}


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., Document]:
    """Runs a command that must succeed; returns its JSON object."""

    def run(*words: str) -> Document:
        target = tmp_path / "results.json"
        assert main([*words, "--json", str(target)]) == 0
        document = json.loads(target.read_text())
        assert document.keys() >= COMMON
        assert document["machine"].keys() >= {"cores", "processor", "gpus"}
        for result in document["results"]:
            assert all(value is None or isinstance(value, (str, int, float))
                       for value in result.values())
        return document

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be refused; returns the one line that says why."""

    def run(*words: str) -> str:
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("conduit: ") and captured.err.count("\n") == 1
        return captured.err

    return run


@pytest.fixture
def launched() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in fresh processes, under torchrun if ``ranks`` is not 0."""

    def run(*words: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        clean = {name: value for name, value in os.environ.items()
                 if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        return subprocess.run(
            [sys.executable, *(launcher if ranks else []), "-m", "conduit", *words],
            capture_output=True, text=True, timeout=100, env=clean, check=False,
        )

    return run
