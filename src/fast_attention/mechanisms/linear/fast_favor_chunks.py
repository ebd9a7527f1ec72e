"""What a chunk of random features needs, forward and backward: sums that are rescaled, queries beside keys, masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fast_attention.engine.recurrence import Chunk, ChunkPass, groups
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.linear import reference
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

TOKENS = 512  # in one chunk, of all heads of a group
SUMMED = 64  # chunks added to a running sum before it moves into the total


def tokens(phi: RandomFeatureMap, rows: Tensor) -> int:
    """Tokens in a chunk: the more features, the more a chunk's state weighs."""
    return 64 if phi.width(rows) <= 512 else 128


@dataclass
class RunningSums:
    """Sums of very many terms, (h, C, Ev) and (h, 1, C): ``limit`` chunks at a time, then these to the total."""

    G: Tensor
    g: Tensor
    limit: int

    def __post_init__(self) -> None:
        self.recent_G, self.recent_g, self.count = torch.zeros_like(self.G), torch.zeros_like(self.g), 0

    def rescale(self, factor: Tensor) -> None:
        """Multiply by factors (h, 1, C) of each feature, or (h, 1, 1)."""
        for total in (self.G, self.recent_G):
            total.mul_(factor.mT)
        for total in (self.g, self.recent_g):
            total.mul_(factor)

    def add(self, values: Tensor, v: Tensor, weights: Tensor | None = None) -> None:
        """Add ``values^T v``, and ``values^T weights``; ones if None."""
        self.recent_G.baddbmm_(values.mT, v)
        if weights is None:
            self.recent_g.add_(values.sum(1, keepdim=True))
        else:
            self.recent_g.baddbmm_(weights[:, None], values)
        self.count += 1
        if self.count == self.limit:
            self.set(*self.read(self.G, self.g))

    def set(self, G: Tensor, g: Tensor) -> None:
        """Begin again from these sums."""
        self.G.copy_(G)
        self.g.copy_(g)
        self.recent_G.zero_()
        self.recent_g.zero_()
        self.count = 0

    def read(self, G: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Write the sums so far into ``G`` and ``g``."""
        return torch.add(self.G, self.recent_G, out=G), torch.add(self.g, self.recent_g, out=g)


@dataclass
class Carry:
    """Sums over the keys of some heads so far, over ``e^log_scale``; backwards, the gradient of the sums."""

    heads: Heads
    sums: RunningSums
    log_scale: Tensor
    running_max: Tensor  # of the keys' logarithms


@dataclass(frozen=True)
class FavorPass(ChunkPass[Carry]):
    """What the passes forward and backward share: flat tensors of all heads, and how chunks read them."""

    q: Tensor
    k: Tensor
    v: Tensor
    masked: Tensor | None
    heads: Heads
    phi: RandomFeatureMap
    workspace: Workspace
    out: Tensor
    inv_denominator: Tensor

    def queries(self, keys: Chunk) -> Chunk | None:
        """The queries beside a chunk of keys; None beside the first keys, where there are more than queries."""
        extra, (start, stop) = self.k.shape[1] - self.q.shape[1], (keys.span.start, keys.span.stop)
        return None if start < extra else keys._replace(span=slice(start - extra, stop - extra))

    def order(self) -> list[list[Chunk]]:
        """Groups of heads with their chunks of keys."""
        length, size = self.k.shape[1], tokens(self.phi, self.heads.rows)
        return groups(len(self.k), length, size, together=max(1, TOKENS // size), lead=max(0, length - self.q.shape[1]))

    def visible(self, keys: Chunk) -> Tensor | None:
        """The mask of a chunk of keys, (h, n, 1)."""
        return None if self.masked is None else keys.of(self.masked)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """``a b^T`` of a chunk, zero where the column comes after the row."""
        return torch.bmm(a, b.mT, out=self.workspace(name, len(a), a.shape[1], b.shape[1])).tril_()

    def pairwise(
        self, q: Tensor, k: Tensor, v: Tensor, heads: Heads, masked: Tensor | None, state: LinearState
    ) -> tuple[Tensor, LinearState]:
        """Outputs and the state after a chunk whose keys differ too much for one scale each feature."""
        mask = None if masked is None else ~masked[..., 0]
        keys = reference.masked_keys(lambda x: self.phi.plain(x, heads.keys), k, mask)
        sums, state = reference.advance(self.phi.plain(q, heads).free, keys, v, state)
        return normalise(sums), state


def inverse(denominator: Tensor) -> Tensor:
    """One over it, in place; 0 where it is too small for a quotient to mean much, as in ``linear_state.normalise``."""
    info = torch.finfo(denominator.dtype)
    nothing = denominator.abs() < info.tiny / info.eps
    return denominator.reciprocal_().masked_fill_(nothing, 0.0)


def keys_vjp(
    k: Tensor, v: Tensor, heads: Heads, masked: Tensor | None, phi: RandomFeatureMap, workspace: Workspace,
    log_scale: Tensor, d_sums: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], d_heads: Heads | None,
) -> None:  # fmt: skip
    """Write the gradients of a chunk of keys and values, from those of G and g over ``e^-log_scale``."""
    (dG, dg), (dk, dv), heads = d_sums, out, heads.keys
    values, half = phi.keys(k, heads, masked, workspace)
    phi.finish(values, half, log_scale)
    d = torch.bmm(v, dG.mT, out=workspace("d", *values.shape)).add_(dg)
    dv.copy_(torch.bmm(values, dG, out=workspace("dv", *v.shape)))
    phi.vjp(d, values, k, heads, workspace, dk, True, d_heads and d_heads.keys)
    if masked is not None:
        dk.masked_fill_(masked, 0.0)
