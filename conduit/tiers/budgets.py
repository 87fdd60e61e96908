"""Budgets: what each tier may take on each rank, agreed before anything is allocated.

Ranks of a host take most kinds of memory from the same stock. All ranks therefore tell each other
first what they see of it, and every rank computes from the same integers what each may have: a
share of the host's stock in proportion to the size of its ring. Nobody allocates before all have
looked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from conduit.errors import CapacityError
from conduit.tiers.available import host_bytes
from conduit.tiers.files import told
from conduit.tiers.specification import MOST_TIERS, Memory

__all__ = ["NO_STOCK", "Budget", "budgets", "most_that_fits", "refuse", "stock"]

NO_STOCK = np.full(1 + 2 * MOST_TIERS, -1, dtype=np.int64)
"""What a rank tells that cannot go on."""

_KEPT = 32
"""One part in so many of a host's memory is left alone: whoever takes the last byte is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Of one tier on one host (on one rank, for device): what the user ``asked`` for (None for
    whatever there is), what was ``available``, and what of it this rank may use."""

    memory: Memory
    asked_bytes: int | None
    available_bytes: int
    usable_bytes: int


def stock(tiers: Sequence[Memory], device: torch.device) -> NDArray[np.int64]:
    """What this rank sees: free host memory, then of each tier all there is and what is free.
    Raises WorldError where one cannot be looked at."""
    seen = np.zeros_like(NO_STOCK)
    total, free = host_bytes()
    seen[0] = max(free - total // _KEPT, 0)
    for i, tier in enumerate(tiers):
        try:
            seen[1 + 2 * i : 3 + 2 * i] = tier.available(device)
        except OSError as error:
            raise told(
                error, f"the {tier.name} tier cannot be looked at", Path(error.filename or "?")
            ) from error
    return seen


def budgets(
    tiers: Sequence[Memory], stocks: NDArray[np.int64], ring_bytes: NDArray[np.int64], rank: int,
    on_host: NDArray[np.bool_],
) -> list[Budget]:
    """The budgets of ``rank``, from the ``stocks`` (one row a rank) of all ranks, the
    sizes of their rings, and the mask of the ranks on this host."""
    seen = stocks[on_host].min(axis=0)
    share, all_shares = int(ring_bytes[rank]), max(int(ring_bytes[on_host].sum()), 1)
    in_ram = int(seen[0])
    found = []
    for i, tier in enumerate(tiers):
        alone = tier.name == "device"
        total, free = (stocks[rank] if alone else seen)[1 + 2 * i : 3 + 2 * i].tolist()
        free = min(free, in_ram) if tier.in_ram else free
        asked = tier.asked_bytes(total)
        granted = free if asked is None else min(asked, free)
        in_ram -= granted if tier.in_ram else 0
        usable = granted if alone else granted * share // all_shares
        found.append(Budget(
            memory=tier, asked_bytes=asked, available_bytes=free, usable_bytes=usable
        ))
    return found


def refuse(found: Sequence[Budget], needed_bytes: int, largest: str) -> CapacityError:
    """The error for a ring that does not fit, with all that one needs to know to make it fit."""
    rows = ["tier", "asked", "available", "usable by this rank"]
    lines = [rows, *(
        [budget.memory.name, _told(budget.asked_bytes), _told(budget.available_bytes),
         _told(budget.usable_bytes)] for budget in found
    )]
    widths = [max(len(line[i]) for line in lines) for i in range(len(rows))]
    table = "\n".join(
        "  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in lines
    )
    usable = sum(budget.usable_bytes for budget in found)
    return CapacityError(
        "the tiers cannot hold this rank's shard",
        expected=f"at most {usable:,} bytes", got=f"{needed_bytes:,} bytes, staging included",
        cure=f"{largest}\n{table}",
    )


def _told(nbytes: int | None) -> str:
    return "all" if nbytes is None else f"{nbytes / 1e9:,.3f} GB"


def most_that_fits(fits: Callable[[int], bool], below: int) -> int:
    """The largest number under ``below`` that ``fits``, which all smaller ones do; 0 if none."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
