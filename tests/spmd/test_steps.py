"""Steps of streams against transitions put together one by one, on one rank and on several."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import conduit
from tests.spmd.cases import make_plane
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank
from tests.steps import EXAMPLE, Buffer, Step, as_rows, shown


class World:
    """The streams of all ranks: every rank knows what the others do."""

    def __init__(self, program: random.Random, streams: list[int], ending: float) -> None:
        self._program, self._streams, self._ending = program, streams, ending
        self._frame = 0
        self._last: dict[tuple[int, int], int] = {}

    def step(self, rank: int, stream: int) -> Step:
        frame = self._last.pop((rank, stream), None) or self._new()
        following = self._new()
        ended = None
        if self._program.random() < self._ending:
            ended = self._program.choice(["terminated", "truncated", "truncated"])
        else:
            self._last[rank, stream] = following
        return Step(
            stream=stream, frame=frame, following=following, ended=ended,
            reward=self._program.choice([0.0, 1.0, -2.5, 1e-3]),
        )

    def extend(self, rank: int) -> tuple[list[Step], dict[str, Any]]:
        """Steps of a rank, and how they are handed in."""
        program, streams = self._program, self._streams[rank]
        kind = program.choice(["nothing", "one", "grid", "grid", "mixed", "some"])
        if streams == 0 or kind == "nothing":
            return [], {"rows": as_rows([])}
        if kind == "one":
            steps = [self.step(rank, 0) for _ in range(program.randrange(1, 9))]
            return steps, {"rows": as_rows(steps)}
        if kind in ("grid", "some"):
            chosen = list(range(streams))
            if kind == "some":
                chosen = sorted(program.sample(chosen, program.randrange(1, streams + 1)))
            time = program.choice([1, 1, 2, 5])
            steps = [self.step(rank, stream) for stream in chosen for _ in range(time)]
            rows = shaped(as_rows(steps), len(chosen), time)
            stream = {"stream": torch.tensor(chosen)} if kind == "some" else {}
            return steps, {"rows": rows, **stream}
        order = [program.randrange(streams) for _ in range(program.randrange(1, 20))]
        steps = [self.step(rank, stream) for stream in order]
        return steps, {"rows": as_rows(steps), "stream": order}

    def _new(self) -> int:
        self._frame += 1
        return self._frame


def shaped(rows: dict[Any, Any], streams: int, time: int) -> dict[Any, Any]:
    return {
        key: shaped(value, streams, time) if isinstance(value, dict)
        else value.view(streams, time, *value.shape[1:]) for key, value in rows.items()
    }


def played(
    rank: Rank, *, seed: int, n_step: int, stack: int, streams: list[int], hidden: bool,
    max_staleness: int = 0, tiers: list[str], ending: float = 0.15, quotas: list[int] | None = None,
    capacity: int = 120, routing: str = "exchangeable",
) -> dict[str, Any]:
    program = random.Random(seed)
    steps = conduit.Steps(
        n_step=n_step, gamma=0.5 if n_step > 1 else None, episode_steps=3, staging_rows=200,
        stack={"observation": stack} if stack > 1 else {},
    )
    model, world = Buffer(steps=steps), World(program, streams, ending)
    batches: list[list[int]] = []
    with make_plane(
        rank, EXAMPLE, capacity=capacity, batch_rows=16, hidden=hidden, routing=routing,
        max_staleness=max_staleness, tiers=tiers, min_size=1, ingestion=steps,
        placement="own" if quotas else "balanced", quotas=quotas or (),
    ) as plane:
        for _ in range(80):
            for _ in range(program.choice([1, 1, 2])):
                for owner in range(rank.size):
                    steps_of, call = world.extend(owner)
                    model.extend(owner, steps_of)
                    if owner == rank.number:
                        plane.extend(call["rows"], **{k: v for k, v in call.items() if k != "rows"})
            model.commit()
            batch = plane.sample()
            assert len(plane) == min(len(model.items), capacity)
            if batch is None:
                continue
            index = batch["index"].tolist()
            assert max_staleness or min(index) >= len(model.items) - capacity
            assert shown(batch, steps) == [model.items[i] for i in index]
            batches.append(index)
        assert len(model.items) > 3 * capacity
        report = plane.report()
    return {"batches": batches, "sent_home": report.rows_sent_home}


@pytest.mark.parametrize("ranks, n_step, stack", [
    (1, 1, 1), (1, 1, 4), (1, 3, 1), (1, 3, 4), (1, 5, 2),
    (2, 1, 1), (2, 1, 4), (2, 3, 1), (2, 3, 4), (4, 3, 4),
])
def test_every_transition_is_whole(pools: Pools, ranks: int, n_step: int, stack: int) -> None:
    results = [
        pools[ranks].run(
            played, seed=n_step + stack, n_step=n_step, stack=stack, hidden=hidden,
            streams=[3, 5, 1, 4][:ranks], tiers=["host", "disk"] if hidden else ["host"],
        ) for hidden in (False, True)
    ]
    assert results[0] == results[1]
    assert ranks == 1 or sum(one["sent_home"] for one in results[0]) > 100


@pytest.mark.parametrize("streams, quotas", [
    ([6, 0], None), ([0, 4, 0, 0], None), ([3, 3], [100, 20]), ([2, 6], [0, 120]),
])
def test_producers_and_holders_differ(
    pools: Pools, streams: list[int], quotas: list[int] | None
) -> None:
    results = pools[len(streams)].run(
        played, seed=11, n_step=3, stack=3, hidden=True, streams=streams, quotas=quotas,
        tiers=["shared"], routing="independent", max_staleness=1,
    )
    assert sum(one["sent_home"] for one in results) > 300


def test_ranks_do_not_matter(pools: Pools) -> None:
    """Blocks of streams on two ranks are, commit by commit, what one rank has of all of them."""
    alone, = pools[1].run(blocks, streams=6, batch_rows=32)
    halves = pools[2].run(blocks, streams=3, batch_rows=16)
    assert alone == [sorted(first + second) for first, second in zip(*halves, strict=True)]


def blocks(rank: Rank, *, streams: int, batch_rows: int) -> list[list[Any]]:
    """What each batch holds, in the order of logical indices."""
    world = World(random.Random(5), [6], 0.2)
    steps = conduit.Steps(n_step=2, gamma=0.9, stack={"observation": 2}, staging_rows=200)
    found = []
    with make_plane(
        rank, EXAMPLE, capacity=150, batch_rows=batch_rows, min_size=1, ingestion=steps
    ) as plane:
        for _ in range(40):
            grid = [[world.step(0, stream) for _ in range(3)] for stream in range(6)]
            mine = grid[rank.number * streams : (rank.number + 1) * streams]
            plane.extend(shaped(as_rows([step for row in mine for step in row]), streams, 3))
            batch = plane.sample()
            if batch is not None:
                found.append(sorted(
                    [index, repr(transition)] for index, transition in
                    zip(batch["index"].tolist(), shown(batch, steps), strict=True)
                ))
    return found
