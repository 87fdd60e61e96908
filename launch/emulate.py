"""Runs a torchrun job on an emulated cluster: several hosts, joined by slow links, on one machine.

    python launch/emulate.py --links 1gbit,1gbit,200mbit --ranks-per-host 2 -- train.py --steps 10

runs ``torchrun train.py --steps 10`` on three hosts of two ranks each, and exits with its status.
There is a host for each link, and ranks are ordered as the links are: global rank r runs on host
r // 2. While it runs, another shell may change a link; the name of the cluster is on stderr:

    python launch/emulate.py --cluster NAME --change 2=50mbit

Needs Linux, root, iproute2 (``ip``, ``tc``) and util-linux (``unshare``, ``nsenter``).

A host is a set of namespaces: its network (``lo``, and ``eth0`` on a bridge that joins all hosts),
its hostname (``host-000``, ...), its process ids, its IPC, and its mounts: the machine's files, but
a /dev/shm, /proc, /etc/hosts and /sys/class/net of its own. Ranks of one host share memory; ranks
of different hosts meet on the network only. A token bucket at each end of a host's link limits what
it sends and, apart from that, what it receives: several senders to one host share its link's rate.

The namespaces have no names, the bridge is in one too, and a host's first process waits for this
one to end: however it ends, SIGKILL included, all processes of the hosts die and nothing remains.

What is not emulated: time on the wire (a packet is late only by queueing, for up to 50 ms at each
end of a link), loss other than from full queues, processors and memory (all hosts share those of
the machine, which may be too slow for links of several Gbit), and disks. Headers count: TCP gets
some 96% of a rate for its payload, a little less when both directions are full.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import ipaddress
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

TOOLS = ("ip", "tc", "unshare", "nsenter")
NAMESPACES = ("--mount", "--uts", "--ipc", "--net")
MAX_HOSTS = 1000
"""What a bridge takes, and what three digits number in an order that is also alphabetical."""

BRIDGE = "bridge"
FIRST_ADDRESS = ipaddress.IPv4Address("10.0.0.1")
_TORCHRUN = """
import argparse, functools
argparse.ArgumentParser.__init__ = functools.partialmethod(
    argparse.ArgumentParser.__init__, allow_abbrev=False
)
from torch.distributed.run import main
main()
"""
"""torchrun, except that it leaves the program's own options alone: up to Python 3.11 it refuses
those that begin like one of its own, as --max does."""
RENDEZVOUS_PORT = 29400
QUEUE_MS = 50
POLL_S = 0.1
GRACE_S = 10.0
"""How long agents may take to end their ranks before they are killed."""

MARK = "conduit-emulate"
"""Before the cluster and the host in the command line of what holds a host's namespaces."""

HOLD = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(flush=True)
sys.stdin.readline()
"""
"""The first process of a host: reaps its orphans, and ends it on a line or the end of its input."""

SET_UP = """
set -e
cluster=$1 host=$2 hosts=$3 python=$4 hold=$5
echo "$host" > /proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 tmpfs /dev/shm

# The file stays for as long as it is mounted, whatever becomes of its name.
replace() {
    [ -e "$1" ] || return 0
    printf '%s\\n' "$2" > /dev/shm/replacement
    mount --bind /dev/shm/replacement "$1"
    rm /dev/shm/replacement
}
replace /etc/hostname "$host"
replace /etc/hosts "$hosts"
# A name server is out of reach: asking it would take seconds each time.
replace /etc/nsswitch.conf "$(sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf)"

mkdir /dev/shm/sys
mount -t sysfs sysfs /dev/shm/sys
for interfaces in class/net devices/virtual/net; do
    mount --bind "/dev/shm/sys/$interfaces" "/sys/$interfaces"
done
umount /dev/shm/sys
rmdir /dev/shm/sys

# Interfaces to come have an IPv4 address only, which is usable at once.
echo 1 2> /dev/null > /proc/sys/net/ipv6/conf/default/disable_ipv6 || true
ip link set dev lo up
exec "$python" -ISc "$hold"
"""

PROBE = """
ip link add dev bridge type bridge &&
ip link add dev port type veth peer name eth0 &&
tc qdisc add dev port root tbf rate 1mbit burst 64kb latency 50ms
"""


class EmulationError(Exception):
    """What was asked for is wrong, or cannot be had here."""


def hostname(host: int) -> str:
    return f"host-{host:03d}"


def address(host: int) -> str:
    return str(FIRST_ADDRESS + host)


def bits_per_second(rate: str) -> int:
    """The number that a rate such as ``200mbit`` stands for."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate.strip(), re.IGNORECASE)
    bits = round(float(match[1]) * 1000 ** (" kmg".index(match[2].lower()))) if match else 0
    if not bits:
        raise EmulationError(
            f"a link has the rate {rate!r}, which is not a positive number of kbit, mbit or gbit;"
            " write for example 200mbit or 2.5gbit"
        )
    return bits


@functools.cache
def unavailable() -> str | None:
    """Why no cluster can be emulated here; None if one can. Tries it, the first time."""
    if sys.platform != "linux":
        return f"emulating a cluster needs Linux's namespaces; this system is {sys.platform}"
    if os.geteuid() != 0:
        return f"emulating a cluster needs root; the effective user id is {os.geteuid()}: use sudo"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return (
            f"emulating a cluster needs {', '.join(missing)}, not found in PATH;"
            " install iproute2 (ip, tc) and util-linux (unshare, nsenter)"
        )
    probe = subprocess.run(
        [*_in_new_namespaces(), "sh", "-c", PROBE],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )
    if probe.returncode:
        said = " ".join(probe.stderr.split()) or f"status {probe.returncode}"
        return (
            "emulating a cluster needs to make namespaces, bridges, veth links and tbf queues,"
            f" which fails here ({said}); a container needs --privileged"
        )
    return None


def _require() -> None:
    reason = unavailable()
    if reason:
        raise EmulationError(reason)


def _in_new_namespaces() -> list[str]:
    return ["unshare", *NAMESPACES, "--pid", "--fork", "--kill-child", "--mount-proc"]


def _configure(holder: int, tool: str, lines: Sequence[str]) -> None:
    """Gives the lines to ``ip`` or ``tc``, on the network of the process."""
    done = subprocess.run(
        ["nsenter", f"--target={holder}", "--net", tool, "-batch", "-"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, check=False,
    )
    if done.returncode:
        raise EmulationError(
            f"{tool} could not configure the network of the emulated cluster:"
            f" {' '.join(done.stderr.split())}"
        )


def _bucket(device: str, rate: str) -> str:
    """A line for ``tc``: the device sends no faster than this, from now on."""
    bits = bits_per_second(rate)
    # 1.5 ms of the rate. Less than one segment of TCP, 64 KB, would have to be cut up.
    burst = max(64 * 1024, round(bits / 8 * 0.0015))
    return f"qdisc replace dev {device} root tbf rate {bits}bit burst {burst}b latency {QUEUE_MS}ms"


def _limit(bridge: int, holder: int, host: int, rate: str) -> None:
    """Sets both ends of a link: the host's own cannot hold back what several others send to it."""
    _configure(holder, "tc", [_bucket("eth0", rate)])
    _configure(bridge, "tc", [_bucket(hostname(host), rate)])


def _find(cluster: str, role: str) -> int | None:
    """The process that holds the namespaces of this host, or of the bridge, of any cluster."""
    wanted = "\0".join(["", MARK, cluster, role, ""]).encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            line = entry.read_bytes()
            if line.startswith(b"unshare\0") and wanted in line:
                return int(entry.parent.name)
    return None


def change(cluster: str, host: int, rate: str) -> None:
    """Changes a link of a cluster that runs, in whichever process. Queued packets stay queued."""
    bits_per_second(rate)
    _require()
    bridge, holder = _find(cluster, BRIDGE), _find(cluster, hostname(host))
    if bridge is None:
        raise EmulationError(
            f"no emulated cluster {cluster!r} runs here; emulate.py prints the name when it starts"
        )
    if holder is None:
        raise EmulationError(f"the cluster {cluster!r} has no host {host}; the first is 0")
    _limit(bridge, holder, host, rate)


class Cluster:
    """Hosts, numbered from 0, that live as long as its ``with`` block.

        with Cluster(["200mbit", "1gbit"]) as cluster:
            cluster.run(1, ["python", "script.py"], check=True)
            cluster.change(1, "50mbit")
    """

    def __init__(self, links: Sequence[str], name: str | None = None) -> None:
        if not 1 <= len(links) <= MAX_HOSTS:
            raise EmulationError(
                f"there are {len(links)} links, and as many hosts; give 1 to {MAX_HOSTS}"
            )
        for rate in links:
            bits_per_second(rate)
        self.links = list(links)
        self.name = name or f"emulated-{os.getpid()}-{secrets.token_hex(4)}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise EmulationError(
                f"the cluster's name is {self.name!r}; use letters, digits, '_', '.' and '-' only"
            )
        self._holders: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Cluster:
        _require()
        if _find(self.name, BRIDGE) is not None:
            raise EmulationError(f"an emulated cluster {self.name!r} runs already; use another")
        try:
            self._start_holders()
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all hosts and every process in them."""
        while self._holders:
            # A line, as other processes may have inherited the pipe, and keep it open.
            _, holder = self._holders.popitem()
            holder.communicate("\n")

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """The command line that runs the program on the host, in this directory.

        The process that runs the command only waits for the program: to send that a signal, use
        ``kill``.
        """
        holder = self._holder(hostname(host))
        return [
            "nsenter", f"--target={holder}", *NAMESPACES,
            # The holder itself has stayed outside, as the first process of these must be its child.
            f"--pid=/proc/{holder}/ns/pid_for_children",
            "env", f"--chdir={Path.cwd()}", "GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=eth0",
            f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '1')}",
            *program,
        ]

    def run(
        self, host: int, program: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """``subprocess.run`` on the host."""
        return subprocess.run(self.command(host, program), **options)

    def kill(self, host: int, number: int) -> None:
        """Sends the signal to all processes of the host; the host itself goes on."""
        self.run(host, ["sh", "-c", 'kill -s "$0" -- -1', str(number)], stderr=subprocess.DEVNULL)

    def change(self, host: int, rate: str) -> None:
        """Changes the rate of the host's link, both ways. Queued packets stay queued."""
        _limit(self._holder(BRIDGE), self._holder(hostname(host)), host, rate)

    def torchrun(self, arguments: Sequence[str], ranks_per_host: int = 1) -> int:
        """Runs ``torchrun`` with these arguments on all hosts; returns its exit status."""
        agents = [
            subprocess.Popen(
                self.command(host, self.agent(host, arguments, ranks_per_host)),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must reach this process only, which ends them
            )
            for host in range(len(self.links))
        ]
        try:
            return _status(agents)
        finally:
            self._stop(agents)

    def agent(self, host: int, arguments: Sequence[str], ranks_per_host: int) -> list[str]:
        """The torchrun of one host."""
        return [
            sys.executable, "-c", _TORCHRUN,
            f"--nnodes={len(self.links)}", f"--nproc-per-node={ranks_per_host}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{RENDEZVOUS_PORT}",
            f"--rdzv-id={self.name}",
            # The rendezvous waits for all nodes and then sorts them by this. (It ignores
            # --node-rank.)
            f"--local-addr={hostname(host)}",
            *arguments,
        ]

    def _start_holders(self) -> None:
        hosts = "\n".join([
            "127.0.0.1 localhost", "::1 localhost",
            *(f"{address(host)} {hostname(host)}" for host in range(len(self.links))),
        ])
        for role in (BRIDGE, *map(hostname, range(len(self.links)))):
            self._holders[role] = subprocess.Popen(
                [*_in_new_namespaces(), "sh", "-c", SET_UP, MARK, self.name, role, hosts,
                 sys.executable, HOLD],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
                start_new_session=True,
            )
        for role, holder in self._holders.items():
            assert holder.stdout is not None
            if not holder.stdout.readline():
                raise EmulationError(
                    f"could not set up {role} of the emulated cluster; the reason is printed above"
                )

    def _holder(self, role: str) -> int:
        """The process whose namespaces are those of this host, or of the bridge."""
        if role not in self._holders:
            raise EmulationError(
                f"the cluster {self.name!r} has no {role} now; it has the hosts 0 to"
                f" {len(self.links) - 1}, in its 'with' block"
            )
        return self._holders[role].pid

    def _connect(self) -> None:
        bridge = self._holder(BRIDGE)
        _configure(bridge, "ip", [
            f"link add dev {BRIDGE} type bridge", f"link set dev {BRIDGE} up",
        ])
        for host, rate in enumerate(self.links):
            port, holder = hostname(host), self._holder(hostname(host))
            _configure(bridge, "ip", [
                f"link add dev {port} type veth peer name eth0 netns {holder}",
                f"link set dev {port} master {BRIDGE} up",
            ])
            _configure(holder, "ip", [
                f"address add {address(host)}/16 dev eth0", "link set dev eth0 up",
            ])
            _limit(bridge, holder, host, rate)

    def _stop(self, agents: Sequence[subprocess.Popen[bytes]]) -> None:
        """Ends what still runs: politely, then not."""
        deadline = time.monotonic() + GRACE_S
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [host for host, agent in enumerate(agents) if agent.poll() is None]
            for host in running:
                self.kill(host, number)
            for host in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agents[host].wait(max(0.0, deadline - time.monotonic()))


def _status(agents: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all agents or the first that fails; its exit status, as a shell has it."""
    while True:
        codes = [agent.poll() for agent in agents]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(POLL_S)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EmulationError(f"{message}; see --help")


def _arguments(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is for this program, and what, after ``--``, for torchrun."""
    assert __doc__ is not None
    parser = _Parser(
        prog="emulate.py", allow_abbrev=False, epilog=__doc__.partition("\n")[2],
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="emulate.py --links RATE,... [--ranks-per-host N] [--cluster NAME] -- ARGS...\n"
        "       emulate.py --cluster NAME --change HOST=RATE",
    )
    does = parser.add_mutually_exclusive_group(required=True)
    does.add_argument("--links", metavar="RATE,...", help="a host for each: 200mbit,2.5gbit")
    does.add_argument("--change", metavar="HOST=RATE", help="of --cluster, which runs; 0=50mbit")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="1 if not given")
    parser.add_argument("--cluster", metavar="NAME", help="made up and printed if not given")
    end = list(words).index("--") if "--" in words else len(words)
    return parser.parse_args(words[:end]), list(words[end + 1 :])


def _change(options: argparse.Namespace) -> int:
    if options.cluster is None:
        raise EmulationError("--change came without --cluster; name the one to change")
    host, _, rate = options.change.partition("=")
    if not re.fullmatch(r"\d+", host):
        raise EmulationError(
            f"--change is {options.change!r}; write HOST=RATE: 0=50mbit for the first host"
        )
    change(options.cluster, int(host), rate)
    return 0


def _run(options: argparse.Namespace, job: list[str]) -> int:
    if not job:
        raise EmulationError("nothing to run; write torchrun's arguments after '--': -- train.py")
    if options.ranks_per_host < 1:
        raise EmulationError(f"--ranks-per-host is {options.ranks_per_host}; it must be at least 1")
    links = [rate for rate in options.links.split(",") if options.links.strip()]
    cluster = Cluster(links, options.cluster)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with cluster:
        print(f"emulate.py: cluster {cluster.name}: torchrun {shlex.join(job)}", file=sys.stderr)
        return cluster.torchrun(job, options.ranks_per_host)


def main(words: Sequence[str]) -> int:
    try:
        options, job = _arguments(words)
        return _change(options) if options.change is not None else _run(options, job)
    except EmulationError as error:
        print(f"emulate.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
