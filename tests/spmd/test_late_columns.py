"""Late columns against a plain dictionary of rows: every batch shows what was updated before it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import conduit
from tests.spmd.cases import make_plane
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank

EXAMPLE = {
    "number": torch.tensor(0), ("late", "advantage"): torch.zeros(3),
    ("late", "tag"): torch.zeros(5, dtype=torch.uint8), "nothing": torch.zeros(0),
}
Row = tuple[list[float], list[int]]


def advantage(value: int) -> list[float]:
    return [value + part / 4 for part in range(3)]


def tag(value: int) -> list[int]:
    return [(value + part) % 251 for part in range(5)]


def updated(
    rank: Rank, *, seed: int, hidden: bool, routing: str, max_staleness: int, tiers: list[str],
) -> dict[str, Any]:
    """All ranks know the program, so each can tell what every row holds at any time."""
    program, capacity = random.Random(seed), 60
    model: dict[int, Row] = {}
    history: list[dict[int, Row]] = []
    fresh = end = changed = 0
    found: list[list[int]] = []
    staged: list[list[dict[str, Any]]] = [[] for _ in range(rank.size)]
    with make_plane(
        rank, EXAMPLE, capacity=capacity, batch_rows=16, hidden=hidden, routing=routing,
        max_staleness=max_staleness, tiers=tiers, min_size=1,
    ) as plane:
        for _ in range(60):
            rows = [program.choice([0, 0, 1, 3, 9]) for _ in range(rank.size)]
            first = end + sum(rows[: rank.number])
            numbers = torch.arange(first, first + rows[rank.number])
            plane.extend({
                "number": numbers, "nothing": torch.zeros(len(numbers), 0), "late": {
                    "advantage": torch.tensor([advantage(0)] * len(numbers)).view(-1, 3),
                    "tag": torch.tensor([tag(0)] * len(numbers), dtype=torch.uint8).view(-1, 5),
                },
            })
            for owner in range(rank.size):
                for _ in range(program.choice([0, 0, 0, 1, 2]) if end else 0):
                    # Rows that have left as well, and some twice in one call.
                    index = [program.randrange(max(0, end - 80), end) for _ in range(
                        program.choice([0, 1, 7, 30])
                    )]
                    fresh += 1
                    keys = program.choice([("advantage",), ("tag",), ("tag", "advantage")])
                    values = [fresh * 100 + place for place in range(len(index))]
                    staged[owner].append({"index": index, "keys": keys, "values": values})
                    if owner == rank.number:
                        late = {
                            "advantage": torch.tensor([advantage(v) for v in values]).view(-1, 3),
                            "tag": torch.tensor(
                                [tag(v) for v in values], dtype=torch.uint8
                            ).view(-1, 5),
                        }
                        plane.update(torch.tensor(index, dtype=torch.int64), {
                            "late": {key: late[key] for key in keys}
                        })
                        # What is handed in can be changed at once.
                        for value in late.values():
                            value.fill_(0)
            end += sum(rows)
            for number in range(end - sum(rows), end):
                model[number] = advantage(0), tag(0)
            for number in [number for number in model if number < end - capacity]:
                del model[number]
            for updates in staged:
                for update in updates:
                    for number, value in zip(update["index"], update["values"], strict=True):
                        if number in model:
                            changed += 1
                            old = model[number]
                            model[number] = (
                                advantage(value) if "advantage" in update["keys"] else old[0],
                                tag(value) if "tag" in update["keys"] else old[1],
                            )
            if sum(rows) or any(staged):
                history.append(dict(model))
            staged = [[] for _ in range(rank.size)]
            if program.random() < 0.25:
                plane.flush()
                continue
            batch = plane.sample()
            if batch is None:
                continue
            assert torch.equal(batch["number"], batch["index"])
            seen = list(zip(batch["index"].tolist(), zip(
                batch["late", "advantage"].tolist(), batch["late", "tag"].tolist(), strict=True
            ), strict=True))
            assert any(
                all(state.get(number) == row for number, row in seen)
                for state in history[-1 - max_staleness :]
            ), "a batch is of the buffer as it was at one moment"
            found.append([int(number) for number, _ in seen])
        report = plane.report()
    assert changed > 50 and len(found) > 20
    return {"found": found, "updated": report.rows_updated, "ignored": report.updates_ignored}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("routing", ["exchangeable", "independent"])
def test_every_batch_shows_what_was_updated(
    pools: Pools, ranks: int, max_staleness: int, routing: str
) -> None:
    results = [
        pools[ranks].run(
            updated, seed=3 + ranks, hidden=hidden, routing=routing, max_staleness=max_staleness,
            tiers=["host", "disk"] if hidden else ["host"],
        ) for hidden in (False, True)
    ]
    assert results[0] == results[1]
    assert sum(one["updated"] for one in results[0]) > 50
    assert sum(one["ignored"] for one in results[0]) > 20


def refusals(rank: Rank) -> None:
    with make_plane(rank, EXAMPLE, capacity=60, batch_rows=8, min_size=1) as plane:
        plane.extend({
            "number": torch.arange(4), "nothing": torch.zeros(4, 0),
            "late": {"advantage": torch.zeros(4, 3), "tag": torch.zeros(4, 5, dtype=torch.uint8)},
        })
        plane.flush()
        one = {"late": {"advantage": torch.ones(1, 3)}}
        for index, values, told in (
            ([0], {"late": {"nonsense": torch.ones(1, 3)}}, "unknown field"),
            ([0], {}, "no field"),
            ([0], {"late": {"advantage": torch.ones(1, 4)}}, "wrong shape"),
            ([0], {"late": {"advantage": torch.ones(1, 3, dtype=torch.float64)}}, "wrong dtype"),
            ([0, 1], one, "ragged"), ([4 * rank.size], one, "never was"), ([-1], one, "never was"),
        ):
            with pytest.raises(conduit.SchemaError, match=told):
                plane.update(torch.tensor(index), values)
        with pytest.raises(conduit.SchemaError, match="logical indices"):
            plane.update(torch.tensor([0.0]), one)
        batch = plane.sample()
        assert batch is not None and (batch["late", "advantage"] == 0).all()
        assert plane.report().rows_updated == 0
        # Numpy will do, too.
        plane.update(np.array([0]), {("late", "advantage"): np.ones((1, 3), dtype=np.float32)})
        batch = plane.sample()
        assert batch is not None
        ones = batch["late", "advantage"] == 1
        assert torch.equal(ones.all(1), batch["index"] == 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_refused_changes_nothing(pools: Pools, ranks: int) -> None:
    pools[ranks].run(refusals)
