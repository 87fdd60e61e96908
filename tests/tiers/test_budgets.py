"""Budgets: ranks of a host share its memory, never take more, and are told what would fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import conduit
from conduit.errors import CapacityError, WorldError
from conduit.tiers.budgets import NO_STOCK, Budget, budgets, most_that_fits, refuse, stock
from tests.properties import examples, hosts_of
from tests.tiers.stores import CPU


def stocks_of(*ranks: tuple[int, ...]) -> np.ndarray:
    """What ranks see: free host memory, then all and free of each tier."""
    seen = np.zeros((len(ranks), len(NO_STOCK)), dtype=np.int64)
    for row, numbers in zip(seen, ranks, strict=True):
        row[: len(numbers)] = numbers
    return seen


def budgets_of(tiers: list[Any], stocks: np.ndarray, rings: list[int], hosts: list[int]) -> Any:
    """Of all ranks."""
    return [
        budgets(tiers, stocks, np.array(rings), rank, np.array(hosts) == hosts[rank])
        for rank in range(len(rings))
    ]


def test_ranks_of_a_host_share_by_the_size_of_their_rings() -> None:
    tiers = [conduit.Host("50%"), conduit.Disk("/nvme")]
    # Ranks look one after the other; what the last one saw is what there is.
    stocks = stocks_of(
        (900, 1_000, 900, 5_000, 80), (800, 1_000, 900, 5_000, 90), (40, 50, 40, 9, 9)
    )
    first, second, alone = budgets_of(tiers, stocks, [10, 30, 7], [0, 0, 1])
    assert [b.asked_bytes for b in first] == [500, None]
    assert [b.available_bytes for b in first] == [b.available_bytes for b in second] == [800, 80]
    assert [b.usable_bytes for b in first] == [125, 20]
    assert [b.usable_bytes for b in second] == [375, 60]
    assert [b.usable_bytes for b in alone] == [25, 9], "another host, of 50 bytes"


def test_kinds_of_memory_that_are_one_stock() -> None:
    # Rows in /dev/shm are in the host's memory, whatever the file system there could hold.
    tiers = [conduit.Host(700), conduit.Shared(), conduit.Disk("/nvme")]
    ((host, shared, disk),) = budgets_of(
        tiers, stocks_of((1_000, 2_000, 1_500, 8_000, 8_000, 60, 60)), [5], [0]
    )
    assert (host.available_bytes, host.usable_bytes) == (1_000, 700)
    assert (shared.available_bytes, shared.usable_bytes) == (300, 300)
    assert disk.usable_bytes == 60


def test_memory_of_a_gpu_is_its_ranks_alone() -> None:
    stocks = stocks_of((100, 80, 60, 100, 100), (100, 80, 70, 100, 100))
    first, second = budgets_of([conduit.Device(), conduit.Pinned(40)], stocks, [9, 9], [0, 0])
    assert [b.usable_bytes for b in first] == [60, 20]
    assert [b.usable_bytes for b in second] == [70, 20]


@examples(200)
@given(data=st.data())
def test_nobody_takes_what_is_not_there(data: st.DataObject) -> None:
    sizes = st.one_of(st.none(), st.integers(1, 10**12), st.sampled_from(["10%", "64GB", "100%"]))
    made: list[Callable[[Any], Any]] = [
        conduit.Host, conduit.Shared, lambda size: conduit.Disk("/a", size),
        lambda size: conduit.Disk("/b", size),
    ]
    tiers = [make(data.draw(sizes)) for make in data.draw(st.permutations(made))]
    ranks = data.draw(st.integers(1, 5))
    amounts = st.integers(0, 10**12)
    stocks = stocks_of(*(
        tuple(data.draw(st.lists(amounts, min_size=9, max_size=9))) for _ in range(ranks)
    ))
    rings = data.draw(st.lists(amounts, min_size=ranks, max_size=ranks))
    hosts = data.draw(hosts_of(ranks))
    found = budgets_of(tiers, stocks, rings, hosts)
    for host in set(hosts):
        on_host = [rank for rank in range(ranks) if hosts[rank] == host]
        in_ram = 0
        for i, tier in enumerate(tiers):
            taken = sum(found[rank][i].usable_bytes for rank in on_host)
            seen = found[on_host[0]][i]
            assert all(found[rank][i].available_bytes == seen.available_bytes for rank in on_host)
            assert 0 <= taken <= seen.available_bytes <= stocks[on_host, 2 + 2 * i].min()
            assert seen.asked_bytes is None or taken <= seen.asked_bytes
            in_ram += taken if tier.in_ram else 0
            # A tier that could hold all of them holds each.
            if taken and (seen.asked_bytes or seen.available_bytes) >= sum(
                rings[rank] for rank in on_host
            ) <= seen.available_bytes:
                assert all(found[rank][i].usable_bytes >= rings[rank] for rank in on_host)
        assert in_ram <= stocks[on_host, 0].min()


def test_what_a_rank_sees(tmp_path: Path) -> None:
    tiers = [conduit.Host(), conduit.Shared(), conduit.Disk(tmp_path)]
    seen = stock(tiers, CPU)
    assert seen.shape == NO_STOCK.shape and seen[0] >= 0 and (seen[7:] == 0).all()
    for total, free in seen[1:7].reshape(3, 2).tolist():
        assert 0 <= free <= total and total > 0
    assert seen[0] < seen[2], "some of it is left alone"
    tmp_path.rmdir()
    with pytest.raises(WorldError, match="disk tier cannot be looked at") as caught:
        stock(tiers, CPU)
    assert str(tmp_path) in str(caught.value)


def test_the_error_says_what_would_help() -> None:
    error = refuse([
        Budget(memory=conduit.Host("8GB"), asked_bytes=8 * 10**9, available_bytes=5 * 10**9,
               usable_bytes=25 * 10**8),
        Budget(memory=conduit.Disk("/nvme"), asked_bytes=None, available_bytes=10**9,
               usable_bytes=5 * 10**8),
    ], 4 * 10**9, "Take less")
    assert "at most 3,000,000,000 bytes" in str(error) and "4,000,000,000 bytes" in str(error)
    assert str(error).splitlines()[-3:] == [
        "  tier     asked  available  usable by this rank",
        "  host  8.000 GB   5.000 GB             2.500 GB",
        "  disk       all   1.000 GB             0.500 GB",
    ]


@examples(200)
@given(limit=st.integers(-1, 50), below=st.integers(1, 60))
def test_the_most_that_fits(limit: int, below: int) -> None:
    assert most_that_fits(lambda n: n <= limit, below) == max(min(limit, below - 1), 0)


@pytest.mark.parametrize("sizes", [
    {"host": "300KB"}, {"disk": "1MB"}, {"host": "200KB", "disk": "100KB", "shared": "100KB"},
])
def test_the_largest_capacity_fits_and_one_row_more_does_not(
    sizes: dict[str, str], tmp_path: Path
) -> None:
    kinds: dict[str, Callable[[str], Any]] = {
        "host": conduit.Host, "shared": conduit.Shared,
        "disk": lambda size: conduit.Disk(tmp_path, size),
    }

    def make(capacity: int) -> conduit.ExperiencePlane:
        return conduit.ExperiencePlane(
            {"x": torch.zeros(13)}, capacity=capacity, batch_size=4, placement=conduit.Central(0),
            ingestion=conduit.Ingestion(staging_rows=100),
            tiers=[kinds[name](size) for name, size in sizes.items()],
        )

    with pytest.raises(CapacityError, match="tiers cannot hold this rank's shard") as caught:
        make(10**6)
    for name in sizes:
        assert re.search(rf"^ +{name} +0\.\d+ GB", str(caught.value), re.MULTILINE)
    found = re.search(r"largest capacity that fits this rank is ([\d,]+) rows", str(caught.value))
    assert found is not None
    most = int(found[1].replace(",", ""))
    # Every tier may lose a part of a segment; there are 64 of them.
    whole = sum(int(size[:-2]) * {"K": 10**3, "M": 10**6}[size[-2]] for size in sizes.values())
    assert 0.8 * whole < (most + 200) * 64 <= whole
    with make(most) as plane:
        for _ in range(most // 100 + 1):
            plane.extend({"x": torch.ones(100, 13)})
            plane.flush()
        assert len(plane) == most and (plane.sample()["x"] == 1).all()
        assert sum(held for _, held in plane.report().tiers) <= whole
    with pytest.raises(CapacityError, match="tiers cannot hold"):
        make(most + 1)
    assert list(tmp_path.iterdir()) == []
