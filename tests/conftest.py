"""Settings for all tests that run in one process."""

from __future__ import annotations

import os

os.environ["CONDUIT_CHECKS"] = "1"  # read when the library is loaded, here and in rank processes

import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)

settings.register_profile(
    "conduit", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow],
    # Without the phase that explains a failure, which takes longer than finding it.
    phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],
)
settings.load_profile("conduit")
