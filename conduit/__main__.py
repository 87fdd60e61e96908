"""``python -m conduit COMMAND``, alone or under torchrun."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import conduit
from conduit.errors import CapacityError, ConduitError, SchemaError
from conduit.tools import inspect, probe, trace
from conduit.tools.arguments import UsageError
from conduit.tools.bench import delivery, exchange, overlap, sample, tiers
from conduit.tools.command import Command, command_parser
from conduit.tools.job import leads
from conduit.tools.output import Reporter, reserved_stdout

COMMANDS: tuple[Command, ...] = (
    sample.COMMAND, delivery.COMMAND, exchange.COMMAND, overlap.COMMAND, tiers.COMMAND,
    inspect.COMMAND, probe.COMMAND, trace.COMMAND,
)
GROUPS = {"bench": "measure a part beside its floor and beside peers"}

FINE, WRONG, BAD_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Only the first rank prints, except for errors that
    ranks may meet alone."""
    first = leads()
    with contextlib.ExitStack() as stack:
        if not first:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        try:
            return _run(argv, first)
        except UsageError as error:
            if first:
                print(f"conduit: {error}", file=sys.stderr)
            return BAD_USAGE
        except ConduitError as error:
            print(f"conduit: {error}", file=sys.stderr)
            return BAD_USAGE if isinstance(error, (CapacityError, SchemaError)) else WRONG


def _run(argv: Sequence[str] | None, first: bool) -> int:
    parser = command_parser(
        COMMANDS, prog="conduit", groups=GROUPS, version=f"conduit {conduit.__version__}"
    )
    try:
        args = parser.parse_args(_without_separator(sys.argv[1:] if argv is None else argv))
    except SystemExit as stop:  # --help and --version have printed what they are for
        return int(stop.code or FINE)
    command: Command = args.command
    shown = {name: value for name, value in vars(args).items() if name not in ("command", "json")}
    report = Reporter(command=command.name, args=shown, target=args.json, leads=first)
    with reserved_stdout(args.json == "-"):
        status = command.run(args, report)
    report.write()
    return status


def _without_separator(argv: Sequence[str]) -> Sequence[str]:
    """``-- COMMAND ...`` is ``COMMAND ...``: torchrun needs the -- to leave options such as --max,
    which begin like its own, to the program, and passes it on."""
    return argv[1:] if argv and argv[0] == "--" else argv


if __name__ == "__main__":
    sys.exit(main())
