"""Jobs on an emulated cluster, where this machine can have one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from launch import emulate

__all__ = ["emulated", "needs_emulation"]

_REASON = emulate.unavailable()
needs_emulation = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def emulated(
    links: Sequence[str], *arguments: str, ranks_per_host: int = 1
) -> subprocess.CompletedProcess[str]:
    """Runs a job under torchrun on as many hosts as there are links."""
    return subprocess.run(
        [sys.executable, emulate.__file__, "--links", ",".join(links),
         "--ranks-per-host", str(ranks_per_host), "--", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )
