"""Peers: other replay buffers, measured beside ours where they are installed. One peer a file."""

from __future__ import annotations

from collections.abc import Sequence

from conduit.tools.arguments import UsageError
from conduit.tools.bench.peers.cpprb_local import Cpprb
from conduit.tools.bench.peers.peer import LocalPeer, PeerError, missing
from conduit.tools.bench.peers.torchrl_local import TorchRL
from conduit.tools.bench.peers.torchrl_memmap import TorchRLMemmap
from conduit.tools.bench.peers.torchrl_rpc import TorchRLRemote

__all__ = ["LOCAL_PEERS", "LocalPeer", "PeerError", "TorchRLRemote", "chosen_peers", "require"]

LOCAL_PEERS: dict[str, type[LocalPeer]] = {
    "torchrl": TorchRL, "cpprb": Cpprb, "torchrl-memmap": TorchRLMemmap
}


def chosen_peers(text: str, *, on_disk: bool) -> dict[str, bool]:
    """The names in ``text`` (commas between them), each with whether it was asked for by name.

    ``auto`` stands for all that are installed and have their rows on disk, or not, as ours does;
    ``none`` for none. UsageError for one that is unknown or not installed.
    """
    if text == "none":
        return {}
    if text == "auto":
        return {name: False for name, peer in LOCAL_PEERS.items()
                if peer.on_disk == on_disk and not missing(peer.packages)}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LOCAL_PEERS:
            raise UsageError(f"no peer is called {name!r}: choose from {', '.join(LOCAL_PEERS)}, "
                             "auto or none")
        require(name, LOCAL_PEERS[name].packages)
    return dict.fromkeys(names, True)


def require(name: str, packages: Sequence[str]) -> None:
    """UsageError unless the ``packages`` of peer ``name`` are installed."""
    if lacking := missing(packages):
        raise UsageError(f"peer {name!r} is not installed: pip install {' '.join(lacking)}, or "
                         "leave it out of --peer")
