"""Ranks that are late for the probe, or die in it: the others learn who."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from conduit.collectives.probe import probe_links
from conduit.collectives.streams import StreamedFlows
from conduit.collectives.world import World
from tests.faults.scripts import TIMEOUT_S, names
from tests.spmd.ranks import Rank, Ranks


def probed(rank: Rank, *, does: str) -> None:
    """The last rank ``does`` something else when it should send."""
    world = World.join(device=torch.device("cpu"), timeout=timedelta(seconds=TIMEOUT_S))
    measure = StreamedFlows.bytes_per_s

    def astray(self: StreamedFlows, flows: Any) -> list[list[int]]:
        if rank.number == rank.size - 1:
            if does == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(TIMEOUT_S + 6)
        return measure(self, flows)

    with mock.patch.object(StreamedFlows, "bytes_per_s", astray):
        probe_links(world)


@pytest.mark.parametrize("does, error, within_s", [
    ("die", "WorldError", TIMEOUT_S), ("sleep", "TimeoutError", TIMEOUT_S + 6),
])
def test_a_rank_is_lost(
    world: Callable[..., Ranks], does: str, error: str, within_s: float
) -> None:
    ranks = world(3)
    ranks.start(probed, does=does)
    for outcome in ranks.outcomes(ranks=[0, 1]):
        assert outcome.error == error, outcome
        assert names(outcome.text, 2) and "the probe of links" in outcome.text, outcome
        assert outcome.seconds < within_s + 3
