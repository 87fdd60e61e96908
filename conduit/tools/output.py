"""What a command puts out: a table for people, one JSON object for programs.

Only the first rank puts anything out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conduit.tools.arguments import UsageError
from conduit.tools.environment import Environment

__all__ = ["Column", "Progress", "Reporter", "Result", "Table", "reserved_stdout"]

Result = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: ``form`` is a format such as ``",.1f"``; None is shown as ``-``."""

    key: str
    form: str = ""
    title: str = ""

    @property
    def heading(self) -> str:
        return self.title or self.key

    def cell(self, result: Result) -> str:
        value = result.get(self.key)
        return "-" if value is None else format(value, self.form)


@dataclass(frozen=True, kw_only=True)
class Table:
    """``results`` as lines of text under headings, right-aligned."""

    columns: Sequence[Column]
    results: Sequence[Result]

    def __str__(self) -> str:
        rows = [[column.heading for column in self.columns]]
        rows += [[column.cell(result) for column in self.columns] for result in self.results]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns))]
        return "\n".join(
            "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )


class Progress:
    """One line on standard error that says how far the work is, where that is a terminal."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Shows ``text`` in place of what was there; an empty one takes it away."""
        if self._shown:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


class Reporter:
    """Puts out what one command found. ``leads`` says whether this rank is the one to speak."""

    def __init__(
        self, *, command: str, args: Mapping[str, object], target: str | None, leads: bool
    ) -> None:
        self._command, self._args, self._target = command, args, target
        self.leads = leads
        self.progress = Progress(shown=leads)
        self._environment: Environment | None = None
        self._notes: list[str] = []
        self._document: dict[str, object] | None = None

    def begin(self, environment: Environment, notes: Sequence[str]) -> None:
        """Prints the header: the environment, and ``notes`` on what is measured and how."""
        self._environment = environment
        self._print("\n".join(f"# {line}" for line in [
            f"conduit {self._command}", *environment.lines(), *notes,
        ]))

    def note(self, text: str) -> None:
        """Has ``text`` printed below the tables."""
        self._notes.append(text)

    def finish(
        self, results: Sequence[Result], *tables: Table, summary: Result | None = None
    ) -> None:
        """Prints ``tables`` and keeps ``results`` for :meth:`write`."""
        self.progress("")
        assert self._environment is not None
        for table in tables:
            self._print(str(table))
        for key, value in (summary or {}).items():
            self._print(f"# {key}: {value}")
        for text in self._notes:
            self._print(f"# {text}".replace("\n", "\n# "))
        self._document = {
            "command": self._command, **self._environment.as_json(), "args": dict(self._args),
            "results": [dict(result) for result in results],
        }
        if summary is not None:
            self._document["summary"] = dict(summary)

    def write(self) -> None:
        """Writes the JSON object, if one was asked for and there are results."""
        if self._target is None or self._document is None or not self.leads:
            return
        text = json.dumps(self._document, indent=1, allow_nan=False)
        if self._target == "-":
            print(text, flush=True)
            return
        try:
            Path(self._target).write_text(text + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {self._target!r}: {error.strerror}") from error

    def _print(self, text: str) -> None:
        if self.leads and self._target != "-":
            print(text, flush=True)


@contextlib.contextmanager
def reserved_stdout(active: bool) -> Iterator[None]:
    """Sends to standard error what anybody prints meanwhile, libraries written in C++ too."""
    if not active:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        # What C and C++ have in their buffers would come out later, on the restored descriptor.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
