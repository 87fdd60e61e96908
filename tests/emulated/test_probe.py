"""The probe finds what each link of an emulated cluster was set to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch import emulate
from tests.emulated.cluster import emulated, needs_emulation

pytestmark = needs_emulation

TOLERANCE = 0.15


def test_hosts_carry_what_their_links_do(tmp_path: Path) -> None:
    links = "200mbit,1gbit,50mbit"
    rates = [emulate.bits_per_second(rate) / 8e9 for rate in links.split(",")]
    path = tmp_path / "results.json"
    done = emulated(links.split(","), "-m", "conduit", "probe", "--json", str(path))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["hosts"] == len(rates)
    for direction in ("egress", "ingress"):
        rows = [row for row in found["results"] if row["kind"] == "host"
                and row["direction"] == direction]
        assert [row["source"] for row in rows] == list(range(len(rates)))
        for host, row in enumerate(rows):
            absorbed = sum(rates) - rates[host]
            expected = min(rates[host], absorbed)
            assert row["bandwidth_gbps"] == pytest.approx(expected, rel=TOLERANCE), row
            assert row["at_least"] == (rates[host] > absorbed), row
        carried = [row["bandwidth_gbps"] for row in rows]
        for a, faster in enumerate(rates):
            assert all(carried[a] > carried[b] for b, rate in enumerate(rates) if rate < faster)
    between = [row for row in found["results"] if row["kind"] == "link"
               and row["direction"] == "between_hosts"]
    per_host = found["world"] // found["hosts"]
    assert len(between) == len(rates) * (len(rates) - 1)
    for row in between:
        expected = min(rates[row["source"] // per_host], rates[row["target"] // per_host])
        assert row["bandwidth_gbps"] == pytest.approx(expected, rel=TOLERANCE), row
        assert row["latency_us"] < 50_000
