"""Double DQN on CartPole, data-parallel over any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/dqn_cartpole.py
    python examples/dqn_cartpole.py

An ordinary PyTorch loop with an ordinary replay buffer, except that the buffer spans the ranks:
each adds what its own environments produced, and every update trains on one global batch drawn
from all of it. Environments, exploration and batch are counted over the whole job, so one rank
and several learn alike.
"""

import argparse
import copy
import os

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import conduit

ENVS = 16  # of the whole job, as is the batch, so at most 16 ranks
BATCH = 128
GAMMA = 0.99
LEARNING_RATE = 2e-3
TARGET_RATE = 0.05
EXPLORATION = 0.05  # reached after a fifth of the run


class QNetwork(nn.Module):
    span: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Position, velocity, angle and angular velocity span very different ranges.
        self.register_buffer("span", torch.tensor([2.4, 2.0, 0.2, 2.0]))
        self.layers = nn.Sequential(
            nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
        )

    def forward(self, observation: Tensor) -> Tensor:
        return self.layers(observation / self.span)


def make_envs(count: int) -> SyncVectorEnv:
    # The step that ends an episode also resets its environment, so that no step is a mere reset.
    makers = [lambda: gym.make("CartPole-v1")] * count
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


@torch.no_grad()
def greedy(net: nn.Module, observation: NDArray[np.float32]) -> NDArray[np.int64]:
    return net(torch.from_numpy(observation)).argmax(-1).numpy()


def td_loss(learner: nn.Module, net: nn.Module, target: nn.Module, batch: TensorDict) -> Tensor:
    value = learner(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        following = batch["next", "observation"]
        choice = net(following).argmax(-1, keepdim=True)
        future = target(following).gather(-1, choice).squeeze(-1)
        # A truncated episode would have gone on, so only a terminated one has no future. Rewards
        # are scaled so that values lie between 0 and 1.
        alive = (~batch["next", "terminated"]).float()
        goal = (1 - GAMMA) * batch["next", "reward"] + GAMMA * alive * future
    return nn.functional.smooth_l1_loss(value, goal)


def evaluate(net: nn.Module, episodes: int, seed: int) -> float:
    """Mean return of the greedy policy over the first episode of each of ``episodes`` games."""
    envs = make_envs(episodes)
    observation, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        observation, reward, terminated, truncated, _ = envs.step(greedy(net, observation))
        returns += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Double DQN on CartPole, on any number of ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120_000, help="environment steps, all ranks")
    parser.add_argument("--eval-episodes", type=int, default=20)
    args = parser.parse_args()

    rank, world = 0, 1
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # more would only slow so small a network down

    net = QNetwork()
    target = copy.deepcopy(net)
    learner = DistributedDataParallel(net) if world > 1 else net
    iterations = args.steps // ENVS
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, iterations)

    mine = range(rank * ENVS // world, (rank + 1) * ENVS // world)
    envs = make_envs(len(mine))
    observation, _ = envs.reset(seed=[args.seed * ENVS + number for number in mine])
    chance = np.random.default_rng(args.seed)  # drawn for all environments, each rank uses its own
    score, scores = np.zeros(len(mine)), [0.0]

    row = {
        "observation": torch.zeros(4),
        "action": torch.tensor(0),
        "next": {
            "observation": torch.zeros(4),
            "reward": torch.tensor(0.0),
            "terminated": torch.tensor(False),
        },
    }
    plane = conduit.ExperiencePlane(
        row, capacity=50_000, batch_size=BATCH // world, min_size=1_000, seed=args.seed
    )

    if rank == 0:
        print(f"{world} rank(s), {args.steps:,} steps; return: of this rank's last 20 episodes")
    for iteration in range(1, iterations + 1):
        epsilon = max(EXPLORATION, 1 - iteration / (0.2 * iterations))
        explore = chance.random(ENVS)[mine] < epsilon
        action = np.where(explore, chance.integers(2, size=ENVS)[mine], greedy(net, observation))
        after, reward, terminated, truncated, info = envs.step(action)
        following = after.copy()
        for ended in np.flatnonzero(terminated | truncated):
            following[ended] = info["final_obs"][ended]
            scores = [*scores, score[ended] + reward[ended]][-20:]
        plane.extend(
            {
                "observation": torch.from_numpy(observation),
                "action": torch.from_numpy(action),
                "next": {
                    "observation": torch.from_numpy(following),
                    "reward": torch.from_numpy(reward).float(),
                    "terminated": torch.from_numpy(terminated),
                },
            }
        )
        observation = after
        score = (score + reward) * ~(terminated | truncated)

        batch = plane.sample()  # commits all ranks' rows; None on all of them below min_size
        if batch is not None:
            loss = td_loss(learner, net, target, batch)
            optimizer.zero_grad()
            (loss * batch["loss_scale"]).backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                    slow.lerp_(fast, TARGET_RATE)

        if rank == 0 and iteration % max(1, iterations // 20) == 0:
            print(
                f"step {iteration * ENVS:>7,}  return {np.mean(scores):5.1f}  rows {len(plane):,}"
                f"  blocked {plane.report().blocked_ms / iteration:.2f} ms an iteration",
                flush=True,
            )

    if rank == 0:
        print(plane.report())
    plane.close()
    envs.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        # The target network is a running mean of the last updates: steadier than the last one.
        result = evaluate(target, args.eval_episodes, seed=1_000_000 + args.seed)
        print(f"evaluated return: {result:.1f} over {args.eval_episodes} episodes")


if __name__ == "__main__":
    main()
