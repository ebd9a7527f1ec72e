"""Causal attention from random features in chunks, the state before each chunk in the units of its first key.

Query i's proper unit for a feature is the largest among the keys it sees. Any will do that is not above it, nor more
than ``SLACK`` below: so those of a chunk's first key serve for the whole chunk, no later key can make an earlier one
vanish, and none overflows. Where a chunk holds a far larger feature, ``reference.advance`` takes it feature by feature.
Arguments are flat, as in ``fast_favor_noncausal``; there may be more keys than queries: the first ones are seen by all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.linear import linear_state, reference
from fast_attention.mechanisms.linear.fast_favor_noncausal import inverse, scatter
from fast_attention.mechanisms.linear.fast_favor_sums import Kept, Running
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.log_features import SLACK
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap


@dataclass(frozen=True)
class Part:
    """A group of heads: tensors (h, ...) of all its tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    heads: Heads
    mask: Tensor | None
    phi: RandomFeatureMap
    workspace: Workspace
    learned: Heads | None = None  # gradients of ``heads``, where they are wanted

    def keys(self, at: slice) -> tuple[Tensor, Tensor]:
        """``RandomFeatureMap.keys`` of a block."""
        return self.phi.keys(self.k[:, at], self.heads.keys, self.seen(at), self.workspace, "keys")

    def queries(self, at: slice, unit: Tensor) -> Tensor:
        """``RandomFeatureMap.queries`` of a block."""
        return self.phi.queries(self.q[:, at], self.heads, unit, self.workspace, "queries")

    def seen(self, at: slice) -> Tensor | None:
        """The mask of a block of keys."""
        return None if self.mask is None else self.mask[:, at]

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """``a b^T`` of a chunk's rows, zero where the column comes after the row."""
        return torch.bmm(a, b.mT, out=self.workspace(name, len(a), a.shape[1], b.shape[1])).tril_()

    def pairwise(
        self, q: Tensor, k: Tensor, v: Tensor, heads: Heads, mask: Tensor | None, state: LinearState
    ) -> tuple[Tensor, LinearState]:
        """Outputs and the state after a chunk whose keys differ too much for one unit each feature."""
        keys = reference.masked_keys(lambda x: self.phi.plain(x, heads.keys), k, mask)
        sums, state = reference.advance(self.phi.plain(q, heads).free, keys, v, state)
        return linear_state.normalise(sums), state


def forward(
    part: Part, order: list[tuple[slice, slice | None]], kept: Kept, sums: Running, unit: Tensor,
    out: Tensor, over: Tensor,
) -> Tensor:  # fmt: skip
    """Write outputs (h, L, Ev) and 1 / denominators (h, L), and carry ``sums`` in ``unit`` to the end's, returned."""
    top = unit
    for index, (at, of) in enumerate(order):
        values, half = part.keys(at)
        scales = part.phi.scales(values, half)
        highest = torch.maximum(top, scales.amax(1, keepdim=True))
        level = highest if of is None else torch.maximum(top, scales[:, :1])
        steep = of is not None and bool((highest - level > SLACK).any())
        level = top if steep else level
        sums.fade((unit - level).exp_())
        here, unit, top = kept.at(index), level, highest
        if of is not None:
            sums.read(here.G, here.g)
        if steep:
            state = LinearState(here.G, here.g[:, 0], level[:, 0])
            tokens = part.q[:, of], part.k[:, at], part.v[:, at]
            out[:, of], state = part.pairwise(*tokens, part.heads, part.seen(at), state)
            sums.set(state.kv, state.k[:, None])
            unit = top = state.log_scale[:, None]
        else:
            part.phi.finish(values, half, level)
            here.enters.copy_(level)
            if of is not None:
                _chunk(part, values, at, of, here, out[:, of], over[:, of])
            sums.add(values, part.v[:, at])
        here.enters.copy_(level)
        here.leaves.copy_(unit)
    sums.fade((unit - top).exp_())
    return top


def _chunk(part: Part, values: Tensor, at: slice, of: slice, before: Kept, out: Tensor, over: Tensor) -> None:
    queries = part.queries(of, before.enters)
    pairs = part.product("pairs", queries, values)
    found = torch.bmm(pairs, part.v[:, at]).baddbmm_(queries, before.G)
    over.copy_(inverse(queries.mul_(before.g).sum(-1).add_(pairs.sum(-1))))
    torch.mul(found, over[..., None], out=out)


def backward(
    part: Part, order: list[tuple[slice, slice | None]], kept: Kept, out: Tensor, over: Tensor, grad: Tensor,
    found: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Write the gradients of q, k and v; ``back`` holds those of the state after each block, from the last one on."""
    dq, dk, dv = found
    back = Running(torch.zeros_like(kept.G[:, 0]), torch.zeros_like(kept.g[:, 0]))
    after, unit = (torch.empty_like(back.G), torch.empty_like(back.g)), kept.leaves[:, -1]
    for index, (at, of) in reversed(list(enumerate(order))):
        here = kept.at(index)
        back.fade((here.leaves - unit).exp_())
        unit = here.enters
        back.read(*after)
        if of is None:
            scatter(part.k[:, at], part.v[:, at], part.heads, part.seen(at), part.phi, part.workspace, unit, after,
                    (dk[:, at], dv[:, at]), part.learned)  # fmt: skip
        elif bool((here.leaves > here.enters).any()):
            dq[:, of], dk[:, at], dv[:, at], G, g = _pairwise_back(part, at, of, here, grad[:, of], after)
            back.set(G, g)
        else:
            dn = grad[:, of] * over[:, of, None]
            dd = torch.linalg.vecdot(dn, out[:, of]).neg_()
            _chunk_back(part, at, of, here, (dn, dd), after, back, (dq[:, of], dk[:, at], dv[:, at]))


def _chunk_back(
    part: Part, at: slice, of: slice, here: Kept, given: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor],
    back: Running, found: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    (dn, dd), v, phi, workspace = given, part.v[:, at], part.phi, part.workspace
    values, half = part.keys(at)
    phi.finish(values, half, here.enters)
    queries = part.queries(of, here.enters)
    pairs = part.product("pairs", queries, values)
    d_pairs = torch.bmm(dn, v.mT, out=workspace("d_pairs", *pairs.shape)).add_(dd[..., None]).tril_()
    d = torch.bmm(dn, here.G.mT, out=workspace("d", *values.shape))
    phi.pull(d.addcmul_(dd[..., None], here.g).baddbmm_(d_pairs, values), queries, part.q[:, of], part.heads, workspace,
              found[0], False, part.learned)  # fmt: skip
    d = torch.bmm(v, after[0].mT, out=workspace("d", *values.shape)).add_(after[1]).baddbmm_(d_pairs.mT, queries)
    back.add(queries, dn, dd)
    found[2].copy_(torch.bmm(values, after[0]).baddbmm_(pairs.mT, dn))
    learned = None if part.learned is None else part.learned.keys
    phi.pull(d, values, part.k[:, at], part.heads.keys, workspace, found[1], True, learned)
    if part.mask is not None:
        found[1].masked_fill_(~part.mask[:, at, None], 0.0)


def _pairwise_back(
    part: Part, at: slice, of: slice, here: Kept, grad: Tensor, after: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    tensors = (part.q[:, of], part.k[:, at], part.v[:, at], here.G, here.g)
    with torch.enable_grad():
        q, k, v, G, g = leaves = [x.detach().requires_grad_() for x in tensors]
        heads = part.heads
        if part.learned is not None:
            heads = heads.mapped(lambda x: x.detach().requires_grad_())
            leaves += [x for x in heads if x is not None]
        state = LinearState(G, g[:, 0], here.enters[:, 0])
        out, state = part.pairwise(q, k, v, heads, part.seen(at), state)
    found = torch.autograd.grad((out, state.kv, state.k), leaves, (grad, after[0], after[1][:, 0]))
    for goal, gradient in zip([x for x in part.learned or () if x is not None], found[5:], strict=True):
        goal.add_(gradient)
    return found[:5]
