"""Experience of real environments, recorded in numpy: Atari frames and MuJoCo episodes.

A recording is the reference that a plane is compared with, byte for byte: row i of it was the i-th
that the environments made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ale_py
import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

import conduit
from conduit import ExperiencePlane

__all__ = ["ATARI", "Recording", "atari", "hopper", "hopper_schema"]

ATARI = conduit.Schema.from_example({
    "observation": torch.zeros(84, 84, dtype=torch.uint8), "action": torch.zeros(1).long(),
    "reward": torch.tensor(0.0), "done": torch.tensor(False),
})
GAMES = ("assault", "pong", "asteroids", "ms_pacman")
"""Some whose screens change from frame to frame, and which run fast."""

_AT_ONCE = 256
"""Screens that are shrunk, or rows that are compared, in one go."""


@dataclass(frozen=True)
class Recording:
    """Rows by field, ``[rows, *shape]``. Plane indices count from the first of them."""

    fields: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def rows(self, first: int, end: int) -> dict[str, Tensor]:
        """Rows as ``extend`` takes them."""
        return {key: torch.from_numpy(value[first:end]) for key, value in self.fields.items()}

    def assert_batch(self, batch: TensorDict, *, live: range) -> None:
        """Each row of a batch is the recorded one that its index names, and in the buffer."""
        indices = batch["index"].numpy()
        assert live.start <= indices.min() and indices.max() < live.stop
        self._assert_same(batch, indices)

    def assert_held(self, plane: ExperiencePlane) -> None:
        """All live rows of a plane without other ranks, read where they lie, are the last ones."""
        end = plane._directory.end
        for first in range(end - len(plane), end, _AT_ONCE):
            indices = np.arange(first, min(first + _AT_ONCE, end))
            block = plane._shard.store.read(plane._shard.slots(indices.copy()))
            self._assert_same(plane._layout.tensordict(block), indices)

    def _assert_same(self, rows: TensorDict, indices: NDArray[np.int64]) -> None:
        for key, value in self.fields.items():
            found, expected = rows[key].contiguous().numpy(), value[indices]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            # As bytes: 0.0 and -0.0 are not the same, and a NaN is the same as itself.
            same = found.tobytes() == expected.tobytes()
            assert same, f"{key} of some rows of {indices.tolist()} differs"

    def distinct(self) -> float:
        """The share of rows that differ from the one before. (Where they do not, a row that was
        taken for its neighbour would go unnoticed.)"""
        differ = np.zeros(len(self) - 1, dtype=np.bool_)
        for value in self.fields.values():
            flat = value.reshape(len(self), -1)
            for first in range(0, len(differ), _AT_ONCE):
                part = flat[first : first + _AT_ONCE + 1]
                differ[first : first + len(part) - 1] |= (part[1:] != part[:-1]).any(axis=1)
        return float(differ.mean())


def atari(rows: int) -> Recording:
    """Every frame of several games, played at random with sticky actions: grey screens of 84 by 84,
    of every other line and column, between black edges of two columns."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    fields: dict[str, NDArray[Any]] = {
        "observation": np.zeros((rows, 84, 84), dtype=np.uint8),
        "action": np.zeros((rows, 1), dtype=np.int64),
        "reward": np.zeros(rows, dtype=np.float32), "done": np.zeros(rows, dtype=np.bool_),
    }
    cuts = [rows * number // len(GAMES) for number in range(len(GAMES) + 1)]
    for number, game in enumerate(GAMES):
        part = slice(cuts[number], cuts[number + 1])
        _play(game, number, {key: value[part] for key, value in fields.items()})
    return Recording(fields)


def _play(game: str, seed: int, fields: dict[str, NDArray[Any]]) -> None:
    """Fills ``fields``, of one game."""
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", 0.25)
    ale.loadROM(ale_py.roms.get_rom_path(game))
    observations, rows = fields["observation"], len(fields["done"])
    legal = ale.getMinimalActionSet()
    chosen = np.random.default_rng(seed).integers(0, len(legal), rows)
    fields["action"][:, 0] = chosen
    screens = np.empty((_AT_ONCE, *ale.getScreenDims()), dtype=np.uint8)
    assert screens.shape[1] >= 202 and screens.shape[2] == 160
    for first in range(0, rows, _AT_ONCE):
        end = min(first + _AT_ONCE, rows)
        for row, screen, action in zip(
            range(first, end), screens, chosen[first:end].tolist(), strict=False
        ):
            fields["reward"][row] = ale.act(legal[action])
            ale.getScreenGrayscale(screen)
            if ale.game_over():
                fields["done"][row] = True
                ale.reset_game()
        observations[first:end, :, 2:82] = screens[: end - first, 34:202:2, ::2]


def hopper_schema() -> conduit.Schema:
    """Of what :func:`hopper` records."""
    recording = hopper(1, seed=0)
    return conduit.Schema.from_example(TensorDict(recording.rows(0, 1), batch_size=[1]))


def hopper(rows: int, *, seed: int) -> Recording:
    """Random steps of Hopper-v5. Most episodes end with a fall, some are cut off before."""
    environment = gymnasium.make("Hopper-v5", max_episode_steps=30)
    environment.action_space.seed(seed)
    observation, _ = environment.reset(seed=seed)
    steps = []
    for _ in range(rows):
        action = environment.action_space.sample()
        following, reward, terminated, truncated, _ = environment.step(action)
        steps.append({
            "observation": observation, "action": action, "reward": reward,
            "next_observation": following, "terminated": terminated, "truncated": truncated,
        })
        observation = following
        if terminated or truncated:
            observation, _ = environment.reset()
    environment.close()
    return Recording({key: np.array([step[key] for step in steps]) for key in steps[0]})
