"""Facts about GPUs, from an NVML of our own: this machine need not have any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from conduit.collectives import nvml
from conduit.collectives.nvml import NOTHING, gpu_facts

CUDA = torch.device("cuda", 0)


class FakeError(Exception):
    pass


class FakeNvml:
    """A machine of three GPUs, of which the process sees the last two, in this order: c, b."""

    NVMLError = FakeError
    NVML_NVLINK_MAX_LINKS = 6
    NVML_FEATURE_ENABLED = 1
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_CAPS_INDEX_READ = (0,)
    uuids = ("GPU-a", "GPU-b", "GPU-c")

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.fails, self.open = fails, 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "fails"):
            def fail(*arguments: object) -> None:
                raise FakeError(name)

            return fail
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid not in self.uuids:
            raise FakeError(uuid)
        return self.uuids.index(uuid)

    def nvmlDeviceGetIndex(self, handle: int) -> int:  # noqa: N802
        return handle

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        if link >= 4:
            raise FakeError("no such link")
        return int(link != 1)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return 3 + handle

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return 16

    def nvmlDeviceGetMemoryAffinity(  # noqa: N802
        self, handle: int, words: int, scope: int
    ) -> list[int]:
        assert scope == 0
        return [0, 1 << handle] + [0] * (words - 2)

    def nvmlDeviceGetP2PStatus(self, handle: int, other: int, what: object) -> int:  # noqa: N802
        assert what == 0, "the constant of some releases is a tuple"
        return 0 if handle != other else 4


def facts(fake: object, device: torch.device = CUDA) -> tuple[int, ...]:
    seen = [SimpleNamespace(uuid=uuid) for uuid in ("c", "b")]
    with mock.patch.object(nvml, "pynvml", fake), \
            mock.patch.object(torch.cuda, "device_count", lambda: len(seen)), \
            mock.patch.object(torch.cuda, "get_device_properties", lambda index: seen[index]), \
            mock.patch.object(torch.cuda, "current_device", lambda: 1):
        return gpu_facts(device)


def test_a_gpu_is_found_by_its_uuid() -> None:
    fake = FakeNvml()
    assert facts(fake) == (3, 5, 16, 66, 1)
    assert facts(fake, torch.device("cuda")) == (3, 4, 16, 65, 1), "the current one"
    assert fake.open == 0


@pytest.mark.parametrize("fails, expected", [
    ("nvmlInit", NOTHING),
    ("nvmlDeviceGetHandleByUUID", NOTHING),
    ("nvmlDeviceGetNvLinkState", (0, 5, 16, 66, 1)),
    ("nvmlDeviceGetMaxPcieLinkWidth", (3, 5, -1, 66, 1)),
    ("nvmlDeviceGetMemoryAffinity", (3, 5, 16, -1, 1)),
    ("nvmlDeviceGetP2PStatus", (3, 5, 16, 66, -1)),
])
def test_what_nvml_does_not_say(fails: str, expected: tuple[int, ...]) -> None:
    fake = FakeNvml((fails,))
    assert facts(fake) == expected
    assert fake.open == 0


def test_without_a_gpu_or_nvml() -> None:
    assert gpu_facts(torch.device("cpu")) == NOTHING
    assert facts(None) == NOTHING


def test_the_real_package_has_what_is_asked_for() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 10
    for name in names:
        assert hasattr(pynvml, name), name
