"""The competitors of a benchmark: our mechanisms, exact attention as the baseline, and published packages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gates import VARIANTS
from fast_attention import catalogue
from fast_attention.lab import measure
from fast_attention.lab.measure import Passes, Setting
from fast_attention.lab.records import EXACT
from fast_attention.mechanism import Mixer
from fast_attention.nn.token_mixer import TokenMixer

Kind = Literal["core", "module", "mixer"]
OURS, TORCH = "fast-attention", "torch"


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

    def __reduce__(self) -> Any:
        """Pickle the name: ``build`` is often a closure."""
        return _peer_named, (self.name,)


def _peer_named(name: str) -> Peer:
    from benchmarks.peers import PEERS  # which imports this module

    return next(peer for peer in PEERS if peer.name == name)


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


@dataclass(frozen=True)
class Competitor:
    """One row of the benchmark: one of ours, a peer, or exact attention where both are None."""

    name: str
    kind: Kind
    is_causal: bool
    mechanism: Any = None
    peer: Peer | None = None

    @property
    def reference(self) -> str:
        """Its baseline: exact attention, between projections where it takes whole tokens, causal where it is."""
        return EXACT + (", projected" if self.kind != "core" else "") + (", causal" if self.is_causal else "")

    @property
    def owner(self) -> str:
        """Whose it is: ours, torch's, or a package's."""
        return self.peer.package if self.peer else TORCH if self.mechanism is None else OURS

    @property
    def family(self) -> str:
        """The expression of our mechanism that it is, or is beside."""
        if self.peer:
            return repr(catalogue.parse(self.peer.against))
        return self.name if self.mechanism is None else repr(self.mechanism)

    @property
    def order(self) -> float:
        """The exponent of its time."""
        if self.peer:
            return self.peer.order
        return 2.0 if self.mechanism is None else self.mechanism.traits.complexity_exponent

    @property
    def memory_order(self) -> float:
        """The exponent of its memory: torch's fused exact attention holds no scores."""
        return 1.0 if self.owner == TORCH else self.order

    def make(self, setting: Setting, length: int) -> Passes:
        """Build it with seeded weights and inputs for one length."""
        setting = replace(setting, is_causal=self.is_causal)
        if self.owner == OURS and self.kind != "module":
            return measure.competitor(self.mechanism, setting, setting.tensors(length))
        if self.owner == TORCH and self.kind == "core":
            return measure.exact(setting, setting.tensors(length))
        torch.manual_seed(setting.seed)
        width, options = setting.heads * setting.head_dim, {"is_causal": self.is_causal}
        if self.peer:
            module, options = self.peer.build(Sizes(setting.heads, setting.head_dim, length)), {}
        elif self.owner == OURS:
            module = TokenMixer(width, setting.heads, self.mechanism, max_len=length)
        else:
            module = Projected(width, setting.heads)
        module = module.to(setting.device, setting.dtype).train() if isinstance(module, nn.Module) else module
        given = setting.tensors(length) if self.kind == "core" else [setting.tokens(length)]
        held = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []
        return Passes.of(lambda: module(*given, **options), given, held)


def ours(mechanism: Any, is_causal: bool, kind: Kind = "core") -> Competitor:
    """One of our mechanisms; as a ``"module"`` between the projections that it reads and one behind it."""
    kind = "mixer" if isinstance(mechanism, Mixer) else kind
    name = repr(mechanism) + (", projected" if kind == "module" else "") + (", causal" if is_causal else "")
    return Competitor(name, kind, is_causal, mechanism)


def default_mechanisms() -> list[Any]:
    """What runs when nothing is named: all mechanisms, and a few more settings."""
    return [*map(catalogue.default, catalogue.names()), *map(catalogue.parse, VARIANTS)]


def chosen(mechanisms: Iterable[Any], causal: bool | None, peers: Iterable[Peer] = ()) -> list[Competitor]:
    """All, family by family: ours in each direction, between projections where a peer is a module, and the peers.

    Args:
        mechanisms: Ours.
        causal: One direction only; None: both.
        peers: Published packages; only those beside one of ours take part.
    """
    competitors: list[Competitor] = []
    directions = (False, True) if causal is None else (causal,)
    for mechanism, is_causal in itertools.product(mechanisms, directions):
        if is_causal not in mechanism.traits.modes:
            continue
        beside = [p for p in peers if catalogue.parse(p.against) == mechanism and p.is_causal == is_causal]
        competitors.append(ours(mechanism, is_causal))
        if any(peer.kind == "module" for peer in beside):
            competitors.append(ours(mechanism, is_causal, "module"))
        competitors += [Competitor(peer.name, peer.kind, peer.is_causal, peer=peer) for peer in beside]
    return competitors


def baselines(competitors: Iterable[Competitor]) -> list[Competitor]:
    """The baselines that ``competitors`` need, each once."""
    needed = {each.reference: Competitor(each.reference, each.kind, each.is_causal) for each in competitors}
    return list(needed.values())
