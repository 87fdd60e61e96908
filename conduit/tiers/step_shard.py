"""A rank's shard where rows are steps of streams, and what is drawn are windows over them.

It does what :class:`~conduit.tiers.shard.Shard` does, item by item: what one holds in its slots,
this one looks up in a table of windows (see ``streams.py``), a few integers an item. Items are kept
in logical order; where the rows lie that they are made of, does not matter (see ``slots.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conduit.errors import CapacityError
from conduit.schema import Records, RowLayout
from conduit.tiers.shard import Runs
from conduit.tiers.slots import Slots
from conduit.tiers.store import Store
from conduit.tiers.streams import Arrived, Streams, Window
from conduit.windows import WindowLayout

__all__ = ["Columns", "StepRows", "StepShard", "step_rows"]

Numbers = NDArray[np.int64]

_FEW_RUNS = 8
_WIDE_BYTES = 4096


def step_rows(items: Numbers, staging_rows: int, episode_steps: int) -> Numbers:
    """Slots for shards of ``items`` items each, of episodes of ``episode_steps`` steps or more."""
    return items + -(-items // episode_steps) + 2 * staging_rows


class StepRows(NamedTuple):
    """Checked steps: ``values`` are the stored columns of the rows, ``finals`` those of the final
    rows behind the ones that are ``done`` (bool ``[n]``); ``ids`` (int64 ``[n]``) the streams,
    ``rewards`` float64 ``[n, rewards]``."""

    values: list[Tensor]
    finals: list[Tensor]
    ids: Numbers
    done: NDArray[np.bool_]
    rewards: NDArray[np.float64]


class Columns(NamedTuple):
    """The numbers of stored columns whose values are known only when an item is complete: the
    reward, what tells that an episode is over, and over how many steps. None where the first step
    says it all."""

    reward: int | None
    done: tuple[int, ...]
    steps: int | None


class StepShard:
    """``quota_rows`` items of ``layout``, over rows in ``store``."""

    def __init__(
        self, layout: WindowLayout, store: Store, window: Window, columns: Columns, *,
        quota_rows: int, staging_rows: int, episode_steps: int, rewards: int,
    ) -> None:
        self.layout, self.store, self._columns = layout, store, columns
        self.quota_rows, self.staging_rows = quota_rows, staging_rows
        self.grace_rows = 1 << 62
        self._episode_steps = episode_steps
        self._rows = int(step_rows(np.array(quota_rows), staging_rows, episode_steps))
        self._table = np.zeros(
            (max(quota_rows, 1), window.length), np.int32 if self._rows < 1 << 31 else np.int64
        )
        self.streams = Streams(window, rewards=rewards)
        self._anchor = window.back
        self.clear()

    @property
    def staged(self) -> int:
        """Items that are complete and not committed."""
        return sum(map(len, self._ready))

    def clear(self) -> None:
        """Forgets all rows, staged ones too; what follows begins new streams."""
        self.streams.clear()
        self.rows = Slots(self._rows)
        # Rows that another rank holds, too, by direction and rank: see ``sched/homewards.py``.
        self.pins: dict[tuple[str, int], Numbers] = {}
        self._ready: list[Numbers] = []
        self._runs = Runs()
        self._first = self._head = self._staged_rows = 0

    # ------------------------------------------------------------------------ steps come in

    def stage(self, rows: StepRows) -> None:
        """Stores steps; CapacityError if they do not fit, and then nothing has changed."""
        n, finals = len(rows.ids), int(np.count_nonzero(rows.done))
        if self._staged_rows + n + finals > self.staging_rows:
            raise CapacityError(
                "these steps cannot be staged",
                expected=f"at most {self.staging_rows - self._staged_rows} more rows before the "
                f"next collective ({self._staged_rows} of {self.staging_rows} are staged)",
                got=f"{n} steps and {finals} observations at ends of episodes",
                cure="Call flush() or sample() more often, extend in smaller pieces, or pass "
                "ingestion=Steps(staging_rows=...)",
            )
        if n + finals > self.rows.free:
            raise CapacityError(
                "there is no room for these steps", expected=f"at most {self.rows.free} rows",
                got=f"{n} steps and {finals} observations at ends of episodes",
                cure=f"Episodes are shorter than {self._episode_steps} steps, or more streams are "
                f"open ({self.streams.open}) than staging_rows={self.staging_rows} is for: pass "
                "ingestion=Steps(episode_steps=..., staging_rows=...)",
            )
        slots = self.rows.take(n + finals)
        self._pack(rows.values, slots[:n])
        self._pack(rows.finals, slots[n:])
        self._staged_rows += n + finals
        arrived, tails = self.streams.arrive(
            rows.ids, slots[:n], rows.done, slots[n:], rows.rewards
        )
        self.rows.need(arrived.windows)
        self.rows.need(tails.after)
        self.rows.release(tails.before)
        self._complete(arrived, rows)
        if len(arrived.windows):
            self._ready.append(arrived.windows)

    def _pack(self, values: Sequence[Tensor], slots: Numbers) -> None:
        if len(slots) == 0:
            return
        ends = np.append(np.flatnonzero(np.diff(slots) != 1) + 1, len(slots)).tolist()
        stored = self.layout.stored
        if len(ends) <= _FEW_RUNS or stored.row_bytes >= _WIDE_BYTES:
            begin = 0
            for end in ends:
                part = list(values) if len(ends) == 1 else [v[begin:end] for v in values]
                self.store.pack(part, int(slots[begin]), end - begin)
                begin = end
        else:
            block = stored.block(len(slots))
            stored.pack(values, block)
            self.store.write(slots, block)

    def _complete(self, arrived: Arrived, rows: StepRows) -> None:
        """Writes into the first step of each item what only its last one has shown."""
        stored, columns = self.layout.stored, self._columns
        anchors = arrived.windows[:, self._anchor]
        if columns.reward is not None:
            returns = torch.from_numpy(arrived.returns)
            self._write(stored, anchors, columns.reward, returns)
        short = np.flatnonzero(arrived.steps != self.streams.window.n_step)
        if columns.steps is not None and len(short):
            steps = torch.from_numpy(arrived.steps[short])[:, None]
            self._write(stored, anchors[short], columns.steps, steps)
        if len(arrived.ended):
            last = torch.from_numpy(arrived.ends)
            for column in columns.done:
                value = rows.values[column]
                flags = value[last.to(value.device)].reshape(len(last), -1)
                self._write(stored, anchors[arrived.ended], column, flags)

    def _write(self, stored: RowLayout, slots: Numbers, column: int, values: Tensor) -> None:
        typed = values.to(stored.columns[column].field.dtype).contiguous()
        if len(slots):
            self.store.overwrite(slots, column, typed.view(torch.uint8))

    # ------------------------------------------------------------------------ items are committed

    def take_ready(self) -> Numbers:
        """The windows of all items staged, ``[staged, length]``, which then no longer are."""
        ready, self._ready = self._ready, []
        return np.concatenate(ready) if ready else np.empty((0, self.layout.length), np.int64)

    def put_ready(self, windows: Numbers) -> None:
        """Stages items in the place of those taken."""
        self._ready = [windows]

    def evict(self, begin: int) -> None:
        """Lets the items before logical index ``begin`` go."""
        self._runs.forget_before(begin)
        first = min(self._runs.oldest(begin), self._head)
        if first > self._first:
            self.rows.release(self._table[np.arange(self._first, first) % len(self._table)])
            self._first = first

    def commit(self, *, starts: Numbers, counts: Numbers, dropped: int, begin: int) -> None:
        """Makes items visible: runs of ``counts`` items at logical ``starts``, in logical order,
        which are the ones staged now. ``begin`` is the oldest live index."""
        self.evict(begin)
        for start, count, end in zip(
            starts.tolist(), counts.tolist(), counts.cumsum().tolist(), strict=True
        ):
            if count:
                self._runs.append(start, self._head + end - count)
        self._enter(self.take_ready())

    def commit_own(self, *, start: int, dropped: int, begin: int) -> None:
        """``commit`` where all that was staged stays here: one run at logical ``start``, after
        ``dropped`` items that are not kept."""
        self.evict(begin)
        ready = self.take_ready()
        if dropped:
            self.rows.release(ready[:dropped])
        if len(ready) > dropped:
            self._runs.append(start, self._head)
        self._enter(ready[dropped:])

    def _enter(self, windows: Numbers) -> None:
        self._table[(self._head + np.arange(len(windows))) % len(self._table)] = windows
        self._head += len(windows)
        self._staged_rows = 0
        self.rows.rested()

    # ------------------------------------------------------------------------ batches go out

    def slots(self, indices: Numbers) -> Numbers:
        """Where in the table items held here are, by logical index; for others some place, and no
        error."""
        return self._runs.ordinals(indices) % len(self._table)

    def rows_at(self, slots: Numbers) -> Numbers:
        """The slots of the items' own steps."""
        return self._table[slots, self._anchor].astype(np.int64)

    def gather(self, slots: Numbers, out: Records) -> None:
        """Copies the windows at ``slots`` into the block whose records ``out`` are."""
        rows = self._table[slots].astype(np.int64).reshape(-1)
        self.store.gather(rows, self.layout.rows_of(out))

    def close(self) -> None:
        """Gives the memory back."""
        self.store.close()
