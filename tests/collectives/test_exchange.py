"""The row exchange and each of its transports, among ranks that are threads of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit.collectives.agreement import Decisions
from conduit.collectives.choice import candidates, open_exchanges
from conduit.collectives.exchange import RowExchange
from conduit.collectives.shared import Window
from conduit.collectives.transports import AllToAll, PointToPoint, Rail
from conduit.collectives.world import World
from conduit.errors import CapacityError, WorldError
from tests.properties import examples
from tests.simulation import Simulation

CPU = torch.device("cpu")
ROW_BYTES = 16
LONG = 200_000
"""Rows enough to be sent in several messages."""


def joined() -> World:
    return World.join(device=CPU, timeout=timedelta(seconds=20))


def shared(world: World, network: Any = None) -> RowExchange:
    windows = world.open_windows(1, words=1 + world.size)
    return RowExchange(world, ROW_BYTES, windows=windows and windows[0], network=network)


TRANSPORTS: dict[str, Callable[[World], RowExchange]] = {
    "point-to-point": lambda world: RowExchange(
        world, ROW_BYTES, network=PointToPoint(world, tag=3)
    ),
    "all-to-all": lambda world: RowExchange(
        world, ROW_BYTES, network=AllToAll(world)
    ),
    "shared": shared,
    "rail": lambda world: shared(
        world, Rail(world, tag=3) if Rail.is_possible(world) else None
    ),
}


def rows_from(sender: int, receiver: int, count: int, call: int) -> torch.Tensor:
    """Rows that say who sent them to whom, when, and their number."""
    rows = torch.zeros(count, ROW_BYTES // 4, dtype=torch.int32)
    rows[:, 0], rows[:, 1], rows[:, 2] = sender, receiver, call
    rows[:, 3] = torch.arange(count)
    return rows.view(torch.uint8)


def exchanged(
    exchange: RowExchange, counts: np.ndarray, rank: int, call: int, **how: Any
) -> torch.Tensor:
    """What comes to ``rank`` when ``counts[s, r]`` rows go from s to r."""
    ranks = len(counts)
    box = exchange.outbox(int(counts[rank].sum()), what="testing")
    box.copy_(torch.cat([
        rows_from(rank, peer, int(counts[rank, peer]), call) for peer in range(ranks)
    ]))
    out = torch.full((int(counts[:, rank].sum()), ROW_BYTES), 255, dtype=torch.uint8)
    flight = exchange.begin(counts[rank], counts[:, rank], what="testing", **how)
    if how.get("chunk_bytes"):
        flight.issue()
    flight.wait(lambda rows, start: out[start : start + len(rows)].copy_(rows))
    return out


def expected(counts: np.ndarray, rank: int, call: int) -> torch.Tensor:
    """The plain exchange: what every rank has for this one, by sending rank."""
    return torch.cat([
        rows_from(peer, rank, int(counts[peer, rank]), call) for peer in range(len(counts))
    ])


@st.composite
def matrices(draw: st.DrawFn, ranks: int) -> np.ndarray:
    """Counts of all kinds: none, a few, one to all, all to one, one pair alone, much skewed."""
    counts = np.zeros((ranks, ranks), dtype=np.int64)
    kind = draw(st.sampled_from(["any", "any", "to one", "from one", "pair", "none", "skewed"]))
    one, other = draw(st.integers(0, ranks - 1)), draw(st.integers(0, ranks - 1))
    if kind == "to one":
        counts[:, one] = draw(st.integers(1, 9))
    elif kind == "from one":
        counts[one] = draw(st.integers(1, 9))
    elif kind == "pair":
        counts[one, other] = draw(st.integers(1, 9))
    elif kind in ("any", "skewed"):
        row = st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks)
        counts = np.array(draw(st.lists(row, min_size=ranks, max_size=ranks)))
        if kind == "skewed":
            counts[one, other] = 3000
    np.fill_diagonal(counts, 0)
    return counts


@pytest.mark.parametrize("transport", TRANSPORTS)
@examples(40)
@given(data=st.data())
def test_every_transport_is_the_plain_exchange(transport: str, data: st.DataObject) -> None:
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=6).map(sorted))
    ranks = len(hosts)
    total = np.zeros((ranks, ranks), dtype=np.int64)
    with Simulation(hosts, shared=transport in ("shared", "rail")) as simulation:
        exchanges = simulation.run(lambda rank: TRANSPORTS[transport](joined()))
        calls = data.draw(st.integers(1, 4))
        for call in range(calls):
            counts = data.draw(matrices(ranks))
            how: dict[str, Any] = {}
            if data.draw(st.booleans()):
                how = {"chunk_bytes": data.draw(st.sampled_from([1, 48, 1000])),
                       "most_rows": int(counts.max())}

            def move(
                rank: int, counts: np.ndarray = counts, call: int = call, how: Any = how
            ) -> torch.Tensor:
                return exchanged(exchanges[rank], counts, rank, call, **how)

            for rank, out in enumerate(simulation.run(move)):
                assert torch.equal(out, expected(counts, rank, call))
            total += counts
        for rank, exchange in enumerate(exchanges):
            traffic = exchange.traffic
            assert (traffic.calls, traffic.unshared_calls) == (calls, 0)
            assert traffic.sent_rows.tolist() == total[rank].tolist()
            assert traffic.received_rows.tolist() == total[:, rank].tolist()
            exchange.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_long_transfers(transport: str) -> None:
    """Some in several messages, with their last bytes in one of its own; and a short one after."""
    with Simulation([0, 0, 1, 1], shared=transport in ("shared", "rail")) as simulation:
        exchanges = simulation.run(lambda rank: TRANSPORTS[transport](joined()))
        counts = np.zeros((4, 4), dtype=np.int64)
        counts[0, 1], counts[1, 2], counts[3, 0], counts[2, 0] = LONG, LONG + 1, LONG, 1
        for call, now in enumerate([counts, counts.T.copy(), np.minimum(counts, 2)]):
            for how in ({}, {"chunk_bytes": 1 << 20, "most_rows": LONG + 1}):
                def move(rank: int, now: Any = now, call: int = call, how: Any = how) -> Any:
                    return exchanged(exchanges[rank], now, rank, call, **how)

                for rank, out in enumerate(simulation.run(move)):
                    assert torch.equal(out, expected(now, rank, call))


def test_a_box_is_not_filled_again_while_others_read_it() -> None:
    """Rank 0 begins exchange after exchange while rank 1 has not looked at the first yet."""
    counts = np.array([[0, 3], [0, 0]])
    with Simulation([0, 0], shared=True) as simulation:
        exchanges = simulation.run(lambda rank: shared(joined()))

        def move(rank: int) -> list[torch.Tensor]:
            got = []
            for call in range(5):
                if rank == 1:
                    torch.manual_seed(call)  # some work, while rank 0 runs ahead
                    torch.randn(200, 200).svd()
                got.append(exchanged(exchanges[rank], counts, rank, call))
            return got

        _, got = simulation.run(move)
        for call, rows in enumerate(got):
            assert torch.equal(rows, expected(counts, 1, call))


def test_rows_go_over_the_network_where_no_shared_memory_is_left() -> None:
    def full(window: Window, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    with Simulation([0, 0, 1], shared=True) as simulation:
        exchanges = simulation.run(lambda rank: shared(joined()))
        counts = np.array([[0, 2, 1], [3, 0, 1], [1, 1, 0]])
        with mock.patch.object(Window, "grow", full):
            for call in range(3):
                for rank, out in enumerate(simulation.run(
                    lambda rank, call=call: exchanged(exchanges[rank], counts, rank, call)
                )):
                    assert torch.equal(out, expected(counts, rank, call))
        assert [e.traffic.unshared_calls for e in exchanges] == [3, 3, 0]
        relayed = simulation.run(lambda rank: shared(joined(), Rail(joined(), tag=1)))
        with mock.patch.object(Window, "grow", full):
            for error in simulation.attempt(lambda rank: relayed[rank].outbox(4, what="testing")):
                assert rank == 2 or isinstance(error, CapacityError)
                assert rank == 2 or "--shm-size" in str(error)


@pytest.mark.parametrize(
    ("rows", "counts", "out_counts"),
    [
        (3, [0, 2], [0, 0]), (1, [0, 2], [0, 0]), (2, [2, 0], [0, 0]), (0, [0, 0], [2, 0]),
        (2, [1, 1], [0, 0]), (2, [0, 2, 0], [0, 0, 0]), (0, [0, 0], [0, -1]),
    ],
)
def test_counts_that_do_not_fit_are_refused_before_anything_is_sent(
    rows: int, counts: list[int], out_counts: list[int]
) -> None:
    with Simulation([0, 0]) as simulation:
        exchange = simulation.run(lambda rank: RowExchange(joined(), ROW_BYTES))[0]
        exchange.outbox(rows, what="testing")
        with pytest.raises(WorldError, match="the counts of testing do not fit"):
            exchange.begin(np.array(counts), np.array(out_counts), what="testing")
        assert exchange.traffic.calls == 0
        assert exchange.traffic.sent_rows.tolist() == [0, 0]


def test_a_neighbour_with_other_counts_is_named() -> None:
    with Simulation([0, 0], shared=True) as simulation:
        exchanges = simulation.run(lambda rank: shared(joined()))
        sends = [np.array([[0, 2], [1, 0]]), np.array([[0, 1], [1, 0]])]  # what each believes
        results = simulation.attempt(
            lambda rank: exchanged(exchanges[rank], sends[rank], rank, 0)
        )
        assert isinstance(results[1], WorldError)
        assert "rank 0 sent another number of rows" in str(results[1])


def test_what_can_carry_rows() -> None:
    def names(hosts: list[int], *, sharing: bool, cuda: bool = False) -> list[str]:
        with Simulation(hosts, shared=sharing) as simulation:
            def of(rank: int) -> list[str]:
                world = joined()
                if cuda:
                    world = dataclasses.replace(world, device=torch.device("cuda:0"))
                return list(candidates(world, shared=sharing))

            results = simulation.run(of)
        assert all(result == results[0] for result in results)
        return results[0]

    assert names([0], sharing=False) == []
    assert names([0, 1], sharing=False) == ["point-to-point", "all-to-all"]
    assert names([0, 0], sharing=True) == ["point-to-point"]
    assert names([0, 0, 1, 1], sharing=True) == ["point-to-point", "rail"]
    assert names([0, 1, 0, 1], sharing=True) == ["point-to-point"]  # no rails
    assert names([0, 1], sharing=False, cuda=True) == ["all-to-all"]


@pytest.mark.parametrize(("times", "chosen"), [
    ({"point-to-point": 100, "rail": 100}, "point-to-point"),
    ({"point-to-point": 100, "rail": 101}, "point-to-point"),
    ({"point-to-point": 100, "rail": 89}, "rail"),
])
def test_the_quickest_transport_is_chosen_by_all(times: dict[str, int], chosen: str) -> None:
    with Simulation([0, 0, 1, 1], shared=True) as simulation, mock.patch(
        "conduit.collectives.choice.measure", lambda *arguments, **more: times
    ):
        def of(rank: int) -> tuple[list[str], int]:
            decisions = Decisions()
            exchanges = open_exchanges(
                joined(), ROW_BYTES, count=2, trial_rows=5, decisions=decisions
            )
            assert exchanges[0].traffic is not exchanges[1].traffic
            return [exchanges[0].transport(peer) for peer in range(4)], decisions.hash

        results = simulation.run(of)
    assert results[0][0] == ["none", "shared memory", chosen, chosen]
    assert len({decided for _, decided in results}) == 1
