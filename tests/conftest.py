"""Settings for all tests that run in one process."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "conduit", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("conduit")
