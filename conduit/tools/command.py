"""What a command is, and how the parser of all commands is made from them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conduit.tools.arguments import Parser, add_json
from conduit.tools.output import Reporter

__all__ = ["Command", "command_parser"]


@dataclass(frozen=True, kw_only=True)
class Command:
    """``conduit WORDS...``: ``run`` does the work, tells the reporter, and returns the exit status.

    ``run`` is called on every rank. It raises UsageError where only the values of the arguments
    together show that they are wrong.
    """

    words: tuple[str, ...]
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Reporter], int]

    @property
    def name(self) -> str:
        return " ".join(self.words)


def command_parser(
    commands: Sequence[Command], *, prog: str, groups: dict[str, str], version: str
) -> Parser:
    """A parser that leaves the chosen command in ``args.command``.

    ``groups`` says what the first word of a command of several words is about.
    """
    parser = Parser(prog=prog, description="Conduit, an experience data plane: tools")
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(command=None)
    top = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    inner: dict[str, argparse._SubParsersAction[Parser]] = {}
    for command in commands:
        under = top
        for word in command.words[:-1]:
            if word not in inner:
                group = top.add_parser(word, help=groups[word], description=groups[word])
                inner[word] = group.add_subparsers(
                    title="commands", metavar="COMMAND", required=True
                )
            under = inner[word]
        made = under.add_parser(command.words[-1], help=command.help, description=command.help)
        command.add_arguments(made)
        add_json(made)
        made.set_defaults(command=command)
    return parser
