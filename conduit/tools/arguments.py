"""Parsing of command lines: errors in one line, and the kinds of values that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

__all__ = ["Parser", "UsageError", "add_json", "at_least", "comma_list"]


class UsageError(Exception):
    """The command was used wrongly; the message says in one line what to do."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def at_least(least: int) -> Callable[[str], int]:
    """For ``type=``: a whole number of at least ``least``; ``1_000_000`` may be written so."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, got {text!r}"
            )
        return value

    return parse


def comma_list(one: Callable[[str], object]) -> Callable[[str], list[object]]:
    """For ``type=``: one or more values of type ``one``, with commas between them."""

    def parse(text: str) -> list[object]:
        return [one(part.strip()) for part in text.split(",")]

    return parse


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that every command has."""
    parser.add_argument(
        "--json", metavar="FILE", type=_json_target,
        help="write the results there as JSON; - is standard output, then nothing else goes there",
    )


def _json_target(text: str) -> str:
    path = Path(text)
    if text != "-" and (not path.parent.is_dir() or path.is_dir()):
        raise argparse.ArgumentTypeError(
            f"cannot write {text!r}: name a file in a directory that exists, or -"
        )
    return text
