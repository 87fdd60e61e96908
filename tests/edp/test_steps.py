"""Steps of streams in a plane of one rank: what is stored, what is refused, what is delivered."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import conduit
from conduit import CapacityError, SchemaError, Steps, WorldError
from tests.steps import EXAMPLE, Buffer, Step, as_rows, shown


def make(steps: Steps, **more: Any) -> conduit.ExperiencePlane:
    arguments = {"capacity": 64, "batch_size": 32, "min_size": 1, **more}
    return conduit.ExperiencePlane(EXAMPLE, ingestion=steps, **arguments)


def run(first: int, count: int, *, stream: int = 0, ended: str | None = None) -> list[Step]:
    """Steps of one stream; the last one has ``ended``."""
    return [
        Step(stream=stream, frame=frame, following=frame + 1, reward=float(frame),
             ended=ended if frame == first + count - 1 else None)
        for frame in range(first, first + count)
    ]


def test_a_step_can_be_drawn_when_its_next_observation_has_come() -> None:
    with make(Steps()) as plane:
        plane.extend(as_rows(run(1, 1)))
        assert plane.sample() is None
        plane.extend(as_rows(run(2, 1)))
        batch = plane.sample()
        assert batch is not None and len(plane) == 1
        assert batch["observation"][0].tolist() == [1, -1]
        assert batch["next", "observation"][0].tolist() == [2, -2]
        plane.add({key: value[0] if not isinstance(value, dict) else
                   {k: v[0] for k, v in value.items()}
                   for key, value in as_rows(run(3, 1, ended="truncated")).items()})
        plane.flush()
        assert len(plane) == 3


def test_fields_of_a_batch_are_views_and_copies_are_not() -> None:
    steps = Steps(stack={"observation": 3})
    with make(steps) as plane:
        plane.extend(as_rows(run(1, 20)))
        batch, copied = plane.sample(), plane.sample(contiguous=True)
        assert batch is not None and copied is not None
        # Frames that observation and next observation share are there once.
        frames, following = batch["observation"], batch["next", "observation"]
        assert following[:, 0].data_ptr() == frames[:, 1].data_ptr()
        assert copied["observation"].is_contiguous()
        copied["observation"].zero_()
        assert (copied["next", "observation"][:, 0] != 0).all()
        # What is done with one view in place is no business of the others'.
        weight = torch.ones(1, requires_grad=True)
        batch["next", "reward"].mul_(weight)
        assert not batch["position"].requires_grad


def test_a_batch_is_kept_while_somebody_looks_at_it() -> None:
    steps, model = Steps(stack={"observation": 2}, n_step=2, gamma=0.9), None
    model = Buffer(steps=steps)
    kept = []
    with make(steps, capacity=20) as plane:
        for start in range(1, 400, 10):
            chunk = run(start, 10, ended="terminated" if start % 30 == 1 else None)
            plane.extend(as_rows(chunk))
            model.extend(0, chunk)
            model.commit()
            batch = plane.sample()
            assert batch is not None
            kept.append(batch)
        assert plane.report().fresh_slabs >= len(kept)
    for batch in kept:
        assert shown(batch, steps) == [model.items[i] for i in batch["index"].tolist()]


def test_late_columns_of_a_step() -> None:
    example = {**EXAMPLE, "advantage": torch.tensor(0.0)}
    steps = Steps(stack={"observation": 2}, n_step=3, gamma=0.9)
    with conduit.ExperiencePlane(example, capacity=64, batch_size=64, ingestion=steps) as plane:
        plane.extend({**as_rows(run(1, 30, ended="terminated")), "advantage": torch.zeros(30)})
        plane.flush()
        index = torch.arange(30)
        plane.update(index, {"advantage": index.float() + 0.5})
        batch = plane.sample()
        assert batch is not None
        assert torch.equal(batch["advantage"], batch["index"] + 0.5)
        assert torch.equal(batch["observation"][:, -1, 0], (batch["index"] + 1).int())
        with pytest.raises(SchemaError, match="unknown field"):
            plane.update(index, {"next": {"observation": torch.zeros(30, 2, dtype=torch.int32)}})


def test_nothing_is_left_of_what_was_there_before_empty() -> None:
    steps = Steps(stack={"observation": 3})
    with make(steps) as plane:
        plane.extend(as_rows(run(1, 20)))
        plane.flush()
        plane.extend(as_rows(run(21, 3)))
        plane.empty()
        assert len(plane) == 0 and plane.sample() is None
        plane.extend(as_rows(run(50, 3)))
        batch = plane.sample()
        assert batch is not None and len(plane) == 2
        assert set(batch["observation"][..., 0].reshape(-1).tolist()) == {50, 51}


def test_short_episodes_need_room() -> None:
    single = [Step(stream=0, frame=2 * i + 1, following=2 * i + 2, reward=0.0, ended="terminated")
              for i in range(4)]
    with make(Steps(episode_steps=1, staging_rows=8)) as plane:
        for _ in range(100):
            plane.extend(as_rows(single))
            plane.flush()
        assert len(plane) == 64
    with make(Steps(episode_steps=8, staging_rows=8)) as plane:
        with pytest.raises(CapacityError, match=r"episode_steps=\.\.\."):
            for _ in range(100):
                plane.extend(as_rows(single))
                plane.flush()
        held = len(plane)
        plane.flush()
        assert len(plane) == held, "what did not fit has changed nothing"


def test_more_steps_than_can_be_staged_stage_nothing() -> None:
    with make(Steps(staging_rows=10)) as plane:
        plane.extend(as_rows(run(1, 6)))
        with pytest.raises(CapacityError, match="at most 4 more rows"):
            plane.extend(as_rows(run(7, 4, ended="truncated")))
        plane.extend(as_rows(run(7, 3, ended="truncated")))
        plane.flush()
        assert len(plane) == 9


def test_a_stalled_stream_costs_no_more_than_its_tail() -> None:
    steps = Steps(stack={"observation": 4}, staging_rows=20)
    model = Buffer(steps=steps)
    with make(steps, capacity=30, batch_size=200) as plane:
        waiting = run(10_001, 5, stream=7)
        for chunk in (waiting, *(run(first, 10) for first in range(1, 2000, 10)),
                      run(10_006, 2, stream=7)):
            plane.extend(as_rows(chunk), stream=chunk[0].stream)
            model.extend(0, chunk)
            model.commit()
            plane.flush()
        batch = plane.sample()
        assert batch is not None
        assert shown(batch, steps) == [model.items[i] for i in batch["index"].tolist()]
        frames = batch["observation"][..., 0].tolist()
        assert [10_003, 10_004, 10_005, 10_006] in frames


def test_numpy_tensordicts_and_grids_are_taken_alike() -> None:
    rows = as_rows(run(1, 12))
    grid = TensorDict(rows, batch_size=[12]).reshape(3, 4)
    as_numpy = {
        key: {k: v.numpy() for k, v in value.items()} if isinstance(value, dict) else value.numpy()
        for key, value in rows.items()
    }
    sizes = []
    for given in (rows, as_numpy, TensorDict(rows, batch_size=[12]), grid, grid.to_dict()):
        with make(Steps()) as plane:
            plane.extend(given)
            plane.flush()
            sizes.append(len(plane))
    assert sizes == [11, 11, 11, 9, 9]


def test_sequences_lie_within_episodes() -> None:
    with make(Steps(length=5), batch_size=256) as plane:
        for first, count in ((1, 3), (101, 9), (201, 4), (301, 5), (401, 6)):
            plane.extend(as_rows(run(first, count, ended="terminated")))
        batch = plane.sample()
        assert batch is not None and len(plane) == 5 + 1 + 2
        frames, following = batch["observation"][..., 0], batch["next", "observation"][..., 0]
        assert frames.shape == following.shape == (256, 5)
        assert batch["next", "done"].shape == (256, 5, 1)
        assert torch.equal(frames + 1, following)
        assert torch.equal(frames[:, 1:], following[:, :-1])
        assert torch.equal(batch["next", "reward"][..., 0], frames.float())
        assert set(frames[:, 0].tolist()) == {101, 102, 103, 104, 105, 301, 401, 402}
        assert not batch["next", "terminated"][:, :-1].any()
        ends = torch.tensor([105, 301, 402])
        assert torch.equal(batch["next", "terminated"][:, -1, 0], torch.isin(frames[:, 0], ends))


def without(*keys: str) -> dict[str, Any]:
    example: dict[str, Any] = copy.deepcopy(EXAMPLE)
    for key in keys:
        del example["next"][key]
    return example


@pytest.mark.parametrize("example, steps, what", [
    (without("observation", "position"), Steps(), "no next observation"),
    (without("done", "terminated", "truncated"), Steps(), "where an episode ends"),
    (without("reward"), Steps(n_step=2, gamma=0.9), "cannot be added up"),
    (EXAMPLE, Steps(stack={"action": 2}), "cannot be stacked"),
])
def test_examples_that_are_no_steps(example: Any, steps: Steps, what: str) -> None:
    with pytest.raises(SchemaError, match=what):
        conduit.ExperiencePlane(example, capacity=10, batch_size=2, ingestion=steps)


@pytest.mark.parametrize("steps, error, what", [
    (Steps(n_step=2), WorldError, "n_step needs gamma"),
    (Steps(n_step=0), CapacityError, "n_step is out of range"),
    (Steps(n_step=2, gamma=1.5), WorldError, "gamma is out of range"),
    (Steps(length=0), CapacityError, "length is out of range"),
    (Steps(length=4, n_step=3, gamma=0.9), WorldError, "sequences are of plain steps"),
    (Steps(length=4, stack={"observation": 2}), WorldError, "sequences are of plain steps"),
    (Steps(episode_steps=0), CapacityError, "episode_steps is out of range"),
    (Steps(stack={"observation": 0}), CapacityError, "stack is out of range"),
    (Steps(staging_rows=0), CapacityError, "staging_rows is out of range"),
])
def test_steps_that_cannot_be(steps: Steps, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        make(steps)


@pytest.mark.parametrize("stream", [np.zeros(3, np.int64), 0.5, torch.zeros(4), [0, 1]])
def test_streams_that_cannot_be(stream: Any) -> None:
    with make(Steps()) as plane:
        with pytest.raises(SchemaError, match="stream numbers expected"):
            plane.extend(as_rows(run(1, 4)), stream=stream)
        plane.flush()
        assert len(plane) == 0


def test_rows_that_are_no_steps_have_no_streams() -> None:
    with (
        conduit.ExperiencePlane(EXAMPLE, capacity=10, batch_size=2) as plane,
        pytest.raises(SchemaError, match="no steps of streams"),
    ):
        plane.extend(as_rows(run(1, 4)), stream=0)


def test_each_frame_is_stored_once() -> None:
    """At most a seventh of the bytes of both stacks, staging and ends of episodes included."""
    frame = torch.zeros(84, 84, dtype=torch.uint8)
    step = {"observation": frame, "action": torch.zeros(1, dtype=torch.int64), "next": {
        "observation": frame, "reward": torch.zeros(1), "done": torch.zeros(1, dtype=torch.bool)}}
    stack = torch.zeros(4, 84, 84, dtype=torch.uint8)
    both = {**step, "observation": stack, "next": {**step["next"], "observation": stack}}
    capacity = 100_000
    with conduit.ExperiencePlane(
        step, capacity=capacity, batch_size=32, ingestion=Steps(stack={"observation": 4})
    ) as plane:
        ours = plane.report().shard_bytes
    row_bytes = conduit.RowLayout(conduit.Schema.from_example(both)).row_bytes
    assert 7 * ours <= capacity * row_bytes
