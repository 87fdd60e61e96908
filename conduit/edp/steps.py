"""Steps of streams in place of finished transitions: each observation is stored once.

What people hand in is what their collectors make: steps with ``observation``, ``action`` and, under
``next``, the reward, what ended, and the next observation. That is the observation of the step that
follows, so only the last one of an episode is stored, behind it; and a stack of frames is stored
frame by frame. Both are put together again when a batch is delivered (see ``tiers/streams.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from conduit.edp.ingestion import Ingestion
from conduit.errors import CapacityError, SchemaError, WorldError
from conduit.fields import Field
from conduit.rows import Key, Rows, as_tensor, flat_rows, public
from conduit.schema import RowLayout, Schema
from conduit.tiers.step_shard import Columns, StepRows, step_rows
from conduit.tiers.streams import Window
from conduit.windows import Shown, WindowLayout

__all__ = ["StepFormat", "Steps"]

REWARD: Key = ("next", "reward")
DONE: tuple[Key, ...] = (("next", "done"), ("next", "terminated"), ("next", "truncated"))
STEPS: Key = ("steps_to_next_obs",)

_STAGED_PART = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps(Ingestion):
    """Rows are steps of streams, handed to ``extend`` in the order of time: ``[n]`` of one stream,
    ``[streams, time]`` of several, or ``[n]`` with ``stream=`` telling which.

    Every field that comes again under ``next``, with the same dtype and shape, is stored once. An
    episode ends where ``("next", "done")``, ``("next", "terminated")`` or ``("next", "truncated")``
    says so; only there ``next`` fields are read. A step can be drawn when its next observation has
    arrived.

    ``n_step`` is how many steps a transition spans, unless the episode ends before: its reward is
    the sum of theirs, each worth ``gamma`` of the one before, what ended is that of the last, and
    ``"steps_to_next_obs"`` (int64 ``[1]``) says how many there are. ``stack`` gives fields a
    leading dimension with so many frames, the newest last, in which the first one of an episode
    stands for those before it: hand in single frames. With ``length`` an item is a sequence of so
    many steps of one episode, and all fields have a dimension for them; its logical index is that
    of its last step. ``episode_steps`` is the length that
    episodes have at least on average: the last observation of each needs room. ``staging_rows``
    bounds the rows a rank may stage between two collectives, by default the larger of 1,024 and a
    32nd of the rank's equal share of the capacity.
    """

    n_step: int = 1
    gamma: float | None = None
    stack: Mapping[Any, int] = field(default_factory=dict)
    length: int | None = None
    episode_steps: int = 16

    def rows(self, *, capacity: int, ranks: int) -> int:
        if self.staging_rows is None:
            share = -(-capacity // ranks)
            staging_rows = max(1_024, share // _STAGED_PART)
            return replace(self, staging_rows=staging_rows).rows(capacity=capacity, ranks=ranks)
        return Ingestion.rows(self, capacity=capacity, ranks=ranks)

    def format(self, schema: Schema) -> StepFormat:
        """What is stored and delivered of rows of ``schema``."""
        return StepFormat(self, schema)


class StepFormat:
    """What of a schema's fields is stored for each step, and how they are delivered.

    Raises SchemaError or WorldError for a schema or arguments that cannot be.
    """

    def __init__(self, steps: Steps, schema: Schema) -> None:
        self.steps, self.given = steps, RowLayout(schema)
        fields = {f.key: f for f in schema.fields}
        self._next = tuple(
            key for key, one in fields.items()
            if ("next", *key) in fields and ("next", *key) not in (REWARD, *DONE)
            and _alike(one, fields["next", *key])
        )
        if not self._next:
            raise SchemaError(
                "steps show no next observation", got=schema.keys,
                expected="a field, such as 'observation', that comes again as ('next', "
                "'observation') with the same dtype and shape",
            )
        self._done = tuple(key for key in DONE if key in fields)
        if not self._done or any(
            fields[key].dtype is not torch.bool or fields[key].numel != 1 for key in self._done
        ):
            raise SchemaError(
                "steps do not say where an episode ends", got=schema.keys,
                expected="one bool a step as ('next', 'done'), ('next', 'terminated') or "
                "('next', 'truncated')",
            )
        reward = fields.get(REWARD)
        self._reward = reward
        self.window = self._window(steps, {key: fields[key] for key in fields if key in self._next})
        stored = [one for key, one in fields.items() if key not in self._shown_next]
        if steps.n_step > 1:
            if reward is None or not reward.dtype.is_floating_point:
                raise SchemaError(
                    "rewards of several steps cannot be added up", field=public(REWARD),
                    expected="a field of a floating-point dtype",
                    got="no such field" if reward is None else reward.dtype,
                )
            stored.append(Field(key=STEPS, dtype=torch.int64, shape=(1,)))
        self.stored = RowLayout(Schema(tuple(stored)))
        self._numbers = {c.field.key: i for i, c in enumerate(self.stored.columns)}
        self.columns = Columns(
            reward=self._numbers[REWARD] if steps.n_step > 1 else None,
            done=tuple(self._numbers[key] for key in self._done),
            steps=self._numbers.get(STEPS),
        )
        self.delivered = WindowLayout(self.stored, self.window.length, self._shown())

    @property
    def rewards(self) -> int:
        """How many numbers a reward is."""
        return self._reward.numel if self._reward is not None and self.steps.n_step > 1 else 1

    @property
    def _shown_next(self) -> dict[Key, Key]:
        return {("next", *key): key for key in self._next}

    def _window(self, steps: Steps, following: Mapping[Key, Field]) -> Window:
        self._stack: dict[Key, int] = {}
        for name, frames in steps.stack.items():
            key = name if isinstance(name, tuple) else (name,)
            if key not in following:
                raise SchemaError(
                    "this field cannot be stacked", field=name, got=name,
                    expected=f"one of {[public(k) for k in following]}",
                )
            self._stack[key] = _whole("stack", frames)
        n_step = _whole("n_step", steps.n_step)
        if steps.length is not None and (n_step > 1 or self._stack):
            raise WorldError("sequences are of plain steps", got=f"length={steps.length} with "
                             f"n_step={n_step} and stack={dict(steps.stack)}",
                             expected="length alone")
        _whole("episode_steps", steps.episode_steps)
        gamma = steps.gamma
        if gamma is None and n_step > 1:
            raise WorldError("n_step needs gamma", got="gamma=None", expected="such as 0.99")
        if gamma is not None and not (isinstance(gamma, (int, float)) and 0 <= gamma <= 1):
            raise WorldError("gamma is out of range", got=repr(gamma), expected="0 to 1")
        if steps.length is not None:
            return Window(back=_whole("length", steps.length) - 1, padded=False)
        back = max(self._stack.values(), default=1) - 1
        return Window(back=back, n_step=n_step, gamma=1.0 if gamma is None else float(gamma))

    def _shown(self) -> Sequence[Shown]:
        window, shown = self.window, []
        for column, place in enumerate(self.stored.columns):
            key = place.field.key
            frames = self._stack.get(key, self.steps.length)
            first = window.back + 1 - (frames or 1)
            shown.append(Shown(key=key, column=column, first=first, rows=frames))
            if key in self._next:
                shown.append(Shown(
                    key=("next", *key), column=column, first=window.next + first, rows=frames
                ))
        return sorted(shown, key=lambda one: one.key)

    def ring_rows(self, items: Any, staging_rows: int) -> Any:
        """Stored rows that shards of ``items`` items each need room for."""
        return step_rows(items, staging_rows, self.steps.episode_steps)

    def read(self, rows: Rows, stream: Any = None) -> StepRows:
        """Steps as people hand them in. Raises SchemaError."""
        rows, streams = self._flat(rows)
        n, values = self.given.check(rows)
        by_key = {c.field.key: v for c, v in zip(self.given.columns, values, strict=True)}
        done = np.zeros(n, dtype=np.bool_)
        for key in self._done:
            done |= by_key[key].detach().cpu().numpy().reshape(n)
        rewards = np.zeros((n, self.rewards))
        if self.columns.reward is not None:
            rewards = by_key[REWARD].detach().cpu().double().numpy().reshape(n, self.rewards)
        at_end = torch.from_numpy(np.flatnonzero(done))
        given, finals = [], []
        for column in self.stored.columns:
            key = column.field.key
            if key == STEPS:
                value = torch.full((n, 1), self.window.n_step)
            else:
                value = by_key[key]
            given.append(value)
            if key in self._next:
                following = by_key["next", *key]
                finals.append(following[at_end.to(following.device)])
            else:
                finals.append(value.new_zeros((len(at_end), *value.shape[1:])))
        return StepRows(given, finals, _ids(stream, n, streams), done, rewards)

    def _flat(self, rows: Rows) -> tuple[Rows, int | None]:
        """Rows ``[n]``, and how many streams there are in ``[streams, time]``."""
        key = self._next[0]
        flat = flat_rows(rows)
        example = flat.get(key)
        if example is None:
            return rows, None
        shape = as_tensor(key, example).shape
        inner = next(c.field for c in self.given.columns if c.field.key == key).shape
        if isinstance(rows, TensorDictBase) and rows.batch_dims != 2:
            return rows, None
        if len(shape) != len(inner) + 2:
            return rows, None
        return {
            key: as_tensor(key, value).flatten(0, 1) if as_tensor(key, value).dim() > 1 else value
            for key, value in flat.items()
        }, int(shape[0])


def _alike(one: Field, other: Field) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape


def _whole(name: str, number: Any) -> int:
    if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < 1:
        raise CapacityError(
            f"{name} is out of range", expected="an integer of at least 1", got=repr(number)
        )
    return int(number)


def _ids(stream: Any, n: int, streams: int | None) -> Any:
    """The stream of each of ``n`` rows, int64 ``[n]``."""
    each = n // streams if streams else n
    if stream is None:
        return np.repeat(np.arange(streams or 1), each) if n else np.empty(0, np.int64)
    ids = stream.detach().cpu().numpy() if isinstance(stream, Tensor) else np.asarray(stream)
    if ids.ndim == 0 and streams is None:
        ids = np.repeat(ids, n)
    expected = n if streams is None else streams
    if ids.dtype.kind not in "iu" or ids.shape != (expected,):
        raise SchemaError(
            "stream numbers expected", field="stream", got=f"{ids.dtype} {list(ids.shape)}",
            expected=f"integers [{expected}], one for each "
            f"{'step' if streams is None else 'stream'}",
        )
    return ids.astype(np.int64) if streams is None else np.repeat(ids.astype(np.int64), each)
