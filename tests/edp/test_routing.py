"""Routing and transfers against handing out draws one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.edp.routing import ROUTINGS, route, transfers
from tests import reference
from tests.properties import examples, hosts_of


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Holders of all draws, hosts of all ranks, and the rows of a batch."""
    ranks, batch_rows = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    hosts = draw(st.one_of(
        st.just([0] * ranks), st.just(list(range(ranks))), hosts_of(ranks)
    ))
    holding = draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
    holders = draw(st.lists(
        st.sampled_from(holding), min_size=ranks * batch_rows, max_size=ranks * batch_rows
    ))
    return holders, hosts, batch_rows


def routed(routing: str, holders: list[int], hosts: list[int], batch_rows: int) -> list[int]:
    [learners] = routed_together(routing, [holders], hosts, batch_rows)
    return learners


def routed_together(
    routing: str, holders: list[list[int]], hosts: list[int], batch_rows: int
) -> list[list[int]]:
    before = np.array(holders, dtype=np.uint8)
    learners = route(routing, before, np.array(hosts, dtype=np.int64), batch_rows)
    assert learners.dtype == np.uint8
    assert before.tolist() == holders, "the holders are the caller's"
    return learners.tolist()


@dataclass(frozen=True)
class Part:
    """One rank's part in one batch: ``mine`` and ``send`` are draws, ``receive`` positions."""

    mine: list[int]
    send: list[int]
    send_counts: list[int]
    receive: list[int]
    receive_counts: list[int]
    moved: int


def parts_of(
    learners: list[list[int]], holders: list[list[int]], rank: int, ranks: int
) -> list[Part]:
    """A rank's parts in several batches."""
    moves = transfers(
        np.array(learners, dtype=np.uint8), np.array(holders, dtype=np.uint8), rank, ranks
    )
    batches, draws = len(holders), len(holders[0])
    assert moves.send_bounds[0] == moves.receive_bounds[0] == 0
    assert moves.send_bounds[-1] == len(moves.send)
    assert moves.receive_bounds[-1] == len(moves.receive)
    return [
        Part(
            mine=(moves.mine[b] - b * draws).tolist(),
            send=(moves.send[moves.send_bounds[b] : moves.send_bounds[b + 1]] - b * draws)
            .tolist(),
            send_counts=moves.send_counts[b].tolist(),
            receive=(moves.receive[moves.receive_bounds[b] : moves.receive_bounds[b + 1]]
                     - b * (draws // ranks)).tolist(),
            receive_counts=moves.receive_counts[b].tolist(), moved=moves.moved[b],
        )
        for b in range(batches)
    ]


@pytest.mark.parametrize("routing", ROUTINGS)
@examples(250)
@given(case=drawn())
def test_routes_are_those_of_the_reference(
    routing: str, case: tuple[list[int], list[int], int]
) -> None:
    holders, hosts, batch_rows = case
    learners = routed(routing, holders, hosts, batch_rows)
    assert learners == reference.routed(routing, holders, hosts, batch_rows)
    assert [learners.count(rank) for rank in range(len(hosts))] == [batch_rows] * len(hosts)


@examples(200)
@given(case=drawn())
def test_exchangeable_moves_the_surplus_and_no_more(
    case: tuple[list[int], list[int], int]
) -> None:
    holders, hosts, batch_rows = case
    learners = routed("exchangeable", holders, hosts, batch_rows)
    counts = [holders.count(rank) for rank in range(len(hosts))]
    surplus = sum(max(count - batch_rows, 0) for count in counts)
    moved = [
        (holder, learner) for holder, learner in zip(holders, learners, strict=True)
        if holder != learner
    ]
    assert len(moved) == surplus
    # Between hosts, too, no more moves than the hosts' surplus.
    host_surplus = 0
    for host in set(hosts):
        mine = [rank for rank, other in enumerate(hosts) if other == host]
        rows = sum(counts[rank] for rank in mine)
        host_surplus += max(rows - batch_rows * len(mine), 0)
    assert sum(hosts[holder] != hosts[learner] for holder, learner in moved) == host_surplus


@examples(200)
@given(case=drawn(), routing=st.sampled_from(ROUTINGS))
def test_all_ranks_agree_on_the_transfers(
    case: tuple[list[int], list[int], int], routing: str
) -> None:
    holders, hosts, batch_rows = case
    ranks = len(hosts)
    learners = routed(routing, holders, hosts, batch_rows)
    parts = [parts_of([learners], [holders], rank, ranks)[0] for rank in range(ranks)]
    moved = sum(a != b for a, b in zip(learners, holders, strict=True))
    for rank, part in enumerate(parts):
        mine = [draw for draw, learner in enumerate(learners) if learner == rank]
        assert part.mine == mine
        assert part.moved == moved
        assert part.send == [
            draw for peer in range(ranks) if peer != rank
            for draw in range(len(holders)) if holders[draw] == rank and learners[draw] == peer
        ]
        assert part.receive == [
            position for peer in range(ranks) if peer != rank
            for position, draw in enumerate(mine) if holders[draw] == peer
        ]
        assert part.send_counts[rank] == part.receive_counts[rank] == 0
        assert sum(part.send_counts) == len(part.send)
        assert sum(part.receive_counts) == len(part.receive)
    # What one rank sends another is what that one receives from it, in the same order.
    for sender in range(ranks):
        for receiver in range(ranks):
            if sender != receiver:
                sent = from_peer(parts[sender].send, parts[sender].send_counts, receiver)
                places = from_peer(
                    parts[receiver].receive, parts[receiver].receive_counts, sender
                )
                assert sent == [parts[receiver].mine[place] for place in places]


def from_peer(values: list[int], counts: list[int], peer: int) -> list[int]:
    start = sum(counts[:peer])
    return values[start : start + counts[peer]]


@examples(150)
@given(data=st.data(), routing=st.sampled_from(ROUTINGS))
def test_batches_together_are_batches_alone(data: st.DataObject, routing: str) -> None:
    ranks, batch_rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    hosts = data.draw(hosts_of(ranks))
    draws = st.lists(
        st.integers(0, ranks - 1), min_size=ranks * batch_rows, max_size=ranks * batch_rows
    )
    holders = data.draw(st.lists(draws, min_size=1, max_size=5))
    learners = routed_together(routing, holders, hosts, batch_rows)
    assert learners == [routed(routing, alone, hosts, batch_rows) for alone in holders]
    for rank in range(ranks):
        assert parts_of(learners, holders, rank, ranks) == [
            parts_of([learners[b]], [holders[b]], rank, ranks)[0] for b in range(len(holders))
        ]


def test_routing_simulated_as_an_exchange() -> None:
    # Rows travel as the transfers say; every learner ends up with the rows of its draws.
    rng = np.random.default_rng(0)
    ranks, batch_rows = 16, 32
    hosts = [rank // 4 for rank in range(ranks)]
    for routing in ROUTINGS:
        holders = rng.integers(0, ranks, ranks * batch_rows).tolist()
        learners = routed(routing, holders, hosts, batch_rows)
        parts = [parts_of([learners], [holders], rank, ranks)[0] for rank in range(ranks)]
        for rank, part in enumerate(parts):
            batch = [draw if holders[draw] == rank else None for draw in part.mine]
            arrived = [
                row for peer in range(ranks) if peer != rank
                for row in from_peer(parts[peer].send, parts[peer].send_counts, rank)
            ]
            for place, row in zip(part.receive, arrived, strict=True):
                batch[place] = row
            assert batch == part.mine


def test_equal_draws_move_nothing() -> None:
    holders = [1, 0, 0, 1, 2, 2]
    assert routed("exchangeable", holders, [0, 0, 0], 2) == holders
    assert parts_of([holders], [holders], 0, 3)[0].moved == 0


def test_surplus_stays_on_its_host_where_it_can() -> None:
    # Rank 0 has three too many. Rank 2 is on its host, so it is served before rank 1.
    holders = [0, 0, 0, 0, 0, 2]
    assert routed("exchangeable", holders, [0, 1, 0], 2) == [0, 0, 2, 1, 1, 2]
    with_spare = [0, 0, 0, 0, 2, 2]
    assert routed("exchangeable", with_spare, [0, 0, 1], 2) == [0, 0, 1, 1, 2, 2]


def test_wide_ranks_keep_their_dtype() -> None:
    ranks = 300
    rng = np.random.default_rng(1)
    holders = rng.integers(0, ranks, (3, ranks * 4)).astype(np.uint16)
    hosts = np.arange(ranks) // 8
    for routing in ROUTINGS:
        learners = route(routing, holders, hosts, 4)
        assert learners.dtype == np.uint16
        assert learners.tolist() == [
            reference.routed(routing, batch, hosts.tolist(), 4) for batch in holders.tolist()
        ]


def test_many_batches_of_many_ranks_do_not_mix() -> None:
    # As many batches as are ever planned together: 32,768 draws.
    rng = np.random.default_rng(3)
    for ranks, batches in ((200, 163), (256, 128), (300, 109)):
        holders = rng.integers(0, ranks, (batches, ranks)).astype(
            np.uint8 if ranks <= 256 else np.uint16
        )
        hosts = np.arange(ranks) // 8
        together = route("exchangeable", holders, hosts, 1)
        for batch in range(batches):
            alone = route("exchangeable", holders[batch : batch + 1], hosts, 1)
            assert (together[batch] == alone[0]).all()
            assert (np.bincount(alone[0], minlength=ranks) == 1).all()


@pytest.mark.parametrize(("ranks", "expected"), [(2, 0.018), (4, 0.022), (64, 0.025)])
def test_how_little_exchangeable_routing_moves(ranks: int, expected: float) -> None:
    # Equal shards, 256 rows a learner: about 0.4 / sqrt(256) of the rows.
    rng = np.random.default_rng(2)
    hosts = np.zeros(ranks, dtype=np.int64)
    shares = []
    for _ in range(200):
        holders = rng.integers(0, ranks, (1, ranks * 256)).astype(np.uint8)
        shares.append(float((route("exchangeable", holders, hosts, 256) != holders).mean()))
    assert abs(np.mean(shares) - expected) < 0.0025
