"""``bench tiers``: fields, what is measured with what, and rows that are wrong.

And ``bench sample`` over other tiers than the host's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conduit.__main__ import main
from conduit.tiers.shared import SHM
from conduit.tiers.store import Store
from conduit.tools.bench import tiers

TINY = ("--rounds", "2", "--round-ms", "1")
WORDS = ("bench", "tiers", "--schema", "mujoco", "--rows", "3000", *TINY)
FIELDS = {"schema", "tiers", "operation", "batch", "us", "floor_us", "vs_floor", "vs_host",
          "vs_slower", "wrong"}

Measured = Callable[..., dict[str, Any]]
Refused = Callable[..., str]


def test_rows_of_the_results(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(SHM.glob("conduit-rows-*bench-tiers*"))
    found = measured(*WORDS, "--tiers", "shared,host+disk", "--batch", "16,64",
                     "--folder", str(tmp_path))
    results = found["results"]
    mixes = ["shared", "host", "disk", "host+disk"]
    assert [(row["operation"], row["batch"], row["tiers"]) for row in results] == [
        (operation, batch, mix)
        for batch in (16, 64) for operation in ("gather", "write") for mix in mixes
    ]
    for row in results:
        assert row.keys() >= FIELDS
        assert row["us"] > 0 and row["floor_us"] > 0 and row["vs_floor"] > 0
        assert (row["vs_host"] is None) == (row["tiers"] == "host")
        assert (row["vs_slower"] is None) == (row["tiers"] != "host+disk")
        assert row["wrong"] == 0
    assert "vs_slower" in capsys.readouterr().out
    assert not [path for path in tmp_path.iterdir() if "conduit-rows" in path.name]
    assert set(SHM.glob("conduit-rows-*bench-tiers*")) <= before


def test_by_default_each_tier_and_each_two(measured: Measured, tmp_path: Path) -> None:
    found = measured(*WORDS, "--folder", str(tmp_path))
    assert {row["tiers"] for row in found["results"]} == {
        "host", "shared", "disk", "host+shared", "host+disk", "shared+disk"
    }


def test_without_the_host_tier_nothing_is_beside_it(measured: Measured) -> None:
    found = measured(*WORDS, "--tiers", "shared")
    assert [row["vs_host"] for row in found["results"]] == [None, None]


def test_a_batch_larger_than_the_buffer(measured: Measured) -> None:
    found = measured("bench", "tiers", "--schema", "mujoco", "--rows", "10", "--tiers", "host",
                     "--batch", "2000", *TINY)
    assert [row["wrong"] for row in found["results"]] == [0, 0]


@pytest.mark.parametrize("broken", ["gather", "write"])
def test_a_wrong_row_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(Store, broken)

    def wrong(self: Store, slots: Any, rows: Any) -> None:
        # Row 5 is mistaken for row 6.
        right(self, np.where(slots == 5, 6, slots), rows)

    monkeypatch.setattr(Store, broken, wrong)
    assert main([*WORDS, "--tiers", "host"]) == 1


def test_what_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "of host, shared, disk" in refused(*WORDS, "--tiers", "host+tape")
    assert "each once" in refused(*WORDS, "--tiers", "disk+disk")
    assert "'/nowhere'" in refused(*WORDS, "--folder", "/nowhere")
    monkeypatch.setattr(tiers, "host_bytes", lambda: (10_000_000, 10_000_000))
    assert "give --rows" in refused(
        "bench", "tiers", "--schema", "mujoco", "--rows", "1000000", "--tiers", "host"
    )


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_samples_from_any_tier(tier: str, measured: Measured, tmp_path: Path) -> None:
    # On a disk the peer that is chosen, where it is installed, has its rows there, too.
    peer = "auto" if tier == "disk" else "none"
    found = measured("bench", "sample", "--schema", "mujoco", "--rows", "1000", "--batch", "16",
                     "--tiers", tier, "--folder", str(tmp_path), "--peer", peer, *TINY)
    installed = tier == "disk" and importlib.util.find_spec("torchrl") is not None
    for row in found["results"]:
        assert row["tiers"] == tier and row["us"] > 0
        assert row["peer"] == ("torchrl-memmap" if installed else None)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
