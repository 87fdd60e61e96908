"""Even shares."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Balanced"]


@dataclass(frozen=True, slots=True)
class Balanced:
    """Every rank holds an equal part of the buffer; lower ranks take the remainder."""

    def quotas(self, *, capacity: int, ranks: int) -> list[int]:
        share, rest = divmod(capacity, ranks)
        return [share + (rank < rest) for rank in range(ranks)]
