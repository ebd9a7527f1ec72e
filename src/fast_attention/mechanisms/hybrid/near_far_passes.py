"""The hybrid's passes: some blocks of queries at a time, whose features stay in the cache, their scores head by head.

A single head reads overlapping spans of its keys in place, where all heads at once would need copies of them. Beside
inputs and outputs nothing is kept but the sums of the blocks of keys; the backward pass computes scores and features
again, stretch by stretch, with autograd inside each. Where there are few scores, all heads and blocks are taken at
once, and autograd keeps what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fast_attention.engine.chunks import add_gradients
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.opaque import Opaque
from fast_attention.engine.tracing import exporting, replaced
from fast_attention.mechanisms.hybrid.far_sums import FarSums, outside, summed
from fast_attention.mechanisms.hybrid.landmarks import Landmarks
from fast_attention.mechanisms.hybrid.near_far import RANKS, Rows, Sight, nearest, rows
from fast_attention.mechanisms.hybrid.spans import Plan, Stretch, Window, alone, key_stretches, plan, query_stretches
from fast_attention.mechanisms.linear import linear_state, reference
from fast_attention.mechanisms.linear.kernelised import Kernelised, TokenMap
from fast_attention.mechanisms.linear.linear_state import LinearState


class Far(NamedTuple):
    """The linear part without its weights, and how those stand in a flat list."""

    mechanism: Kernelised[Any]
    layout: TreeSpec

    def maps(self, leaves: Tensors) -> tuple[TokenMap, TokenMap]:
        """The maps of queries and of keys."""
        return self.mechanism.per_token(tree_unflatten(leaves, self.layout))

    def closed(self, one: Tensor, leaves: Tensors) -> bool:
        """Whether the maps of a key have no other parameters than ``leaves``: a user's own may hold some."""
        maps = self.maps(tuple(x if x is None else x.detach() for x in leaves))
        return not any(x.requires_grad for phi in maps for x in phi(one) if x is not None)


def near_and_far(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    seen: Bool[Tensor, "*#batch keys"],
    marks: Landmarks,
    far: Kernelised[Any],
    w: Any,
    window: Window,
    start: int,
    before: LinearState | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Outputs over the keys ``seen``, the landmarks, exact for every query, and the sums ``before`` the first key.

    Query i stands at position ``start + i``, counted from the first key. ``w`` are the weights of ``far``.
    """
    flat, layout = tree_flatten(w)
    known, leaves, one = Far(far, layout), tuple(flat), k[..., :1, :].detach()
    beyond = FarSums.of(before or linear_state.empty(known.maps(leaves)[1](one), v))
    if alone(q, k, window):
        return nearest(q, k, v, seen, marks, known.maps(leaves)[0](q), beyond)
    both, top = beyond
    tensors = (q, k, v, seen, *marks, both.unsqueeze(-3), top.unsqueeze(-1), *leaves)
    where = plan(q.shape[-2], window, start)
    path = _STRETCHES if q.is_cpu and where.many(q) and known.closed(one, leaves) else _plain
    return path(*tensors, far=known, plan=where)


class Given(NamedTuple):
    """The tensors of a call by name."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor
    marks: Landmarks
    before: FarSums
    leaves: Tensors

    @staticmethod
    def of(tensors: tuple[Any, ...]) -> Given:
        """From the flat list."""
        q, k, v, seen = tensors[:4]
        return Given(q, k, v, seen, Landmarks(*tensors[4:7]), FarSums(*tensors[7:9]), tensors[9:])


def _plain(*tensors: Any, far: Far, plan: Plan) -> Tensor:
    x = Given.of(tensors)
    maps = far.maps(x.leaves)
    keys = reference.masked_keys(maps[1], x.k, x.seen)
    given = Rows(x.q, x.k, x.v, x.seen, x.marks, maps[0](x.q), keys, x.before)
    return _OPAQUE(*given.flat(), *plan.flat())[0]


def _joined(*arguments: Any) -> tuple[Tensor]:
    """Outputs from rows that hold the sums before the first key where ``rows`` wants those beyond every span."""
    given, plan = Rows.of(*arguments[: len(RANKS)]), Plan.of(*arguments[len(RANKS) :])
    states = given.beyond.part(0, 0)
    if exporting() or plan.several:
        states = summed(given.keys, given.v, start=plan.first, block=plan.block, number=plan.several)
    whole = replaced(given, beyond=outside(states, given.beyond, plan))
    return (rows(whole, Sight.of(plan, given.q.device), plan),)


_OPAQUE = Opaque(_joined, lambda q, k, v, *others: (q.new_empty(*q.shape[:-1], v.shape[-1]),))


def _rows_of(part: Stretch, plan: Plan, far: Far, seen: Tensor, place: Tensor, top: Tensor) -> Callable[..., Tensor]:
    """The outputs of a stretch as a function of the tensors that have gradients."""
    local = replaced(plan, start=part.start, number=part.blocks.stop - part.blocks.start)
    visible, sight = _unless_all(seen[..., part.keys]), Sight.of(local, seen.device)

    def function(q: Tensor, k: Tensor, v: Tensor, mk: Tensor, mv: Tensor, both: Tensor, *w: Any) -> Tensor:
        marks, beyond = Landmarks(mk, mv, place - part.keys.start), FarSums(both, top[..., part.blocks])
        queries, keys = far.maps(w)
        whole = Rows(q, k, v, visible, marks, queries(q), reference.masked_keys(keys, k, visible), beyond)
        return torch.stack([rows(head, sight, local) for head in whole.apart()]).unflatten(0, q.shape[:-2])

    return function


def _sums_of(part: Stretch, plan: Plan, far: Far, seen: Tensor) -> Callable[..., FarSums]:
    """The sums of a stretch's blocks as a function of the tensors that have gradients."""
    number, visible = part.blocks.stop - part.blocks.start, _unless_all(seen[..., part.keys])

    def function(k: Tensor, v: Tensor, *w: Any) -> FarSums:
        keys = reference.masked_keys(far.maps(w)[1], k, visible)
        return summed(keys, v, start=part.start, block=plan.block, number=number)

    return function


def _unless_all(seen: Tensor) -> Tensor | None:
    return None if bool(seen.all()) else seen


def _forward(*tensors: Any, far: Far, plan: Plan, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    x = Given.of(tensors)
    states = x.before.room(plan.several)
    for part in key_stretches(x.q, x.k, plan):
        found = _sums_of(part, plan, far, x.seen)(x.k[..., part.keys, :], x.v[..., part.keys, :], *x.leaves)
        states.both[..., part.blocks, :, :], states.top[..., part.blocks] = found
    beyond = outside(states, x.before, plan)
    out = x.q.new_empty(*x.q.shape[:-1], x.v.shape[-1])
    for part in query_stretches(x.q, x.k, plan):
        function = _rows_of(part, plan, far, x.seen, x.marks.place, beyond.top)
        out[..., part.rows, :] = function(*_local(x, part, beyond), *x.leaves)
    return out, tuple(states) if keep else ()


def _local(x: Given, part: Stretch, beyond: FarSums) -> tuple[Tensor, ...]:
    k, v, both = x.k[..., part.keys, :], x.v[..., part.keys, :], beyond.both[..., part.blocks, :, :]
    return x.q[..., part.rows, :], k, v, x.marks.k, x.marks.v, both


def _backward(
    inputs: Tensors, outputs: Tensors, kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *, far: Far, plan: Plan
) -> Tensors:
    x = Given.of(inputs)
    q, k, v, mk, mv = (torch.zeros_like(each) for each in (x.q, x.k, x.v, x.marks.k, x.marks.v))
    learned = [None if w is None or not w.requires_grad else torch.zeros_like(w) for w in x.leaves]
    coarse = [each.detach().requires_grad_() for each in (kept[0], x.before.both)]
    with torch.enable_grad():
        beyond = outside(FarSums(coarse[0], kept[1]), FarSums(coarse[1], x.before.top), plan)
    far_both = torch.empty_like(beyond.both)
    for part in query_stretches(x.q, x.k, plan):
        function = _rows_of(part, plan, far, x.seen, x.marks.place, beyond.top)
        into = [q[..., part.rows, :], k[..., part.keys, :], v[..., part.keys, :], mk, mv]
        sums = far_both[..., part.blocks, :, :].zero_()
        above = [gradients[0][..., part.rows, :]]
        add_gradients(function, _local(x, part, beyond), x.leaves, above, [*into, sums], learned)
    found, first = torch.autograd.grad(beyond.both, coarse, far_both)
    for part in key_stretches(x.q, x.k, plan):
        held = [x.k[..., part.keys, :], x.v[..., part.keys, :]]
        above, into = [found[..., part.blocks, :, :]], [k[..., part.keys, :], v[..., part.keys, :]]
        add_gradients(_sums_of(part, plan, far, x.seen), held, x.leaves, above, into, learned)
    return q, k, v, None, mk, mv, None, first, None, *learned


_STRETCHES = CustomGradient(_plain, _forward, _backward)
