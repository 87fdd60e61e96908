"""A mean loss has the same gradient however the global batch is split: training does not notice."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from tests.spmd.cases import make_plane
from tests.spmd.conftest import Pools
from tests.spmd.ranks import Rank

GLOBAL_ROWS = 64


def train(rank: Rank, *, routing: str, jitter: int) -> NDArray[np.float64]:
    """Twelve steps of gradient descent under DDP; the parameters after each step."""
    rank.jitter(jitter, 1.0)
    torch.manual_seed(5)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(6, 8, dtype=torch.float64), torch.nn.Tanh(),
        torch.nn.Linear(8, 1, dtype=torch.float64),
    )
    if rank.size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    example = {"x": torch.zeros(6).double(), "y": torch.zeros(()).double()}
    with make_plane(
        rank, example, capacity=500, batch_rows=GLOBAL_ROWS // rank.size, routing=routing, seed=2
    ) as plane:
        for step in range(12):
            # One stream of rows, cut into contiguous blocks.
            numbers = torch.arange(step * 120, (step + 1) * 120).double().chunk(rank.size)
            mine = numbers[rank.number]
            x = torch.sin(mine[:, None] * torch.arange(1, 7))
            plane.extend({"x": x, "y": torch.cos(mine)})
            rank.pause()
            batch = plane.sample()
            assert batch is not None
            loss = (model(batch["x"]).squeeze(1) - batch["y"]).square().mean()
            optimizer.zero_grad()
            (loss * batch["loss_scale"]).backward()
            optimizer.step()
            history.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.stack(history).numpy()


def test_routing_and_ranks_do_not_change_training(pools: Pools) -> None:
    (alone,) = pools[1].run(train, routing="exchangeable", jitter=0)
    assert np.ptp(alone, axis=0).max() > 0.05, "nothing was learned"
    for ranks, routing in itertools.product((2, 4), ("exchangeable", "independent")):
        for history in pools[ranks].run(train, routing=routing, jitter=ranks):
            np.testing.assert_allclose(history, alone, rtol=1e-10, atol=1e-12)


def test_which_rows_a_rank_gets_does_change(pools: Pools) -> None:
    """Otherwise the test above would say nothing."""
    first = pools[2].run(batch_of, routing="exchangeable")
    second = pools[2].run(batch_of, routing="independent")
    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second))
    assert sorted(first[0]) != sorted(second[0])


def batch_of(rank: Rank, *, routing: str) -> list[int]:
    with contextlib.closing(
        make_plane(rank, {"x": torch.zeros(2)}, capacity=500, batch_rows=32, routing=routing)
    ) as plane:
        plane.extend({"x": torch.zeros(100, 2)})
        batch = plane.sample()
        assert batch is not None
        return list(batch["index"].tolist())
