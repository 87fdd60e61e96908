"""Every tier that this machine has keeps the contract; the others are checked in tests/device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.contract import check_tier
from tests.tiers.stores import CPU, TIERS


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_does_what_tiers_do(name: str, tmp_path: Path) -> None:
    check_tier(name, CPU, tmp_path)
