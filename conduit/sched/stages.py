"""The stages of a delivery and of a commit, and by when each must be done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from conduit.collectives.control import STAGES

__all__ = [
    "COMMIT", "DRAW", "EXCHANGE", "GATHER", "LATE", "LATE_COLUMNS", "SEND_HOME", "Due", "Stage",
]


class Due(Enum):
    """What may not go on before a stage is done."""

    COMMIT = auto()
    """Whatever changes the directory and the shard: it reads them."""
    BATCH = auto()
    """Handing over the batch."""
    CALL = auto()
    """The call in which it runs, on the training thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step of the experience path; errors, traces and explanations call it by its name."""

    name: str
    due: Due


_DRAW, _GATHER, _EXCHANGE = STAGES

DRAW = Stage(name=_DRAW, due=Due.COMMIT)
"""Draws a batch, routes it, and looks up where its rows lie."""
GATHER = Stage(name=_GATHER, due=Due.COMMIT)
"""Gathers the rows that others want, sends them, gathers those that lie here, and makes views."""
EXCHANGE = Stage(name=_EXCHANGE, due=Due.BATCH)
"""Waits for the rows of others and puts them in their places."""
LATE = Stage(name="late rows", due=Due.CALL)
"""Fetches what the last commit changed in a draft."""
COMMIT = Stage(name="commit", due=Due.CALL)
"""Plans a commit and makes its rows visible."""
LATE_COLUMNS = Stage(name="late columns", due=Due.CALL)
"""Sends new values of rows to their holders and writes them."""
SEND_HOME = Stage(name="send home", due=Due.CALL)
"""Packs the rows beyond this rank's quota, sends them to their holders, and writes what comes."""
