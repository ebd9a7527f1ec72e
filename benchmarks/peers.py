"""Every peer, with what it is compared against. A package is imported only when its peer is built."""

from __future__ import annotations

from benchmarks import functions, mixers, modules
from benchmarks.competitors import Peer

PEERS: list[Peer] = [*functions.PEERS, *modules.PEERS, *mixers.PEERS]
