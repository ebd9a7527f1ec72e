"""Causal attention from random features in chunks, the state before each chunk in the scales of its first key.

Query i's proper log scale for a feature is the largest among the keys it sees. Any will do that is not above it, nor
more than ``SLACK`` below: so the log scales of a chunk's first key serve for the whole chunk, no later key can make an
earlier one vanish, and none overflows. Where a chunk holds a far larger feature, ``reference.advance`` takes it feature
by feature. Arguments are flat, as in ``fast_favor``; where there are more keys, all queries see the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import Tensors
from fast_attention.engine.recurrence import Chunk, ChunkPass, groups, masked_rows
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.linear import reference
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise
from fast_attention.mechanisms.linear.log_features import SLACK
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

State = tuple[Tensor, Tensor, Tensor]  # G (N, C, Ev), g (N, 1, C) and log scales (N, 1, C) or (N, 1, 1)


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


@dataclass(frozen=True)
class _Forward(FavorPass):
    state: State  # where the scan begins, and where it leaves its end

    def begin(self, rows: slice) -> Carry:
        G, g, log_scale = (x[rows] for x in self.state)
        return Carry(self.heads.some(rows), RunningSums(G, g, SUMMED), log_scale, log_scale)

    def chunk(self, chunk: Chunk, carry: Carry, kept: Sequence[Tensor]) -> None:
        (G, g, enters, leaves), sums, queries = kept, carry.sums, self.queries(chunk)
        k, v, masked = chunk.of(self.k), chunk.of(self.v), self.visible(chunk)
        values, half = self.phi.keys(k, carry.heads.keys, masked, self.workspace)
        scales = values if self.phi.exponential else half
        running_max = torch.maximum(carry.running_max, scales.amax(1, keepdim=True))
        log_scale = running_max if queries is None else torch.maximum(carry.running_max, scales[:, :1])
        pairwise = queries is not None and bool((running_max - log_scale > SLACK).any())
        log_scale = carry.running_max if pairwise else log_scale
        sums.rescale((carry.log_scale - log_scale).exp_())
        enters.copy_(log_scale)
        if queries is not None:
            sums.read(G, g)
        if pairwise:
            assert queries is not None
            state = LinearState(G, g[:, 0], log_scale[:, 0])
            rows, state = self.pairwise(queries.of(self.q), k, v, carry.heads, masked, state)
            queries.of(self.out).copy_(rows)
            sums.set(state.kv, state.k[:, None])
            log_scale = running_max = state.log_scale[:, None]
        else:
            self.phi.finish(values, half, log_scale)
            if queries is not None:
                self._outputs(queries, values, v, carry.heads, G, g, log_scale)
            sums.add(values, v)
        leaves.copy_(log_scale)
        carry.log_scale, carry.running_max = log_scale, running_max

    def _outputs(
        self, chunk: Chunk, keys: Tensor, v: Tensor, heads: Heads, G: Tensor, g: Tensor, log_scale: Tensor
    ) -> None:
        queries = self.phi.queries(chunk.of(self.q), heads, log_scale, self.workspace)
        pairs = self.product("pairs", queries, keys)
        numerator, factor = torch.bmm(pairs, v).baddbmm_(queries, G), chunk.of(self.inv_denominator)
        factor.copy_(inverse(queries.mul_(g).sum(-1).add_(pairs.sum(-1))))
        torch.mul(numerator, factor[..., None], out=chunk.of(self.out))

    def end(self, rows: slice, carry: Carry) -> None:
        G, g, log_scale = (x[rows] for x in self.state)
        carry.sums.rescale((carry.log_scale - carry.running_max).exp_())
        carry.sums.read(G, g)
        log_scale.copy_(carry.running_max)


@dataclass(frozen=True)
class _Backward(FavorPass):
    d_state: State  # gradients of G and g after the last key, then before the first; log scales after the last
    first: Tensor  # log scales before the first
    grad: Tensor
    d_heads: Heads | None
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def begin(self, rows: slice) -> Carry:
        G, g, log_scale = (x[rows] for x in self.d_state)
        return Carry(self.heads.some(rows), RunningSums(G, g, SUMMED), log_scale, log_scale)

    def chunk(self, chunk: Chunk, carry: Carry, kept: Sequence[Tensor]) -> None:
        (_, _, enters, leaves), queries, sums = kept, self.queries(chunk), carry.sums
        sums.rescale((leaves - carry.log_scale).exp_())
        carry.log_scale = enters
        d_after = sums.read(self.workspace("d_G", *sums.G.shape), self.workspace("d_g", *sums.g.shape))
        d_heads = self.d_heads and self.d_heads.some(chunk.rows)
        if queries is None:
            keys_vjp(chunk.of(self.k), chunk.of(self.v), carry.heads, self.visible(chunk), self.phi, self.workspace,
                     enters, d_after, (chunk.of(self.dk), chunk.of(self.dv)), d_heads)  # fmt: skip
        elif bool((leaves > enters).any()):
            sums.set(*self._pairwise_vjp(chunk, queries, carry.heads, kept, d_after, d_heads))
        else:
            self._vjp(chunk, queries, carry, kept, d_after, d_heads)

    def _vjp(
        self, chunk: Chunk, beside: Chunk, carry: Carry, kept: Sequence[Tensor], d_after: tuple[Tensor, ...],
        d_heads: Heads | None,
    ) -> None:  # fmt: skip
        (G, g, enters, _), (dG, dg), phi, workspace = kept, d_after, self.phi, self.workspace
        q, k, v, heads, masked = beside.of(self.q), chunk.of(self.k), chunk.of(self.v), carry.heads, self.visible(chunk)
        d_numerator = beside.of(self.grad) * beside.of(self.inv_denominator)[..., None]
        d_denominator = torch.linalg.vecdot(d_numerator, beside.of(self.out)).neg_()[..., None]
        keys, half = phi.keys(k, heads.keys, masked, workspace)
        phi.finish(keys, half, enters)
        queries = phi.queries(q, heads, enters, workspace)
        pairs = self.product("pairs", queries, keys)
        d_pairs = torch.bmm(d_numerator, v.mT, out=workspace("d_pairs", *pairs.shape)).add_(d_denominator).tril_()
        d = torch.bmm(d_numerator, G.mT, out=workspace("d", *keys.shape))
        d.addcmul_(d_denominator, g).baddbmm_(d_pairs, keys)
        phi.vjp(d, queries, q, heads, workspace, beside.of(self.dq), False, d_heads)
        d = torch.bmm(v, dG.mT, out=workspace("d", *keys.shape)).add_(dg).baddbmm_(d_pairs.mT, queries)
        carry.sums.add(queries, d_numerator, d_denominator[..., 0])
        chunk.of(self.dv).copy_(torch.bmm(keys, dG).baddbmm_(pairs.mT, d_numerator))
        phi.vjp(d, keys, k, heads.keys, workspace, chunk.of(self.dk), True, d_heads and d_heads.keys)
        if masked is not None:
            chunk.of(self.dk).masked_fill_(masked, 0.0)

    def _pairwise_vjp(
        self, chunk: Chunk, beside: Chunk, heads: Heads, kept: Sequence[Tensor], d_after: tuple[Tensor, ...],
        d_heads: Heads | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Write the gradients of a chunk that went pair by pair, by autograd; return those of the state before it."""
        (before_G, before_g, enters, _), masked = kept, self.visible(chunk)
        with torch.enable_grad():
            tensors = beside.of(self.q), chunk.of(self.k), chunk.of(self.v), before_G, before_g
            q, k, v, G, g = leaves = [x.detach().requires_grad_() for x in tensors]
            if d_heads is not None:
                heads = heads.mapped(lambda x: x.detach().requires_grad_())
                leaves += [x for x in heads if x is not None]
            out, state = self.pairwise(q, k, v, heads, masked, LinearState(G, g[:, 0], enters[:, 0]))
        d_out = beside.of(self.grad), d_after[0], d_after[1][:, 0]
        dq, dk, dv, dG, dg, *d_weights = torch.autograd.grad((out, state.kv, state.k), leaves, d_out)
        for chunk_of, x, gradient in ((beside, self.dq, dq), (chunk, self.dk, dk), (chunk, self.dv, dv)):
            chunk_of.of(x).copy_(gradient)
        for total, gradient in zip([x for x in d_heads or () if x is not None], d_weights, strict=True):
            total.add_(gradient)
        return dG, dg

    def end(self, rows: slice, carry: Carry) -> None:
        carry.sums.rescale((self.first[rows] - carry.log_scale).exp_())
        carry.sums.read(*(x[rows] for x in self.d_state[:2]))


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *others: Tensor | None, phi: RandomFeatureMap, keep: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs (N, L, Ev) and the state after the last key; ``others``: the weights of the heads and the first state."""
    heads, state = _split(others)
    out, inv_denominator = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_zeros(q.shape[:2])
    after = tuple(x.clone() for x in state)
    work = _Forward(q, k, v, masked_rows(mask, k), heads, phi, Workspace(q), out, inv_denominator, cast("State", after))
    order = work.order()
    count = (len(q), len(order[0])) if keep else (len(q), 1)
    kept = tuple(x.new_empty(*count, *x.shape[1:]) for x in (*after, after[-1]))
    work.run(order, kept)
    return (out, *after), (*kept, inv_denominator) if keep else ()


def backward(
    inputs: Tensors, outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *,
    phi: RandomFeatureMap,
) -> Tensors:  # fmt: skip
    """Gradients of q, k and v, of trained rows and bias, and of the first state's sums."""
    q, k, v, mask, *others = cast("list[Tensor]", inputs)
    (heads, state), (*states, inv_denominator) = _split(others), kept
    d_heads = heads.mapped(torch.zeros_like) if heads.trained else None
    d_state = gradients[1].clone(), gradients[2].clone(), outputs[3]
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    fixed = q, k, v, masked_rows(mask, k), heads, phi, Workspace(q), outputs[0], inv_denominator
    work = _Backward(*fixed, d_state, state[2], gradients[0], d_heads, *grads)
    work.run(work.order(), states, backward=True)
    return *grads, None, *(d_heads or (None, None, None)), *d_state[:2], None


def _split(others: Sequence[Tensor | None]) -> tuple[Heads, State]:
    return Heads(*cast("list[Tensor]", others[:3])), cast("State", tuple(others[3:]))
