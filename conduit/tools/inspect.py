"""``inspect``: what files of rows hold, and which of them dead jobs have left behind."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from conduit.tiers.files import RowFileInfo, found_in, info_of, remove_dead
from conduit.tiers.shared import SHM
from conduit.tools.arguments import UsageError
from conduit.tools.command import Command
from conduit.tools.environment import Environment
from conduit.tools.job import leads
from conduit.tools.output import Column, Reporter, Result, Table

__all__ = ["COMMAND"]

_OWNER = (Column(key="job"), Column(key="plane"), Column(key="rank"), Column(key="tier"))
_HASH = Column(key="schema_hash", title="schema hash")
LISTED = (
    Column(key="path"), *_OWNER, Column(key="bytes", form=","), Column(key="alive"), _HASH,
    Column(key="removed"),
)
VERIFIED = (
    Column(key="part"), *_OWNER, Column(key="rows", form=","), Column(key="bytes", form=","),
    Column(key="alive"), _HASH, Column(key="ok"),
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a file of rows")
    parser.add_argument("--shared", action="store_true",
                        help=f"list the files of rows in {SHM} and in the folders given")
    parser.add_argument("--folder", nargs="+", action="extend", default=[], metavar="DIR",
                        help="with --shared: look there too, as for tiers on disks")
    parser.add_argument("--remove", action="store_true",
                        help="with --shared: remove those of dead jobs")


def _run(args: argparse.Namespace, report: Reporter) -> int:
    if args.shared == bool(args.paths):
        raise UsageError("name files of rows, or list those that there are with --shared")
    if not args.shared and (args.folder or args.remove):
        raise UsageError("--folder and --remove go with --shared")
    for folder in args.folder:
        if not Path(folder).is_dir():
            raise UsageError(f"cannot look into {folder!r}: name a folder that exists")
    for path in args.paths:
        if not Path(path).is_file():
            raise UsageError(f"cannot read {path!r}: name a file that exists")
    if not leads():
        return 0
    here = Environment.here(world=1, hosts=1, device="cpu", backend="none")
    if args.shared:
        report.begin(here, ["alive: the process that made the file still runs"])
        return _list(args.folder, args.remove, report)
    report.begin(here, ["rows: room for so many, used or not"])
    return _verify(args.paths, report)


def _list(folders: Sequence[str], remove: bool, report: Reporter) -> int:
    results, status = [], 0
    for info in _all_in([SHM, *map(Path, folders)]):
        removed = False
        if remove:
            try:
                removed = remove_dead(info)
            except OSError as error:
                report.note(f"cannot remove {info.path}: {error.strerror}")
                status = 1
        results.append({"path": str(info.path), **_told(info), "removed": removed})
    gone = [result for result in results if result["removed"]]
    for result in gone:
        report.note(f"removed {result['path']}")
    if remove and not gone:
        report.note("removed nothing")
    _finish(report, LISTED, results)
    return status


def _all_in(folders: Sequence[Path]) -> Iterator[RowFileInfo]:
    """The files in these folders, of which several may be the same one."""
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        yield from found_in(folder)


def _verify(paths: Sequence[str], report: Reporter) -> int:
    results: list[Result] = []
    for path in paths:
        info = info_of(Path(path))
        if info is None:
            report.note(f"{path} is no file of rows, or this user may not read it")
            results.append({"part": path, "rows": None, "bytes": Path(path).stat().st_size,
                            "schema_hash": None, "ok": False})
            continue
        if not info.whole:
            report.note(f"{path} is not whole: something is missing at its end")
        rows = info.segments * info.header["segment_rows"]
        results.append({"part": path, "rows": rows, **_told(info), "ok": info.whole})
    _finish(report, VERIFIED, results)
    return 0 if all(result["ok"] for result in results) else 1


def _told(info: RowFileInfo) -> dict[str, object]:
    header = info.header
    return {
        "job": header["job"], "plane": header["plane"], "rank": header["rank"],
        "tier": header["tier"], "bytes": info.nbytes, "alive": info.alive,
        "schema_hash": f"{header['schema']:016x}",
    }


def _finish(report: Reporter, columns: Sequence[Column], results: Sequence[Result]) -> None:
    """In the table words for what is true or false; JSON has both."""
    shown = [
        {key: ("yes" if value else "no") if isinstance(value, bool) else value
         for key, value in result.items()} for result in results
    ]
    report.finish(results, Table(columns=columns, results=shown))


COMMAND = Command(
    words=("inspect",), help="what files of rows hold, and which of them dead jobs have left",
    add_arguments=_add_arguments, run=_run,
)
