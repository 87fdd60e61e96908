"""Real ranks for tests: processes that stay, and run one function of a test after another.

Importing torch takes seconds, so it is imported once, in a *template* process without threads and
without process groups, and ranks are forked from that. A test gives a function of a module; it is
called on every rank as ``function(rank, **arguments)``, with arguments that JSON can carry, and may
return numpy arrays and what JSON can carry. What a rank raises comes back with its traceback; what
it prints, and the stacks of ranks that hang, go to a log that is shown when something fails.

This file is also the program of the template: it is run by path and imports torch only there.
"""

from __future__ import annotations

import base64
import faulthandler
import functools
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

__all__ = ["Outcome", "Rank", "Ranks", "free_port"]

_PATIENCE_S = 40.0
"""How long a test waits for its ranks: far longer than any test should take."""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


# ------------------------------------------------------------------------------ in a rank process


class Rank:
    """What a function that runs on a rank gets: who it is, and a source of jitter."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.jitter(0, 0.0)

    def jitter(self, seed: int, pause_ms: float) -> None:
        """From now on ``pause`` sleeps for up to ``pause_ms``, differently for each seed."""
        self._random, self._pause_s = random.Random(f"{seed} {self.number}"), pause_ms / 1e3

    def pause(self) -> None:
        """Often nothing, often a short sleep, seldom a long one."""
        kind = self._random.random()
        if self._pause_s and kind > 0.4:
            time.sleep(self._pause_s * self._random.random() * (5 if kind > 0.97 else 1))


_stores: list[Any] = []


def serve_store(rank: Rank) -> int:
    """This rank serves the store of the world; returns its port."""
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, rank.size, is_master=True, wait_for_workers=False
    )
    _stores.append(store)
    return int(store.port)


def join_world(rank: Rank, *, port: int) -> None:
    """What a user's program does before it makes a plane: ``init_process_group``."""
    import torch.distributed as dist

    store = _stores[0] if _stores else dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, rank.size
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank.number, world_size=rank.size, timeout=timedelta(seconds=20)
    )


def _serve(connection: Connection, rank: Rank) -> NoReturn:
    """Calls functions as they are asked for; a function that raises SystemExit ends the rank."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    while True:
        try:
            message = _receive(connection)
        except EOFError:
            os._exit(0)
        begun = time.monotonic()
        reply: dict[str, Any] = {"value": None, "error": None, "text": "", "trace": ""}
        try:
            module, name = message["function"].split(":")
            function = getattr(importlib.import_module(module), name)
            reply["value"] = function(rank, **message["arguments"])
        except SystemExit:
            # As a program that ends: with Python's own clearing up.
            raise
        except BaseException as error:
            reply["error"], reply["text"] = type(error).__name__, str(error)
            reply["trace"] = traceback.format_exc()
        reply["seconds"] = time.monotonic() - begun
        _send(connection, reply)


def _template(control: Connection) -> None:
    """Forks ranks on request, and says how they ended."""
    sys.path[:] = _receive(control)["path"]
    # This file runs as __main__; functions are looked up by the module's name.
    sys.modules["tests.spmd.ranks"] = sys.modules["__main__"]
    import pytest  # noqa: F401
    import torch

    import conduit  # noqa: F401

    torch.set_num_threads(1)
    tasks = "/proc/self/task"
    _send(control, {"threads": len(os.listdir(tasks)) if os.path.isdir(tasks) else 1})
    while True:
        try:
            request = _receive(control)
        except EOFError:
            return
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            _send(control, {"code": os.waitstatus_to_exitcode(status) if pid else None})
            continue
        handles = [recv_handle(control) for _ in range(2)]
        pid = os.fork()
        if pid == 0:
            control.close()
            os.dup2(handles[1], 1)
            os.dup2(handles[1], 2)
            os.environ.update(request["environment"])
            _serve(Connection(handles[0]), Rank(request["rank"], request["size"]))
        for handle in handles:
            os.close(handle)
        _send(control, {"pid": pid})


def _encode(value: object) -> object:
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"__array__": data, "dtype": value.dtype.str, "shape": value.shape}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a rank cannot send a {type(value).__name__}")


def _decode(value: dict[str, Any]) -> object:
    if "__array__" not in value:
        return value
    data = np.frombuffer(base64.b64decode(value["__array__"]), dtype=value["dtype"])
    return data.reshape(value["shape"])


def _send(connection: Connection, message: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(message, default=_encode).encode())


def _receive(connection: Connection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(connection.recv_bytes(), object_hook=_decode)
    return message


# ---------------------------------------------------------------------------- in the test process


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a function on one rank: its ``value``, or the name of its ``error``.

    ``error`` is ``"died"`` when the process ended before it answered, ``"hangs"`` when it did not
    answer in time.
    """

    value: Any = None
    error: str | None = None
    text: str = ""
    trace: str = ""
    seconds: float = 0.0


class Template:
    """The process that ranks are forked from; it ends with the test process."""

    def __init__(self) -> None:
        path = [str(Path(__file__).parents[2]), *sys.path]
        self._control, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env=os.environ | _ENVIRONMENT, stdin=subprocess.DEVNULL,
        )
        theirs.close()
        _send(self._control, {"path": path})
        threads = _receive(self._control)["threads"]
        assert threads == 1, f"forking a process with {threads} threads is not safe"

    def fork(
        self, rank: int, size: int, *, log: int, environment: Mapping[str, str]
    ) -> tuple[int, Connection]:
        """A new rank process: its id, and the connection to it."""
        ours, theirs = Pipe()
        _send(self._control, {"rank": rank, "size": size, "environment": dict(environment)})
        for handle in (theirs.fileno(), log):
            send_handle(self._control, handle, self._process.pid)
        theirs.close()
        return int(_receive(self._control)["pid"]), ours

    def exit_code(self, pid: int) -> int | None:
        """How a rank ended: its exit code or minus its signal; None while it runs. Ask once."""
        _send(self._control, {"ended": pid})
        code: int | None = _receive(self._control)["code"]
        return code


@functools.cache
def template() -> Template:
    """The one template of this test session."""
    return Template()


class Ranks:
    """A world of ``size`` rank processes.

    With ``grouped`` the user's process group exists before the first function runs; without, the
    ranks find the variables that ``torchrun`` sets.
    """

    def __init__(self, size: int, *, grouped: bool = True) -> None:
        self.size, self._failed, self._busy = size, False, False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the world
        environment = {}
        if not grouped:
            environment = {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            }
        started = []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if not grouped else {}
            started.append(template().fork(
                rank, size, log=self._log.fileno(), environment=environment | own
            ))
        self.pids = [pid for pid, _ in started]
        self._connections = [connection for _, connection in started]
        if grouped and size > 1:
            port = self.run(serve_store, ranks=[0])[0]
            self.run(join_world, port=port)

    @property
    def healthy(self) -> bool:
        """Whether all ranks are there, waiting for the next function."""
        return not self._failed and not self._busy

    def start(
        self, function: Callable[..., Any], *, ranks: Sequence[int] | None = None,
        each: Sequence[Mapping[str, Any]] | None = None, **arguments: Any,
    ) -> None:
        """Begins ``function`` on ``ranks`` (default: all); ``each`` are arguments by rank."""
        self._busy = True
        name = f"{function.__module__}:{function.__name__}"
        for rank in ranks if ranks is not None else range(self.size):
            own = each[rank] if each is not None else {}
            _send(self._connections[rank], {"function": name, "arguments": arguments | {**own}})

    def outcomes(
        self, *, ranks: Sequence[int] | None = None, patience_s: float = _PATIENCE_S
    ) -> list[Outcome]:
        """Waits for what ``start`` began, and says what became of it, in the order of ``ranks``."""
        ranks = list(ranks) if ranks is not None else list(range(self.size))
        deadline = time.monotonic() + patience_s
        found: dict[int, Outcome] = {}
        open_ = {self._connections[rank]: rank for rank in ranks}
        while open_ and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(open_), left):
                assert isinstance(ready, Connection)
                rank = open_.pop(ready)
                try:
                    found[rank] = Outcome(**_receive(ready))
                except (EOFError, ConnectionError):
                    found[rank] = Outcome(error="died")
        if open_:
            for rank in open_.values():
                self._signal(rank, signal.SIGUSR1)
                found[rank] = Outcome(error="hangs", text=f"no answer within {patience_s:g} s")
            time.sleep(0.5)
        self._busy = False
        self._failed = self._failed or any(one.error is not None for one in found.values())
        return [found[rank] for rank in ranks]

    def values(
        self, *, ranks: Sequence[int] | None = None, patience_s: float = _PATIENCE_S
    ) -> list[Any]:
        """As ``outcomes``, where no rank may fail: the values. Fails the test with all traces."""
        outcomes = self.outcomes(ranks=ranks, patience_s=patience_s)
        failed = [
            f"rank {rank}: {one.error}: {one.text}\n{one.trace}"
            for rank, one in zip(ranks or range(self.size), outcomes, strict=True)
            if one.error is not None
        ]
        if failed:
            raise AssertionError("\n".join([f"{len(failed)} ranks failed", *failed, self.log()]))
        return [one.value for one in outcomes]

    def run(
        self, function: Callable[..., Any], *, ranks: Sequence[int] | None = None,
        each: Sequence[Mapping[str, Any]] | None = None, **arguments: Any,
    ) -> list[Any]:
        """``start`` and ``values``."""
        self.start(function, ranks=ranks, each=each, **arguments)
        return self.values(ranks=ranks)

    def log(self) -> str:
        """What the ranks printed, its end."""
        end = self._log.seek(0, os.SEEK_END)
        return os.pread(self._log.fileno(), 20_000, max(end - 20_000, 0)).decode(errors="replace")

    def exit_code(self, rank: int, *, patience_s: float = 10.0) -> int | None:
        """How ``rank`` ended, minus the signal if by one; None if it still runs. Ask once."""
        deadline = time.monotonic() + patience_s
        while (code := template().exit_code(self.pids[rank])) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        self.pids[rank] = 0
        return code

    def _signal(self, rank: int, number: int) -> None:
        # Process 0 would be this process and all others of its group.
        if self.pids[rank] > 0:
            os.kill(self.pids[rank], number)

    def close(self) -> None:
        """Ends all ranks, however they are."""
        for rank, connection in enumerate(self._connections):
            connection.close()
            if self.pids[rank]:
                self._signal(rank, signal.SIGKILL)
                self.exit_code(rank)
        self._log.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    _template(Connection(int(sys.argv[1])))
