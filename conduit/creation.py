"""Making a plane: each rank's part, and the first exchange, in which all say that they could."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from conduit.collectives.choice import open_exchanges
from conduit.collectives.control import FINGERPRINT, Control, Operation
from conduit.collectives.exchange import RowExchange
from conduit.collectives.live import LiveLinks
from conduit.collectives.probe import links_at_start
from conduit.collectives.watch import raise_missing
from conduit.collectives.world import TRANSPORT_ERRORS, World
from conduit.configuration import Configuration
from conduit.edp.directory import Directory
from conduit.edp.routing import typical_moves
from conduit.errors import DesyncError, SchemaError, WorldError
from conduit.schema import Schema
from conduit.tiers.budgets import NO_STOCK, Budget, budgets, most_that_fits, refuse, stock
from conduit.tiers.files import Owner
from conduit.tiers.opening import open_store
from conduit.tiers.shard import Shard
from conduit.tiers.step_shard import StepShard
from conduit.tiers.tier import Ring

__all__ = ["Created", "create"]


class Created(NamedTuple):
    """What ranks make together: the exchanges are for batches, for late rows, and for what goes to
    its holder."""

    world: World
    configuration: Configuration
    shard: Shard | StepShard
    directory: Directory
    control: Control
    links: LiveLinks
    exchanges: Sequence[RowExchange]


def create(world: World, checked: Callable[[World], Configuration]) -> Created:
    """Collective. Makes the parts of a plane with the configuration ``checked``, or raises what is
    wrong with it, on this rank or on another, and gives everything back, the world too."""
    with contextlib.ExitStack() as undo:
        undo.callback(world.close)
        fingerprint = dict.fromkeys(FINGERPRINT, 0)
        configuration: Configuration | None = None
        shard: Shard | StepShard | None = None
        problem: Exception | None = None
        seen = NO_STOCK
        # A rank whose arguments are bad still takes part in the first exchange, so that the others
        # learn of it there instead of waiting for it.
        try:
            configuration = checked(world)
            fingerprint = configuration.fingerprint()
            seen = stock(configuration.tiers, world.device)
        except Exception as error:  # a policy of the user's can raise anything
            problem = error
        stocks = _told_by_all(world, seen)
        if configuration is not None and not (stocks[:, 0] == NO_STOCK[0]).any():
            try:
                shard = _make_shard(configuration, world, stocks)
                undo.callback(shard.close)
                directory = Directory(capacity=configuration.capacity, ranks=world.size)
            except Exception as error:
                problem = error
        control = Control(world, fingerprint)
        _create_together(control, world, configuration, problem)
        assert configuration is not None and shard is not None
        control.decisions.decide("NCCL group", "the job's" if world.borrowed else "own")
        links = LiveLinks(links_at_start(world))
        exchanges = open_exchanges(
            world, configuration.batches.row_bytes, count=3, decisions=control.decisions,
            trial_rows=typical_moves(
                configuration.routing, configuration.batch_size, world.size
            ),
            observe=links.observed,
        )
        undo.pop_all()
        return Created(world, configuration, shard, directory, control, links, exchanges)


def _create_together(
    control: Control, world: World, configuration: Configuration | None, problem: Exception | None
) -> None:
    """Collective. Raises ``problem``, what went wrong on this rank; WorldError if something did on
    another; SchemaError or DesyncError, saying what each gave, if their arguments differ.
    """
    if world.size == 1:
        if problem is not None:
            raise problem
        return
    try:
        control.exchange(Operation.CREATE, failed=problem is not None)
    except WorldError:
        if problem is not None:
            raise problem from None
        raise
    except DesyncError as error:
        # All ranks come here together, so they can tell each other more.
        assert configuration is not None
        if error.field == "schema":
            _refuse_schemas(control, world, configuration.given.schema)
        if error.field in FINGERPRINT:
            _refuse_arguments(control, world, configuration, error)
        raise


def _refuse_schemas(control: Control, world: World, schema: Schema) -> NoReturn:
    """Collective. Says in which fields the ranks' schemas differ."""
    mine = schema.field_texts
    for peer, text in enumerate(control.gather_text(schema.description)):
        theirs = Schema.from_description(text).field_texts
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                raise SchemaError(
                    f"{world.told([peer])} has another schema", rank=world.rank, field=key,
                    expected=f"{mine.get(key, 'no such field')} as here",
                    got=theirs.get(key, "no such field"),
                    cure="Give every rank the same example",
                ) from None
    raise SchemaError(
        "other ranks have different schemas", rank=world.rank,
        cure="Give every rank the same example",
    ) from None


def _refuse_arguments(
    control: Control, world: World, configuration: Configuration, error: DesyncError
) -> NoReturn:
    """Collective. Says which rank gave which argument."""
    field = str(error.field)
    ranks: dict[str, list[int]] = {}
    for peer, text in enumerate(control.gather_text(configuration.told(field))):
        ranks.setdefault(text, []).append(peer)
    raise DesyncError(
        f"ranks disagree on {field}", rank=world.rank, field=field,
        expected="one value on all ranks",
        got="; ".join(f"{text} on {world.told(who)}" for text, who in ranks.items()),
        cure=error.cure,
    ) from None


def _told_by_all(world: World, mine: NDArray[np.int64]) -> NDArray[np.int64]:
    """Collective. Every rank's integers, ``[ranks, len(mine)]``; TimeoutError or WorldError naming
    the ranks that did not come."""
    try:
        return world.gather(mine)
    except TRANSPORT_ERRORS as error:
        raise_missing(world, "making the plane", error)


def _make_shard(
    configuration: Configuration, world: World, stocks: NDArray[np.int64]
) -> Shard | StepShard:
    """This rank's shard, within its budgets. ``stocks`` is what all ranks saw of their memory."""
    layout, rank = configuration.layout, world.rank

    def fits(capacity: int) -> tuple[list[Budget], Ring, bool]:
        """This rank's budgets and ring for so many rows, and whether the one holds the other."""
        wanted = configuration.ring_rows(capacity).tolist()
        rings = [Ring.of(layout, rows, world.device) for rows in wanted]
        ring = rings[rank]
        found = budgets(
            configuration.tiers, stocks, np.array([ring.nbytes for ring in rings]), rank,
            world.hosts == world.hosts[rank],
        )
        room = sum(budget.usable_bytes // ring.segment_bytes for budget in found)
        return found, ring, room >= ring.segments

    found, ring, fitting = fits(configuration.capacity)
    if not fitting:
        most = most_that_fits(lambda rows: fits(rows)[2], configuration.capacity)
        raise refuse(found, ring.nbytes, f"The largest capacity that fits this rank is {most:,} "
                     f"rows ({layout.row_bytes:,} bytes each)")
    store = open_store(ring, found, Owner.here(configuration.name, rank))
    quota_rows, staging_rows = int(configuration.quotas[rank]), configuration.staging_rows
    steps = configuration.steps
    if steps is None:
        return Shard(layout, store, quota_rows=quota_rows, staging_rows=staging_rows)
    return StepShard(
        steps.delivered, store, steps.window, steps.columns, quota_rows=quota_rows,
        staging_rows=staging_rows, episode_steps=steps.steps.episode_steps, rewards=steps.rewards,
    )
