"""Which rank sends how much to which: the shapes of traffic that an exchange is measured with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conduit.edp.routing import route

__all__ = ["PATTERNS", "count_matrix"]

PATTERNS = ("uniform", "skewed", "surplus")

_SURPLUS_BATCH = 4_096


def count_matrix(pattern: str, *, ranks: int, rows: int) -> NDArray[np.int64]:
    """Rows from each rank to each, int64 ``[ranks, ranks]``: the busiest sends about ``rows``.

    ``uniform``: every rank the same to every other. ``skewed``: rank r sends 1/(r+1) of what rank 0
    does, half of it to the next rank, a quarter to the one after it, and so on. ``surplus``: what
    exchangeable routing leaves to be sent of a batch drawn from equal shards.
    """
    if ranks == 1:
        return np.zeros((1, 1), dtype=np.int64)
    here = np.arange(ranks)
    distance = (here - here[:, None]) % ranks
    if pattern == "uniform":
        shares = np.where(distance > 0, 1.0, 0.0)
    elif pattern == "skewed":
        shares = np.where(distance > 0, 0.5**distance / (1 + here[:, None]), 0.0)
    else:
        shares = _surplus(ranks)
    sent = shares.sum(axis=1).max()
    counts = np.round(shares / sent * rows).astype(np.int64)
    # Of rounding to nothing only what was nothing is left out.
    return np.where((counts == 0) & (shares > 0), 1, counts)


def _surplus(ranks: int) -> NDArray[np.float64]:
    holders = np.random.default_rng(0).integers(0, ranks, (1, ranks * _SURPLUS_BATCH))
    learners = route(
        "exchangeable", holders.astype(np.uint16), np.zeros(ranks, dtype=np.int64), _SURPLUS_BATCH
    )
    pairs = holders.astype(np.int64) * ranks + learners
    counts = np.bincount(pairs.reshape(-1), minlength=ranks * ranks).reshape(ranks, ranks)
    np.fill_diagonal(counts, 0)
    return counts.astype(np.float64)
