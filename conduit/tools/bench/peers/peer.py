"""What a peer is."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tensordict import TensorDict

from conduit.schema import Schema

__all__ = ["LocalPeer", "PeerError", "missing"]


class PeerError(Exception):
    """The peer is installed but cannot do this; the message says why."""


class LocalPeer(Protocol):
    """A buffer of ``rows`` rows in this process, sampled uniformly ``batch`` rows at a time. One
    that is ``on_disk`` has its rows in files under ``folder``."""

    packages: ClassVar[tuple[str, ...]]
    on_disk: ClassVar[bool]
    version: str

    def __init__(self, schema: Schema, *, rows: int, batch: int, folder: Path) -> None: ...

    def converted(self, rows: TensorDict) -> Any:
        """``rows`` in the form that the peer likes best; not timed."""

    def extend(self, rows: Any) -> object:
        """Adds converted rows."""

    def sample(self) -> object:
        """A batch."""


def missing(packages: Sequence[str]) -> list[str]:
    """Those of ``packages`` that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]
