"""Control records in two levels and rows by rail, on real ranks that seem to be on two hosts."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import conduit
from tests.spmd.cases import make_plane
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank, Ranks

HOSTS = [0, 0, 1, 1]
EXAMPLE = {"number": torch.zeros((), dtype=torch.int64)}


def played(rank: Rank, *, two_levels: bool, network: str) -> dict[str, Any]:
    """Batches of a buffer that all ranks feed, of different sizes and at different times."""
    def quickest(world: object, row_bytes: int, makers: dict[str, Any], *, rows: int) -> Any:
        return {name: 1 if name == network else 9 for name in makers}

    rank.jitter(5, 2.0)
    with (
        mock.patch("conduit.collectives.world.TWO_LEVEL_RANKS", 3 if two_levels else 64),
        mock.patch("conduit.collectives.choice.measure", quickest),
        make_plane(
            rank, EXAMPLE, capacity=90, batch_rows=16, routing="independent", hosts=HOSTS, seed=4
        ) as plane,
    ):
        batches = []
        for step in range(25):
            rank.pause()
            first = 1_000 * step + 100 * rank.number
            plane.extend({"number": torch.arange(first, first + (step + rank.number) % 4)})
            batch = plane.sample() if step > 2 else plane.flush()
            if batch is not None:
                batches.append(batch["number"].numpy().copy())
        agreed = plane.agree(rank.number)
        report = plane.report()
    return {"batches": np.stack(batches), "agreed": agreed, "control": report.control,
            "transports": list(report.transports)}


def test_two_levels_and_rails_change_no_batch(pools: Pools) -> None:
    plain = pools[4].run(played, two_levels=False, network="point-to-point")
    other = pools[4].run(played, two_levels=True, network="rail")
    for number, (one, two) in enumerate(zip(plain, other, strict=True)):
        assert (one["control"], two["control"]) == ("gloo", "two levels")
        assert two["transports"] == [
            "none" if peer == number else
            "shared memory" if HOSTS[peer] == HOSTS[number] else "rail" for peer in range(4)
        ]
        assert one["agreed"] == two["agreed"] == 3
        assert one["batches"].tobytes() == two["batches"].tobytes()


def out_of_step(rank: Rank) -> str:
    """Rank 2, which leads its host, calls something else than the others."""
    with mock.patch("conduit.collectives.world.TWO_LEVEL_RANKS", 3):
        plane = make_plane(rank, EXAMPLE, capacity=90, batch_rows=16, hosts=HOSTS)
    with pytest.raises(conduit.DesyncError) as caught:
        (plane.empty if rank.number == 2 else plane.flush)()
    plane.close()
    return str(caught.value)


def bereft(rank: Rank, *, victim: int) -> str:
    """One rank dies between two calls."""
    with mock.patch("conduit.collectives.world.TWO_LEVEL_RANKS", 3):
        plane = make_plane(
            rank, EXAMPLE, capacity=90, batch_rows=16, hosts=HOSTS, timeout=timedelta(seconds=12)
        )
    plane.flush()
    if rank.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(conduit.WorldError) as caught:
        plane.flush()
    plane.close()
    assert time.monotonic() - begun < 10
    return str(caught.value)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_dead_rank_is_noticed_at_once_also_through_leaders(victim: int) -> None:
    """Rank 1 follows and rank 2 leads."""
    world = Ranks(4)
    try:
        world.start(bereft, each=[{"victim": victim}] * 4)
        others = [rank for rank in range(4) if rank != victim]
        for outcome in world.outcomes(ranks=others):
            assert outcome.error is None, outcome
            # Whoever hears of it through others may find them gone as well.
            assert str(victim) in outcome.value.split("lost")[-1] \
                or "all other ranks are gone" in outcome.value
    finally:
        world.close()


def test_errors_reach_all_ranks_through_their_leaders() -> None:
    world = Ranks(4)
    try:
        texts = world.run(out_of_step)
    finally:
        world.close()
    for text in texts:
        assert "rank 2 called empty" in text and "ranks [0, 1, 3] called flush" in text
