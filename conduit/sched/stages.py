"""The stages of a delivery and of a commit: what each needs, and by when it must be done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["COMMIT", "DRAW", "EXCHANGE", "GATHER", "LATE", "SEND_HOME", "Due", "Stage"]


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
    """``links`` says whether rows of other ranks are sent or waited for in it."""

    name: str
    due: Due
    links: bool = False


DRAW = Stage(name="draw", due=Due.COMMIT)
"""Draws a batch, routes it, and looks up where its rows lie."""
GATHER = Stage(name="gather", due=Due.COMMIT, links=True)
"""Gathers the rows that others want, sends them, gathers those that lie here, and makes views."""
EXCHANGE = Stage(name="exchange", due=Due.BATCH, links=True)
"""Waits for the rows of others and puts them in their places."""
LATE = Stage(name="late rows", due=Due.CALL, links=True)
"""Fetches what the last commit changed in a draft."""
COMMIT = Stage(name="commit", due=Due.CALL)
"""Plans a commit and makes its rows visible."""
SEND_HOME = Stage(name="send home", due=Due.CALL, links=True)
"""Packs the rows beyond this rank's quota, sends them to their holders, and writes what comes."""
