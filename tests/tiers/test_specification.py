"""Tiers as users write them: sizes, and what cannot be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import conduit
from conduit.errors import CapacityError, WorldError
from conduit.tiers.specification import checked_tiers, parse_bytes
from tests.tiers.stores import CPU


@pytest.mark.parametrize(("text", "nbytes"), [
    ("512B", 512), ("64GB", 64 * 10**9), ("1.5 TiB", 3 << 39), (" 2 kb ", 2_000), ("3MiB", 3 << 20),
    ("0B", 0), ("64", None), ("GB", None), ("-1GB", None), ("1,5GB", None), ("1 PB", None),
    ("1GB 2GB", None), ("", None), ("nanB", None), ("1e9B", None),
])
def test_bytes_in_words(text: str, nbytes: int | None) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(("size", "nbytes"), [
    (None, None), ("8GB", 8 * 10**9), (8_000, 8_000), ("25%", 250), (" 12.5 % ", 125),
    ("100%", 1_000), ("0.1%", 1),
])
def test_sizes(size: Any, nbytes: int | None) -> None:
    assert conduit.Host(size).asked_bytes(1_000) == nbytes
    assert conduit.Disk("/nvme", size).asked_bytes(1_000) == nbytes


@pytest.mark.parametrize("size", [
    0, -1, True, 1.5, "0B", "0%", "-5%", "101%", "many", "8", "", b"8GB", ("8GB",),
])
def test_what_is_no_size(size: Any) -> None:
    for tier in (conduit.Host(size), conduit.Disk(".", size)):
        with pytest.raises(CapacityError, match=f"size of tier '{tier.name}'") as caught:
            checked_tiers([tier], CPU)
        assert "'8GB'" in str(caught.value) and repr(size) in str(caught.value)


def test_what_can_be(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    wanted = [
        conduit.Host("1GB"), conduit.Shared(), conduit.Disk(tmp_path, "5%"),
        conduit.Disk(os.fspath(other)),
    ]
    assert checked_tiers(wanted, CPU) == tuple(wanted)
    assert checked_tiers(tuple(wanted), CPU) == tuple(wanted)
    assert checked_tiers("auto", CPU) == (conduit.Host(),)
    cuda = torch.device("cuda", 0)
    assert checked_tiers("auto", cuda) == (conduit.Device(), conduit.Host())
    every = [conduit.Device("1GB"), conduit.Pinned(), *wanted]
    assert checked_tiers(every, cuda) == tuple(every)


@pytest.mark.parametrize("tiers", [
    None, "host", "", [], {}, conduit.Host(), ["host"], [conduit.Host], [None], 5,
    [conduit.Disk(f"/{number}") for number in range(9)],
])
def test_what_are_no_tiers(tiers: Any) -> None:
    with pytest.raises(WorldError, match="tiers is out of range") as caught:
        checked_tiers(tiers, CPU)
    assert "conduit.Host('8GB')" in str(caught.value)


def test_a_kind_is_named_once() -> None:
    with pytest.raises(WorldError, match="named twice"):
        checked_tiers([conduit.Host("1GB"), conduit.Shared(), conduit.Host("2GB")], CPU)


@pytest.mark.parametrize("tier", [conduit.Device(), conduit.Pinned("1GB")])
def test_without_a_gpu_there_is_none_of_its_memory(tier: Any) -> None:
    with pytest.raises(WorldError, match=f"tier '{tier.name}' needs a GPU") as caught:
        checked_tiers([conduit.Host(), tier], CPU)
    assert "Leave the tier out" in str(caught.value)


@pytest.mark.parametrize("path", ["nothing", "file", "bad\0name", 5, None, ["list"]])
def test_a_folder_that_is_none(path: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(0o777)
    folder = tmp_path / path if isinstance(path, str) else path
    with pytest.raises(WorldError, match="the disk tier's folder cannot be used") as caught:
        checked_tiers([conduit.Disk(folder)], CPU)
    assert repr(folder) in str(caught.value)
