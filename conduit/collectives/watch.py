"""Who is missing: names the ranks that did not come to a collective that failed.

A Gloo collective that times out or breaks does not say because of whom. Then every rank that is
still there sends each other rank one integer over the watch group, which nothing else uses, and
waits a short while for theirs. Whoever does not answer is *late* (its connection is open) or *gone*
(its connection is closed). The failure of one rank closes its control connections, so that the
others come here at about the same time; no store and no special rank is needed.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from conduit.collectives.world import TRANSPORT_ERRORS, World
from conduit.errors import TimeoutError, WorldError

__all__ = ["BrokenCallError", "raise_broken", "raise_missing"]

_GRACE = timedelta(seconds=3)
_CLOSED = ("closed by peer", "reset by peer", "BrokenCallError pipe", "refused")


class BrokenCallError(RuntimeError):
    """A call failed away from the training thread, which alone can find out who is missing."""

    def __init__(self, call: str, cause: Exception) -> None:
        super().__init__(f"{call}: {cause}")
        self.call, self.cause = call, cause


def raise_broken(world: World, call: str, cause: Exception) -> NoReturn:
    """In place of :func:`raise_missing` where another thread may use the watch group."""
    raise BrokenCallError(call, cause) from cause


def raise_missing(world: World, call: str, cause: Exception) -> NoReturn:
    """Raises TimeoutError naming the late ranks or WorldError naming those gone."""
    late, gone = _missing(world)
    others = world.size - 1
    if len(gone) == others:
        raise WorldError(
            f"all other ranks are gone in {call}", rank=world.rank,
            cure="Either they ended or failed (see what they printed), or this rank came after "
            f"their deadline of {world.timeout.total_seconds():g} s",
        ) from cause
    if gone:
        raise WorldError(
            f"lost {world.told(gone)} in {call}", rank=world.rank,
            cure="A process ended or was killed: see its log. Restart the job",
        ) from cause
    if late:
        raise TimeoutError(
            f"{world.told(late)} did not come to {call}", rank=world.rank,
            expected=f"all ranks within {world.timeout.total_seconds():g} s",
            got=f"nothing from {world.told(late)}",
            cure="Make the same collective calls on every rank; if a rank is slow for a reason, "
            "give the plane a longer timeout",
        ) from cause
    raise WorldError(
        f"{call} failed although all ranks answer", rank=world.rank,
        cure=f"The transport said: {str(cause).splitlines()[0]}",
    ) from cause


def _missing(world: World) -> tuple[list[int], list[int]]:
    """Ranks that are late, and ranks that are gone."""
    note = torch.tensor([world.rank], device="cpu")
    late: list[int] = []
    gone: list[int] = []
    waits: dict[int, tuple[torch.Tensor, dist.Work]] = {}
    sends = []
    for peer in range(world.size):
        if peer == world.rank:
            continue
        try:
            got = torch.zeros_like(note)
            wait = dist.irecv(got, group=world.watch, group_src=peer)
            assert wait is not None
            waits[peer] = (got, wait)
            sends.append(dist.isend(note, group=world.watch, group_dst=peer))
        except TRANSPORT_ERRORS:
            gone.append(peer)
            waits.pop(peer, None)
    deadline = time.monotonic() + _GRACE.total_seconds()
    for peer, (_, wait) in waits.items():
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:
            wait.wait(left)
        except TRANSPORT_ERRORS as error:
            closed = any(word in str(error) for word in _CLOSED)
            (gone if closed else late).append(peer)
    return sorted(late), sorted(gone)
