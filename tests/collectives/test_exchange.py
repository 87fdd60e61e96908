"""The row exchange among ranks that are threads of this process."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit.collectives.exchange import RowExchange
from conduit.collectives.world import World
from conduit.errors import WorldError
from tests.properties import examples
from tests.simulation import Simulation

CPU = torch.device("cpu")
ROW_BYTES = 16


def exchanges_of(world: Simulation) -> list[RowExchange]:
    return world.run(lambda rank: RowExchange(
        World.join(device=CPU, timeout=timedelta(seconds=5)), ROW_BYTES
    ))


def rows_from(sender: int, receiver: int, count: int, call: int) -> torch.Tensor:
    """Rows that say who sent them to whom."""
    rows = torch.zeros(count, ROW_BYTES, dtype=torch.uint8)
    rows[:, 0], rows[:, 1], rows[:, 2] = sender, receiver, call
    rows[:, 3] = torch.arange(count)
    return rows


@examples(60)
@given(data=st.data(), ranks=st.integers(2, 5), calls=st.integers(1, 3))
def test_rows_arrive_by_sender_in_order(data: st.DataObject, ranks: int, calls: int) -> None:
    total = np.zeros((ranks, ranks), dtype=np.int64)
    with Simulation([0] * ranks) as world:
        exchanges = exchanges_of(world)
        for call in range(calls):
            # counts[s, r] rows go from s to r.
            counts = np.array(data.draw(st.lists(
                st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks),
                min_size=ranks, max_size=ranks,
            )))
            np.fill_diagonal(counts, 0)

            def move(rank: int, counts: np.ndarray = counts, call: int = call) -> torch.Tensor:
                rows = torch.cat([
                    rows_from(rank, peer, int(counts[rank, peer]), call)
                    for peer in range(ranks)
                ])
                out = torch.full(
                    (int(counts[:, rank].sum()), ROW_BYTES), 255, dtype=torch.uint8
                )
                exchanges[rank](rows, counts[rank], out, counts[:, rank], what="testing")
                return out

            for rank, out in enumerate(world.run(move)):
                assert torch.equal(out, torch.cat([
                    rows_from(peer, rank, int(counts[peer, rank]), call)
                    for peer in range(ranks)
                ]))
            total += counts
        for rank, exchange in enumerate(exchanges):
            assert exchange.calls == calls
            assert exchange.sent_rows.tolist() == total[rank].tolist()
            assert exchange.received_rows.tolist() == total[:, rank].tolist()
            assert exchange.sent_bytes.tolist() == (total[rank] * ROW_BYTES).tolist()


@pytest.mark.parametrize(
    ("rows", "counts", "out", "out_counts"),
    [
        (3, [0, 2], 0, [0, 0]), (1, [0, 2], 0, [0, 0]), (2, [2, 0], 0, [0, 0]),
        (0, [0, 0], 2, [0, 1]), (0, [0, 0], 2, [2, 0]), (2, [1, 1], 0, [0, 0]),
        (0, [0, 0], 0, [0, 1]),
    ],
)
def test_counts_that_do_not_fit_are_refused_before_anything_is_sent(
    rows: int, counts: list[int], out: int, out_counts: list[int]
) -> None:
    with Simulation([0, 0]) as world:
        exchange = exchanges_of(world)[0]
        with pytest.raises(WorldError, match="the counts of testing do not fit"):
            exchange(
                torch.zeros(rows, ROW_BYTES, dtype=torch.uint8), np.array(counts),
                torch.zeros(out, ROW_BYTES, dtype=torch.uint8), np.array(out_counts),
                what="testing",
            )
        assert exchange.calls == 0
        assert exchange.sent_rows.tolist() == [0, 0]


def test_rows_of_another_width_are_refused() -> None:
    with Simulation([0, 0]) as world:
        exchange = exchanges_of(world)[0]
        with pytest.raises(WorldError, match="do not fit"):
            exchange(
                torch.zeros(1, ROW_BYTES + 16, dtype=torch.uint8), np.array([0, 1]),
                torch.zeros(0, ROW_BYTES, dtype=torch.uint8), np.array([0, 0]), what="testing",
            )
