"""The probe among real ranks of one machine, which are told that they are on several hosts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from conduit.collectives import probe
from conduit.collectives.flows import PARTS, CollectiveFlows
from conduit.collectives.links import LinkMatrix
from conduit.collectives.probe import probe_links
from conduit.collectives.streams import StreamedFlows, rates
from conduit.collectives.world import World
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank

RANKS = 4
WINDOW_NS = 20_000_000


def joined(hosts: list[int]) -> World:
    world = World.join(device=torch.device("cpu"), timeout=timedelta(seconds=20))
    world.hosts = np.array(hosts)
    return world


def probed(rank: Rank, *, hosts: list[int], short: bool) -> dict[str, Any]:
    world = joined(hosts)
    with mock.patch.object(probe, "WINDOW_NS", WINDOW_NS), \
            mock.patch.object(probe, "SHORT_WINDOW_NS", WINDOW_NS):
        found = probe_links(world, short=short)
    world.close()
    return found.as_dict()


@pytest.mark.parametrize("hosts, short, links", [
    ([0, 0, 0, 0], False, 12), ([0, 1, 0, 1], False, 6), ([0, 1, 1, 1], False, 8),
    ([0, 1, 2, 3], False, 12), ([0, 1, 2, 3], True, 12),
])
def test_every_rank_has_the_same_matrix(
    pools: Pools, hosts: list[int], short: bool, links: int
) -> None:
    first, *others = pools[RANKS].run(probed, hosts=hosts, short=short)
    assert all(other == first for other in others)
    found = LinkMatrix._from(first)
    assert found.hosts == tuple(hosts) and len(found.links) == links
    assert len(found.capacities) == (max(hosts) + 1 if max(hosts) else 0)
    away = ~np.eye(RANKS, dtype=bool)
    assert (found.bandwidth[away] > 1_000_000).all() and (found.bandwidth[~away] == 0).all()
    assert (found.latency_ns[away] > 1_000).all() and (found.latency_ns[away] < 10**8).all()
    for capacity in found.capacities:
        assert min(capacity.egress_bytes_per_s, capacity.ingress_bytes_per_s) > 1_000_000
    assert {copy.rank for copy in found.copies} == set(range(RANKS))


def measured(rank: Rank, *, kind: str, flows: list[list[int]]) -> list[Any]:
    world = joined([0] * rank.size)
    way = StreamedFlows if kind == "streamed" else CollectiveFlows
    meter = way(world, WINDOW_NS)
    together = [(source, target) for source, target in flows]
    try:
        latencies = meter.latency_ns(together[:1])
        return [latencies, meter.bytes_per_s(together)]
    finally:
        world.close()


@pytest.mark.parametrize("kind", ["streamed", "collective"])
@pytest.mark.parametrize("flows", [
    [[0, 1]], [[3, 0], [1, 2]], [[0, 1], [0, 2], [0, 3]], [[1, 0], [2, 0], [3, 0]],
])
def test_flows_are_told_by_their_receivers(
    pools: Pools, kind: str, flows: list[list[int]]
) -> None:
    for number, (latencies, found) in enumerate(
        pools[RANKS].run(measured, kind=kind, flows=flows)
    ):
        assert len(latencies) == (flows[0][1] == number)
        assert len(found) == sum(target == number for _, target in flows)
        for parts in found:
            assert len(parts) == PARTS and all(type(part) is int for part in parts)
            # A loopback carries gigabytes; a part may be starved on a busy machine, not all.
            assert 1_000_000 < sorted(parts)[PARTS // 2] < 10**12


def test_a_bucket_is_not_taken_for_the_link() -> None:
    """256 KB at once, then 50 Mbit a second, and the link for itself when others are done."""
    chunk, slow = 16_384, 6_250_000
    came, ns, total = [], 0, 0
    while ns < 200_000_000:
        ns += 1_000 if total < 256_000 else chunk * 10**9 // (slow if ns < 150_000_000 else 10**9)
        total += chunk
        came.append((ns, total))
    found = rates(came, 150_000_000, PARTS)
    assert len(found) == PARTS
    assert all(abs(rate - slow) < slow // 10 for rate in found)
