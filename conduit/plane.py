"""ExperiencePlane: one logical experience buffer over all ranks of a job."""

from __future__ import annotations

import hashlib
import re
import time
import zlib
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from conduit.collectives.control import FINGERPRINT, Control, Operation
from conduit.collectives.exchange import RowExchange
from conduit.collectives.world import World
from conduit.edp.delivery import Delivery, Replay
from conduit.edp.directory import Directory
from conduit.edp.draws import UniformDraws
from conduit.edp.ingestion import Commit, Ingestion, plan_commit
from conduit.edp.placement import Balanced, Placement, checked_quotas
from conduit.edp.routing import ROUTINGS
from conduit.errors import (
    CapacityError,
    ConduitError,
    DesyncError,
    EmptyError,
    SchemaError,
    WorldError,
)
from conduit.metrics import Counters, Report
from conduit.sched.batch import BatchMaker
from conduit.sched.slabs import SlabPool
from conduit.schema import RowLayout, Rows, Schema
from conduit.tiers.memory import MemoryTier
from conduit.tiers.shard import Shard, ring_rows

__all__ = ["ExperiencePlane"]

Counts = NDArray[np.int64]
Index = NDArray[np.int64]


class ExperiencePlane:
    """A buffer of the last ``capacity`` rows that the ranks of a job produced.

    Local calls, free to differ between ranks: ``extend``, ``add``, ``len``, ``report``. Collective
    calls, to be made by all ranks in the same order: making the plane, ``sample``, ``flush``,
    ``agree``, ``empty``, ``close``. A plane is used from one thread.

    Args:
        example: one row as a (nested) dict of tensors or a TensorDict without batch size, a
            TensorDict with one batch dimension, or a :class:`Schema`.
        capacity: rows of the whole job, or bytes of the whole job such as ``"64GB"``.
        batch_size: rows that each rank gets from one ``sample``.
        ingestion: bounds of staging.
        placement: how many rows each rank holds.
        routing: ``"exchangeable"`` hands each rank rows of its own shard first and moves only the
            surplus: right for a loss that is a mean over rows. ``"independent"`` gives each rank
            its own share of the draws: for BatchNorm that is not synchronised, per-rank statistics
            and in-batch contrast.
        max_staleness: how many of the last commits a batch may ignore. Deliveries are synchronous
            and ignore none, whatever is allowed.
        min_size: ``sample`` returns None on every rank while the buffer holds fewer rows.
        seed: of the draws.
        device: where rows and batches lie, CPU by default; rows on CUDA move over NCCL.
        group: the ranks that take part, by default all.
        timeout: how long a collective call waits for the other ranks.
        name: tells planes apart in errors, and gives each its own draws.

    Raises:
        SchemaError: the example cannot be stored, or ranks gave different schemas.
        CapacityError: the shard does not fit into memory, or the quotas do not hold ``capacity``.
        DesyncError: ranks gave different arguments.
        WorldError: bad arguments, or another rank failed to make its part.
    """

    def __init__(
        self,
        example: Rows | Schema,
        *,
        capacity: int | str,
        batch_size: int,
        ingestion: Ingestion | None = None,
        placement: Placement | None = None,
        routing: str = "exchangeable",
        max_staleness: int = 0,
        min_size: int = 0,
        seed: int = 0,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = timedelta(minutes=5),
        name: str = "experience",
    ) -> None:
        self._failure: ConduitError | None = None
        self._closed = False
        self._world = World.join(device=_device(device), timeout=timeout, group=group)
        world = self._world
        fingerprint = dict.fromkeys(FINGERPRINT, 0)
        problem: ConduitError | None = None
        # A rank whose arguments are bad still takes part in the first exchange, so that the others
        # learn of it there instead of waiting for it.
        try:
            if routing not in ROUTINGS:
                raise WorldError("unknown routing", rank=world.rank, got=repr(routing),
                                 expected=" or ".join(map(repr, ROUTINGS)))
            for argument, value, least in (("batch_size", batch_size, 1), ("min_size", min_size, 0),
                                           ("max_staleness", max_staleness, 0)):
                if not isinstance(value, int) or value < least:
                    raise WorldError(f"{argument} is out of range", rank=world.rank,
                                     expected=f"an integer of at least {least}", got=repr(value))
            self._schema = _schema(example)
            self._layout = RowLayout(self._schema)
            self._capacity = _rows(capacity, self._layout.row_bytes)
            if min_size > self._capacity:
                raise CapacityError("min_size can never be reached", rank=world.rank,
                                    expected=f"at most {self._capacity} rows", got=min_size)
            self._quotas = checked_quotas(
                placement or Balanced(), capacity=self._capacity, ranks=world.size
            )
            self._staging_rows = (ingestion or Ingestion()).rows(
                capacity=self._capacity, ranks=world.size
            )
            fingerprint = {
                "batch_size": batch_size, "capacity": self._capacity, "schema": self._schema.hash,
                "seed": _hash(seed), "routing": ROUTINGS.index(routing),
                "max_staleness": max_staleness, "min_size": min_size,
                "placement": _hash(self._quotas.tolist()), "staging": self._staging_rows,
                "name": _hash(name),
            }
            quota = int(self._quotas[world.rank])
            tier = MemoryTier(
                self._layout,
                rows=ring_rows(quota, self._staging_rows) + (batch_size if world.size > 1 else 0),
                device=world.device, sharers=world.host_ranks,
            )
            self._shard = Shard(
                self._layout, tier, quota_rows=quota, staging_rows=self._staging_rows
            )
            self._directory = Directory(capacity=self._capacity, ranks=world.size)
        except ConduitError as error:
            problem = error
        self.name = name
        self.batch_size, self.min_size = batch_size, min_size
        self._routing = routing
        self._control = Control(world, fingerprint)
        try:
            self._agree_to_begin(problem)
        except ConduitError as error:
            self._failure = error
            world.close()
            raise
        self._exchange = RowExchange(world, self._layout.row_bytes)
        draws = UniformDraws(seed=seed, name=name, global_rows=batch_size * world.size,
                             capacity=self._capacity)
        self._replay = Replay(
            directory=self._directory, draws=draws, routing=routing, rank=world.rank,
            hosts=world.hosts, batch_rows=batch_size,
        )
        self._slabs = SlabPool(self._layout, batch_size, world.device)
        self._batches = BatchMaker(self._layout.tree, rows=batch_size, device=world.device)
        self._outbox = self._layout.block(0, world.device)
        # The draft, and the slots of its rows.
        self._drafted: tuple[Delivery | None, tuple[Index, Index] | None] = None, None
        # In a world of one: the batches known ahead, and their rows' slots.
        self._known = self._known_slots = np.empty((0, batch_size), dtype=np.int64)
        self._counters = Counters()

    # ---------------------------------------------------------------- local calls

    def extend(self, rows: Rows) -> None:
        """Stages rows: a TensorDict or (nested) dict of tensors ``[n, *shape]``, n of 0 or more.

        They are copied before the call returns and become visible at the next ``sample`` or
        ``flush``. Raises SchemaError or CapacityError, and then stages nothing.
        """
        self._check_open()
        n, values = self._layout.check(rows)
        if n:
            self._shard.stage(values, n)
            self._counters.rows_staged += n

    def add(self, row: Rows) -> None:
        """Stages one row: a TensorDict or (nested) dict of tensors ``[*shape]``."""
        self.extend(self._layout.one_row(row))

    def __len__(self) -> int:
        """Rows of the whole buffer at the last collective call."""
        return self._directory.size

    @property
    def schema(self) -> Schema:
        """Names, dtypes and shapes of a row's fields."""
        return self._schema

    @property
    def capacity(self) -> int:
        """Rows that the whole buffer holds at most."""
        return self._capacity

    @property
    def rank(self) -> int:
        """This rank's number among the plane's ranks."""
        return self._world.rank

    @property
    def ranks(self) -> int:
        """How many ranks share the buffer."""
        return self._world.size

    def report(self) -> Report:
        """What the plane did and what it cost, on this rank."""
        counters, world, exchange = self._counters, self._world, self._exchange
        return Report(
            name=self.name, rank=world.rank, ranks=world.size,
            hosts=len(np.unique(world.hosts)), device=str(world.device), routing=self._routing,
            rows=self._directory.size, capacity=self._capacity,
            row_bytes=self._layout.row_bytes,
            shard_rows=int(self._directory.held[world.rank]),
            shard_bytes=self._shard.tier.nbytes, directory_bytes=self._directory.nbytes,
            samples=counters.samples, commits=counters.commits, fences=counters.fences,
            rows_staged=counters.rows_staged, rows_committed=counters.rows_committed,
            rows_skipped=counters.rows_skipped, rows_sent_home=counters.rows_sent_home,
            rows_delivered=counters.rows_delivered, rows_received=counters.rows_received,
            late_rows=self._replay.late_rows, exchanges=exchange.calls,
            sent_rows=tuple(exchange.sent_rows.tolist()),
            sent_bytes=tuple(exchange.sent_bytes.tolist()),
            received_rows=tuple(exchange.received_rows.tolist()),
            fresh_slabs=self._slabs.fresh, blocked_ms=counters.blocked_ns / 1e6,
        )

    # ----------------------------------------------------------- collective calls

    def sample(self, *, contiguous: bool = False) -> TensorDict | None:
        """Commits what all ranks staged, then delivers this rank's rows of the next global batch.

        Returns a TensorDict of ``batch_size`` rows with the schema's fields, ``"index"`` (int64
        ``[batch_size]``, logical indices) and ``"loss_scale"`` (a float: multiply the mean loss by
        it before ``backward`` under DDP). Rows are in draw order. Fields are strided views: use
        ``reshape`` where ``view`` refuses, or ``contiguous=True`` to have them copied. The batch is
        the caller's to keep. Returns None on every rank while the buffer holds fewer than
        ``min_size`` rows; raises EmptyError on every rank when it holds none and ``min_size`` is 0.
        """
        begun = time.perf_counter_ns()
        self._synchronise(Operation.SAMPLE)
        size = self._directory.size
        if size == 0 and self.min_size == 0:
            raise EmptyError(
                "there are no rows to sample", rank=self.rank,
                cure="extend first on some rank, or give min_size to get None until there are rows",
            )
        batch = None
        if size >= max(self.min_size, 1):
            batch = self._deliver()
            if contiguous:
                batch = batch.clone()
        self._counters.blocked_ns += time.perf_counter_ns() - begun
        return batch

    def flush(self) -> None:
        """Commits what all ranks staged, and delivers nothing."""
        begun = time.perf_counter_ns()
        self._synchronise(Operation.FLUSH)
        self._counters.blocked_ns += time.perf_counter_ns() - begun

    def agree(self, flag: int | bool) -> int:
        """The largest ``flag`` of all ranks, for decisions such as stopping early together."""
        begun = time.perf_counter_ns()
        _, values = self._talk(Operation.AGREE, value=int(flag))
        self._counters.blocked_ns += time.perf_counter_ns() - begun
        return int(values.max())

    def empty(self) -> None:
        """Forgets all rows, staged ones too. Logical indices go on and are never used again."""
        self._talk(Operation.EMPTY)
        self._replay.clear()
        self._directory.clear()
        self._shard.clear()

    def close(self) -> None:
        """Ends the plane on all ranks and frees its memory; batches stay valid.

        May be called again, and after a failure, when it is a local call.
        """
        if self._closed:
            return
        try:
            if self._failure is None and (self._world.size == 1 or dist.is_initialized()):
                self._talk(Operation.CLOSE)
        finally:
            self._free()

    def __enter__(self) -> ExperiencePlane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # On an error the other ranks may never come to a collective: leave them to their deadline.
        if error is None:
            self.close()
        else:
            self._free()

    # ------------------------------------------------------------------- internals

    def _agree_to_begin(self, problem: ConduitError | None) -> None:
        """The first exchange: all ranks could make their part, from equal arguments."""
        world = self._world
        if world.size == 1:
            if problem is not None:
                raise problem
            return
        try:
            self._control.exchange(Operation.CREATE, failed=problem is not None)
        except WorldError:
            if problem is not None:
                raise problem from None
            raise
        except DesyncError as error:
            if error.field == "schema":
                self._refuse_schemas(error)
            raise

    def _refuse_schemas(self, error: DesyncError) -> NoReturn:
        """Says in which fields the ranks' schemas differ. All ranks came here together."""
        texts = self._control.gather_text(self._schema.description)
        mine = self._schema.field_texts
        for peer, text in enumerate(texts):
            theirs = Schema.from_description(text).field_texts
            for key in sorted(mine.keys() | theirs.keys()):
                if mine.get(key) != theirs.get(key):
                    raise SchemaError(
                        f"rank {peer} has another schema", rank=self._world.rank, field=key,
                        expected=f"{mine.get(key, 'no such field')} as here",
                        got=theirs.get(key, "no such field"),
                        cure="Give every rank the same example",
                    ) from error
        raise SchemaError(
            "other ranks have different schemas", rank=self._world.rank,
            cure="Give every rank the same example",
        ) from error

    def _check_open(self) -> None:
        if self._closed or self._failure is not None:
            raise WorldError(
                f"plane {self.name!r} is closed", rank=self._world.rank,
                cure=f"It failed: {self._failure}" if self._failure else "Make a new one",
            ) from self._failure

    def _talk(self, operation: Operation, value: int = 0) -> tuple[Counts, Counts]:
        """One control exchange; a failure is final for the plane."""
        self._begin(operation, value)
        return self._finish()

    def _begin(self, operation: Operation, value: int = 0) -> None:
        self._check_open()
        directory = self._directory
        try:
            self._control.begin(
                operation, staged=self._shard.staged, value=value, directory_end=directory.end,
                directory_state=zlib.crc32(directory.held) if self._world.size > 1 else 0,
            )
        except ConduitError as error:
            self._failure = error
            raise

    def _finish(self) -> tuple[Counts, Counts]:
        try:
            return self._control.finish()
        except ConduitError as error:
            self._failure = error
            raise

    def _synchronise(self, operation: Operation) -> None:
        if self._world.size == 1:
            self._check_open()
            if self._shard.staged:
                self._commit_alone(self._shard.staged)
            return
        self._begin(operation)
        # While the other ranks' records are on their way: the draft of the next batch, which is
        # the batch itself if nothing was staged anywhere.
        draft = self._replay.draft()
        self._drafted = draft, self._slots(draft) if draft is not None else None
        staged, _ = self._finish()
        if np.count_nonzero(staged):
            try:
                self._commit(staged)
            except ConduitError as error:
                self._failure = error
                raise

    def _commit_alone(self, staged: int) -> None:
        """``_commit`` in a world of one, without the arithmetic over ranks."""
        directory, counters = self._directory, self._counters
        skipped = directory.append_alone(staged)
        self._shard.commit_own(
            start=directory.end - staged + skipped, dropped=skipped, begin=directory.begin
        )
        counters.commits += 1
        counters.rows_committed += staged
        counters.rows_skipped += skipped

    def _commit(self, staged: Counts) -> None:
        world, directory, shard = self._world, self._directory, self._shard
        plan = plan_commit(staged, directory, self._quotas)
        occupied = directory.held + plan.dropped + plan.arriving
        if (occupied > self._quotas + self._staging_rows).any():
            self._talk(Operation.FENCE)
            self._counters.fences += 1
        received = self._send_home(plan) if plan.moves else None
        starts = directory.end + plan.skipped + np.cumsum(plan.counts) - plan.counts
        directory.append(
            plan.holders, plan.counts, skipped=plan.skipped, lost=plan.lost,
            arriving=plan.arriving,
        )
        here = plan.holders == world.rank
        shard.commit(
            starts=starts[here], counts=plan.counts[here], own=plan.sources[here] == world.rank,
            received=received, dropped=int(plan.dropped[world.rank]), begin=directory.begin,
        )
        self._counters.commits += 1
        self._counters.rows_committed += int(staged.sum())
        self._counters.rows_skipped += plan.skipped

    def _send_home(self, plan: Commit) -> Tensor:
        """Sends rows beyond this rank's quota to their holders; returns those that came here."""
        rank = self._world.rank
        counts, out_counts = plan.sent_by(rank), plan.received_by(rank)
        outgoing = int(counts.sum())
        first = int(plan.dropped[rank] + plan.kept_by(rank))
        rows = self._shard.outgoing(first=first, rows=outgoing)
        received = self._layout.block(int(out_counts.sum()), self._world.device)
        self._exchange(rows, counts, received, out_counts, what="sending rows home")
        self._counters.rows_sent_home += outgoing
        return received

    def _deliver(self) -> TensorDict:
        delivery = self._replay.deal()
        shard, index = self._shard, delivery.index
        if delivery.block is None:
            slots = self._receive(delivery)
        else:
            if delivery.block is not self._known:
                self._known, self._known_slots = delivery.block, shard.slots(delivery.block)
            slots = self._known_slots[delivery.row]
        slab = self._slabs.take()
        shard.gather(slots, slab.records)
        self._counters.samples += 1
        self._counters.rows_delivered += len(index)
        return self._batches.make(slab.views.fresh(), index, loss_scale=1.0)

    def _slots(self, delivery: Delivery) -> tuple[Index, Index]:
        """Slots of the rows of a delivery in order, those received in the inbox, and of the rows
        that this rank sends."""
        shard, moves = self._shard, delivery.transfers
        assert moves is not None and delivery.send is not None
        incoming = len(moves.receive)
        if incoming == 0:
            slots = shard.slots(delivery.index)
        else:
            own = np.ones(len(delivery.index), dtype=np.bool_)
            own[moves.receive] = False
            slots = np.empty(len(delivery.index), dtype=np.int64)
            slots[own] = shard.slots(delivery.index[own])
            slots[moves.receive] = np.arange(shard.inbox_slot, shard.inbox_slot + incoming)
        return slots, shard.slots(delivery.send) if len(delivery.send) else delivery.send

    def _receive(self, delivery: Delivery) -> Index:
        """Exchanges the rows of a delivery; returns the slots of this rank's rows, in order."""
        shard, moves = self._shard, delivery.transfers
        assert moves is not None
        drafted, known = self._drafted
        slots, send = known if known is not None and drafted is delivery else self._slots(delivery)
        if moves.moved:
            if len(self._outbox) < len(send):
                self._outbox = self._layout.block(2 * len(send), self._world.device)
            outbox = self._outbox[: len(send)]
            if len(send):
                shard.gather(send, self._layout.records(outbox))
            incoming = len(moves.receive)
            self._exchange(
                outbox, moves.send_counts, shard.inbox[:incoming], moves.receive_counts,
                what="exchanging the rows of a batch",
            )
            self._counters.rows_received += incoming
        return slots

    def _free(self) -> None:
        self._closed = True
        self._slabs.clear()
        self._shard.tier.close()
        self._world.close()


def _device(device: torch.device | str | None) -> torch.device:
    chosen = torch.device(device if device is not None else "cpu")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    if chosen.type not in ("cpu", "cuda"):
        raise WorldError("rows cannot lie on this device", expected="cpu or cuda", got=chosen)
    return chosen


def _schema(example: Rows | Schema) -> Schema:
    return example if isinstance(example, Schema) else Schema.from_example(example)


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _rows(capacity: int | str, row_bytes: int) -> int:
    """``capacity`` in rows: an integer is rows, a string such as "64GB" or "512MiB" bytes."""
    rows = capacity
    if isinstance(capacity, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B\s*", capacity.upper())
        if not found:
            raise CapacityError("capacity is not understood", got=repr(capacity),
                                expected="rows as an integer, or bytes such as '64GB'")
        rows = int(float(found[1]) * _UNITS[found[2]]) // row_bytes
    if not isinstance(rows, int) or rows < 1:
        raise CapacityError("capacity holds no row", got=repr(capacity),
                            expected=f"at least 1 row ({row_bytes} bytes)")
    return rows


def _hash(value: object) -> int:
    digest = hashlib.sha256(repr(value).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
