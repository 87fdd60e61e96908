"""The report: plain values for logging, and lines for people."""

from __future__ import annotations

import dataclasses
import json

import pytest

from conduit.metrics import Counters, Report


def report_of(**values: object) -> Report:
    """A report with a value in every field."""
    plain: dict[str, object] = {
        field.name: 0 for field in dataclasses.fields(Report)
    }
    plain |= {
        "name": "replay", "rank": 1, "ranks": 4, "hosts": 2, "device": "cpu",
        "routing": "exchangeable", "sent_rows": (5, 0, 7, 0), "sent_bytes": (500, 0, 700, 0),
        "received_rows": (1, 0, 2, 0), "blocked_ms": 0.0, "control": "gloo",
        "slow_links": ("rank 0 to rank 1: less",),
        "transports": ("shared memory", "none", "rail", "rail"), "tiers": (("host", 0),),
    }
    return Report(**{**plain, **values})  # type: ignore[arg-type]


def test_counters_begin_at_zero() -> None:
    assert set(dataclasses.asdict(Counters()).values()) == {0}


def test_a_report_is_plain_values() -> None:
    values = report_of(rows=12).as_dict()
    assert values["rows"] == 12
    assert set(values) == {field.name for field in dataclasses.fields(Report)}
    json.dumps(values)


def test_a_report_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        report_of().rows = 5  # type: ignore[misc]


def test_a_report_reads_well() -> None:
    text = str(report_of(
        rows=12_345, capacity=100_000, row_bytes=128, shard_rows=3_000, samples=10,
        rows_delivered=2_560, rows_received=64, blocked_ms=25.0, late_rows=17, fresh_slabs=3,
        shard_bytes=2_000_000, tiers=(("host", 1_500_000), ("disk", 500_000)),
        directory_bytes=100_000, commits=9, rows_staged=50,
        rows_committed=200, rows_sent_home=11, exchanges=8,
    ))
    lines = text.splitlines()
    assert "'replay': rank 1 of 4 on 2 host(s), cpu, exchangeable" in lines[0]
    for told in (
        "12,345 of 100,000 (global), 128 bytes", "3,000 held here", "50 rows staged here",
        "200 committed (global) in 9 commits", "11 sent to other ranks", "10 batches, 2,560 rows",
        "64 (2.5%) came from other ranks", "17 of the global batches",
        "12 rows, 0.00 MB in 8 exchanges", "2.1 MB (host 1.5 MB, disk 0.5 MB)",
        "3 batches needed fresh memory",
        "25.0 ms in plane calls, 2.500 ms a batch",
    ):
        assert told in text
    assert all(len(line) < 120 for line in lines)


def test_a_report_of_nothing_reads_well_too() -> None:
    text = str(report_of())
    assert "(0.0%)" in text
    assert "0.000 ms a batch" in text
