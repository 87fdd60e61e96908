"""How many rows move between ranks, and that the report counts what really moved."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conduit.collectives.boxes import Box
from tests.spmd.cases import make_plane
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank

RANKS = 4
SAMPLES = 200


def deliver(
    rank: Rank, *, routing: str, batch_rows: int, placement: str, produced: int, filled: int,
    shared: bool,
) -> dict[str, Any]:
    """Samples from a buffer that was filled by ``filled`` rows a rank and commit, with ``produced``
    new rows a rank and step. Counts, apart from the library, rows of batches that another rank
    holds and bytes that are handed to the network, or read from shared memory."""
    exchanged = np.zeros(rank.size, dtype=np.int64)
    read = np.zeros(rank.size, dtype=np.int64)
    send, rows_of = dist.ProcessGroup.send, Box.rows_of

    def reading(box: Box, peer: int, receiver: int) -> torch.Tensor:
        rows = rows_of(box, peer, receiver)
        read[peer] += rows.nbytes
        return rows

    def same_times(*arguments: Any, **more: Any) -> dict[str, int]:
        return {"point-to-point": 1, "all-to-all": 1}

    def counting(group: dist.ProcessGroup, rows: list[torch.Tensor], to: int, tag: int) -> Any:
        assert {part.dtype for part in rows} == {torch.uint8}
        exchanged[to] += sum(part.nbytes for part in rows)
        return send(group, rows, to, tag)

    foreign = 0
    example = {"observation": torch.zeros(17), "done": torch.zeros((), dtype=torch.bool)}
    with (
        mock.patch.object(dist.ProcessGroup, "send", counting),
        mock.patch.object(Box, "rows_of", reading),
        mock.patch("conduit.collectives.choice.measure", same_times),
        make_plane(
            rank, example, capacity=4_000, batch_rows=batch_rows, routing=routing, quotas=[4_000],
            placement=placement, seed=3, hosts=None if shared else range(rank.size),
        ) as plane,
    ):
        def produce(n: int) -> None:
            plane.extend({"observation": torch.zeros(n, 17), "done": torch.ones(n).bool()})

        for _ in range(plane.capacity // rank.size // filled):
            produce(filled)
            plane.flush()
        for _ in range(SAMPLES):
            produce(produced)
            batch = plane.sample()
            assert batch is not None
            directory = plane._directory
            positions = batch["index"].numpy() % directory.capacity
            foreign += int(np.count_nonzero(directory.holders(positions) != rank.number))
        report = plane.report().as_dict()
    return {"report": report, "foreign": foreign, "exchanged": exchanged, "read": read}


def _moved_share(results: list[dict[str, Any]], batch_rows: int) -> float:
    """The share of delivered rows that moved; and all accounts of it agree."""
    for number, result in enumerate(results):
        report = result["report"]
        assert report["rows_delivered"] == SAMPLES * batch_rows
        # A moved row that a late one displaces was moved for nothing.
        wasted = report["rows_received"] - result["foreign"]
        assert 0 <= wasted <= report["late_rows"]
        if "shared memory" in report["transports"]:
            assert result["exchanged"].sum() == 0
            received_bytes = [n * report["row_bytes"] for n in report["received_rows"]]
            assert received_bytes == result["read"].tolist()
        else:
            assert result["read"].sum() == 0
            assert report["sent_bytes"] == result["exchanged"].tolist()
        assert report["sent_bytes"] == [n * report["row_bytes"] for n in report["sent_rows"]]
        assert report["sent_rows"][number] == report["received_rows"][number] == 0
        for peer, other in enumerate(results):
            assert report["sent_rows"][peer] == other["report"]["received_rows"][number]
    total = {
        name: np.sum([result["report"][name] for result in results])
        for name in ("received_rows", "rows_received", "rows_sent_home", "rows_delivered")
    }
    assert total["received_rows"] == total["rows_received"] + total["rows_sent_home"]
    return float(total["rows_received"] / total["rows_delivered"])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("produced", [0, 3])
def test_exchangeable_moves_only_the_surplus(pools: Pools, produced: int, shared: bool) -> None:
    """About 0.4 / sqrt(256) of the rows, not three quarters; late rows add a little."""
    results = pools[RANKS].run(
        deliver, routing="exchangeable", batch_rows=256, placement="balanced", produced=produced,
        filled=100, shared=shared,
    )
    assert 0.015 < _moved_share(results, 256) <= 0.03
    assert all((result["report"]["late_rows"] > 0) == (produced > 0) for result in results)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("produced", [0, 3])
def test_independent_moves_all_that_is_elsewhere(pools: Pools, produced: int, shared: bool) -> None:
    results = pools[RANKS].run(
        deliver, routing="independent", batch_rows=256, placement="balanced", produced=produced,
        filled=100, shared=shared,
    )
    assert _moved_share(results, 256) == pytest.approx(1 - 1 / RANKS, abs=0.01)


def test_equal_shards_send_nothing_home(pools: Pools) -> None:
    results = pools[RANKS].run(
        deliver, routing="exchangeable", batch_rows=32, placement="balanced", produced=5, filled=5,
        shared=True,
    )
    assert all(result["report"]["rows_sent_home"] == 0 for result in results)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("routing", ["exchangeable", "independent"])
def test_central_serves_everybody_from_one_rank(
    pools: Pools, routing: str, shared: bool
) -> None:
    """All rows go to rank 0 when they are committed, and come from there."""
    results = pools[RANKS].run(
        deliver, routing=routing, batch_rows=32, placement="central", produced=2, filled=100,
        shared=shared,
    )
    delivered = SAMPLES * 32 * RANKS
    wasted = results[0]["report"]["late_rows"] / delivered
    assert (RANKS - 1) / RANKS <= _moved_share(results, 32) <= (RANKS - 1) / RANKS + wasted
    committed = 1_000 + SAMPLES * 2
    assert [result["report"]["rows_sent_home"] for result in results] == [0] + [committed] * 3
    assert [result["report"]["shard_rows"] for result in results] == [4_000, 0, 0, 0]
    for result in results[1:]:
        assert result["report"]["sent_rows"] == [committed, 0, 0, 0]
