"""The line-up: which settings run by default, in which directions, and which peers beside them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from fast_attention import catalogue
from fast_attention.lab import inputs
from fast_attention.lab.bench.entrants import Entrant, Peer, ours, reference, theirs
from fast_attention.lab.inputs import InputError

Direction = Literal["both", "causal", "bidirectional"]
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
VARIANTS = ("AFTLocal(window=128)", "Manhattan(distance='l1')", "Manhattan(distance='laplacian')")


def default_mechanisms() -> list[Any]:
    """What runs when nothing is named: all mechanisms, and a few more settings worth seeing."""
    return inputs.every(VARIANTS)


def checkout() -> Path | None:
    """The source tree this runs from, if it holds the peers' adapters."""
    root = Path(__file__).resolve().parents[4]
    return root if (root / "benchmarks" / "peers.py").is_file() else None


def load_peers() -> list[Peer]:
    """The peers that ``benchmarks/peers.py`` of the checkout describes, installed or not.

    Raises:
        InputError: This does not run from a checkout.
    """
    root = checkout()
    if root is None:
        raise InputError("--vs-peers: the adapters are in a checkout's benchmarks folder, not in the installed package")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return list(importlib.import_module("benchmarks.peers").PEERS)


def entrants(mechanisms: Iterable[Any], direction: Direction, peers: Iterable[Peer] = ()) -> list[Entrant]:
    """Everybody, family by family: ours in each direction, between projections where a peer is a module, the peers."""
    found: list[Entrant] = []
    for mechanism in mechanisms:
        mine = [peer for peer in peers if repr(catalogue.parse(peer.against)) == repr(mechanism)]
        for is_causal in (False, True):
            if is_causal and (direction == "bidirectional" or not mechanism.traits.causal):
                continue
            if not is_causal and direction == "causal":
                continue
            beside = [peer for peer in mine if peer.is_causal == is_causal]
            found.append(ours(mechanism, is_causal))
            if any(peer.kind == "module" for peer in beside):
                found.append(ours(mechanism, is_causal, "module"))
            found += map(theirs, beside)
    return found


def references(chosen: Iterable[Entrant]) -> list[Entrant]:
    """The lines to beat that ``chosen`` need, each once."""
    wanted = {entrant.reference: reference(entrant.kind, entrant.is_causal) for entrant in chosen}
    return list(wanted.values())
