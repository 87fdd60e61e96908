"""The link matrix: worked out entries, and files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.collectives.copies import KINDS
from conduit.collectives.figures import matrix_of, turns
from conduit.collectives.flows import PARTS
from conduit.collectives.links import LinkMatrix, middle
from conduit.collectives.nvml import NOTHING
from conduit.collectives.schedule import LOADED, WITHIN, rounds
from conduit.errors import WorldError
from tests.properties import examples, hosts_of

LOCAL_BYTES_PER_S, LATENCY_NS = 3_000, 70
GPU = (18, 5, 16, 1, 7)


def measured(
    hosts: list[int], egress: list[int], ingress: list[int], *, short: bool = False,
    gpu: tuple[int, ...] = NOTHING,
) -> LinkMatrix:
    """What ranks would gather on hosts that carry that much each way, and nothing else limits."""
    rows: list[list[int]] = [
        [9, 8, 7] * 2 + [0, 0, 0] * (len(KINDS) - 2) + list(gpu) for _ in hosts
    ]
    schedule = rounds(hosts, short=short)
    for turn, flows in turns(schedule):
        if turn.kind == WITHIN:
            carried = dict.fromkeys(flows, LOCAL_BYTES_PER_S)
        else:
            carried = shared_out(flows, hosts, egress, ingress)
        for flow in flows:
            latency = 0 if turn.kind == LOADED else LATENCY_NS
            rows[flow[1]] += [latency, *[carried[flow]] * PARTS]
    width = max(map(len, rows))
    return matrix_of(hosts, schedule, np.array([row + [0] * (width - len(row)) for row in rows]))


def shared_out(
    flows: tuple[tuple[int, int], ...], hosts: list[int], egress: list[int], ingress: list[int]
) -> dict[tuple[int, int], int]:
    """Fair shares: a unit for each flow in turn, as long as both of its hosts have one left."""
    out, into = list(egress), list(ingress)
    carried = dict.fromkeys(flows, 0)
    moved = True
    while moved:
        moved = False
        for source, target in flows:
            if out[hosts[source]] and into[hosts[target]]:
                out[hosts[source]] -= 1
                into[hosts[target]] -= 1
                carried[source, target] += 1
                moved = True
    return carried


@given(data=st.data(), ranks=st.integers(2, 9))
@examples(60)
def test_capacities_are_right_or_at_least(data: st.DataObject, ranks: int) -> None:
    hosts = data.draw(hosts_of(ranks))
    count = max(hosts) + 1
    rates = st.lists(st.integers(20, 400), min_size=count, max_size=count)
    egress, ingress = data.draw(rates), data.draw(rates)
    found = measured(hosts, egress, ingress).capacities
    assert len(found) == (count if count > 1 else 0)
    for host, capacity in enumerate(found):
        others = [other for other in range(count) if other != host]
        for figure, at_least, own, absorbed in (
            (capacity.egress_bytes_per_s, capacity.egress_at_least, egress[host],
             sum(ingress[other] for other in others)),
            (capacity.ingress_bytes_per_s, capacity.ingress_at_least, ingress[host],
             sum(egress[other] for other in others)),
        ):
            assert figure <= own
            if not at_least:
                assert figure == own
            if own > absorbed:
                assert at_least and figure == absorbed


def test_a_cluster_with_slow_hosts() -> None:
    rates = [1000, 1000, 200, 50]
    found = measured([0, 1, 2, 3], rates, rates)
    for host, capacity in enumerate(found.capacities):
        assert (capacity.egress_bytes_per_s, capacity.egress_at_least) == (rates[host], False)
        assert (capacity.ingress_bytes_per_s, capacity.ingress_at_least) == (rates[host], False)
    assert found.bandwidth.tolist() == [
        [0 if a == b else min(rates[a], rates[b]) for b in range(4)] for a in range(4)
    ]
    alone = measured([0, 1, 2], [1000, 200, 50], [1000, 200, 50])
    assert [capacity.egress_at_least for capacity in alone.capacities] == [True, False, False]
    assert alone.capacities[0].egress_bytes_per_s == 250


def test_entries_that_were_not_measured() -> None:
    hosts = [0, 0, 1, 1]
    found = measured(hosts, [700, 600], [500, 400])
    assert found.measured.tolist() == [
        [False, True, True, False], [True, False, False, False],
        [True, False, False, True], [False, False, True, False],
    ]
    assert found.bandwidth.dtype == found.latency_ns.dtype == np.int64
    assert found.bandwidth.tolist() == [
        [0, LOCAL_BYTES_PER_S, 400, 400], [LOCAL_BYTES_PER_S, 0, 400, 400],
        [500, 500, 0, LOCAL_BYTES_PER_S], [500, 500, LOCAL_BYTES_PER_S, 0],
    ]
    assert set(found.latency_ns[~np.eye(4, dtype=bool)].tolist()) == {LATENCY_NS}
    with pytest.raises(ValueError):
        found.bandwidth[0, 1] = 1


def test_hosts_that_never_met() -> None:
    """The lower of what one sends and the other receives."""
    rates = [800, 300, 200, 100, 900, 50]
    found = measured(list(range(6)), rates, rates, short=True)
    assert not found.measured[3, 4] and not found.measured[1, 2]
    assert found.bandwidth[3, 4] == 100
    assert found.bandwidth[1, 2] == 200


def test_spread_and_middle() -> None:
    schedule = rounds([0, 1])
    row = [0] * (3 * len(KINDS)) + list(NOTHING)
    parts = [90, 100, 110, 120, 100]
    found = matrix_of([0, 1], schedule, np.array(
        [row + [70, *parts] + [0, *parts] * 2] * 2
    ))
    assert {(link.bytes_per_s, link.spread_per_mille) for link in found.links} == {(100, 300)}
    assert [middle(figures) for figures in ([], [4], [4, 2], [9, 1, 5])] == [0, 4, 2, 5]


def test_gpus_and_copies() -> None:
    found = measured([0, 0], [1], [1], gpu=GPU)
    assert [dataclasses.astuple(gpu) for gpu in found.gpus] == [(0, *GPU), (1, *GPU)]
    assert [(copy.rank, copy.operation, copy.bytes_per_s) for copy in found.copies] == [
        (rank, operation, 9) for rank in (0, 1) for operation in ("gather", "copy")
    ]
    assert measured([0, 0], [1], [1]).gpus == ()


@given(data=st.data(), ranks=st.integers(1, 9))
@examples(30)
def test_a_file_says_all(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, ranks: int
) -> None:
    hosts = data.draw(hosts_of(ranks))
    rates = [100 * (host + 1) for host in range(max(hosts) + 1)]
    found = measured(hosts, rates, rates, gpu=GPU)
    path = tmp_path_factory.mktemp("links") / "links.json"
    found.save(path)
    assert [other.name for other in path.parent.iterdir()] == ["links.json"]
    again = LinkMatrix.load(path)
    assert again == found and hash(again) == hash(found)
    assert np.array_equal(again.bandwidth, found.bandwidth)
    assert again != dataclasses.replace(found, hosts=(*found.hosts, 0))


def edited(change: Callable[[dict[str, Any]], Any]) -> str:
    made = measured([0, 0, 1], [30, 20], [30, 20], gpu=GPU)
    content = json.loads(json.dumps(made.as_dict()))
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize("text, reason", [
    ("", "no JSON"), ("{", "no JSON"), ("[]", "no format"), ("{}", "no format"),
    ("[" * 100_000, "no JSON"),
    (edited(lambda found: found.update(format="other")), "no format"),
    (edited(lambda found: found.update(version=2)), "version is 2"),
    (edited(lambda found: found.pop("links")), "links"),
    (edited(lambda found: found.update(hosts=[])), "from 0"),
    (edited(lambda found: found.update(hosts=[0, 0, 2])), "from 0"),
    (edited(lambda found: found.update(hosts=[0, 1, -1])), "from 0"),
    (edited(lambda found: found.update(hosts=[0, 0.0, 1])), "integers"),
    (edited(lambda found: found.update(hosts=[0, 1])), "2 ranks"),
    (edited(lambda found: found.update(links=7)), "no list"),
    (edited(lambda found: found["links"].append(3)), "fields"),
    (edited(lambda found: found["links"][0].update(more=3)), "fields"),
    (edited(lambda found: found["links"][0].update(target=-1)), "range"),
    (edited(lambda found: found["links"][0].update(bytes_per_s=1.5)), "bytes_per_s"),
    (edited(lambda found: found["links"][0].update(bytes_per_s=True)), "bytes_per_s"),
    (edited(lambda found: found["links"][0].update(bytes_per_s=2**63)), "range"),
    (edited(lambda found: found["links"][0].update(latency_ns=-5)), "range"),
    (edited(lambda found: found["capacities"].pop()), "capacity"),
    (edited(lambda found: found["capacities"][0].update(egress_at_least=1)), "egress_at_least"),
    (edited(lambda found: found["copies"][0].update(operation=None)), "operation"),
    (edited(lambda found: found["gpus"][0].update(rank=3)), "ranks"),
])
def test_other_files_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(WorldError, match=r"conduit probe --save") as error:
        LinkMatrix.load(path)
    assert reason in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_bytes(b"\x80\x04\xff")
    with pytest.raises(WorldError, match="no JSON"):
        LinkMatrix.load(path)
    with pytest.raises(OSError):
        LinkMatrix.load(tmp_path / "none")


def test_the_table() -> None:
    rates = [10**9, 2 * 10**8, 5 * 10**7]
    scaled = measured([0, 1, 2], [1000, 200, 50], [1000, 200, 50])
    found = dataclasses.replace(scaled, capacities=tuple(
        dataclasses.replace(c, egress_bytes_per_s=rate, ingress_bytes_per_s=rate)
        for c, rate in zip(scaled.capacities, rates, strict=True)
    ))
    lines = found.table().splitlines()
    assert lines[0] == "3 rank(s) on 3 host(s), 6 links measured"
    assert lines[2].split() == ["0", "1", "at", "least", "1.00", "at", "least", "1.00"]
    assert lines[4].split() == ["2", "1", "0.0500", "0.0500"]
    assert len(lines) == 5 + 2 + 3
    many = measured([rank // 4 for rank in range(12)], [9] * 3, [9] * 3).table()
    assert len(many.splitlines()) == 2 + 3, "ranks only if there are few"


def test_where_nothing_was_measured_nothing_is_known() -> None:
    matrix = LinkMatrix(hosts=(0, 1, 1))
    assert not matrix.measured.any()
    for figures in (matrix.bandwidth, matrix.latency_ns, matrix.spread_per_mille):
        assert figures.tolist() == [[0] * 3] * 3
