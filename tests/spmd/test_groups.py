"""Planes beside a program's own process groups, on parts of the job, and several at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import conduit
from tests.spmd.cases import make_plane
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank, Ranks

EXAMPLE = {"rank": torch.zeros(2, dtype=torch.int64)}


@contextmanager
def no_new_default_group() -> Iterator[None]:
    """A program calls ``init_process_group`` itself: nobody else may."""
    with mock.patch.object(
        dist, "init_process_group", side_effect=AssertionError("a second init_process_group")
    ):
        yield


def use(plane: conduit.ExperiencePlane, number: int, steps: int = 5) -> list[int]:
    """Some steps in which every rank stages rows that carry ``number``; what was delivered."""
    seen = []
    for _ in range(steps):
        plane.extend({"rank": torch.full((3, 2), number)})
        batch = plane.sample()
        assert batch is not None
        seen += batch["rank"][:, 1].tolist()
    return seen


def users_sum(group: Any = None) -> int:
    """A collective of the program's own."""
    value = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(value, group=group)
    return int(value)


def on_a_sub_group(rank: Rank, *, members: Sequence[int], planes: int) -> dict[str, Any]:
    """One plane after the other on some of the ranks."""
    rank.jitter(1, 3.0)
    group = dist.new_group(list(members))
    seen: set[int] = set()
    numbers = None
    if rank.number in members:
        with no_new_default_group():
            for _ in range(planes):
                rank.pause()
                with make_plane(
                    rank, EXAMPLE, capacity=60, batch_rows=32, routing="independent", group=group
                ) as plane:
                    numbers = [plane.rank, plane.ranks, plane.report().ranks]
                    seen |= set(use(plane, rank.number))
        assert users_sum(group) == len(members)
        dist.destroy_process_group(group)
    return {"seen": sorted(seen), "numbers": numbers, "all": users_sum()}


@pytest.mark.parametrize("members", [[1, 3], [0, 1, 2], [2]])
def test_planes_on_a_sub_group(pools: Pools, members: list[int]) -> None:
    """Ranks of the plane count from 0; the others are not needed; the program's groups survive."""
    results = pools[4].run(on_a_sub_group, members=members, planes=4)
    for number, result in enumerate(results):
        assert result["all"] == 4
        if number in members:
            assert result["seen"] == members
            assert result["numbers"] == [members.index(number), len(members), len(members)]


def after_other_groups(rank: Rank) -> list[int]:
    """Rank 0 is in a group of the program that rank 2 is not in."""
    dist.new_group([0, 1], use_local_synchronization=True)
    group = dist.new_group([0, 2])
    seen = []
    if rank.number in (0, 2):
        with make_plane(rank, EXAMPLE, capacity=60, batch_rows=32, group=group) as plane:
            seen = use(plane, rank.number)
    return sorted(set(seen))


def test_a_sub_group_whose_ranks_are_in_different_groups() -> None:
    world = Ranks(4)
    try:
        assert world.run(after_other_groups) == [[0, 2], [], [0, 2], []]
    finally:
        world.close()


def overlapping(rank: Rank) -> dict[str, Any]:
    """Two disjoint sub-groups with a plane each, and a plane of all ranks, used in turn."""
    rank.jitter(2, 2.0)
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = halves[rank.number % 2]
    with no_new_default_group(), ExitStack() as stack:
        part = stack.enter_context(make_plane(
            rank, EXAMPLE, capacity=60, batch_rows=32, routing="independent", group=mine,
            name="part",
        ))
        whole = stack.enter_context(make_plane(
            rank, EXAMPLE, capacity=90, batch_rows=64, routing="independent", name="whole"
        ))
        in_part: list[int] = []
        in_whole: list[int] = []
        for _ in range(4):
            rank.pause()
            in_part += use(part, rank.number, steps=2)
            rank.pause()
            in_whole += use(whole, 10 + rank.number, steps=1)
        return {"part": sorted(set(in_part)), "whole": sorted(set(in_whole))}


def test_planes_of_parts_and_of_the_whole(pools: Pools) -> None:
    for number, result in enumerate(pools[4].run(overlapping)):
        assert result["part"] == ([0, 2] if number % 2 == 0 else [1, 3])
        assert result["whole"] == [10, 11, 12, 13]


def two_planes(rank: Rank, *, names: Sequence[str]) -> dict[str, Any]:
    """Two planes of one configuration at a time; what each delivers alone comes first."""
    rank.jitter(3, 2.0)

    def make(name: str) -> conduit.ExperiencePlane:
        return make_plane(rank, EXAMPLE, capacity=50, batch_rows=16, name=name, seed=9)

    def fill(plane: conduit.ExperiencePlane) -> None:
        plane.extend({"rank": torch.full((12, 2), rank.number)})

    def indices(plane: conduit.ExperiencePlane) -> list[int]:
        batch = plane.sample()
        assert batch is not None
        return list(batch["index"].tolist())

    alone = {}
    for name in names:
        with make(name) as plane:
            fill(plane)
            alone[name] = [indices(plane) for _ in range(5)]
    together: dict[str, list[list[int]]] = {name: [] for name in names}
    with ExitStack() as stack:
        planes = {name: stack.enter_context(make(name)) for name in names}
        for plane in planes.values():
            fill(plane)
        for _ in range(5):
            for name, plane in planes.items():
                rank.pause()
                together[name].append(indices(plane))
    return {"alone": alone, "together": together}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_planes_do_not_disturb_each_other(pools: Pools, ranks: int) -> None:
    """And have draws of their own, by their names."""
    for result in pools[ranks].run(two_planes, names=["train", "expert"]):
        assert result["alone"] == result["together"]
        assert result["alone"]["train"] != result["alone"]["expert"]


def without_a_group(rank: Rank, *, planes: int) -> dict[str, Any]:
    """The plane makes the process group, once, and leaves it to the program."""
    made = []
    init = dist.init_process_group

    def counted(*arguments: Any, **more: Any) -> None:
        made.append(arguments)
        init(*arguments, **more)

    seen: set[int] = set()
    assert not dist.is_initialized()
    with mock.patch.object(dist, "init_process_group", counted):
        for _ in range(planes):
            with make_plane(
                rank, EXAMPLE, capacity=60, batch_rows=32, routing="independent"
            ) as plane:
                seen |= set(use(plane, rank.number))
    return {"made": len(made), "seen": sorted(seen), "all": users_sum()}


def test_without_a_group_the_plane_makes_it() -> None:
    world = Ranks(3, grouped=False)
    try:
        for result in world.run(without_a_group, planes=3):
            assert result == {"made": 1, "seen": [0, 1, 2], "all": 3}
    finally:
        world.close()


def user_ends_first(rank: Rank) -> bool:
    """The program destroys its process group before it closes the plane."""
    plane = make_plane(rank, EXAMPLE, capacity=60, batch_rows=32)
    use(plane, rank.number)
    dist.barrier()
    dist.destroy_process_group()
    plane.close()
    return dist.is_initialized()


def test_closing_after_the_program_destroyed_its_group() -> None:
    world = Ranks(2)
    try:
        assert world.run(user_ends_first) == [False, False]
    finally:
        world.close()


PROGRAM = """
import json, sys
from pathlib import Path
import torch
import conduit

torch.set_num_threads(1)
seen = []
for name in ("first", "second"):
    plane = conduit.ExperiencePlane(
        {"x": torch.zeros(3)}, capacity=100, batch_size=16, name=name, routing="independent"
    )
    for step in range(4):
        plane.extend({"x": torch.full((5, 3), float(plane.rank))})
        batch = plane.sample()
        seen += batch["x"][:, 0].tolist()
    rank, ranks = plane.rank, plane.ranks
    plane.close()
result = {"rank": rank, "ranks": ranks, "seen": sorted(set(seen))}
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(result))
"""


def test_under_torchrun(tmp_path: Path) -> None:
    """A plain program, started as its user would start it, ends well and without complaints."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = str(Path(conduit.__file__).parents[1])
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(program), str(tmp_path),
        ],
        env=os.environ | {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, *sys.path]),
            "PYTHONWARNINGS": "default",
        },
        capture_output=True, text=True, timeout=100, check=False,
    )
    assert done.returncode == 0, done.stderr
    complaints = [
        line for line in done.stderr.splitlines() if "conduit" in line or "destroy_process" in line
    ]
    assert complaints == []
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result == {"rank": rank, "ranks": 2, "seen": [0.0, 1.0]}


def seen_hosts(rank: Rank, *, hosts: Sequence[int]) -> dict[str, Any]:
    """With which host's rows a rank is served, when two ranks of one host are short of rows."""
    with make_plane(
        rank, EXAMPLE, capacity=400, batch_rows=32, hosts=hosts, placement="own",
        quotas=[200, 0, 200, 0], seed=4,
    ) as plane:
        plane.extend({"rank": torch.full((100, 2), rank.number)})
        for _ in range(20):
            plane.sample()
        report = plane.report()
    return {"received": list(report.received_rows), "hosts": report.hosts}


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 0]])
def test_rows_come_from_the_own_host_first(pools: Pools, hosts: list[int]) -> None:
    """Ranks 1 and 3 hold nothing. Each gets its rows from the holder on its host, and only what
    that one cannot give from the other."""
    results = pools[4].run(seen_hosts, hosts=hosts)
    for number in (1, 3):
        near = next(rank for rank in (0, 2) if hosts[rank] == hosts[number])
        received = np.array(results[number]["received"])
        assert results[number]["hosts"] == 2
        assert received[near] > 5 * received[2 - near] > 0


def disagree(rank: Rank) -> str:
    """Ranks 1 and 3 of the job are ranks 0 and 1 of the plane, and call different things."""
    group = dist.new_group([1, 3])
    if rank.number not in (1, 3):
        return ""
    plane = make_plane(rank, EXAMPLE, capacity=60, batch_rows=32, group=group)
    with pytest.raises(conduit.DesyncError) as caught:
        (plane.flush if rank.number == 1 else plane.empty)()
    plane.close()
    return str(caught.value)


def test_errors_on_a_sub_group_name_the_ranks_of_the_job() -> None:
    world = Ranks(4)
    try:
        _, first, _, last = world.run(disagree)
    finally:
        world.close()
    for text in (first, last):
        assert "rank 0 (in the job rank 1) called flush" in text
        assert "rank 1 (in the job rank 3) called empty" in text
