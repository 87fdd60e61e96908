"""Steps of streams the slow and obvious way: every transition is put together on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conduit import Steps

__all__ = ["EXAMPLE", "Buffer", "Step", "Transition", "as_rows", "shown"]

EXAMPLE = {
    "observation": torch.zeros(2, dtype=torch.int32),
    "position": torch.zeros((), dtype=torch.float64),
    "action": torch.zeros(1, dtype=torch.int64),
    "next": {
        "observation": torch.zeros(2, dtype=torch.int32),
        "position": torch.zeros((), dtype=torch.float64),
        "reward": torch.zeros(1),
        "done": torch.zeros(1, dtype=torch.bool),
        "terminated": torch.zeros(1, dtype=torch.bool),
        "truncated": torch.zeros(1, dtype=torch.bool),
    },
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a stream: ``frame`` and ``following`` number what was seen before and after."""

    stream: int
    frame: int
    following: int
    reward: float
    ended: str | None

    @property
    def done(self) -> bool:
        return self.ended is not None


def as_rows(steps: Sequence[Step]) -> dict[Any, Any]:
    """As ``extend`` takes them."""
    def frames(numbers: list[int]) -> dict[str, Tensor]:
        return {
            "observation": torch.tensor([[n, -n] for n in numbers], dtype=torch.int32).view(-1, 2),
            "position": torch.tensor([n / 8 for n in numbers], dtype=torch.float64),
        }

    ended = [step.ended for step in steps]
    return {
        **frames([step.frame for step in steps]),
        "action": torch.tensor([[step.frame % 7] for step in steps], dtype=torch.int64).view(-1, 1),
        "next": {
            **frames([step.following for step in steps]),
            "reward": torch.tensor([[step.reward] for step in steps]).view(-1, 1),
            "done": torch.tensor([[e is not None] for e in ended], dtype=torch.bool).view(-1, 1),
            "terminated": torch.tensor(
                [[e == "terminated"] for e in ended], dtype=torch.bool).view(-1, 1),
            "truncated": torch.tensor(
                [[e == "truncated"] for e in ended], dtype=torch.bool).view(-1, 1),
        },
    }


@dataclass(frozen=True)
class Transition:
    """What a batch shows of one item."""

    frames: tuple[int, ...]
    next_frames: tuple[int, ...]
    position: float
    next_position: float
    action: int
    reward: float
    ended: str | None
    steps: int


@dataclass(kw_only=True)
class Buffer:
    """All transitions of a job, in the order in which they were committed."""

    steps: Steps
    items: list[Transition] = field(default_factory=list)
    _episodes: dict[tuple[int, int], list[list[Step]]] = field(default_factory=dict)
    _told: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _staged: dict[int, list[Transition]] = field(default_factory=dict)

    def extend(self, rank: int, steps: Sequence[Step]) -> None:
        for step in steps:
            episodes = self._episodes.setdefault((rank, step.stream), [[]])
            if episodes[-1] and episodes[-1][-1].done:
                episodes.append([])
            episodes[-1].append(step)
        for stream in sorted({step.stream for step in steps}):
            for number, episode in enumerate(self._episodes[rank, stream]):
                told = self._told.get((rank, stream, number), 0)
                while (made := self._transition(episode, told)) is not None:
                    self._staged.setdefault(rank, []).append(made)
                    told += 1
                self._told[rank, stream, number] = told

    def commit(self) -> int:
        """All ranks' items in their order; how many there are."""
        before = len(self.items)
        for rank in sorted(self._staged):
            self.items += self._staged[rank]
        self._staged = {}
        return len(self.items) - before

    def _transition(self, episode: list[Step], at: int) -> Transition | None:
        """That of step number ``at``, once all of it is there."""
        frames = [step.frame for step in episode]
        if episode[-1].done:
            frames.append(episode[-1].following)
        end = at + self.steps.n_step
        if episode[-1].done:
            end = min(end, len(episode))
        if at >= len(episode) or end >= len(frames):
            return None
        total, weight = np.float64(0), 1.0
        for step in episode[at:end]:
            total += weight * np.float64(np.float32(step.reward))
            weight *= self.steps.gamma if self.steps.gamma is not None else 1.0
        stack = self.steps.stack.get("observation", 1)

        def stacked(newest: int) -> tuple[int, ...]:
            return tuple(frames[max(newest - i, 0)] for i in reversed(range(stack)))

        return Transition(
            stacked(at), stacked(end), frames[at] / 8, frames[end] / 8, frames[at] % 7,
            float(np.float32(total)), episode[end - 1].ended, end - at,
        )


def shown(batch: Any, steps: Steps) -> list[Transition]:
    """The transitions of a batch."""
    seen = {}
    for name, root in (("frames", batch), ("next_frames", batch["next"])):
        frames = root["observation"].reshape(len(batch), -1, 2)
        assert ("observation" in steps.stack) == (root["observation"].dim() == 3)
        assert torch.equal(frames[..., 0], -frames[..., 1])
        seen[name] = [tuple(row) for row in frames[..., 0].tolist()]
    flags = batch["next"]
    ended = [
        "terminated" if terminated else "truncated" if truncated else None
        for terminated, truncated in zip(
            flags["terminated"][:, 0].tolist(), flags["truncated"][:, 0].tolist(), strict=True
        )
    ]
    assert flags["done"][:, 0].tolist() == [end is not None for end in ended]
    count = (
        batch["steps_to_next_obs"][:, 0].tolist() if steps.n_step > 1 else [1] * len(batch)
    )
    return [Transition(*row) for row in zip(
        seen["frames"], seen["next_frames"], batch["position"].tolist(),
        flags["position"].tolist(), batch["action"][:, 0].tolist(),
        flags["reward"][:, 0].tolist(), ended, count, strict=True,
    )]
