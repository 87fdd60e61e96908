"""Pools of ranks, one a world size, that live as long as the test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spmd.ranks import Ranks


class Pools:
    """Worlds by size, made when first asked for, and again when one has seen a failure."""

    def __init__(self) -> None:
        self._worlds: dict[int, Ranks] = {}

    def __getitem__(self, size: int) -> Ranks:
        world = self._worlds.get(size)
        if world is not None and not world.healthy:
            world.close()
            world = None
        if world is None:
            world = self._worlds[size] = Ranks(size)
        return world

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """``pools[n]`` is a world of n ranks with the user's process group in place."""
    made = Pools()
    yield made
    made.close()
