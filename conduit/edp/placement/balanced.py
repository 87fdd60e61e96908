"""Even shares."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Balanced"]

_SLACK = 64


@dataclass(frozen=True, slots=True)
class Balanced:
    """Every rank holds an equal part of the buffer (lower ranks take the remainder), or up to a
    sixty-fourth more.

    Without that slack a full buffer would have a new row travel to whichever rank held the row that
    it evicts, for ever, once ranks had committed rows in blocks larger than those of later steps.
    """

    def quotas(self, *, capacity: int, ranks: int) -> list[int]:
        share, rest = divmod(capacity, ranks)
        slack = share // _SLACK if ranks > 1 else 0
        return [share + (rank < rest) + slack for rank in range(ranks)]
