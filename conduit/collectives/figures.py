"""From the integers that ranks gathered to the link matrix, the same way on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from conduit.collectives.copies import KINDS
from conduit.collectives.flows import PARTS, Flow
from conduit.collectives.links import Capacity, Copy, Gpu, Link, LinkMatrix, middle
from conduit.collectives.nvml import NOTHING
from conduit.collectives.schedule import LOADED, Round

__all__ = ["matrix_of", "turns"]

Figures = NDArray[np.int64]

_COPIES_END = 3 * len(KINDS)
_LOCAL_END = _COPIES_END + len(NOTHING)


def turns(schedule: Sequence[Round]) -> list[tuple[Round, tuple[Flow, ...]]]:
    """Every round, one way and the other."""
    return [(turn, flows) for turn in schedule for flows in (turn.flows, turn.reversed)]


def matrix_of(hosts: list[int], schedule: Sequence[Round], figures: Figures) -> LinkMatrix:
    """The matrix of ranks on ``hosts``, from ``figures`` (int64 ``[ranks, n]``).

    The row of a rank holds what ``copy_figures`` and ``gpu_facts`` say there, and then, for each of
    its incoming flows, turn by turn, the latency (0 in loaded rounds) and ``PARTS`` bandwidths.
    """
    at = [_LOCAL_END] * len(hosts)
    links = []
    sent: list[list[_Load]] = [[] for _ in range(max(hosts) + 1)]
    received: list[list[_Load]] = [[] for _ in range(max(hosts) + 1)]
    for turn, together in turns(schedule):
        for loads in (*sent, *received):
            loads.append(_Load())
        for source, target in together:
            latency_ns, *parts = figures[target, at[target] : at[target] + 1 + PARTS].tolist()
            at[target] += 1 + PARTS
            if turn.kind != LOADED:
                links.append(Link(
                    source=source, target=target, bytes_per_s=middle(parts),
                    latency_ns=latency_ns, spread_per_mille=_spread(parts),
                ))
            if hosts[source] != hosts[target]:
                sent[hosts[source]][-1].add(parts, hosts[target])
                received[hosts[target]][-1].add(parts, hosts[source])
    return LinkMatrix(
        hosts=tuple(hosts), links=tuple(links), capacities=_capacities(sent, received),
        copies=_copies(figures[:, :_COPIES_END]),
        gpus=tuple(
            Gpu(rank=rank, nvlinks=facts[0], pcie_generation=facts[1], pcie_width=facts[2],
                numa_node=facts[3], readable=facts[4])
            for rank, facts in enumerate(figures[:, _COPIES_END:_LOCAL_END].tolist())
            if tuple(facts) != NOTHING
        ),
    )


@dataclass(kw_only=True)
class _Load:
    """What a host sent, or received, in one turn: bytes per second by part, and with which hosts.
    """

    parts: list[int] = field(default_factory=lambda: [0] * PARTS)
    others: set[int] = field(default_factory=set)

    @property
    def bytes_per_s(self) -> int:
        """The mean: what a lost packet holds up in one part comes in the next, and in the median
        of sums over flows it would count for more."""
        return sum(self.parts) // PARTS

    def add(self, parts: Sequence[int], other: int) -> None:
        self.parts = [a + b for a, b in zip(self.parts, parts, strict=True)]
        self.others.add(other)


def _capacities(sent: list[list[_Load]], received: list[list[_Load]]) -> tuple[Capacity, ...]:
    """A host carries what it did in its best turn; with whom the others show how far to trust it.
    """
    if len(sent) == 1:
        return ()
    out, into = ([max(loads, key=lambda load: load.bytes_per_s) for loads in direction]
                 for direction in (sent, received))
    egress, ingress = ([load.bytes_per_s for load in best] for best in (out, into))
    return tuple(
        Capacity(
            egress_bytes_per_s=egress[host], ingress_bytes_per_s=ingress[host],
            egress_at_least=_at_least(egress[host], sent[host], ingress),
            ingress_at_least=_at_least(ingress[host], received[host], egress),
            egress_spread_per_mille=_spread(out[host].parts),
            ingress_spread_per_mille=_spread(into[host].parts),
        ) for host in range(len(sent))
    )


def _at_least(figure: int, loads: list[_Load], others: list[int]) -> bool:
    """Whether in no turn that came near the figure the other hosts could have carried clearly more:
    an eighth is left for what measurements differ by."""
    return not any(
        8 * load.bytes_per_s >= 7 * figure and
        7 * sum(others[host] for host in load.others) > 8 * figure
        for load in loads
    )


def _copies(figures: Figures) -> tuple[Copy, ...]:
    return tuple(
        Copy(rank=rank, source=source, target=target, operation=operation,
             bytes_per_s=int(numbers[0]), latency_ns=int(numbers[1]),
             spread_per_mille=int(numbers[2]))
        for rank, row in enumerate(figures.reshape(len(figures), len(KINDS), 3))
        for (source, target, operation), numbers in zip(KINDS, row, strict=True) if numbers[0]
    )


def _spread(parts: Sequence[int]) -> int:
    return (max(parts) - min(parts)) * 1000 // max(middle(parts), 1)
