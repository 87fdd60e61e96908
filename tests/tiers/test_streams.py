"""Windows found out call by call against those of whole episodes, put together afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.errors import CapacityError
from conduit.tiers.slots import Slots
from conduit.tiers.streams import Streams, Window
from tests.properties import examples

CALLS = st.lists(st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([False, False, False, True])),
    min_size=1, max_size=14,
), max_size=8)


def windows_of(
    calls: list[list[tuple[int, bool]]], slots: list[list[int]], finals: list[list[int]],
    rewards: list[list[float]], window: Window,
) -> list[list[tuple[list[int], int, float]]]:
    """By call: the window of each item that it completes, its steps and its return."""
    episodes: dict[int, list[dict[str, Any]]] = {}
    for call, rows in enumerate(calls):
        spare = iter(finals[call])
        for (stream, done), slot, reward in zip(rows, slots[call], rewards[call], strict=True):
            known = episodes.setdefault(stream, [])
            if not known or known[-1]["done"]:
                known.append({"slots": [], "rewards": [], "done": False})
            known[-1]["slots"].append((slot, call))
            known[-1]["rewards"].append(reward)
            if done:
                known[-1]["slots"].append((next(spare), call))
                known[-1]["done"] = True
    found: list[list[tuple[list[int], int, float]]] = [[] for _ in calls]
    for stream in sorted(episodes):
        for episode in episodes[stream]:
            rows = episode["slots"]
            for step in range(len(episode["rewards"])):
                end = step + window.n_step
                if episode["done"]:
                    end = min(end, len(rows) - 1)
                if end < len(rows) and (window.padded or step >= window.back):
                    before, after = (
                        [rows[max(newest - back, 0)][0] for back in range(window.back, -1, -1)]
                        for newest in (step, end)
                    )
                    total = sum(
                        window.gamma**i * reward
                        for i, reward in enumerate(episode["rewards"][step:end])
                    )
                    whole = [*before, after[-1]] if window.n_step == 1 else before + after
                    found[rows[end][1]].append((whole, end - step, total))
    return found


@examples(300)
@given(calls=CALLS, back=st.integers(0, 3), n_step=st.integers(1, 4), padded=st.booleans())
def test_windows_are_those_of_whole_episodes(
    calls: list[list[tuple[int, bool]]], back: int, n_step: int, padded: bool
) -> None:
    window = Window(back=back, n_step=n_step, gamma=0.5, padded=padded)
    streams, rng, slot = Streams(window), np.random.default_rng(len(calls)), 0
    held: set[int] = set()
    slots, finals, rewards, got = [], [], [], []
    for rows in calls:
        ids = np.array([stream for stream, _ in rows])
        done = np.array([ended for _, ended in rows])
        mine = np.arange(slot, slot + len(rows))
        last = np.arange(slot + len(rows), slot + len(rows) + np.count_nonzero(done))
        slot += len(mine) + len(last)
        reward = rng.integers(-8, 8, len(rows)).astype(float)
        arrived, tails = streams.arrive(ids, mine, done, last, reward[:, None])
        slots.append(mine.tolist())
        finals.append(last.tolist())
        rewards.append(reward.tolist())
        got.append(list(zip(
            arrived.windows.tolist(), arrived.steps.tolist(), arrived.returns[:, 0].tolist(),
            strict=True,
        )))
        # An item that ends with its episode says so as the step does with which the episode ends.
        for item, row in zip(arrived.ended.tolist(), arrived.ends.tolist(), strict=True):
            assert done[row] and arrived.windows[item, -1] in last
        # What tails hold is told exactly.
        assert held >= set(tails.before.tolist())
        held = (held - set(tails.before.tolist())) | set(tails.after.tolist())
        assert len(set(streams.settled.tolist()) - held) == 0
    assert got == windows_of(calls, slots, finals, rewards, window)
    assert len(held) <= window.tail * streams.open


def test_closed_streams_are_forgotten() -> None:
    streams = Streams(Window(back=2, n_step=2))
    for episode in range(300):
        streams.arrive(
            np.full(3, episode), np.arange(3), np.array([False, False, True]), np.array([3]),
            np.zeros((3, 1)),
        )
    assert streams.open == 0 and len(streams._ids) < 4


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=40))
def test_slots_are_given_out_when_nobody_needs_them(
    program: list[tuple[int, int, bool]]
) -> None:
    slots, needed = Slots(16), dict.fromkeys(range(16), 0)
    rng = np.random.default_rng(len(program))
    for take, release, commit in program:
        free = sum(count == 0 for count in needed.values())
        assert slots.free == free
        if take > free:
            with pytest.raises(CapacityError):
                slots.take(take)
        elif take:
            taken = slots.take(take)
            assert all(needed[slot] == 0 for slot in taken.tolist())
            # Several need one, and one needs it several times.
            chosen = np.concatenate([taken, rng.choice(taken, 3)])
            slots.need(chosen.reshape(-1, 1))
            for slot in chosen.tolist():
                needed[slot] += 1
        used = [slot for slot, count in needed.items() for _ in range(count)]
        if used and release:
            let_go = rng.permutation(used)[:release]
            slots.release(let_go)
            for slot in let_go.tolist():
                needed[slot] -= 1
        if commit:
            slots.rested()
