"""``launch/emulate.py``: hosts, links, the order of ranks, statuses, and that nothing remains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch import emulate
from launch.emulate import Cluster, EmulationError

EMULATE = [sys.executable, emulate.__file__]
UNAVAILABLE = emulate.unavailable()
emulated = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

MBIT = 50
SHARE_OF_RATE = (0.85, 1.0)
"""What TCP's payload may take of a link."""

RECEIVE = """
import selectors, socket, sys, time
senders, windows = int(sys.argv[1]), [float(end) for end in sys.argv[2:]]
server = socket.create_server(("", 5000))
print("listening", flush=True)
ready = selectors.DefaultSelector()
for _ in range(senders):
    ready.register(server.accept()[0], selectors.EVENT_READ)
started, received, seen = time.monotonic(), 0, []
while len(seen) < len(windows):
    for key, _ in ready.select():
        received += len(key.fileobj.recv(1 << 18))
    now = time.monotonic() - started
    if now > windows[len(seen)]:
        seen.append((now, received))
for (start, before), (end, after) in zip(seen[::2], seen[1::2]):
    print((after - before) * 8 / (end - start) / 1e6)
"""
"""Megabits per second that came in between pairs of seconds; the first second is slow start."""

SEND = """
import socket, sys
stream = socket.create_connection((sys.argv[1], 5000))
try:
    while True:
        stream.sendall(bytes(1 << 18))
except ConnectionError:
    pass
"""

RANK = """
import json, os, socket, sys
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
found = {"host": socket.gethostname(), **{name: os.environ[name] for name in names}}
sys.stdout.write(json.dumps(found) + "\\n")
"""

GLOO = """
import os, socket, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
# In one piece: ranks share the output, and an unbuffered print writes word by word.
print(f"ranks {socket.gethostname()} {dist.get_rank()} {total.item()}\\n", end="", flush=True)
dist.barrier()
"""


def python(text: str, *arguments: object) -> list[str]:
    return [sys.executable, "-Sc", text, *map(str, arguments)]


class Transfer:
    """Streams from some hosts to one host, until it has measured what comes in."""

    def __init__(
        self, cluster: Cluster, sources: Sequence[int], target: int, windows: Sequence[float]
    ) -> None:
        self._receiver = subprocess.Popen(
            cluster.command(target, python(RECEIVE, len(sources), *windows)),
            stdout=subprocess.PIPE, text=True,
        )
        assert self._receiver.stdout is not None and self._receiver.stdout.readline()
        self._senders = [
            subprocess.Popen(cluster.command(source, python(SEND, emulate.address(target))))
            for source in sources
        ]

    def rates(self) -> list[float]:
        out, _ = self._receiver.communicate(timeout=30)
        for sender in self._senders:
            sender.wait(timeout=30)
        return [float(line) for line in out.split()]


def check_rate(measured: float, mbit: float) -> None:
    low, high = SHARE_OF_RATE
    assert low * mbit < measured < high * mbit, f"{measured} Mbit/s on a link of {mbit}"


def output(cluster: Cluster, host: int, program: Sequence[str]) -> str:
    done = cluster.run(host, program, capture_output=True, text=True, check=True)
    return str(done.stdout).strip()


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EMULATE, *arguments], capture_output=True, text=True, timeout=60, **options
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster([f"{MBIT}mbit"] * 3) as cluster:
        yield cluster


class Agents(Cluster):
    """A cluster whose agents are these shell commands."""

    def __init__(self, *commands: str) -> None:
        super().__init__(["1gbit"] * len(commands))
        self.commands = commands

    def agent(self, host: int, arguments: Sequence[str], ranks_per_host: int) -> list[str]:
        return ["sh", "-c", self.commands[host]]


class Machine:
    """What a cluster must leave as it was."""

    def __init__(self) -> None:
        links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        self.links = re.findall(r"^\d+: (\S+):", links.stdout, re.MULTILINE)
        self.namespaces = names.stdout
        self.mounts = Path("/proc/self/mountinfo").read_text()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Machine) and vars(self) == vars(other)


def processes(name: str) -> list[str]:
    """Those that carry this cluster's name in their command line or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if name.encode() in words:
            found.append(f"{process.name}: {words[:200]!r}")
    return found


def check_no_processes(name: str) -> None:
    deadline = time.monotonic() + 5
    while (left := processes(name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize(("rate", "bits"), [
    ("200mbit", 200_000_000), ("1gbit", 10**9), ("2.5Gbit", 2_500_000_000), ("64KBIT", 64_000),
    ("0.5mbit", 500_000),
])
def test_rates(rate: str, bits: int) -> None:
    assert emulate.bits_per_second(rate) == bits


@pytest.mark.parametrize(("arguments", "named"), [
    (["--links", "1gbit,fast", "--", "x.py"], "'fast'"),
    (["--links", "1gbit,", "--", "x.py"], "''"),
    (["--links", "-1gbit", "--", "x.py"], "--links"),
    (["--links", "0mbit", "--", "x.py"], "'0mbit'"),
    (["--links", "100", "--", "x.py"], "'100'"),
    (["--links", "", "--", "x.py"], "0 links"),
    (["--links", "1gbit"], "nothing to run"),
    (["--links", "1gbit", "--"], "nothing to run"),
    (["--links", "1gbit", "--ranks-per-host", "0", "--", "x.py"], "--ranks-per-host is 0"),
    (["--links", "1gbit", "--ranks-per-host", "two", "--", "x.py"], "'two'"),
    (["--links", "1gbit", "--cluster", "a b", "--", "x.py"], "'a b'"),
    (["--links", "1gbit", "x.py"], "x.py"),
    (["--", "x.py"], "--links"),
    (["--change", "0=1gbit"], "--cluster"),
    (["--change", "0", "--cluster", "c"], "''"),
    (["--change", "first=1gbit", "--cluster", "c"], "'first=1gbit'"),
])
def test_bad_arguments(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emulate.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and named in err, err


@pytest.mark.parametrize(("where", "name", "value", "named"), [
    (sys, "platform", "darwin", "this system is darwin"),
    (os, "geteuid", lambda: 1000, "user id is 1000"),
    (emulate, "TOOLS", ("ip", "no-such-tool"), "needs no-such-tool"),
    (emulate, "PROBE", "echo not here >&2; false", "(not here)"),
])
def test_refuses_where_it_cannot_run(
    where: Any, name: str, value: object, named: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if where is emulate and UNAVAILABLE is not None:
        pytest.skip(UNAVAILABLE)
    emulate.unavailable.cache_clear()
    monkeypatch.setattr(where, name, value)
    try:
        assert emulate.main(["--links", "1gbit", "--", "x.py"]) == 2
    finally:
        emulate.unavailable.cache_clear()
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and named in err, err


@emulated
def test_set_up_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "SET_UP", "[ $2 != host-001 ] || exit 1; echo; read -r _")
    before = Machine()
    with pytest.raises(EmulationError, match="set up host-001"):
        Cluster(["1gbit"] * 2, "half-made").__enter__()
    check_no_processes("half-made")
    assert Machine() == before


@emulated
def test_hosts_have_names_of_their_own(cluster: Cluster) -> None:
    script = """
import socket, time
start = time.monotonic()
print(socket.gethostname(), socket.getfqdn(), socket.gethostbyname("host-002"),
      socket.gethostbyaddr("10.0.0.1")[0], socket.getfqdn("10.0.0.99"),
      open("/etc/hostname").read().strip(), time.monotonic() - start < 1)
"""
    for host in range(3):
        name = f"host-{host:03d}"
        expected = f"{name} {name} 10.0.0.3 host-000 10.0.0.99 {name} True"
        assert output(cluster, host, python(script)) == expected


@emulated
def test_hosts_have_interfaces_of_their_own(cluster: Cluster) -> None:
    assert sorted(output(cluster, 1, ["ls", "/sys/class/net"]).split()) == ["eth0", "lo"]
    assert output(cluster, 1, ["cat", "/sys/class/net/eth0/operstate"]) == "up"
    assert "10.0.0.2/16" in output(cluster, 1, ["ip", "address", "show", "dev", "eth0"])


@emulated
def test_programs_find_the_callers_files_and_environment(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_THE_CALLER", "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (tmp_path / "file").write_text("here")
    shown = output(cluster, 0, ["sh", "-c", "pwd; cat file; echo; env"]).splitlines()
    assert shown[:2] == [str(tmp_path), "here"]
    assert {"FROM_THE_CALLER=yes", "OMP_NUM_THREADS=3", "GLOO_SOCKET_IFNAME=eth0",
            "NCCL_SOCKET_IFNAME=eth0"} <= set(shown)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS=1" in output(cluster, 0, ["env"])


@emulated
def test_hosts_share_no_memory(cluster: Cluster) -> None:
    """Programs of one host do, also when the one that wrote has ended."""
    output(cluster, 0, ["sh", "-c", "echo there > /dev/shm/segment"])
    assert output(cluster, 0, ["cat", "/dev/shm/segment"]) == "there"
    assert [output(cluster, host, ["ls", "/dev/shm"]) for host in range(3)] == ["segment", "", ""]
    devices = [output(cluster, host, ["stat", "-c", "%d", "/dev/shm"]) for host in (0, 0, 1, 2)]
    assert len(set(devices)) == 3 and str(os.stat("/dev/shm").st_dev) not in devices
    assert not Path("/dev/shm/segment").exists()


@emulated
def test_a_host_reaps_its_orphans(cluster: Cluster) -> None:
    child = int(output(cluster, 0, ["sh", "-c", "sleep 0.1 > /dev/null & echo $!"]))
    time.sleep(0.3)
    script = "import os, sys; print(os.path.exists(f'/proc/{sys.argv[1]}'))"
    assert output(cluster, 0, python(script, child)) == "False"


@emulated
def test_links_limit_both_directions_at_once(cluster: Cluster) -> None:
    there = Transfer(cluster, [0], 1, [1, 3])
    back = Transfer(cluster, [1], 0, [1, 3])
    for transfer in (there, back):
        check_rate(transfer.rates()[0], MBIT)


@emulated
def test_links_limit_an_incast(cluster: Cluster) -> None:
    check_rate(Transfer(cluster, [0, 1], 2, [1, 3]).rates()[0], MBIT)


@emulated
def test_links_change_while_in_use(cluster: Cluster) -> None:
    """From another process, and then from this one."""
    transfer = Transfer(cluster, [0], 2, [1, 2, 3.5, 4.5])
    time.sleep(2.2)
    done = run("--cluster", cluster.name, "--change", "2=20mbit")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    before, after = transfer.rates()
    check_rate(before, MBIT)
    check_rate(after, 20)
    cluster.change(2, f"{MBIT}mbit")
    check_rate(Transfer(cluster, [2], 0, [1, 2]).rates()[0], MBIT)


@emulated
def test_changes_refused(cluster: Cluster) -> None:
    for name, host, rate, named in [
        ("no-such-cluster", 0, "1gbit", "'no-such-cluster'"), (cluster.name, 3, "1gbit", "host 3"),
        (cluster.name, 0, "fast", "'fast'"),
    ]:
        with pytest.raises(EmulationError, match=named):
            emulate.change(name, host, rate)
    with pytest.raises(EmulationError, match="host-003"):
        cluster.change(3, "1gbit")
    with pytest.raises(EmulationError, match="hosts 0 to 2"):
        cluster.command(-1, ["true"])


@emulated
def test_clusters_at_the_same_time(cluster: Cluster) -> None:
    """They have the same addresses and do not notice; only their names must differ."""
    with pytest.raises(EmulationError, match="runs already"), Cluster(["1gbit"], cluster.name):
        pass
    with Cluster(["1gbit", "1gbit"]) as other:
        (fast,) = Transfer(other, [0], 1, [0.5, 1]).rates()
        assert fast > 2 * MBIT
        other.change(0, "1mbit")
        assert output(other, 0, ["ls", "/dev/shm"]) == ""
    check_rate(Transfer(cluster, [0], 1, [1, 2]).rates()[0], MBIT)


@emulated
@pytest.mark.parametrize(("commands", "status"), [
    (["true", "true"], 0),
    (["true", "exit 7"], 7),
    (["sleep 100", "exit 7"], 7),
    (["trap '' TERM; while :; do sleep 100; done", "exit 7"], 7),
    (["sleep 0.5; exit 3", "exit 7"], 7),
    (["kill -KILL $$", "sleep 100"], 128 + signal.SIGKILL),
])
def test_statuses(commands: list[str], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the first host to fail, and the others are stopped."""
    monkeypatch.setattr(emulate, "GRACE_S", 0.5)
    started = time.monotonic()
    with Agents(*commands) as cluster:
        assert cluster.torchrun([]) == status
    assert time.monotonic() - started < 10


@emulated
def test_other_hosts_may_end_in_order(tmp_path: Path) -> None:
    note = tmp_path / "note"
    ends = f"trap 'echo ended > {note}; exit' TERM; sleep 100 & wait"
    with Agents(ends, "sleep 0.3; false") as cluster:
        assert cluster.torchrun([]) == 1
    assert note.read_text() == "ended\n"


@emulated
def test_ranks_are_ordered_as_links(tmp_path: Path) -> None:
    """Also when agents come in another order: here the first host's comes last."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with Cluster(["1gbit", "1gbit"]) as cluster:
        agents = []
        for host in (1, 0):
            agents.append(subprocess.Popen(
                cluster.command(host, cluster.agent(host, [str(script)], 2)),
                stdout=subprocess.PIPE, text=True,
            ))
            time.sleep(1)
        printed = "".join(agent.communicate(timeout=60)[0] for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0]
    found = [json.loads(line) for line in printed.splitlines()]
    assert sorted(found, key=lambda rank: int(rank["RANK"])) == [
        {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4",
         "host": emulate.hostname(rank // 2), "GLOO_SOCKET_IFNAME": "eth0",
         "NCCL_SOCKET_IFNAME": "eth0"}
        for rank in range(4)
    ]


@emulated
def test_gloo_meets_and_nothing_remains(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(GLOO)
    before, name = Machine(), f"test-{os.getpid()}-gloo"
    done = run("--links", "200mbit,1gbit", "--cluster", name, "--", str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["ranks host-000 0 3", "ranks host-001 1 3"]
    assert name in done.stderr
    check_no_processes(name)
    assert Machine() == before


@emulated
def test_nothing_remains_of_a_failure(tmp_path: Path) -> None:
    """Not the child, in a session of its own, of the rank that torchrun ends."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit(3)\n"
        "subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "time.sleep(100)\n"
    )
    before, name = Machine(), f"test-{os.getpid()}-failure"
    done = run("--links", "1gbit", "--ranks-per-host", "2", "--cluster", name, "--", str(script))
    assert done.returncode == 1, done.stderr
    assert "exitcode  : 3" in done.stderr
    check_no_processes(name)
    assert Machine() == before


@emulated
def test_nothing_remains_of_signals(tmp_path: Path) -> None:
    """Nor does a cluster notice what ends another."""
    script = tmp_path / "job.py"
    script.write_text(
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "print('runs', flush=True)\n"
        "time.sleep(100)\n"
    )
    before, jobs = Machine(), {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        name = f"test-{os.getpid()}-{number.name}"
        jobs[name, number] = subprocess.Popen(
            [*EMULATE, "--links", "1gbit", "--cluster", name, "--", str(script)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
    for (name, _), job in jobs.items():
        assert job.stdout is not None and job.stdout.readline() == "runs\n"
        assert len(processes(name)) > 4
    for (name, number), job in jobs.items():
        assert job.poll() is None
        job.send_signal(number)
        expected = -number if number == signal.SIGKILL else 128 + number
        assert job.wait(timeout=30) == expected
        check_no_processes(name)
    assert Machine() == before
