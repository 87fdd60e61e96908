"""Placement-invariant, write-stable draws.

Draw j of batch t has candidates u(seed, name, t, j, a), a = 0, 1, ...; the low bits of each are a
position below the power of two not below the buffer's size, and the first that lies below the size
is taken. Every candidate is a pure function of its arguments, so the draws are independent and
uniform with replacement, and neither the number of ranks, nor where rows live, nor when a batch is
fetched can change them. They are write-stable: d rows more in a buffer of n change only about d/n
of the draws, those that reject one candidate less. (When the size passes a power of two, once in a
doubling, one more bit counts and about half of them change.)

Candidate 0 is a piece of Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
3", SC 2011) with key = hash(seed, name, draws a batch) and a counter that numbers the draws of all
batches: 32 bits where the capacity allows, else 64. Candidate a > 0 is output a of SplitMix64
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) started from
that piece and the draw's number: only rejected draws need more candidates.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["UniformDraws"]

Pieces = NDArray[np.unsignedinteger]
Words = NDArray[np.uint64]
Positions = NDArray[np.int64]

_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_WORD = 1 << 64
_AHEAD_DRAWS = 32_768


class UniformDraws:
    """The draws of one plane: ``global_rows`` positions a batch, below sizes up to ``capacity``."""

    def __init__(self, *, seed: int, name: str, global_rows: int, capacity: int) -> None:
        digest = hashlib.sha256(f"conduit draws {seed} {global_rows} {name}".encode()).digest()
        self._philox = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8"))
        self._state: Any = self._philox.state
        self._key = int.from_bytes(digest[16:24], "little")
        self._piece: type[np.unsignedinteger[Any]]
        self._piece = np.uint32 if capacity <= 1 << 32 else np.uint64
        self._rows = global_rows
        # Philox makes four words for each value of its counter: a batch takes whole ones.
        self._counters = -(-global_rows * np.dtype(self._piece).itemsize // 32)
        # Positions of batches [first, first + len) at one size: a buffer that is full, or that is
        # sampled several times between writes, resolves many batches in one numpy pass.
        self._most = max(_AHEAD_DRAWS // global_rows, 1)
        self._first, self._size = 0, 0
        self._block = np.empty((0, global_rows), dtype=np.int64)

    def ahead(self, batch: int, size: int) -> Positions:
        """Positions in ``[0, size)`` of batch number ``batch`` and of some that follow it: int64
        ``[batches, global_rows]``, not to be changed."""
        row = batch - self._first
        if size != self._size or not 0 <= row < len(self._block):
            # The longer a size has lasted, the longer it is likely to last.
            count = min(2 * len(self._block), self._most) if size == self._size else 1
            first_draw = (batch * self._rows + self._key) % _WORD
            block = _resolve(self.pieces(batch, count).reshape(-1), first_draw, size)
            self._block = block.reshape(count, self._rows)
            self._first, self._size, row = batch, size, 0
        return self._block[row:]

    def positions(self, batch: int, size: int) -> Positions:
        """Positions of batch number ``batch``: int64 ``[global_rows]``, not to be changed."""
        return self.ahead(batch, size)[0]

    def pieces(self, batch: int, count: int) -> Pieces:
        """Candidate 0 of every draw of ``count`` batches from ``batch`` on: ``[count,
        global_rows]``."""
        state = self._state
        state["state"]["counter"][0] = batch * self._counters
        state["buffer_pos"] = 4
        self._philox.state = state
        words = self._philox.random_raw(4 * self._counters * count).reshape(count, -1)
        return words.view(self._piece)[:, : self._rows]


def _resolve(pieces: Pieces, first_draw: int, size: int) -> Positions:
    """The first candidate below ``size`` of each draw, ``pieces`` being their candidates 0 and
    ``first_draw`` the number of the first one: int64 ``[draws]``."""
    mask = (1 << (size - 1).bit_length()) - 1
    low = pieces & pieces.dtype.type(mask)
    positions = low.astype(np.int64)
    if mask == size - 1:
        return positions
    attempt = 1
    rejected = np.flatnonzero(low >= pieces.dtype.type(size))
    if 8 * len(rejected) > len(pieces):
        # Many: next candidates for all draws are cheaper than picking out the rejected.
        seeds = pieces.astype(np.uint64) << np.uint64(32)
        seeds += np.arange(len(pieces), dtype=np.uint64)
        while 8 * len(rejected) > len(pieces):
            candidates = _candidates(seeds, first_draw, attempt, mask)
            np.copyto(positions, candidates, where=positions >= size)
            rejected = np.flatnonzero(positions >= size)
            attempt += 1
    if len(rejected) == 0:
        return positions
    seeds = pieces[rejected].astype(np.uint64) << np.uint64(32)
    seeds += rejected.astype(np.uint64)
    while True:
        candidates = _candidates(seeds, first_draw, attempt, mask)
        positions[rejected] = candidates
        again = np.flatnonzero(candidates >= size)
        if len(again) == 0:
            return positions
        rejected, seeds = rejected[again], seeds[again]
        attempt += 1


def _candidates(seeds: Words, first_draw: int, attempt: int, mask: int) -> Positions:
    """Output ``attempt`` of SplitMix64 started at ``seeds + first_draw``, its low bits."""
    z = seeds + np.uint64((first_draw + attempt * _GAMMA) % _WORD)
    z ^= z >> np.uint64(30)
    z *= _MIX1
    z ^= z >> np.uint64(27)
    z *= _MIX2
    z ^= z >> np.uint64(31)
    z &= np.uint64(mask)
    return z.view(np.int64)
