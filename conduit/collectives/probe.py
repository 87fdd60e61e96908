"""The probe: measures the links between ranks, what hosts carry, and what ranks copy.

Rounds come from :mod:`.schedule`, figures of a round's flows from :mod:`.streams` or, on NCCL,
:mod:`.flows`. Ranks keep what they measured until all rounds are done; then it is gathered, and
every rank makes the same matrix of it (:mod:`.figures`). A rank that has no part in a round makes
the same collective calls.
"""

from __future__ import annotations

import numpy as np

from conduit.collectives.copies import copy_figures
from conduit.collectives.figures import matrix_of, turns
from conduit.collectives.flows import PARTS, CollectiveFlows, Flows, gathered
from conduit.collectives.links import LinkMatrix
from conduit.collectives.nvml import gpu_facts
from conduit.collectives.schedule import LOADED, rounds
from conduit.collectives.streams import StreamedFlows
from conduit.collectives.watch import raise_missing
from conduit.collectives.world import TRANSPORT_ERRORS, World

__all__ = ["SHORT_WINDOW_NS", "WINDOW_NS", "links_at_start", "probe_links"]

WINDOW_NS, SHORT_WINDOW_NS = 150_000_000, 50_000_000
"""How much of a flow counts: long enough to outlast a bucket of 256 KB at 50 Mbit."""

_COPY_BYTES, _SHORT_COPY_BYTES = 16 * 1024 * 1024, 4 * 1024 * 1024


def probe_links(world: World, *, short: bool = False) -> LinkMatrix:
    """Collective. Measures all links; ``short`` measures few pairs, for a shorter time.

    Returns the same matrix on every rank. Raises TimeoutError or WorldError naming the ranks that
    did not come.
    """
    copies = copy_figures(world.device, _SHORT_COPY_BYTES if short else _COPY_BYTES)
    local = [number for figure in copies for number in figure] + list(gpu_facts(world.device))
    if world.size == 1:
        return matrix_of([0], (), np.array([local]))
    try:
        return _probe(world, short, local)
    except TRANSPORT_ERRORS as error:
        raise_missing(world, "the probe of links", error)


def links_at_start(world: World) -> LinkMatrix:
    """Collective. What a plane begins with: where all ranks share a host its rows use no link, so
    nothing is measured there, and in short elsewhere."""
    if world.hosts.max() == 0:
        return LinkMatrix(hosts=tuple(world.hosts.tolist()))
    return probe_links(world, short=True)


def _probe(world: World, short: bool, local: list[int]) -> LinkMatrix:
    hosts = world.hosts.tolist()
    schedule = rounds(hosts, short=short)
    way = StreamedFlows if world.device.type == "cpu" else CollectiveFlows
    flows: Flows = way(world, SHORT_WINDOW_NS if short else WINDOW_NS)
    mine = list(local)
    for turn, together in turns(schedule):
        # Everybody meets before each measurement, so that it has the links for itself.
        _meet(world)
        latencies = [0] * sum(target == world.rank for _, target in together)
        if turn.kind != LOADED:
            latencies = flows.latency_ns(together)
            _meet(world)
        for latency, parts in zip(latencies, flows.bytes_per_s(together), strict=True):
            mine += [latency, *parts]
    incoming = [target for _, together in turns(schedule) for _, target in together]
    most = max(incoming.count(rank) for rank in range(world.size))
    sent = np.zeros(len(local) + (1 + PARTS) * most, dtype=np.int64)
    sent[: len(mine)] = mine
    return matrix_of(hosts, schedule, gathered(world, sent))


def _meet(world: World) -> None:
    gathered(world, np.zeros(1, dtype=np.int64))
