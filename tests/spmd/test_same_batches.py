"""One seed and the same commits give the same global batches on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.properties import examples
from tests.spmd.cases import play, play_watching_slots
from tests.spmd.conftest import Pools
from tests.spmd.programs import Program, Setting, as_sorted, bytes_of, cases, expected
from tests.spmd.rows import DTYPES

_Case = tuple[Program, list[Setting]]
_JITTER = st.integers(0, 2**30)


def worlds_of_examples(count: int) -> settings:
    """As ``examples``, but what fails is not made smaller: real ranks are too slow for that."""
    return settings(examples(count), phases=(Phase.explicit, Phase.generate))


def _played(pools: Pools, program: Program, settings_: list[Setting], **more: Any) -> list[Any]:
    """The program's results by setting and rank; all worlds run at the same time."""
    worlds = [pools[setting.ranks] for setting in settings_]
    for world, setting in zip(worlds, settings_, strict=True):
        world.start(play, **program.arguments(setting), pause_ms=1.0, **more)
    return [world.values() for world in worlds]


def _global_batch(results: list[Any], number: int) -> list[tuple[int, bytes]] | str | None:
    """Batch ``number`` of all ranks as a multiset; what all ranks got instead of a batch."""
    parts = [result["samples"][number] for result in results]
    if not isinstance(parts[0], dict):
        assert all(part == parts[0] for part in parts), parts
        return parts[0]
    return as_sorted(
        np.concatenate([part["index"] for part in parts]),
        np.concatenate([part["rows"] for part in parts]),
    )


@given(case=cases(), jitter=_JITTER, keep=st.booleans())
@worlds_of_examples(50)
def test_global_batches_are_those_of_one_buffer(
    pools: Pools, case: _Case, jitter: int, keep: bool
) -> None:
    """As multisets of logical indices and bytes, whatever ranks, routing, quotas and hosts are."""
    program, worlds = case
    one = Setting(
        ranks=1, routing="independent", placement="balanced", quotas=[program.capacity], hosts=[0],
        staging_rows=None,
    )
    truth = expected(program, one)
    for setting, results in zip(
        worlds, _played(pools, program, worlds, jitter=jitter, keep=keep), strict=True
    ):
        for number, batch in enumerate(truth.samples):
            got = _global_batch(results, number)
            if not isinstance(batch, list):
                assert got == batch, (setting, number)
                continue
            rows = [row for part in batch for row in part]
            index = np.array([row.index for row in rows])
            assert got == as_sorted(index, bytes_of(program, rows)), (setting, number)
        for result in results:
            assert result["sizes"] == [len(rows) for rows in truth.contents], setting
            assert result["agreed"] == truth.agreed, setting


@given(case=cases(), jitter=_JITTER, keep=st.booleans())
@worlds_of_examples(50)
def test_batches_follow_the_rule_of_drafts(
    pools: Pools, case: _Case, jitter: int, keep: bool
) -> None:
    """By rank and position: the draft of batch t+1, drawn and routed over what was committed when
    batch t was delivered, says which learner a draw goes to; the final draws say which row."""
    program, worlds = case
    for setting, results in zip(
        worlds, _played(pools, program, worlds, jitter=jitter, keep=keep), strict=True
    ):
        truth = expected(program, setting)
        for number, batch in enumerate(truth.samples):
            for rank, result in enumerate(results):
                got = result["samples"][number]
                if not isinstance(batch, list):
                    assert got == batch, (setting, number, rank)
                    continue
                where = (setting, number, rank)
                assert got["index"].tolist() == [row.index for row in batch[rank]], where
                assert (got["rows"] == bytes_of(program, batch[rank])).all(), where
        for rank, result in enumerate(results):
            report = result["report"]
            peers = range(setting.ranks)
            assert report["sent_rows"] == [truth.sent[rank, peer] for peer in peers], setting
            assert report["received_rows"] == [truth.sent[peer, rank] for peer in peers], setting
            assert report["commits"] == truth.commits, setting
            assert report["rows_skipped"] == truth.job.skipped, setting
            if setting.ranks > 1:
                assert report["late_rows"] == truth.job.late_rows, setting


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_batches_have_the_same_bytes(pools: Pools, dtype: str) -> None:
    program = Program(
        schema=[[["a"], dtype, [3]], [["b"], dtype, []]], capacity=300, global_rows=64, min_size=0,
        seed=1, operations=[["extend", [90, 70, 80, 60]], ["sample"]],
    )
    setting = Setting(
        ranks=2, routing="independent", placement="balanced", quotas=[150, 150], hosts=[0, 0],
        staging_rows=None,
    )
    views = pools[2].run(play, **program.arguments(setting))
    copies = pools[2].run(play, **program.arguments(setting), contiguous=True)
    for one, other in zip(views, copies, strict=True):
        assert one["samples"][0]["rows"].tobytes() == other["samples"][0]["rows"].tobytes()


@given(case=cases(), jitters=st.tuples(_JITTER, _JITTER))
@worlds_of_examples(15)
def test_two_runs_are_bit_identical(
    pools: Pools, case: _Case, jitters: tuple[int, int]
) -> None:
    """By rank and position, however late each rank comes to each call."""
    program, worlds = case
    runs = [_played(pools, program, worlds, jitter=jitter) for jitter in jitters]
    for setting, first, second in zip(worlds, *runs, strict=True):
        for rank, (one, other) in enumerate(zip(first, second, strict=True)):
            for number, (a, b) in enumerate(zip(one["samples"], other["samples"], strict=True)):
                where = (setting, rank, number)
                if isinstance(a, dict):
                    assert a["index"].tobytes() == b["index"].tobytes(), where
                    assert a["rows"].tobytes() == b["rows"].tobytes(), where
                else:
                    assert a == b, where
            for report in (one["report"], other["report"]):
                report.pop("blocked_ms")
                if setting.hidden:  # the batch before may be in use as yet, or not
                    report.pop("fresh_slabs")
                report.pop("transports")  # whichever was quickest this time
                report.pop("tiers")  # segments move about by chance
            assert one["report"] == other["report"], (setting, rank)


@given(case=cases(), jitter=_JITTER)
@worlds_of_examples(40)
def test_the_buffer_is_exactly_the_last_rows(
    pools: Pools, case: _Case, jitter: int
) -> None:
    """After every collective the ranks' shards together are the last ``capacity`` rows, each once,
    every rank's within its quota, and all ranks agree on who holds what."""
    program, worlds = case
    for setting, results in zip(
        worlds, _played(pools, program, worlds, jitter=jitter, inspect_all=True), strict=True
    ):
        truth = expected(program, setting)
        for number, rows in enumerate(truth.contents):
            shards = [result["shards"][number] for result in results]
            for rank, shard in enumerate(shards):
                where = (setting, number, rank)
                mine = [row for row in rows if row.holder == rank]
                assert shard["indices"].tolist() == [row.index for row in rows], where
                assert shard["holders"].tolist() == [row.holder for row in rows], where
                assert shard["mine"].tolist() == [row.index for row in mine], where
                assert (shard["rows"] == bytes_of(program, mine)).all(), where
                assert len(mine) == shard["held"][rank] <= setting.quotas[rank], where
                assert shard["held"].tolist() == shards[0]["held"].tolist(), where


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_commit_writes_no_slot_that_it_frees(pools: Pools, ranks: int) -> None:
    """Rows that leave stay readable until the next collective, unless a fence came before."""
    operations: list[list[Any]] = []
    random = np.random.default_rng(ranks)
    for step in range(60):
        most = 40 if step % 9 == 8 else 4
        operations.append(["extend", random.integers(0, most, 4).tolist()])
        operations.append(["sample"] if step % 3 else ["flush"])
    results = pools[ranks].run(
        play_watching_slots, operations=operations,
        schema=[[["a"], "int64", [3]]],
        plane={"capacity": 61, "batch_rows": 64 // ranks, "staging_rows": 160 // ranks},
    )
    assert sum(result["watched"] for result in results) > 500
