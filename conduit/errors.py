"""Every error a user can meet: what was wrong, what came, what was expected, and the cure."""

from __future__ import annotations

import builtins

__all__ = [
    "CapacityError",
    "ConduitError",
    "DesyncError",
    "EmptyError",
    "SchemaError",
    "TimeoutError",
    "WorldError",
]


class ConduitError(Exception):
    """Base of all Conduit errors.

    The message is put together from its parts, and the parts stay readable as attributes, so that
    a program can react to ``error.field`` without parsing prose.
    """

    def __init__(
        self,
        what: str,
        *,
        rank: int | None = None,
        field: object = None,
        expected: object = None,
        got: object = None,
        cure: str | None = None,
    ) -> None:
        self.what, self.rank, self.field = what, rank, field
        self.expected, self.got, self.cure = expected, got, cure
        text = what if rank is None else f"[rank {rank}] {what}"
        if field is not None:
            text += f": field {field!r}"
        if expected is not None or got is not None:
            text += f": expected {expected}, got {got}"
        if cure:
            text += f". {cure}"
        super().__init__(text)


class SchemaError(ConduitError, ValueError):
    """A field is missing, unknown, of another dtype or shape, ragged, or not a tensor."""


class EmptyError(ConduitError):
    """``sample`` was called while the buffer holds no rows and ``min_size`` is 0."""


class CapacityError(ConduitError):
    """Rows or bytes do not fit: in staging, in memory, or in the quotas of the ranks."""


class DesyncError(ConduitError):
    """Ranks called different collectives, or were configured differently."""


class TimeoutError(ConduitError, builtins.TimeoutError):
    """A rank did not come to a collective within the deadline."""


class WorldError(ConduitError):
    """The world cannot be formed, lost a rank, or the plane is closed."""
