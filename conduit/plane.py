"""ExperiencePlane: one logical experience buffer over all ranks of a job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from conduit.calls import Calls
from conduit.collectives.control import Gathered, Operation
from conduit.collectives.links import LinkMatrix
from conduit.collectives.world import World
from conduit.configuration import Configuration, chosen_device
from conduit.creation import create
from conduit.edp.delivery import Replay
from conduit.edp.draws import UniformDraws
from conduit.edp.ingestion import Ingestion
from conduit.edp.placement import Placement
from conduit.edp.updates import Updates
from conduit.errors import EmptyError, SchemaError
from conduit.metrics import Counters, Report
from conduit.sched.batch import BatchMaker
from conduit.sched.commits import Commits
from conduit.sched.deliveries import Deliveries
from conduit.sched.explanation import explain
from conduit.sched.homewards import homewards_for
from conduit.sched.lanes import StageError, lane_for
from conduit.sched.late_columns import LateColumns
from conduit.sched.letters import Letters
from conduit.sched.slabs import SlabPool
from conduit.sched.stages import LATE_COLUMNS
from conduit.sched.timeline import CALL, PHASES, Timeline
from conduit.schema import Rows, Schema
from conduit.tiers.shard import Shard
from conduit.tiers.specification import Memory
from conduit.tiers.step_shard import StepShard
from conduit.tracing import Tracer

__all__ = ["ExperiencePlane"]


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
        max_staleness: how many of the last commits a batch may ignore: 0, the default, for a batch
            of the newest rows, of which those that the last commit changed are fetched in
            ``sample``; 1 or more to leave even these out.
        min_size: ``sample`` returns None on every rank while the buffer holds fewer rows.
        seed: of the draws.
        device: where rows and batches lie, CPU by default; rows on CUDA move over NCCL.
        group: the ranks that take part, by default all.
        timeout: how long a collective call waits for the other ranks.
        name: tells planes apart in errors, and gives each its own draws.
        overlap: False to fetch everything inside ``sample``, as a reference. The batches are the
            same.
        tiers: the memory of each rank's shard, such as ``[conduit.Host("8GB"),
            conduit.Disk("/nvme", "500GB")]``, with sizes for all ranks of a host together. By
            default the memory of ``device``, on a GPU the host's as well.

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
        overlap: bool = True,
        tiers: str | Sequence[Memory] = "auto",
    ) -> None:
        device = chosen_device(device)
        parts = create(
            World.join(device=device, timeout=timeout, group=group),
            lambda world: Configuration.checked(
                example, ranks=world.size, rank=world.rank, capacity=capacity,
                batch_size=batch_size, ingestion=ingestion, placement=placement, routing=routing,
                max_staleness=max_staleness, min_size=min_size, seed=seed, name=name,
                overlap=overlap, tiers=tiers, device=device,
            ),
        )
        world, configuration = parts.world, parts.configuration
        self._world, self._configuration, self._layout = world, configuration, configuration.given
        self._shard, self._directory = parts.shard, parts.directory
        self._control, self._links, self._exchanges = parts.control, parts.links, parts.exchanges
        batches, late, homewards = self._exchanges
        self._tracer = Tracer(rank=world.rank)
        self._timeline = Timeline(self._tracer, overlap=configuration.overlap)
        lane = lane_for(world.device, self._tracer)
        self._updates = Updates(configuration.layout)
        self._calls = Calls(
            control=self._control, world=world, directory=self._directory, shard=self._shard,
            lane=lane, timeline=self._timeline, updates=self._updates, name=name,
        )
        self._counters = Counters()
        self._slabs = SlabPool(configuration.batches, configuration.batch_size, world.device)
        self._replay = Replay(
            directory=self._directory, routing=routing, rank=world.rank, hosts=world.hosts,
            batch_rows=configuration.batch_size, max_staleness=configuration.max_staleness,
            draws=UniformDraws(
                seed=configuration.seed, name=name, capacity=configuration.capacity,
                global_rows=configuration.batch_size * world.size,
            ),
        )
        letters = Letters(homewards, self._control.swap)
        self._commits = Commits(
            directory=self._directory, shard=self._shard, homewards=homewards_for(
                self._shard, homewards, self._directory, letters, rank=world.rank,
                counters=self._counters,
            ), quotas=configuration.quotas, rank=world.rank, counters=self._counters,
            timeline=self._timeline,
        )
        self._late_columns = LateColumns(
            updates=self._updates, directory=self._directory, shard=self._shard,
            letters=letters, rank=world.rank,
            counters=self._counters,
        )
        self._deliveries = Deliveries(
            replay=self._replay, shard=self._shard, exchange=batches, late_exchange=late,
            slabs=self._slabs, batches=BatchMaker(
                configuration.batches.tree, rows=configuration.batch_size, device=world.device
            ),
            counters=self._counters, lane=lane, timeline=self._timeline,
        )
        self._calls.let_go = [self._deliveries.close, batches.close, world.close_lane]

    # ---------------------------------------------------------------- local calls

    def extend(self, rows: Rows, *, stream: Any = None) -> None:
        """Stages rows: a TensorDict or (nested) dict of tensors ``[n, *shape]``, n of 0 or more.

        They are copied before the call returns and become visible at the next ``sample`` or
        ``flush``. With ``ingestion=Steps(...)`` rows are steps of one stream, in order, or
        ``[streams, time, *shape]``; ``stream`` (integers ``[n]``, or ``[streams]``) tells streams
        of this rank apart where they are others than 0, 1, ... Raises SchemaError or CapacityError,
        and then stages nothing.
        """
        self._calls.check_open()
        steps = self._configuration.steps
        if steps is None:
            if stream is not None:
                raise SchemaError("rows are no steps of streams", field="stream",
                                  expected="a plane with ingestion=conduit.Steps(...)")
            n, values = self._layout.check(rows)
            if n:
                assert isinstance(self._shard, Shard)
                self._shard.stage(values, n)
        else:
            read = steps.read(rows, stream)
            n = len(read.ids)
            if n:
                assert isinstance(self._shard, StepShard)
                self._shard.stage(read)
        self._counters.rows_staged += n

    def add(self, row: Rows, *, stream: int | None = None) -> None:
        """Stages one row: a TensorDict or (nested) dict of tensors ``[*shape]``."""
        self.extend(self._layout.one_row(row), stream=stream)

    def update(self, index: Tensor, values: Rows) -> None:
        """Stages new values for some fields of rows that are in the buffer: late columns.

        ``index`` are logical indices (int64 ``[n]``, as in ``batch["index"]``), ``values`` a
        TensorDict or (nested) dict of tensors ``[n, *shape]`` with some of the schema's fields.
        They are copied, and become visible at the next ``sample`` or ``flush``; a batch that is
        being fetched then is fetched once more, unless ``max_staleness`` lets it ignore them. Of
        several values for one field of a row the last one stays, in the order of ranks and calls.
        Rows that have left are ignored, and counted in the report. Raises SchemaError, and then
        stages nothing.
        """
        self._calls.check_open()
        self._updates.stage(index, values, end=self._directory.end)

    def __len__(self) -> int:
        """Rows of the whole buffer at the last collective call."""
        return self._directory.size

    @property
    def schema(self) -> Schema:
        """Names, dtypes and shapes of a row's fields."""
        return self._layout.schema

    @property
    def capacity(self) -> int:
        """Rows that the whole buffer holds at most."""
        return self._configuration.capacity

    @property
    def name(self) -> str:
        """What tells this plane from others."""
        return self._configuration.name

    @property
    def batch_size(self) -> int:
        """Rows that each rank gets from one ``sample``."""
        return self._configuration.batch_size

    @property
    def min_size(self) -> int:
        """Rows below which ``sample`` returns None."""
        return self._configuration.min_size

    @property
    def rank(self) -> int:
        """This rank's number among the plane's ranks."""
        return self._world.rank

    @property
    def ranks(self) -> int:
        """How many ranks share the buffer."""
        return self._world.size

    @property
    def links(self) -> LinkMatrix:
        """The links between ranks on several hosts, measured in short when the plane was made;
        ``python -m conduit probe`` measures them better. On one host it has none."""
        return self._links.matrix

    def report(self) -> Report:
        """What the plane did and what it cost, on this rank."""
        counters, world = self._counters, self._world
        first_row_bytes = self._configuration.batches.row_bytes
        first, *others = (exchange.traffic for exchange in self._exchanges)
        traffic = sum(others, start=first)
        return Report(
            name=self.name, rank=world.rank, ranks=world.size,
            hosts=len(np.unique(world.hosts)), device=str(world.device),
            routing=self._configuration.routing, rows=self._directory.size, capacity=self.capacity,
            row_bytes=self._configuration.layout.row_bytes,
            shard_rows=int(self._directory.held[world.rank]),
            shard_bytes=self._shard.store.nbytes, tiers=self._shard.store.held_bytes(),
            directory_bytes=self._directory.nbytes,
            samples=counters.samples, commits=counters.commits, fences=counters.fences,
            rows_staged=counters.rows_staged, rows_committed=counters.rows_committed,
            rows_skipped=counters.rows_skipped, rows_sent_home=counters.rows_sent_home,
            rows_updated=counters.rows_updated, updates_ignored=counters.updates_ignored,
            rows_delivered=counters.rows_delivered, rows_received=counters.rows_received,
            late_rows=self._replay.late_rows, exchanges=traffic.calls,
            unshared_exchanges=traffic.unshared_calls,
            sent_rows=tuple(traffic.sent_rows.tolist()),
            sent_bytes=tuple((traffic.sent_rows * first_row_bytes).tolist()),
            received_rows=tuple(traffic.received_rows.tolist()),
            control=self._control.transport,
            slow_links=tuple(map(str, self._links.slow())),
            transports=tuple(map(self._exchanges[0].transport, range(world.size))),
            fresh_slabs=self._slabs.fresh, blocked_ms=counters.blocked_ns / 1e6,
        )

    def explain(self) -> str:
        """What of the experience path is still exposed, and why, in the last iterations on this
        rank."""
        return explain(
            self._timeline, list(self._tracer.spans), rank=self.rank,
            max_staleness=self._configuration.max_staleness,
        )

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Labels what the learner does meanwhile, for the trace: ``with plane.phase("backward"):``.
        """
        return self._tracer.span(name, PHASES)

    def trace(self, path: str | Path) -> None:
        """Writes the last spans of this rank to a file that Perfetto opens: stages, waits, steps
        and phases of the last 16,384 that there were. Give each rank a path of its own;
        ``python -m conduit trace FILE...`` draws them. Raises OSError."""
        self._tracer.write(path, title=self.name)

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
        self._timeline.enter()
        gathered = self._synchronise(Operation.SAMPLE)
        size = self._directory.size
        if size == 0 and self.min_size == 0:
            raise EmptyError(
                "there are no rows to sample", rank=self.rank,
                cure="extend first on some rank, or give min_size to get None until there are rows",
            )
        batch = None
        if size >= max(self.min_size, 1):
            try:
                batch = self._deliveries.deliver(contiguous=contiguous)
                if self._hides(gathered):
                    self._deliveries.hide()
            except BaseException as error:
                self._calls.give_up(error)
        self._counters.blocked_ns += self._timeline.leave()
        return batch

    def flush(self) -> None:
        """Commits what all ranks staged, and delivers nothing."""
        begun = time.perf_counter_ns()
        self._synchronise(Operation.FLUSH)
        self._counters.blocked_ns += time.perf_counter_ns() - begun

    def agree(self, flag: int | bool) -> int:
        """The largest ``flag`` of all ranks, for decisions such as stopping early together."""
        begun = time.perf_counter_ns()
        gathered = self._calls.talk(Operation.AGREE, value=int(flag))
        self._counters.blocked_ns += time.perf_counter_ns() - begun
        return int(gathered.value.max())

    def empty(self) -> None:
        """Forgets all rows, staged ones too. Logical indices go on and are never used again."""
        self._calls.talk(Operation.EMPTY)
        self._drop_draft()
        self._replay.clear()
        self._directory.clear()
        self._shard.clear()
        self._updates.take()

    def close(self) -> None:
        """Ends the plane on all ranks and frees its memory; batches stay valid.

        May be called again, and after a failure, when it is a local call.
        """
        if self._calls.closed:
            return
        try:
            if self._calls.failure is None and (self._world.size == 1 or dist.is_initialized()):
                self._calls.talk(Operation.CLOSE)
                self._drop_draft()
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

    def _drop_draft(self) -> None:
        """Collective. Ends what is being fetched."""
        try:
            self._deliveries.clear()
        except BaseException as error:
            self._calls.give_up(error)

    def _hides(self, gathered: Gathered | None) -> bool:
        """Whether the next batch is to be fetched on the lane: the same on all ranks."""
        timeline = self._timeline
        if gathered is None:
            return timeline.decide(np.array([timeline.step_us]), np.array([timeline.fetch_us]))
        return timeline.decide(gathered.step_us, gathered.fetch_us)

    def _synchronise(self, operation: Operation) -> Gathered | None:
        """Commits what all ranks staged. What they brought along; None in a world of one."""
        self._calls.check_open()
        deliveries, alone = self._deliveries, self._world.size == 1
        try:
            try:
                deliveries.settle()
            except StageError:
                if alone:
                    raise
                # Others are told in this call.
            if alone:
                staged, updates = self._shard.staged, self._updates.rows
                if (staged or updates) and self._configuration.max_staleness:
                    deliveries.begin()
                if staged:
                    self._commits.commit_alone()
                if updates:
                    self._update(committed=staged > 0)
                return None
            self._calls.begin(operation)
            # While control records are on their way: most of the next batch, or all of it if
            # nothing was staged anywhere. (NCCL would hang in what other ranks never join: there
            # it waits until all have said that they are in the same call.)
            ahead = self._world.device.type == "cpu"
            if ahead:
                deliveries.begin()
            gathered = self._calls.finish()
            if not ahead:
                deliveries.begin()
            committed = bool(np.count_nonzero(gathered.staged))
            if committed:
                self._commits.commit(
                    gathered.staged, fence=lambda: self._calls.talk(Operation.FENCE)
                )
            if np.count_nonzero(gathered.updates):
                self._update(committed=committed)
            return gathered
        except BaseException as error:
            self._calls.give_up(error)

    def _update(self, *, committed: bool) -> None:
        """Collective. Applies the late columns of all ranks."""
        with self._timeline.span(LATE_COLUMNS.name, CALL):
            self._directory.update(committed=committed)
            self._late_columns.apply()

    def _free(self) -> None:
        self._calls.closed = True
        self._deliveries.close()
        self._slabs.clear()
        self._shard.close()
        for exchange in self._exchanges:
            exchange.close()
        self._control.close()
        self._world.close()
