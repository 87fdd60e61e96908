"""The arithmetic of rounds, and what is held while the clock runs."""

from __future__ import annotations

import gc

import numpy as np

from conduit.tools.bench.rounds import Step, Times, collective_rounds
from conduit.tools.bench.timing import Contender, Series, interleaved, undisturbed
from conduit.tools.job import Job
from conduit.tools.output import Column, Progress, Table


def test_a_series_is_a_median_of_medians() -> None:
    slow = Series(rounds_us=((2.0, 4.0, 90.0), (20.0, 40.0, 40.0)))
    fast = Series(rounds_us=((1.0, 1.0, 1.0), (10.0, 10.0, 10.0)))
    assert slow.us == 22.0 and fast.us == 5.5
    assert slow.over(fast) == 4.0
    assert slow.p99_us == 90.0
    assert slow.mean_us == np.mean([2, 4, 90, 20, 40, 40])


def test_contenders_take_turns() -> None:
    order: list[str] = []
    prepared: list[int] = []
    series = interleaved(
        {"a": Contender(call=lambda: order.append("a")),
         "b": Contender(call=lambda: order.append("b"), before=lambda: prepared.append(1))},
        rounds=4, round_ms=0.001, progress=Progress(shown=False), what="test",
    )
    assert {name: len(each.rounds_us) for name, each in series.items()} == {"a": 4, "b": 4}
    assert len(prepared) == order.count("b")
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    # Warm-up of both, then a b, b a, a b, b a: neighbours of equal name melt into one.
    assert turns == ["a", "b", "a", "b", "a", "b", "a"]


def test_the_collector_is_kept_away_and_comes_back() -> None:
    assert gc.isenabled()
    with undisturbed():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collective_rounds_count_without_the_warm_up() -> None:
    calls: list[str] = []
    steps = [
        Step(name="x", call=lambda: calls.append("x"), before=lambda: calls.append("before"),
             after=lambda: calls.append("after")),
        Step(name="y", call=lambda: calls.append("y")),
    ]
    job = Job(rank=0, ranks=1, group=None, made=False)
    times = collective_rounds(
        job, steps, iterations=3, warm_up=2, progress=Progress(shown=False), what="test"
    )
    assert calls == ["before", "x", "after", "y"] * 5
    assert [len(times[name].iterations_us) for name in ("x", "y")] == [3, 3]


def test_turns_are_joined() -> None:
    turns = [Times(iterations_us=np.array(us)) for us in ([1.0, 20.0], [3.0])]
    assert Times.joined(turns).iterations_us.tolist() == [1.0, 20.0, 3.0]
    assert Times.joined(turns).us == 3.0


def test_a_table_is_aligned() -> None:
    table = Table(
        columns=(Column(key="name"), Column(key="value", form=",.1f", title="µs")),
        results=({"name": "a", "value": 1234.56}, {"name": "longer", "value": None}),
    )
    assert str(table).splitlines() == [
        "    name       µs",
        "       a  1,234.6",
        "  longer        -",
    ]
