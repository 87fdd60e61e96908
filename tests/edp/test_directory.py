"""The directory against a list of (logical index, holder), and its size in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit.edp.directory import Directory
from conduit.errors import WorldError
from tests.properties import examples


class ListDirectory:
    """The same as a list, oldest row first."""

    def __init__(self, capacity: int, ranks: int) -> None:
        self.capacity, self.ranks = capacity, ranks
        self.rows: list[tuple[int, int]] = []
        self.end = self.origin = 0

    def lost(self, arriving: int) -> list[int]:
        leaving = max(len(self.rows) + arriving - self.capacity, 0)
        gone = [holder for _, holder in self.rows[:leaving]]
        return [gone.count(rank) for rank in range(self.ranks)]

    def append(self, holders: list[int], skipped: int) -> None:
        self.end += skipped
        for holder in holders:
            self.rows.append((self.end, holder))
            self.end += 1
            if len(self.rows) > self.capacity:
                self.rows.pop(0)

    def clear(self) -> None:
        self.rows, self.origin = [], self.end

    def at(self, position: int) -> tuple[int, int]:
        found = [
            row for row in self.rows if (row[0] - self.origin) % self.capacity == position
        ]
        assert len(found) == 1
        return found[0]


def append(directory: Directory, runs: list[tuple[int, int]], skipped: int) -> list[int]:
    """Appends (holder, rows) runs; returns the holder of every row."""
    holders = np.array([holder for holder, _ in runs], dtype=np.int64)
    counts = np.array([rows for _, rows in runs], dtype=np.int64)
    arriving = np.zeros(directory.ranks, dtype=np.int64)
    np.add.at(arriving, holders, counts)
    directory.append(
        holders, counts, skipped=skipped, lost=directory.evicted(int(counts.sum())),
        arriving=arriving,
    )
    return np.repeat(holders, counts).tolist()


def assert_equal(directory: Directory, model: ListDirectory) -> None:
    assert directory.size == len(model.rows)
    assert directory.end == model.end
    assert directory.begin == model.end - len(model.rows)
    held = [[holder for _, holder in model.rows].count(rank) for rank in range(model.ranks)]
    assert directory.held.tolist() == held
    positions = np.arange(directory.size)
    assert list(zip(
        directory.indices(positions).tolist(), directory.holders(positions).tolist(), strict=True
    )) == [model.at(position) for position in range(directory.size)]
    # In any order, with repetitions.
    mixed = np.concatenate([positions[::-1], positions[::2]])
    assert directory.indices(mixed).tolist() == [model.at(p)[0] for p in mixed.tolist()]


@examples(150)
@given(data=st.data(), capacity=st.integers(1, 30), ranks=st.sampled_from([1, 2, 3, 7, 300]))
def test_a_directory_is_a_list(data: st.DataObject, capacity: int, ranks: int) -> None:
    directory = Directory(capacity=capacity, ranks=ranks)
    model = ListDirectory(capacity, ranks)
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 7)) == 0:
            directory.clear()
            model.clear()
        else:
            runs, room = [], capacity
            for _ in range(data.draw(st.integers(0, 4))):
                rows = data.draw(st.integers(0, room))
                runs.append((data.draw(st.integers(0, ranks - 1)), rows))
                room -= rows
            # Indices are skipped by commits that fill the whole buffer.
            skipped = data.draw(st.integers(0, 2 * capacity)) if room == 0 else 0
            arriving = capacity - room
            assert directory.evicted(arriving).tolist() == model.lost(arriving)
            model.append(append(directory, runs, skipped), skipped)
        assert_equal(directory, model)


@examples(100)
@given(
    capacity=st.integers(1, 30),
    commits=st.lists(st.one_of(st.none(), st.integers(0, 80)), max_size=12),
)
def test_appending_alone_is_appending(capacity: int, commits: list[int | None]) -> None:
    directory = Directory(capacity=capacity, ranks=1)
    model = ListDirectory(capacity, 1)
    for rows in commits:
        if rows is None:
            directory.clear()
            model.clear()
        else:
            skipped = max(rows - capacity, 0)
            assert directory.append_alone(rows) == skipped
            model.append([0] * (rows - skipped), skipped)
        assert_equal(directory, model)


def test_indices_are_never_used_again() -> None:
    directory = Directory(capacity=4, ranks=2)
    seen: set[int] = set()
    for _ in range(6):
        before = directory.end
        append(directory, [(1, 3)], 0)
        fresh = set(range(before, directory.end))
        assert not fresh & seen
        seen |= fresh
        directory.clear()
        assert directory.size == 0
        assert directory.held.tolist() == [0, 0]
    assert directory.end == 18


def test_logical_indices_beyond_32_bits() -> None:
    directory = Directory(capacity=5, ranks=2)
    model = ListDirectory(5, 2)
    for _ in range(3):
        model.append(append(directory, [(0, 2), (1, 3)], 1 << 40), 1 << 40)
        assert_equal(directory, model)
    assert directory.end == (3 << 40) + 15


@pytest.mark.parametrize(
    ("ranks", "row_bytes"), [(1, 1), (2, 1), (256, 1), (257, 2), (1024, 2), (65_536, 2)]
)
def test_bytes_a_row(ranks: int, row_bytes: int) -> None:
    directory = Directory(capacity=1000, ranks=ranks)
    assert directory.nbytes == 1000 * row_bytes
    append(directory, [(ranks - 1, 1000)], 0)
    assert directory.holders(np.arange(1000)).tolist() == [ranks - 1] * 1000
    assert directory.nbytes == 1000 * row_bytes


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(WorldError, match="too many ranks"):
        Directory(capacity=10, ranks=65_537)
