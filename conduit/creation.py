"""Making a plane: each rank's part, and the first exchange, in which all say that they could."""

from __future__ import annotations

from typing import NoReturn

from conduit.collectives.control import FINGERPRINT, Control, Operation
from conduit.collectives.world import World
from conduit.configuration import Configuration
from conduit.errors import DesyncError, SchemaError, WorldError
from conduit.schema import Schema
from conduit.tiers.memory import MemoryTier
from conduit.tiers.shard import Shard, ring_rows

__all__ = ["create_together", "make_shard"]


def create_together(
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
            _refuse_schemas(control, world, configuration.layout.schema)
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


def make_shard(configuration: Configuration, world: World) -> Shard:
    """This rank's shard."""
    layout, staging_rows = configuration.layout, configuration.staging_rows
    rows = ring_rows(configuration.quotas, staging_rows)
    tier = MemoryTier(
        layout, rows=int(rows[world.rank]), all_rows=int(rows[world.memory_sharers].sum()),
        device=world.device,
    )
    quota_rows = int(configuration.quotas[world.rank])
    return Shard(layout, tier, quota_rows=quota_rows, staging_rows=staging_rows)
