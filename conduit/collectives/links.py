"""The link matrix: what the links between ranks were measured to carry, equal on all ranks.

Integers only, gathered from whoever measured them, so that whatever is planned from them comes out
the same everywhere. A file holds the figures that were measured; those of other pairs are worked
out from them, the same way each time.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from conduit.errors import WorldError

__all__ = ["Capacity", "Copy", "Gpu", "Link", "LinkMatrix", "middle"]

FORMAT, VERSION = "conduit links", 1

_SHOWN_RANKS = 8

Figures = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two ranks: the median of its repetitions, and the distance of the
    highest from the lowest in thousandths of it. ``latency_ns`` is of a small message, one way."""

    source: int
    target: int
    bytes_per_s: int
    latency_ns: int
    spread_per_mille: int


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a host sends and receives with all of its ranks, to and from several other hosts.

    ``at_least``: the other hosts may not have been able to take, or give, more than that.
    """

    egress_bytes_per_s: int
    ingress_bytes_per_s: int
    egress_at_least: bool
    ingress_at_least: bool
    egress_spread_per_mille: int
    ingress_spread_per_mille: int


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What one rank copies from one kind of memory to another (``host``, ``pinned``, ``device``),
    or, as ``gather``, picks rows from it."""

    rank: int
    source: str
    target: str
    operation: str
    bytes_per_s: int
    latency_ns: int
    spread_per_mille: int


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a rank's GPU is connected by, as NVML has it; -1 where it does not say.

    ``nvlinks`` counts the links that are up, ``readable`` the process's other GPUs whose memory it
    can read.
    """

    rank: int
    nvlinks: int
    pcie_generation: int
    pcie_width: int
    numa_node: int
    readable: int


@dataclass(frozen=True, kw_only=True)
class LinkMatrix:
    """Measured links of ranks on ``hosts`` (``hosts[r]``: the host of rank r, from 0).

    ``links`` are the pairs that were measured, ``capacities`` is by host and empty where there is
    one host. ``bandwidth`` and the others are int64 ``[ranks, ranks]``, source by target, with 0
    on the diagonal; see ``measured`` for which entries are figures of their own.
    """

    hosts: tuple[int, ...]
    links: tuple[Link, ...] = ()
    capacities: tuple[Capacity, ...] = ()
    copies: tuple[Copy, ...] = ()
    gpus: tuple[Gpu, ...] = ()

    @cached_property
    def measured(self) -> NDArray[np.bool_]:
        """``[ranks, ranks]``: True for measured pairs. Others between hosts have the median of
        what their two hosts have, or the lower of egress and ingress; else of all pairs of their
        class (within a host, between hosts)."""
        found = np.zeros((len(self.hosts), len(self.hosts)), dtype=np.bool_)
        for link in self.links:
            found[link.source, link.target] = True
        return found

    @cached_property
    def bandwidth(self) -> Figures:
        """Bytes per second."""
        unknown = [0] * (max(self.hosts) + 1)
        egress = np.array([found.egress_bytes_per_s for found in self.capacities] or unknown)
        ingress = np.array([found.ingress_bytes_per_s for found in self.capacities] or unknown)
        return self._filled("bytes_per_s", np.minimum(egress[:, None], ingress))

    @cached_property
    def latency_ns(self) -> Figures:
        return self._filled("latency_ns")

    @cached_property
    def spread_per_mille(self) -> Figures:
        return self._filled("spread_per_mille")

    def _filled(self, name: str, between: Figures | None = None) -> Figures:
        """The figure ``name`` of every pair: its own, or that of pairs like it. ``between``
        (``[hosts, hosts]``) is for hosts between which nothing was measured."""
        count = max(self.hosts) + 1
        by_hosts: dict[tuple[int, int], list[int]] = {}
        classes: tuple[list[int], list[int]] = ([], [])
        for link in self.links:
            a, b = self.hosts[link.source], self.hosts[link.target]
            by_hosts.setdefault((a, b), []).append(getattr(link, name))
            classes[a != b].append(getattr(link, name))
        likely = np.full((count, count), middle(classes[1])) if between is None else between
        np.fill_diagonal(likely, middle(classes[0]))
        for pair, figures in by_hosts.items():
            likely[pair] = middle(figures)
        hosts = np.array(self.hosts)
        found: Figures = likely[hosts[:, None], hosts]
        for link in self.links:
            found[link.source, link.target] = getattr(link, name)
        np.fill_diagonal(found, 0)
        found.setflags(write=False)
        return found

    def table(self) -> str:
        """For people: hosts with what they carry, ranks only if there are few."""
        lines = [
            f"{len(self.hosts)} rank(s) on {max(self.hosts) + 1} host(s), "
            f"{len(self.links)} links measured"
        ]
        if self.capacities:
            lines.append(f"{'host':>6}  {'ranks':>5}  {'egress GB/s':>16}  {'ingress GB/s':>16}")
        for host, found in enumerate(self.capacities):
            egress = _shown(found.egress_bytes_per_s, found.egress_at_least)
            ingress = _shown(found.ingress_bytes_per_s, found.ingress_at_least)
            ranks = self.hosts.count(host)
            lines.append(f"{host:>6}  {ranks:>5}  {egress:>16}  {ingress:>16}")
        if 1 < len(self.hosts) <= _SHOWN_RANKS:
            numbers = range(len(self.hosts))
            lines.append("GB/s from rank (down) to rank (across); ~ worked out, not measured")
            lines.append(" " * 6 + "".join(f"{rank:>10}" for rank in numbers))
            for a in numbers:
                cells = ["-" if a == b else ("" if self.measured[a, b] else "~") +
                         _shown(int(self.bandwidth[a, b]), False) for b in numbers]
                lines.append(f"{a:>6}" + "".join(f"{cell:>10}" for cell in cells))
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """What ``save`` writes: the measured figures, of tuples, strings and integers."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes a JSON file, all of it or nothing. Raises OSError, also for a path that is there
        and no plain file."""
        target = Path(path)
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is no plain file", str(target))
        unfinished = target.with_name(target.name + ".unfinished")
        unfinished.write_text(json.dumps(self.as_dict()) + "\n")
        unfinished.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> LinkMatrix:
        """Reads what ``save`` wrote. Raises OSError if it cannot be read, WorldError if it is not
        that, or does not fit together."""
        try:
            found = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
            raise _refused(path, f"it is no JSON: {error}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise _refused(path, f"it has no format {FORMAT!r}")
        if found.get("version") != VERSION:
            raise _refused(path, f"its version is {found.get('version')!r}, not {VERSION}")
        try:
            return cls._from(found)
        except (KeyError, TypeError, ValueError) as error:
            raise _refused(path, str(error)) from error

    @classmethod
    def _from(cls, found: dict[str, Any]) -> LinkMatrix:
        hosts = found["hosts"]
        if not isinstance(hosts, list) or any(type(host) is not int for host in hosts):
            raise ValueError("hosts are no list of integers")
        if not hosts or sorted(set(hosts)) != list(range(len(set(hosts)))):
            raise ValueError("hosts are not numbered from 0")
        matrix = cls(
            hosts=tuple(hosts), links=_all(Link, found["links"]),
            capacities=_all(Capacity, found["capacities"]), copies=_all(Copy, found["copies"]),
            gpus=_all(Gpu, found["gpus"]),
        )
        ranks = {link.source for link in matrix.links} | {link.target for link in matrix.links}
        ranks |= {copy.rank for copy in matrix.copies} | {gpu.rank for gpu in matrix.gpus}
        if ranks and not 0 <= min(ranks) <= max(ranks) < len(hosts):
            raise ValueError(f"it has {len(hosts)} ranks, and figures of others")
        pairs = [(link.source, link.target) for link in matrix.links]
        if len(set(pairs)) != len(pairs) or any(source == target for source, target in pairs):
            raise ValueError("a link is there twice, or from a rank to itself")
        if len(matrix.capacities) != (max(hosts) + 1 if max(hosts) else 0):
            raise ValueError("it has not one capacity for each host")
        return matrix


def middle(figures: Sequence[int]) -> int:
    """The lower median; 0 of none."""
    return sorted(figures)[(len(figures) - 1) // 2] if figures else 0


def _all(kind: type[T], found: Any) -> tuple[T, ...]:
    """Objects of ``kind`` from what a file says of them: its fields exactly, of its types."""
    if not isinstance(found, list):
        raise ValueError(f"the figures of kind {kind.__name__} are no list")
    types = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    for item in found:
        if not isinstance(item, dict) or item.keys() != types.keys():
            raise ValueError(f"a {kind.__name__} has other fields than {', '.join(types)}")
        for name, value in item.items():
            if type(value).__name__ != types[name]:
                raise ValueError(f"{name} of a {kind.__name__} is {value!r}, not {types[name]}")
            if type(value) is int and not (-1 if kind is Gpu else 0) <= value < 2**63:
                raise ValueError(f"{name} of a {kind.__name__} is {value!r}: out of range")
    return tuple(kind(**item) for item in found)


def _refused(path: str | Path, reason: str) -> WorldError:
    return WorldError(
        f"{str(path)!r} is no file of measured links", got=reason,
        expected="what LinkMatrix.save writes",
        cure="Measure again: python -m conduit probe --save FILE, under torchrun",
    )


def _shown(bytes_per_s: int, at_least: bool) -> str:
    figure = bytes_per_s / 1e9
    digits = max(2 - math.floor(math.log10(figure)), 0) if figure > 0 else 0
    return ("at least " if at_least else "") + f"{figure:.{min(digits, 6)}f}"
