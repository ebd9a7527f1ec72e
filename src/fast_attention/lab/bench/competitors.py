"""The competitors of a benchmark: ours, exact attention as the baseline, and peers; each built for one length."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import catalogue
from fast_attention.lab import inputs, measure
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import Passes, Setting
from fast_attention.lab.records import EXACT
from fast_attention.mechanism import Mixer
from fast_attention.nn.token_mixer import TokenMixer

Kind = Literal["core", "module", "mixer"]
OURS, TORCH = "fast-attention", "torch"
Direction = Literal["both", "causal", "bidirectional"]
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
VARIANTS = (
    "AFTLocal(window=128)", "Manhattan(distance='l1')", "Manhattan(distance='laplacian')",
    "Hybrid(near=BlockLocal(), far=LearnedFeatures(num_features=32))",
)  # fmt: skip


class Sizes(NamedTuple):
    """The sizes that a peer is built for."""

    heads: int
    head_dim: int
    length: int

    @property
    def width(self) -> int:
        """The width of a whole token."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Peer:
    """A published implementation beside which ours runs.

    Args:
        name: Its name in tables.
        package: The distribution that brings it.
        against: The expression of our mechanism that does the same work.
        build: ``build(sizes)`` imports the package and gives a module or function of (q, k, v) or (x).
        kind: ``"core"`` takes (q, k, v); ``"module"`` takes whole tokens and has projections of its own;
            ``"mixer"`` takes whole tokens and stands where our mixer stands.
        is_causal: Which direction it was built for.
        truth: ``truth(made, *inputs)`` is what it should compute, in float64; None: only the laws judge it.
        mask: The name of its key mask argument (True = may be seen), if it has one.
        order: The exponent of its time, to predict it.
        note: What it does differently by design.
        same: Whether it is meant to compute the same function of its inputs as ours.
    """

    name: str
    package: str
    against: str
    build: Callable[[Sizes], Any]
    kind: Kind = "core"
    is_causal: bool = False
    truth: Callable[..., Tensor] | None = None
    mask: str | None = None
    order: float = 1.0
    note: str = ""
    same: bool = True


@dataclass(frozen=True)
class Competitor(measure.Competitor):
    """One row of the benchmark."""

    family: str
    kind: Kind
    is_causal: bool
    owner: str
    mechanism: Any = None
    peer: Peer | None = None

    @property
    def memory_order(self) -> float:
        """The exponent of its memory: torch's fused exact attention holds no scores."""
        return 1.0 if self.owner == TORCH else self.order


def baseline_name(kind: Kind, is_causal: bool) -> str:
    """Exact attention's name: between projections where the competitor takes whole tokens, causal where it is."""
    return EXACT + (", projected" if kind != "core" else "") + (", causal" if is_causal else "")


def title(mechanism: Any, kind: Kind, is_causal: bool) -> str:
    """The name of one of ours."""
    return repr(mechanism) + (", projected" if kind == "module" else "") + (", causal" if is_causal else "")


class Projected(nn.Module):
    """Linear, torch's fused exact attention, Linear: what a mixer replaces."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
        """(B, L, E) to (B, L, E)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.in_proj(x).chunk(3, -1))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2))


def baseline(kind: Kind, is_causal: bool) -> Competitor:
    """Exact attention as a competitor."""

    def make(setting: Setting, length: int) -> Passes:
        setting = replace(setting, is_causal=is_causal)
        if kind == "core":
            return measure.exact(setting, setting.tensors(length))
        module = Projected(setting.heads * setting.head_dim, setting.heads)
        return _whole(module, setting, length, is_causal=is_causal)

    name = baseline_name(kind, is_causal)
    return Competitor(name, name, make, 2.0, name, kind, is_causal, TORCH)


def ours(mechanism: Any, is_causal: bool, kind: Kind = "core") -> Competitor:
    """One of our mechanisms; as a ``"module"`` between the projections that it reads and one behind it."""
    kind = "mixer" if isinstance(mechanism, Mixer) else kind

    def make(setting: Setting, length: int) -> Passes:
        setting = replace(setting, is_causal=is_causal)
        if kind != "module":
            return measure.competitor(mechanism, setting, setting.tensors(length))
        torch.manual_seed(setting.seed)
        module = TokenMixer(setting.heads * setting.head_dim, setting.heads, mechanism, max_len=length)
        return _whole(module, setting, length, is_causal=is_causal)

    family, name = repr(mechanism), title(mechanism, kind, is_causal)
    reference, order = baseline_name(kind, is_causal), mechanism.traits.order
    return Competitor(name, reference, make, order, family, kind, is_causal, OURS, mechanism)


def as_competitor(peer: Peer) -> Competitor:
    """A peer as a competitor."""

    def make(setting: Setting, length: int) -> Passes:
        torch.manual_seed(setting.seed)
        module = peer.build(Sizes(setting.heads, setting.head_dim, length))
        if isinstance(module, nn.Module):
            module = module.to(setting.device, setting.dtype).train()
        if peer.kind != "core":
            return _whole(module, setting, length)
        inputs = list(setting.tensors(length))
        return Passes.of(lambda: module(*inputs), inputs, _held(module))

    family = repr(catalogue.parse(peer.against))
    reference, owner = baseline_name(peer.kind, peer.is_causal), peer.package
    return Competitor(peer.name, reference, make, peer.order, family, peer.kind, peer.is_causal, owner, peer=peer)


def _whole(module: Any, setting: Setting, length: int, **options: bool) -> Passes:
    """A competitor out of a module or function of whole tokens."""
    if isinstance(module, nn.Module):
        module = module.to(setting.device, setting.dtype)
    x = setting.tokens(length)
    return Passes.of(lambda: module(x, **options), [x], _held(module))


def _held(module: Any) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []


def default_mechanisms() -> list[Any]:
    """What runs when nothing is named: all mechanisms, and a few more settings."""
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


def chosen(mechanisms: Iterable[Any], direction: Direction, peers: Iterable[Peer] = ()) -> list[Competitor]:
    """All, family by family: ours in each direction, between projections where a peer is a module, and the peers."""
    competitors: list[Competitor] = []
    directions = {"both": (False, True), "bidirectional": (False,), "causal": (True,)}[direction]
    for mechanism, is_causal in itertools.product(mechanisms, directions):
        if is_causal not in mechanism.traits.modes:
            continue
        beside = [p for p in peers if catalogue.parse(p.against) == mechanism and p.is_causal == is_causal]
        competitors.append(ours(mechanism, is_causal))
        if any(peer.kind == "module" for peer in beside):
            competitors.append(ours(mechanism, is_causal, "module"))
        competitors += map(as_competitor, beside)
    return competitors


def baselines(competitors: Iterable[Competitor]) -> list[Competitor]:
    """The baselines that ``competitors`` need, each once."""
    wanted = {competitor.reference: baseline(competitor.kind, competitor.is_causal) for competitor in competitors}
    return list(wanted.values())
