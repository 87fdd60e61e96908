"""Agreement: ranks confirm that they computed the same decision.

What all ranks work out for themselves from the same integers (a transport, a plan) is never sent.
Its hash is part of every control record instead, so that a rank that went another way is found out
at the next collective call, before anything is done about it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

__all__ = ["Decisions", "differing"]


class Decisions:
    """What this rank has decided, by name; ``hash`` (63 bits) stands for all of it."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}
        self.hash = 0

    def decide(self, name: str, choice: str) -> None:
        """Local, on all ranks. ``choice`` says what was decided; it replaces an earlier choice."""
        self._made[name] = choice
        digest = hashlib.sha256(self.text.encode()).digest()
        self.hash = int.from_bytes(digest[:8], "little") >> 1

    @property
    def text(self) -> str:
        """A line ``name: choice`` for each decision, in the order of names."""
        lines = (f"{name}: {choice!r}" for name, choice in sorted(self._made.items()))
        return "\n".join(lines)


def differing(texts: list[str], told: Callable[[list[int]], str]) -> tuple[str, str]:
    """The first decision in which ranks' texts differ, and who decided what.

    The choice of the fewest ranks comes first: they are the odd ones.
    """
    made = [dict(line.split(": ", 1) for line in text.splitlines()) for text in texts]
    for name in sorted(set().union(*made)):
        choices: dict[str, list[int]] = {}
        for rank, decisions in enumerate(made):
            choices.setdefault(decisions.get(name, "nothing"), []).append(rank)
        if len(choices) > 1:
            by_number = sorted(choices.items(), key=lambda choice: (len(choice[1]), choice[1]))
            return name, "; ".join(f"{told(ranks)} {choice}" for choice, ranks in by_number)
    raise AssertionError("all ranks decided the same")
