"""What a placement policy is, and the check that every policy's answer passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from conduit.errors import CapacityError

__all__ = ["Placement", "checked_quotas"]


class Placement(Protocol):
    """Decides the quotas. Must be a pure function of its arguments: every rank calls it alone,
    and all must come to the same integers."""

    def quotas(self, *, capacity: int, ranks: int) -> Sequence[int]:
        """Rows that each rank may hold, ``ranks`` integers that add up to ``capacity`` or more."""
        ...


def checked_quotas(placement: Placement, *, capacity: int, ranks: int) -> NDArray[np.int64]:
    """The policy's quotas as int64 ``[ranks]``; CapacityError when they cannot hold the buffer."""
    if not callable(getattr(placement, "quotas", None)):
        raise CapacityError(
            "this is no placement policy", expected="an object with a method quotas",
            got=repr(placement),
        )
    answer = placement.quotas(capacity=capacity, ranks=ranks)
    if isinstance(answer, np.ndarray):
        answer = answer.tolist()
    if not (
        isinstance(answer, Sequence) and len(answer) == ranks
        and all(isinstance(rows, (int, np.integer)) and type(rows) is not bool for rows in answer)
    ):
        raise CapacityError(
            f"{type(placement).__name__} gave unusable quotas", expected=f"{ranks} integers",
            got=repr(answer),
        )
    quotas = np.array(answer, dtype=np.int64)
    if (quotas < 0).any() or int(quotas.sum()) < capacity:
        raise CapacityError(
            f"the quotas of {type(placement).__name__} cannot hold the buffer",
            expected=f"rows of at least 0 that add up to {capacity}", got=quotas.tolist(),
        )
    return np.minimum(quotas, capacity)
