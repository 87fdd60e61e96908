"""Commands on GPUs: the exchange over NCCL, and what the probe finds there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def measured(target: Path, *words: str, ranks: int) -> dict[str, Any]:
    """The JSON object of a command on so many GPUs."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA GPUs")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), "-m", "conduit", "--", *words, "--json", str(target)],
        check=True, timeout=200,
    )
    document: dict[str, Any] = json.loads(target.read_text())
    assert document["backend"] == "nccl"
    return document


@pytest.mark.parametrize("pattern", ["uniform", "skewed", "surplus"])
def test_the_exchange_over_nccl(tmp_path: Path, pattern: str) -> None:
    found = measured(
        tmp_path / "results.json", "bench", "exchange", "--device", "cuda", "--pattern", pattern,
        "--min", "4K", "--max", "16M", "--iterations", "8", ranks=2,
    )
    for row in found["results"]:
        assert (row["transport"], row["wrong"]) == ("all-to-all", 0)
        assert row["vs_raw"] > 0


def test_the_probe_over_nccl(tmp_path: Path) -> None:
    found = measured(tmp_path / "results.json", "probe", ranks=2)
    kinds = {row["kind"] for row in found["results"]}
    assert {"tier", "link"} <= kinds
    assert all(row["bandwidth_gbps"] > 0 for row in found["results"])
