"""How control records travel: through memory within a host, over Gloo between hosts.

Every carrier does the same: each rank gives one record and gets those of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from conduit.collectives.shared import NUMBERS, Window, Windows
from conduit.collectives.world import RECORD_WORDS, World

__all__ = ["Carrier", "Flat", "Shared", "TwoLevel", "carrier_for"]

Records = NDArray[np.int64]

_ALL = 1
"""The word in which the leader of a host publishes that it has the records of all ranks; word 0 is
where each rank publishes its own."""


class Carrier(Protocol):
    """``begin`` sends this rank's record (int64 ``[fields]``) and waits for nobody; ``finish``
    returns everyone's, ``[ranks, fields]``, valid until the next ``begin``. Raises one of
    ``TRANSPORT_ERRORS`` when a rank does not come. One exchange at a time, made by all ranks."""

    name: str

    def begin(self, record: Records) -> None: ...

    def finish(self) -> Records: ...


class Flat:
    """One equal-split all-to-all over Gloo, in the ``group`` that the world has just now.

    It keeps no group: what an error's traceback keeps would keep the connections open, by which
    others learn that this rank has given up.
    """

    name = "gloo"

    def __init__(
        self, world: World, group: Callable[[], dist.ProcessGroup | None], fields: int
    ) -> None:
        self._timeout, self._group = world.timeout, group
        made = group()
        assert made is not None
        self._out = np.zeros((made.size(), fields), dtype=np.int64)
        self._in = np.zeros_like(self._out)
        self._sent, self._received = torch.from_numpy(self._out), torch.from_numpy(self._in)
        self._work: dist.Work | None = None

    def begin(self, record: Records) -> None:
        self._out[:] = record
        # What dist.all_to_all_single calls, which takes twice as long to begin.
        group = self._group()
        assert group is not None
        self._work = group.alltoall_base(self._received, self._sent, [], [])

    def finish(self) -> Records:
        # Kept longer, it would keep the group's connections open after the plane is closed.
        work, self._work = self._work, None
        assert work is not None
        # Where every core is busy, the transport's threads may not have had a turn since ``begin``.
        os.sched_yield()
        # With a deadline of its own: the group's starts anew whenever another rank comes.
        work.wait(self._timeout)
        return self._in


class Shared:
    """Through memory, among the ranks of one host (``near``, this one included).

    A rank writes its records into two places in turn: it gets to write the third only after all
    ranks have published the second, and therefore have read the first.
    """

    name = "shared memory"

    def __init__(self, world: World, windows: Windows, fields: int, near: list[int]) -> None:
        self._windows, self._timeout_s = windows, world.timeout.total_seconds()
        self._peers = [peer for peer in near if peer != world.rank]
        self._number = 0
        own = _places(windows.own, 1, fields)
        self._mine = [place[0] for place in own]
        self._theirs = [
            [
                self._mine[turn] if rank == world.rank else
                _places(windows.peers[rank], 1, fields)[turn][0]
                for rank in near
            ] for turn in (0, 1)
        ]
        self._records = np.zeros((len(near), fields), dtype=np.int64)

    def begin(self, record: Records) -> None:
        self._number += 1
        self._mine[self._number % 2][:] = record
        self._windows.publish(0, self._number)

    def finish(self) -> Records:
        self._windows.wait(0, self._number, self._peers, self._timeout_s)
        np.stack(self._theirs[self._number % 2], out=self._records)
        return self._records


class TwoLevel:
    """Through memory within hosts; the first rank of each host exchanges all of them over Gloo."""

    name = "two levels"

    def __init__(self, world: World, windows: Windows, fields: int) -> None:
        self._windows, self._timeout_s = windows, world.timeout.total_seconds()
        by_host = [np.flatnonzero(world.hosts == h).tolist() for h in range(world.hosts.max() + 1)]
        near = by_host[world.hosts[world.rank]]
        self._near = Shared(world, windows, fields, near)
        self._leader, self._peers = near[0], [peer for peer in near if peer != world.rank]
        self._number = 0
        leads = self._leader == world.rank
        self._all = _places(
            windows.own if leads else windows.peers[self._leader], world.size, fields,
            behind=RECORD_WORDS,
        )
        if leads:
            # Every host sends as many records as the largest has; those that are none are left out.
            self._most = max(map(len, by_host))
            self._mine = np.zeros((self._most, fields), dtype=np.int64)
            self._far = Flat(world, lambda: world.leaders, self._most * fields)
            self._rows = np.concatenate([
                np.arange(len(ranks)) + host * self._most for host, ranks in enumerate(by_host)
            ])
            self._ranks = np.concatenate(by_host)

    def begin(self, record: Records) -> None:
        self._number += 1
        self._near.begin(record)

    def finish(self) -> Records:
        table: Records = self._all[self._number % 2]
        if self._peers and self._leader in self._peers:
            self._windows.wait(_ALL, self._number, [self._leader], self._timeout_s)
            return table
        here = self._near.finish()
        self._mine[: len(here)] = here
        self._far.begin(self._mine.reshape(-1))
        table[self._ranks] = self._far.finish().reshape(-1, here.shape[1])[self._rows]
        self._windows.publish(_ALL, self._number)
        return table


def _places(window: Window, ranks: int, fields: int, *, behind: int = 0) -> list[Records]:
    """Two places for the records of so many ranks in a window, ``[ranks, fields]`` each."""
    words = np.frombuffer(window.words, dtype=np.int64)
    first = NUMBERS + 2 * behind
    return [
        words[first + turn * ranks * RECORD_WORDS :][: ranks * fields].reshape(ranks, fields)
        for turn in (0, 1)
    ]


def carrier_for(world: World, fields: int) -> Carrier:
    """The quickest way between these ranks. For a world of several."""
    assert fields <= RECORD_WORDS
    if world.windows is not None and world.hosts.max() == 0:
        return Shared(world, world.windows, fields, list(range(world.size)))
    if world.two_level:
        assert world.windows is not None
        return TwoLevel(world, world.windows, fields)
    return Flat(world, lambda: world.control, fields)
