"""Worlds that a test may break: made for it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.spmd.ranks import Ranks


@pytest.fixture
def world() -> Iterator[Callable[..., Ranks]]:
    """``world(n)`` is a fresh world of n ranks."""
    made: list[Ranks] = []

    def make(size: int, *, grouped: bool = True) -> Ranks:
        made.append(Ranks(size, grouped=grouped))
        return made[-1]

    yield make
    for one in made:
        one.close()
