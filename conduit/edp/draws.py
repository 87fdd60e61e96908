"""Placement-invariant, write-stable draws.

Draw j of batch t has candidates u(seed, name, t, j, a), a = 0, 1, ...; the low bits of each are a
position below the power of two not below the buffer's size, and the first that lies below the size
is taken. Every candidate is a pure function of its arguments, so the draws are independent and
uniform with replacement, and neither the number of ranks, nor where rows live, nor when a batch is
fetched can change them. They are write-stable: d rows more in a buffer of n change only about d/n
of the draws, those that reject one candidate less.

Candidate 0 is a piece of Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
3", SC 2011) with key = hash(seed, name, draws a batch) and a counter that numbers the draws of all
batches: 32 bits where the capacity allows, else 64. Candidate a > 0 is output a of SplitMix64 (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", OOPSLA 2014) started from a word of the batch, the piece and j:
only rejected draws need more candidates, and they are few.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["UniformDraws"]

Pieces = NDArray[np.unsignedinteger]
Words = NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_AHEAD_DRAWS = 16_384
_FEW_DRAWS = 4_096


class UniformDraws:
    """The draws of one plane: ``global_rows`` positions a batch, below sizes up to ``capacity``."""

    def __init__(self, *, seed: int, name: str, global_rows: int, capacity: int) -> None:
        digest = hashlib.sha256(f"conduit draws {seed} {global_rows} {name}".encode()).digest()
        self._philox = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8"))
        self._state: Any = self._philox.state
        self._piece: type[np.unsignedinteger[Any]]
        self._piece = np.uint32 if capacity <= 1 << 32 else np.uint64
        self._rows = global_rows
        # Philox makes four words a counter value: a batch takes whole ones, the last word is its
        # own word.
        needed = -(-global_rows * np.dtype(self._piece).itemsize // 8) + 1
        self._counters = -(-needed // 4)
        # Positions of batches [first, first + len) at one size: a buffer that is full, or that is
        # sampled several times between writes, resolves many batches in one numpy pass.
        self._most = max(_AHEAD_DRAWS // global_rows, 1)
        self._first, self._size = 0, 0
        self._block = np.empty((0, global_rows), dtype=np.int64)

    def random(self, batch: int, count: int) -> tuple[Pieces, Words]:
        """Candidate 0 of every draw of ``count`` batches from ``batch`` on (``[count,
        global_rows]``), and each batch's word (``[count]``)."""
        state = self._state
        state["state"]["counter"][0] = batch * self._counters
        state["buffer_pos"] = 4
        self._philox.state = state
        words = self._philox.random_raw(4 * self._counters * count).reshape(count, -1)
        return words.view(self._piece)[:, : self._rows], words[:, -1]

    def ahead(self, batch: int, size: int) -> NDArray[np.int64]:
        """Positions in ``[0, size)`` of batch number ``batch`` and of some that follow it: int64
        ``[batches, global_rows]``, not to be changed."""
        row = batch - self._first
        if size != self._size or not 0 <= row < len(self._block):
            # The longer a size has lasted, the longer it is likely to last.
            count = min(2 * len(self._block), self._most) if size == self._size else 1
            self._block = _resolve(*self.random(batch, count), size)
            self._first, self._size, row = batch, size, 0
        return self._block[row:]

    def positions(self, batch: int, size: int) -> NDArray[np.int64]:
        """Positions of batch number ``batch``: int64 ``[global_rows]``, not to be changed."""
        return self.ahead(batch, size)[0]


def _resolve(pieces: Pieces, words: Words, size: int) -> NDArray[np.int64]:
    """The first candidate below ``size`` of each draw: int64, ``[batches, rows]`` as ``pieces``."""
    mask = (1 << (size - 1).bit_length()) - 1
    low = pieces & pieces.dtype.type(mask)
    positions = low.astype(np.int64)
    if mask == size - 1:
        return positions
    flat = positions.reshape(-1)
    rejected = np.flatnonzero(low >= pieces.dtype.type(size))
    if len(rejected) == 0:
        return positions
    batches, draws = np.divmod(rejected, pieces.shape[1])
    seeds = pieces[batches, draws].astype(np.uint64) << np.uint64(32)
    seeds ^= draws.astype(np.uint64)
    seeds += words[batches]
    attempt = 1
    # Several candidates at a time while few draws are left: fewer passes, the same result.
    few = 2 if size > 0.9 * mask else 6
    while len(rejected):
        width = few if len(rejected) <= _FEW_DRAWS else 1
        steps = [(attempt + i) * _GAMMA & 0xFFFFFFFFFFFFFFFF for i in range(width)]
        candidates = _mix(seeds + np.array(steps, dtype=np.uint64)[:, None]) & np.uint64(mask)
        accepted = candidates < np.uint64(size)
        first = accepted.argmax(axis=0)
        columns = np.arange(len(rejected))
        taken = accepted[first, columns]
        flat[rejected[taken]] = candidates[first, columns][taken]
        rejected, seeds = rejected[~taken], seeds[~taken]
        attempt += width
    return positions


def _mix(z: Words) -> Words:
    z ^= z >> np.uint64(30)
    z *= _MIX1
    z ^= z >> np.uint64(27)
    z *= _MIX2
    z ^= z >> np.uint64(31)
    return z
