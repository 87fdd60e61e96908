"""A word of shared memory wakes who sleeps on it."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conduit.collectives import futex

pytestmark = pytest.mark.skipif(not futex.WORKS, reason="needs Linux on a known processor")

WRITER = """
import mmap, sys, time
import numpy as np
from conduit.collectives import futex
with open(sys.argv[1], "r+b") as file:
    words = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int64)
print("ready", flush=True)
sys.stdin.readline()
time.sleep(0.1)
written = time.monotonic_ns()
words[3] = 1 << 40 | 5
futex.wake(words.ctypes.data + 24)
print(written, flush=True)
"""


def test_another_process_wakes_who_sleeps(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_bytes(bytes(4096))
    with open(path, "r+b") as file:
        words = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int64)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.flush()
        before = time.thread_time_ns()
        while words[3] == 0:
            futex.sleep_while(words.ctypes.data + 24, 0, 20)
        awake, used = time.monotonic_ns(), time.thread_time_ns() - before
        written = int(writer.stdout.readline())
    assert words[3] == 1 << 40 | 5
    assert awake - written < 5e9 and used < 5e7, "slept until the word changed"


def test_it_sleeps_no_longer_than_told() -> None:
    words = np.array([7, 1 << 33], dtype=np.int64)
    begun = time.monotonic()
    futex.sleep_while(words.ctypes.data, 7, 0.1)
    assert 0.09 < time.monotonic() - begun < 5
    for address, seen in ((words.ctypes.data, 6), (words.ctypes.data + 8, 1)):
        futex.sleep_while(address, seen, 20)
    assert time.monotonic() - begun < 10, "a word that has changed already is not waited for"
