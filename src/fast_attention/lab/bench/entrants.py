"""Who runs: ours, exact attention as the line to beat, and peers; each made for one length on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import catalogue
from fast_attention.lab import measure
from fast_attention.lab.measure import Competitor, Setting
from fast_attention.lab.records import EXACT
from fast_attention.mechanism import Mixer
from fast_attention.nn.token_mixer import TokenMixer

Kind = Literal["core", "module", "mixer"]
OURS, TORCH = "fast-attention", "torch"


class Sizes(NamedTuple):
    """What a peer is built for."""

    heads: int
    head_dim: int
    length: int

    @property
    def width(self) -> int:
        """Of a whole token."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Peer:
    """A published implementation beside which ours runs.

    Args:
        name: How the tables call it.
        package: The distribution that brings it.
        against: The spelling of our mechanism that does the same work.
        build: ``build(sizes)`` imports the package and gives a module or function of (q, k, v) or (x).
        kind: ``"core"`` takes (q, k, v); ``"module"`` takes whole tokens and has projections of its own;
            ``"mixer"`` takes whole tokens and stands where our mixer stands.
        is_causal: Which direction it was built for.
        truth: ``truth(made, *inputs)`` is what it should compute, in float64; None: only the laws judge it.
        mask: The name of its key mask argument (True = may be seen), if it has one.
        order: The exponent of its time, to foretell.
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
class Entrant:
    """One row of the benchmark; ``make(setting, length)`` builds it with fresh weights and inputs."""

    name: str
    family: str
    kind: Kind
    is_causal: bool
    owner: str
    make: Callable[[Setting, int], Competitor]
    order: float
    mechanism: Any = None
    peer: Peer | None = None

    @property
    def memory_order(self) -> float:
        """The exponent of its memory: torch's fused exact attention holds no scores."""
        return 1.0 if self.owner == TORCH else self.order

    @property
    def reference(self) -> str:
        """The name of the line to beat."""
        return line(self.kind, self.is_causal)


def line(kind: Kind, is_causal: bool) -> str:
    """Exact attention's name: between projections where the competitor takes whole tokens, causal where it is."""
    return EXACT + (", projected" if kind != "core" else "") + (", causal" if is_causal else "")


def title(mechanism: Any, kind: Kind, is_causal: bool) -> str:
    """How one of ours is called."""
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


def reference(kind: Kind, is_causal: bool) -> Entrant:
    """Exact attention as an entrant."""

    def make(setting: Setting, length: int) -> Competitor:
        setting = replace(setting, is_causal=is_causal)
        if kind == "core":
            return measure.exact(setting, setting.tensors(length))
        module = Projected(setting.heads * setting.head_dim, setting.heads)
        return _whole(module, setting, length, is_causal=is_causal)

    name = line(kind, is_causal)
    return Entrant(name, name, kind, is_causal, TORCH, make, 2.0)


def ours(mechanism: Any, is_causal: bool, kind: Kind = "core") -> Entrant:
    """One of our mechanisms; as a ``"module"`` between the projections that it reads and one behind it."""
    kind = "mixer" if isinstance(mechanism, Mixer) else kind

    def make(setting: Setting, length: int) -> Competitor:
        setting = replace(setting, is_causal=is_causal)
        if kind != "module":
            return measure.competitor(mechanism, setting, setting.tensors(length))
        torch.manual_seed(setting.seed)
        module = TokenMixer(setting.heads * setting.head_dim, setting.heads, mechanism, max_len=length)
        return _whole(module, setting, length, is_causal=is_causal)

    family, name = repr(mechanism), title(mechanism, kind, is_causal)
    return Entrant(name, family, kind, is_causal, OURS, make, mechanism.traits.order, mechanism=mechanism)


def theirs(peer: Peer) -> Entrant:
    """A peer."""

    def make(setting: Setting, length: int) -> Competitor:
        torch.manual_seed(setting.seed)
        made = peer.build(Sizes(setting.heads, setting.head_dim, length))
        if isinstance(made, nn.Module):
            made = made.to(setting.device, setting.dtype).train()
        if peer.kind != "core":
            return _whole(made, setting, length)
        inputs = list(setting.tensors(length))
        return measure.runner(lambda: made(*inputs), inputs, _held(made))

    family = repr(catalogue.parse(peer.against))
    return Entrant(peer.name, family, peer.kind, peer.is_causal, peer.package, make, peer.order, peer=peer)


def _whole(made: Any, setting: Setting, length: int, **options: bool) -> Competitor:
    """A competitor out of a module or function of whole tokens."""
    if isinstance(made, nn.Module):
        made = made.to(setting.device, setting.dtype)
    x = setting.tokens(length)
    return measure.runner(lambda: made(x, **options), [x], _held(made))


def _held(made: Any) -> list[Tensor]:
    return [*made.parameters(), *made.buffers()] if isinstance(made, nn.Module) else []
