"""Control records reach every rank, however they travel."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit.collectives import world as world_module
from conduit.collectives.carriers import Carrier, Flat, Shared, TwoLevel, carrier_for
from conduit.collectives.world import World
from tests.properties import examples
from tests.simulation import Group, Hub, Simulation

FIELDS = 5


def joined() -> World:
    return World.join(device=torch.device("cpu"), timeout=timedelta(seconds=20))


def two_levels(hub: Hub, hosts: list[int]) -> Callable[[], World]:
    def join() -> World:
        world = joined()
        leaders = [hosts.index(host) for host in sorted(set(hosts))]
        world.two_level = True
        if world.rank in leaders:
            world.leaders = Group(hub, leaders.index(world.rank))  # type: ignore[assignment]
        return world

    return join


def carry(carrier: Carrier, rank: int, call: int) -> np.ndarray:
    carrier.begin(np.arange(FIELDS) + 100 * rank + 10_000 * call)
    return carrier.finish().copy()


@pytest.mark.parametrize("kind", [Flat, Shared, TwoLevel])
@examples(25)
@given(data=st.data())
def test_every_rank_gets_every_record(kind: type, data: st.DataObject) -> None:
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=7))
    if kind is Shared:
        hosts = [0] * len(hosts)
    numbers: dict[int, int] = {}
    hosts = [numbers.setdefault(host, len(numbers)) for host in hosts]
    if kind is TwoLevel and (len(set(hosts)) == 1 or len(set(hosts)) == len(hosts)):
        hosts = [0, *hosts, max(hosts) + 1]
    ranks = len(hosts)
    join = two_levels(Hub(len(set(hosts))), hosts) if kind is TwoLevel else joined
    with Simulation(hosts, shared=kind is not Flat) as simulation:
        carriers = simulation.run(lambda rank: carrier_for(join(), FIELDS))
        assert {type(carrier) for carrier in carriers} == {kind}
        for call in range(5):
            expected = np.arange(FIELDS) + 100 * np.arange(ranks)[:, None] + 10_000 * call
            for got in simulation.run(lambda rank, call=call: carry(carriers[rank], rank, call)):
                assert got.tolist() == expected.tolist()


def test_above_so_many_ranks_on_several_hosts_there_are_two_levels() -> None:
    def kinds(hosts: list[int], *, above: int) -> set[type]:
        hub = Hub(len(set(hosts)))

        def leaders(ranks: list[int], leaders: list[int], timeout: timedelta) -> Group:
            return Group(hub, 0)

        def make(rank: int) -> type:
            world = joined()
            world._agree_on_levels(list(range(world.size)))
            return type(carrier_for(world, FIELDS))

        # All patched before there are threads: patches by several undo each other.
        with (
            Simulation(hosts, shared=True) as simulation,
            mock.patch.object(world_module, "leaders_group", leaders),
            mock.patch.object(world_module, "TWO_LEVEL_RANKS", above),
        ):
            return set(simulation.run(make))

    assert kinds([0, 0, 1, 1], above=4) == {Flat}
    assert kinds([0, 0, 1, 1], above=3) == {TwoLevel}
    assert kinds([0, 0, 0, 0], above=3) == {Shared}
    assert kinds([0, 1, 2, 3], above=3) == {Flat}
