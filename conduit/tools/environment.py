"""The environment that a figure depends on: versions, ranks, machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import conduit

__all__ = ["Environment"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a measurement ran. ``world`` and ``hosts`` count what was measured."""

    world: int
    hosts: int
    backend: str
    device: str
    when: str
    cores: int
    processor: str
    gpus: tuple[str, ...]
    load: float
    threads: int

    @classmethod
    def here(cls, *, world: int, hosts: int, backend: str, device: str) -> Environment:
        """The environment of this process, now."""
        gpus = range(torch.cuda.device_count())
        return cls(
            world=world, hosts=hosts, backend=backend, device=device,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            cores=_cores(), processor=_processor(),
            gpus=tuple(torch.cuda.get_device_name(gpu) for gpu in gpus),
            load=round(os.getloadavg()[0], 2), threads=torch.get_num_threads(),
        )

    def as_json(self) -> dict[str, object]:
        """The part of the JSON object that all commands share."""
        return {
            "conduit": conduit.__version__, "torch": torch.__version__,
            "python": platform.python_version(), "world": self.world, "hosts": self.hosts,
            "backend": self.backend, "device": self.device, "when": self.when,
            "machine": {
                "cores": self.cores, "processor": self.processor, "gpus": list(self.gpus),
                "load": self.load, "threads": self.threads,
            },
        }

    def lines(self) -> list[str]:
        """The same for people."""
        gpus = "".join(f", {gpu}" for gpu in self.gpus)
        busy = " (busy: trust ratios more than times)" if self.load > self.cores / 2 else ""
        return [
            f"conduit {conduit.__version__}, torch {torch.__version__}, "
            f"python {platform.python_version()}; {self.when}",
            f"{self.world} rank(s) on {self.hosts} host(s), backend {self.backend}, "
            f"device {self.device}, {self.threads} torch thread(s) a rank",
            f"{self.processor}, {self.cores} cores{gpus}; load {self.load:.2f}{busy}",
        ]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
