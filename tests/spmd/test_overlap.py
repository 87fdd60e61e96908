"""What runs beside the learner changes nothing: batches and parameters, bit for bit."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import conduit
from conduit.collectives.control import Control
from conduit.edp.routing import ROUTINGS
from conduit.sched.commits import Commits
from conduit.sched.deliveries import Deliveries
from conduit.sched.fetch import Fetch
from conduit.sched.timeline import Timeline
from tests.spmd.cases import OWN_DECISION, make_plane
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank, Ranks

UPDATES = 1_000
ITERATIONS = 400
"""Of the program with sleeps everywhere; 10,000 of it were run by hand."""

_hides = OWN_DECISION
EXAMPLE = {"x": torch.zeros(6), "y": torch.zeros(1)}


def written(rng: np.random.Generator, serial: int) -> dict[str, torch.Tensor]:
    """None, some, or for once many new rows."""
    rows = int(rng.choice([0, 0, 1, 2, 5, 40], p=[0.2, 0.2, 0.2, 0.2, 0.19, 0.01]))
    x = torch.from_numpy(rng.standard_normal((rows, 6), dtype=np.float32))
    return {"x": x, "y": x.sum(1, keepdim=True) + serial % 7}


def patient(ranks: Ranks, function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """``run``, for what takes long on a busy machine."""
    ranks.start(function, **arguments)
    return ranks.values(patience_s=110)


def trained(
    rank: Rank, *, how: str, routing: str, updates: int, jitter: int, max_staleness: int = 0
) -> dict[str, str]:
    """Trains a small network; digests of all batches and of the parameters."""
    rank.jitter(jitter, 1.5 if how != "within" else 0.0)
    straggler = rank.number == rank.size - 1 and how != "within"
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rng = np.random.default_rng(rank.number)
    batches = hashlib.sha256()
    with make_plane(
        rank, EXAMPLE, capacity=701, batch_rows=24, routing=routing, hidden=how == "lane",
        overlap=how != "within", max_staleness=max_staleness,
    ) as plane:
        if how == "timed":
            Timeline.hides = staticmethod(_hides)  # type: ignore[method-assign]
        plane.extend({"x": torch.ones(20, 6), "y": torch.ones(20, 1)})
        for update in range(updates):
            plane.extend(written(rng, update))
            if how != "within" and update % 10 == 0:
                rank.pause()
            batch = plane.sample()
            assert batch is not None
            for tensor in (batch["index"], batch["x"], batch["y"]):
                batches.update(tensor.contiguous().numpy().tobytes())
            if straggler and update % 20 == 0:
                time.sleep(0.003)
            loss = (model(batch["x"]) - batch["y"]).square().mean() * batch["loss_scale"]
            optimizer.zero_grad()
            loss.backward()
            if rank.size > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= rank.size
            optimizer.step()
        hidden = plane._tracer.total_ns.get("draw", 0) > 0
    torch.use_deterministic_algorithms(False)
    assert hidden or how != "lane"
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {"batches": batches.hexdigest(), "parameters": parameters.hex()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_training_is_the_same_bit_for_bit(pools: Pools, ranks: int, routing: str) -> None:
    ways = [("within", 0), ("lane", 1), ("timed", 2)]
    # Four ranks on two cores take their time.
    updates = UPDATES if ranks < 4 or routing == "exchangeable" else UPDATES * 2 // 5
    runs = [
        patient(pools[ranks], trained, how=how, routing=routing, updates=updates, jitter=jitter)
        for how, jitter in (ways if ranks < 4 else ways[:2])
    ]
    assert all(run == runs[0] for run in runs)
    assert len({rank["batches"] for rank in runs[0]}) == ranks
    assert len({rank["parameters"] for rank in runs[0]}) == 1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_batches_that_may_be_stale_are_the_same(
    pools: Pools, ranks: int, max_staleness: int
) -> None:
    runs = [
        patient(
            pools[ranks], trained, how=how, routing="exchangeable", updates=200, jitter=3,
            max_staleness=max_staleness,
        ) for how in ("within", "lane", "timed")
    ]
    assert runs[0] == runs[1] == runs[2]
    fresh = patient(
        pools[ranks], trained, how="lane", routing="exchangeable", updates=200, jitter=3
    )
    assert fresh != runs[0]


def ages(rank: Rank, *, max_staleness: int, flushes: int) -> list[int]:
    """How many commits each batch ignores: a row's field says in which it came."""
    found = []
    with make_plane(
        rank, {"commit": torch.tensor(0)}, capacity=8, batch_rows=64, hidden=True,
        max_staleness=max_staleness,
    ) as plane:
        commits = 0
        for _ in range(30):
            for _ in range(flushes):
                plane.extend({"commit": torch.full((4,), commits)})
                plane.flush()
                commits += 1
            plane.extend({"commit": torch.full((4,), commits)})
            commits += 1
            batch = plane.sample()
            assert batch is not None
            newest, oldest = int(batch["commit"].max()), int(batch["commit"].min())
            # Of a full buffer, 64 draws see every row but with a chance of 1 in 5,000.
            found.append(commits - 1 - newest)
            assert newest - oldest < 8 // (4 * rank.size) + 1
    return found[3:]


@pytest.mark.parametrize(("max_staleness", "flushes", "expected"), [
    (0, 0, 0), (1, 0, 1), (3, 0, 1), (1, 1, 0), (2, 1, 2),
])
def test_no_more_commits_are_ignored_than_allowed(
    pools: Pools, max_staleness: int, flushes: int, expected: int
) -> None:
    for found in pools[2].run(ages, max_staleness=max_staleness, flushes=flushes):
        assert sorted(found)[len(found) // 2] == expected
        assert max(found) <= max(max_staleness, 1)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sleeping(rank: Rank, *, iterations: int, hidden: bool) -> dict[str, Any]:
    """Calls of all kinds, with sleeps at every point of every stage; what is taken in the end."""
    sleeps = random.Random(f"sleeps {rank.number}")
    kinds = random.Random("kinds")
    patched: list[tuple[Any, str, Callable[..., Any]]] = []
    for owner, name in (
        (Deliveries, "_draw"), (Deliveries, "_gather"), (Fetch, "finish"), (Control, "begin"),
        (Control, "finish"), (Commits, "commit"), (Deliveries, "hide"), (Deliveries, "deliver"),
    ) if hidden else ():
        original = getattr(owner, name)

        def slow(*arguments: Any, _original: Any = original, **more: Any) -> Any:
            if sleeps.random() < 0.3:
                time.sleep(sleeps.random() * 0.002)
            result = _original(*arguments, **more)
            if sleeps.random() < 0.1:
                time.sleep(sleeps.random() * 0.002)
            return result

        patched.append((owner, name, original))
        setattr(owner, name, slow)
    digest, taken = hashlib.sha256(), []
    try:
        with make_plane(
            rank, EXAMPLE, capacity=301, batch_rows=20, routing="independent", hidden=hidden,
            min_size=30, staging_rows=60,
        ) as plane:
            rng = np.random.default_rng(rank.number)
            for iteration in range(iterations):
                if iteration in (iterations // 3, iterations - 1):
                    gc.collect()
                    taken.append((
                        resident_bytes(), len(os.listdir("/proc/self/fd")),
                        len(os.listdir("/proc/self/task")),
                    ))
                plane.extend(written(rng, iteration))
                kind = kinds.random()
                if kind < 0.01:
                    plane.empty()
                elif kind < 0.08:
                    plane.flush()
                elif kind < 0.15:
                    plane.agree(iteration)
                else:
                    batch = plane.sample()
                    if batch is not None:
                        digest.update(batch["index"].numpy().tobytes())
                        digest.update(batch["x"].contiguous().numpy().tobytes())
    finally:
        for owner, name, original in patched:
            setattr(owner, name, original)
    return {"digest": digest.hexdigest(), "taken": taken}


@pytest.mark.parametrize("ranks", [2, 4])
def test_sleeps_anywhere_neither_lock_nor_leak(pools: Pools, ranks: int) -> None:
    slow = patient(pools[ranks], sleeping, iterations=ITERATIONS, hidden=True)
    quick = patient(pools[ranks], sleeping, iterations=ITERATIONS, hidden=False)
    for one, other in zip(slow, quick, strict=True):
        assert one["digest"] == other["digest"]
        (memory, *others), (memory_after, *others_after) = one["taken"]
        assert others_after == others
        assert memory_after - memory < 8 << 20


def test_alone_and_with_a_plane_that_may_be_stale(pools: Pools) -> None:
    """A draft in a world of one is a draft like any other."""
    assert pools[1].run(ages, max_staleness=1, flushes=0)[0].count(1) > 20
    assert conduit.ExperiencePlane(EXAMPLE, capacity=4, batch_size=2).explain().startswith("no ")


def trained_restlessly(rank: Rank, *, decision: str, jitter: int, **arguments: Any) -> Any:
    """``trained`` where every rank sleeps before every call and the last one longest, and where the
    plane decides by time, or ``"either"`` way at random, alike on all ranks."""
    global _hides
    usual, sample = _hides, conduit.ExperiencePlane.sample
    sleeps, coin = random.Random(f"{jitter} {rank.number}"), random.Random(jitter)
    seen: list[tuple[int, int]] = []
    hidden = 0

    def hides(step_us: int, fetch_us: int) -> bool:
        nonlocal hidden
        seen.append((step_us, fetch_us))
        way = OWN_DECISION(step_us, fetch_us) if decision == "own" else coin.random() < 0.5
        hidden += way
        return way

    def sleepy(self: conduit.ExperiencePlane, **more: Any) -> Any:
        time.sleep(0.001 if rank.number == rank.size - 1 else sleeps.random() * 0.001)
        return sample(self, **more)

    _hides = hides
    conduit.ExperiencePlane.sample = sleepy  # type: ignore[method-assign]
    try:
        result = trained(rank, how="timed", jitter=jitter, **arguments)
    finally:
        _hides = usual
        conduit.ExperiencePlane.sample = sample  # type: ignore[method-assign]
    assert len(seen) == arguments["updates"], "the plane has asked"
    assert decision == "own" or 0.3 < hidden / len(seen) < 0.7
    return {**result, "figures": seen[-1], "hidden": hidden}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "updates", "decision", "routing"), [
    (1, UPDATES // 4, "own", "exchangeable"), (2, UPDATES // 4, "own", "exchangeable"),
    (2, UPDATES // 10, "own", "independent"), (2, UPDATES // 4, "either", "independent"),
    # Four ranks on two cores are slow: all 1,000 updates were run by hand, in every way.
    (4, UPDATES // 20, "own", "exchangeable"),
])
def test_however_a_plane_decides_training_is_the_same(
    pools: Pools, ranks: int, updates: int, decision: str, routing: str
) -> None:
    """On all ranks alike, by the figures of all of them."""
    reference = patient(
        pools[ranks], trained, how="within", routing=routing, updates=updates, jitter=0
    )
    results = patient(
        pools[ranks], trained_restlessly, decision=decision, routing=routing, updates=updates,
        jitter=5,
    )
    assert len({(*one.pop("figures"), one.pop("hidden")) for one in results}) == 1
    assert results == reference


def windows(rank: Rank, *, max_staleness: int, hidden: bool) -> list[list[int]]:
    """Batches of rows that know their logical index. Every one must be of a buffer as it was at
    most ``max_staleness`` commits ago."""
    capacity, counts = 50, random.Random("counts")
    found, ages = [], []
    ends = [0]
    with make_plane(
        rank, {"number": torch.tensor(0)}, capacity=capacity, batch_rows=32, hidden=hidden,
        overlap=hidden, max_staleness=max_staleness, routing="independent", min_size=1,
    ) as plane:
        for _ in range(120):
            flushes = counts.choice([0, 0, 0, 1, 2, 3])
            for call in range(flushes + 1):
                produced = [counts.choice([0, 0, 1, 2, 5]) for _ in range(rank.size)]
                first = ends[-1] + sum(produced[: rank.number])
                plane.extend({"number": torch.arange(first, first + produced[rank.number])})
                if sum(produced):
                    ends.append(ends[-1] + sum(produced))
                if call < flushes:
                    plane.flush()
            batch = plane.sample()
            assert (batch is None) is (ends[-1] == 0)
            if batch is None:
                continue
            assert torch.equal(batch["number"], batch["index"])
            index = batch["index"].tolist()
            fitting = [
                age for age, end in enumerate(reversed(ends))
                if end and max(0, end - capacity) <= min(index) and max(index) < end
            ]
            assert fitting and fitting[0] <= max_staleness, (index, ends[-4:])
            ages.append(fitting[0])
            found.append(index)
    assert len(found) > 100 and len({*ages}) > (max_staleness > 0), "some batches were stale"
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_batch_is_one_of_a_buffer_of_at_most_so_many_commits_ago(
    pools: Pools, ranks: int, max_staleness: int
) -> None:
    """One buffer for all rows of a batch, and the same on the lane as within the call."""
    hidden, within = (
        pools[ranks].run(windows, max_staleness=max_staleness, hidden=way) for way in (True, False)
    )
    assert hidden == within
