"""What a plane is made of: its arguments, checked, and their fingerprint."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conduit.edp.ingestion import Ingestion
from conduit.edp.placement import Balanced, Placement, checked_quotas
from conduit.edp.routing import ROUTINGS
from conduit.edp.steps import StepFormat, Steps
from conduit.errors import CapacityError, WorldError
from conduit.schema import RowLayout, Rows, Schema
from conduit.tiers.shard import ring_rows
from conduit.tiers.specification import Memory, checked_tiers, parse_bytes
from conduit.windows import BatchLayout

__all__ = ["Configuration", "chosen_device"]

@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Arguments of a plane that must be equal on all ranks, as integers where they are counted.

    ``given`` is the layout of rows as users hand them in, ``layout`` of those stored, ``batches``
    of those delivered; where rows are steps ``steps`` is their format. ``quotas`` are the rows that
    each rank may hold, int64 ``[ranks]``.
    """

    given: RowLayout
    layout: RowLayout
    batches: BatchLayout
    steps: StepFormat | None
    capacity: int
    batch_size: int
    quotas: NDArray[np.int64]
    staging_rows: int
    routing: str
    max_staleness: int
    min_size: int
    seed: int
    name: str
    overlap: bool
    tiers: tuple[Memory, ...]
    placement: Placement
    ingestion: Ingestion

    @classmethod
    def checked(
        cls, example: Rows | Schema, *, ranks: int, rank: int, capacity: int | str,
        batch_size: int, ingestion: Ingestion | None, placement: Placement | None, routing: str,
        max_staleness: int, min_size: int, seed: int, name: str, overlap: bool, tiers: Any,
        device: torch.device,
    ) -> Configuration:
        """The configuration, or SchemaError, CapacityError or WorldError for what is wrong."""
        if routing not in ROUTINGS:
            raise WorldError(
                "unknown routing", rank=rank, got=repr(routing),
                expected=" or ".join(map(repr, ROUTINGS)),
            )
        batch_size = _integer("batch_size", batch_size, least=1, rank=rank)
        min_size = _integer("min_size", min_size, least=0, rank=rank)
        max_staleness = _integer("max_staleness", max_staleness, least=0, rank=rank)
        seed = _integer("seed", seed, least=None, rank=rank)
        if not isinstance(name, str):
            raise WorldError("name is no string", rank=rank, got=repr(name))
        if not isinstance(overlap, bool):
            raise WorldError("overlap is out of range", rank=rank, got=repr(overlap),
                             expected="True or False")
        schema = example if isinstance(example, Schema) else Schema.from_example(example)
        given = RowLayout(schema)
        steps = ingestion.format(schema) if isinstance(ingestion, Steps) else None
        layout = given if steps is None else steps.stored
        rows = _rows(capacity, layout.row_bytes)
        if min_size > rows:
            raise CapacityError(
                "min_size can never be reached", rank=rank, expected=f"at most {rows} rows",
                got=min_size,
            )
        placement = placement or Balanced()
        quotas = checked_quotas(placement, capacity=rows, ranks=ranks)
        if ingestion is not None and not isinstance(ingestion, Ingestion):
            raise WorldError("ingestion is out of range", rank=rank, got=repr(ingestion),
                             expected="conduit.Ingestion(...) or conduit.Steps(...)")
        ingestion = ingestion or Ingestion()
        staging_rows = ingestion.rows(capacity=rows, ranks=ranks)
        return cls(
            given=given, layout=layout, batches=given if steps is None else steps.delivered,
            steps=steps, capacity=rows, batch_size=batch_size, quotas=quotas,
            staging_rows=staging_rows, routing=routing, max_staleness=max_staleness,
            min_size=min_size, seed=seed, name=name, overlap=overlap,
            tiers=checked_tiers(tiers, device), placement=placement, ingestion=ingestion,
        )

    def ring_rows(self, capacity: int) -> NDArray[np.int64]:
        """Slots that each rank needs for a buffer of ``capacity`` rows, int64 ``[ranks]``."""
        ranks = len(self.quotas)
        quotas = checked_quotas(self.placement, capacity=capacity, ranks=ranks)
        staging_rows = self.ingestion.rows(capacity=capacity, ranks=ranks)
        if self.steps is not None:
            return self.steps.ring_rows(quotas, staging_rows)
        return ring_rows(quotas, staging_rows)

    def fingerprint(self) -> dict[str, int]:
        """One integer for everything that ranks must have in common."""
        return {
            "batch_size": self.batch_size, "capacity": self.capacity,
            "schema": self.given.schema.hash, "seed": _hash(self.seed),
            "routing": ROUTINGS.index(self.routing), "max_staleness": self.max_staleness,
            "min_size": self.min_size, "placement": _hash(self.quotas.tolist()),
            "staging": self.staging_rows, "steps": _hash(self._told_steps),
            "name": _hash(self.name), "overlap": int(self.overlap),
            # Ranks may have disks at different paths.
            "tiers": _hash([(tier.name, tier.size) for tier in self.tiers]),
        }

    @property
    def _told_steps(self) -> str:
        return "none" if self.steps is None else str(self.steps.window)

    def told(self, field: str) -> str:
        """What this rank has for a part of the fingerprint, for people."""
        values = {
            "schema": self.given.schema.description, "placement": self.quotas.tolist(),
            "staging": self.staging_rows, "steps": self._told_steps,
        }
        return repr(values[field] if field in values else getattr(self, field))


def _integer(argument: str, value: Any, *, least: int | None, rank: int) -> int:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):
        raise WorldError(
            f"{argument} is out of range", rank=rank, got=repr(value),
            expected="an integer" if least is None else f"an integer of at least {least}",
        )
    return int(value)


def chosen_device(device: torch.device | str | None) -> torch.device:
    """The device to use: CPU unless told otherwise; CUDA always with its number."""
    try:
        chosen = torch.device(device if device is not None else "cpu")
    except (RuntimeError, TypeError) as error:
        raise WorldError("this is no device", expected="cpu or cuda", got=repr(device)) from error
    if chosen.type not in ("cpu", "cuda"):
        raise WorldError("rows cannot lie on this device", expected="cpu or cuda", got=chosen)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise WorldError("rows cannot lie on this device", expected="cpu", got=chosen,
                         cure="This process sees no GPU that torch can use")
    if chosen.type == "cuda" and chosen.index is None:
        # Under torchrun each rank has a GPU of its own, unless it was shown only that one.
        index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
        in_range = index < torch.cuda.device_count()
        chosen = torch.device("cuda", index if in_range else torch.cuda.current_device())
    return chosen


def _rows(capacity: int | str, row_bytes: int) -> int:
    """``capacity`` in rows: an integer is rows, a string such as "64GB" or "512MiB" bytes."""
    rows: int | None
    if isinstance(capacity, str):
        nbytes = parse_bytes(capacity)
        rows = None if nbytes is None else nbytes // row_bytes
    else:
        rows = capacity
    if not isinstance(rows, (int, np.integer)) or isinstance(rows, bool):
        raise CapacityError(
            "capacity is not understood", got=repr(capacity),
            expected="rows as an integer, or bytes such as '64GB'",
        )
    if rows < 1:
        raise CapacityError(
            "capacity holds no row", got=repr(capacity),
            expected=f"at least 1 row ({row_bytes} bytes)",
        )
    return int(rows)


def _hash(value: object) -> int:
    digest = hashlib.sha256(repr(value).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
