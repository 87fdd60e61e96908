"""Everything on one rank: what request-driven frameworks do, kept as the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from conduit.errors import WorldError

__all__ = ["Central"]


@dataclass(frozen=True, slots=True)
class Central:
    """Rank ``rank`` holds the whole buffer; rows staged elsewhere travel to it at the commit."""

    rank: int = 0

    def quotas(self, *, capacity: int, ranks: int) -> list[int]:
        if not 0 <= self.rank < ranks:
            raise WorldError("Central names no rank of this world",
                             expected=f"0 to {ranks - 1}", got=self.rank)
        return [capacity if rank == self.rank else 0 for rank in range(ranks)]
