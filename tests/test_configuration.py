"""The configuration: checked arguments, and what ranks compare of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from conduit import Balanced, CapacityError, Central, Ingestion, Schema, WorldError
from conduit.collectives.control import FINGERPRINT
from conduit.configuration import Configuration, chosen_device

EXAMPLE = {"x": torch.zeros(3), "done": torch.tensor(False)}


def configuration(**changes: Any) -> Configuration:
    arguments: dict[str, Any] = {
        "example": EXAMPLE, "ranks": 3, "rank": 1, "capacity": 1000, "batch_size": 8,
        "ingestion": None, "placement": None, "routing": "exchangeable", "max_staleness": 0,
        "min_size": 0, "seed": 0, "name": "experience", "overlap": True, "tiers": "auto",
        "device": torch.device("cpu"),
        **changes,
    }
    return Configuration.checked(arguments.pop("example"), **arguments)


def test_defaults_are_filled_in() -> None:
    made = configuration()
    assert made.layout.schema == Schema.from_example(EXAMPLE)
    assert (made.capacity, made.batch_size, made.staging_rows) == (1000, 8, 1024)
    assert made.quotas.tolist() == [339, 338, 338]
    assert made.quotas.dtype == np.int64


def test_bytes_become_rows() -> None:
    row_bytes = configuration().layout.row_bytes
    assert configuration(capacity="1MB").capacity == 10**6 // row_bytes
    assert configuration(capacity="1MB").quotas.sum() >= 10**6 // row_bytes


def test_a_fingerprint_has_what_ranks_compare() -> None:
    fingerprint = configuration().fingerprint()
    assert set(fingerprint) == set(FINGERPRINT)
    for value in fingerprint.values():
        assert isinstance(value, int)
        assert 0 <= value < 1 << 63


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"batch_size": 9}, {"batch_size"}), ({"seed": 1}, {"seed"}),
        ({"name": "other"}, {"name"}), ({"routing": "independent"}, {"routing"}),
        ({"max_staleness": 1}, {"max_staleness"}), ({"min_size": 5}, {"min_size"}),
        ({"placement": Central(0)}, {"placement"}),
        ({"ingestion": Ingestion(staging_rows=5)}, {"staging"}),
        ({"capacity": 1001}, {"capacity", "placement"}),
        ({"example": {**EXAMPLE, "x": torch.zeros(4)}}, {"schema"}),
    ],
    ids=str,
)
def test_every_difference_shows(changes: dict[str, Any], changed: set[str]) -> None:
    first, second = configuration().fingerprint(), configuration(**changes).fingerprint()
    assert {name for name in first if first[name] != second[name]} == changed


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": Balanced()}, {"ingestion": Ingestion()}, {"rank": 2},
        {"ingestion": Ingestion(staging_rows=1024)},
        {"example": Schema.from_example(EXAMPLE)},
        {"example": dict(reversed(EXAMPLE.items()))},
    ],
    ids=str,
)
def test_what_means_the_same_is_the_same(changes: dict[str, Any]) -> None:
    assert configuration(**changes).fingerprint() == configuration().fingerprint()


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")], ids=str)
def test_the_cpu_is_the_device(device: Any) -> None:
    assert chosen_device(device) == torch.device("cpu")


@pytest.mark.parametrize("device", ["meta", "mps", torch.device("xpu", 0)], ids=str)
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(WorldError, match="cannot lie on this device"):
        chosen_device(device)


def test_under_torchrun_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert chosen_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert chosen_device("cuda") == torch.device("cuda", 3)
    assert chosen_device("cuda:1") == torch.device("cuda", 1)
    # Shown only its own GPU, every rank calls it 0.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert chosen_device("cuda") == torch.device("cuda", 0)


@pytest.mark.parametrize("capacity", [1e6, 0.5, None, True])
def test_a_capacity_that_is_no_integer_is_told_so(capacity: Any) -> None:
    with pytest.raises(CapacityError, match="not understood"):
        configuration(capacity=capacity)


def test_ingestion_of_another_kind_is_refused() -> None:
    with pytest.raises(WorldError, match="Ingestion"):
        configuration(ingestion=5)
