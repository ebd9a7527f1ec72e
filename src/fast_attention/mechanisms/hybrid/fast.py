"""Near and far keys, some blocks of queries at a time: their features stay in the cache, scores are made head by head.

A single head reads overlapping spans of its keys in place, where all heads at once would need copies of them. Beside
inputs and outputs nothing is kept but the sums of the blocks of keys; the backward pass computes scores and features
again, chunk by chunk, with autograd inside each. Short sequences are one chunk, of which autograd keeps what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fast_attention.engine.chunks import add_gradients
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.tracing import replaced
from fast_attention.mechanisms.hybrid import reference
from fast_attention.mechanisms.hybrid.far_sums import FarSums, block_sums, sums_outside
from fast_attention.mechanisms.hybrid.positions import Chunk, Plan, SinkTokens
from fast_attention.mechanisms.hybrid.reference import Arguments, Inputs, Maps, Sight, attend_spans
from fast_attention.mechanisms.linear.kernelised import Kernelised, TokenMap
from fast_attention.mechanisms.linear.linear_state import LinearState, empty
from fast_attention.mechanisms.linear.reference import masked_keys


def near_far_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    visible: Bool[Tensor, "*#batch keys"],
    sinks: SinkTokens,
    far: Kernelised[Any],
    w: Any,
    *,
    left: int,
    right: int,
    is_causal: bool,
    start: int,
    earlier: LinearState | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Outputs over the ``visible`` keys, the sink tokens and the sums of all ``earlier`` keys.

    Query i stands at position ``start + i``, counted from the first key, and weighs keys from ``left`` positions before
    it to ``right`` after it exactly. ``w`` are the weights of ``far``.
    """
    leaves, layout = tree_flatten(w)

    def maps(*weights: Any) -> tuple[TokenMap, TokenMap]:
        return far.per_token(tree_unflatten(weights, layout))

    queries, keys = maps(*leaves)
    one = k[..., :1, :].detach()
    sums, log_scale = FarSums.of(earlier or empty(keys(one), v))
    if not torch.compiler.is_compiling() and is_causal and q.shape[-2] == 1 and k.shape[-2] <= left + 1:
        return reference.attend_near(q, k, v, visible, sinks, queries(q), FarSums(sums, log_scale))
    plan = Plan.of(q.shape[-2], left, right, is_causal, start)
    path = _CHUNKS if q.is_cpu and plan.is_long(q) and _complete(maps, leaves, one) else reference.near_far
    tensors = (q, k, v, visible, *sinks, sums.unsqueeze(-3), log_scale.unsqueeze(-1), *leaves)
    return path(*tensors, maps=maps, plan=plan)


def _complete(maps: Maps, weights: list[Any], one: Tensor) -> bool:
    """Whether the maps of a key have no other parameters than ``weights``: a user's own may hold some."""
    pair = maps(*(x if x is None else x.detach() for x in weights))
    return not any(x.requires_grad for phi in pair for x in phi(one) if x is not None)


def _outputs(chunk: Chunk, x: Arguments, log_scale: Tensor, maps: Maps, plan: Plan) -> Callable[..., Tensor]:
    """The outputs of a chunk of queries, as a function of what ``_read_by`` gives and the weights."""
    local = replaced(plan, start=chunk.start, query_blocks=chunk.number)
    visible, sight = _unless_all(x.visible[..., chunk.keys]), Sight.of(local, x.q.device)

    def function(q: Tensor, k: Tensor, v: Tensor, sk: Tensor, sv: Tensor, sums: Tensor, *w: Any) -> Tensor:
        sinks = SinkTokens(sk, sv, x.sinks.position - chunk.keys.start)
        outside, (queries, keys) = FarSums(sums, log_scale[..., chunk.blocks]), maps(*w)
        whole = Inputs(q, k, v, visible, sinks, queries(q), masked_keys(keys, k, visible), outside)
        return torch.stack([attend_spans(head, sight, local) for head in whole.heads()]).unflatten(0, q.shape[:-2])

    return function


def _read_by(chunk: Chunk, x: Arguments, sums: Tensor) -> list[Tensor]:
    """The tensors, or their gradients, that a chunk of queries reads; ``sums`` are those outside all spans."""
    k, v = x.k[..., chunk.keys, :], x.v[..., chunk.keys, :]
    return [x.q[..., chunk.queries, :], k, v, x.sinks.k, x.sinks.v, sums[..., chunk.blocks, :, :]]


def _block_sums(chunk: Chunk, x: Arguments, maps: Maps, plan: Plan) -> Callable[..., FarSums]:
    """The sums of a chunk of key blocks, as a function of its keys, its values and the weights."""
    visible = _unless_all(x.visible[..., chunk.keys])

    def function(k: Tensor, v: Tensor, *w: Any) -> FarSums:
        keys = masked_keys(maps(*w)[1], k, visible)
        return block_sums(keys, v, start=chunk.start, block=plan.block, number=chunk.number)

    return function


def _unless_all(visible: Tensor) -> Tensor | None:
    return None if bool(visible.all()) else visible


def _forward(*tensors: Any, maps: Maps, plan: Plan, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    x = Arguments.of(tensors)
    blocks = x.earlier.new_empty(plan.key_blocks)
    for chunk in plan.key_chunks(x.q, x.k):
        results = _block_sums(chunk, x, maps, plan)(x.k[..., chunk.keys, :], x.v[..., chunk.keys, :], *x.weights)
        blocks.sums[..., chunk.blocks, :, :], blocks.log_scale[..., chunk.blocks] = results
    outside = sums_outside(blocks, x.earlier, plan)
    out = x.q.new_empty(*x.q.shape[:-1], x.v.shape[-1])
    for chunk in plan.query_chunks(x.q, x.k):
        outputs = _outputs(chunk, x, outside.log_scale, maps, plan)
        out[..., chunk.queries, :] = outputs(*_read_by(chunk, x, outside.sums), *x.weights)
    return out, tuple(blocks) if keep else ()


def _backward(
    inputs: Tensors, outputs: Tensors, kept: tuple[Tensor, ...], grad_out: tuple[Tensor, ...], *, maps: Maps, plan: Plan
) -> Tensors:
    x = Arguments.of(inputs)
    d = Arguments.of(tuple(torch.zeros_like(t) if t is not None and t.is_floating_point() else None for t in inputs))
    d_weights = [g if w is not None and w.requires_grad else None for w, g in zip(x.weights, d.weights, strict=True)]
    leaves = [sums.detach().requires_grad_() for sums in (kept[0], x.earlier.sums)]
    with torch.enable_grad():
        outside = sums_outside(FarSums(leaves[0], kept[1]), FarSums(leaves[1], x.earlier.log_scale), plan)
    d_outside = torch.zeros_like(outside.sums)
    for chunk in plan.query_chunks(x.q, x.k):
        function = _outputs(chunk, x, outside.log_scale, maps, plan)
        held, into = _read_by(chunk, x, outside.sums), _read_by(chunk, d, d_outside)
        add_gradients(function, held, x.weights, [grad_out[0][..., chunk.queries, :]], into, d_weights)
    d_blocks, d_earlier = torch.autograd.grad(outside.sums, leaves, d_outside)
    for chunk in plan.key_chunks(x.q, x.k):
        held, into = ([t.k[..., chunk.keys, :], t.v[..., chunk.keys, :]] for t in (x, d))
        above = [d_blocks[..., chunk.blocks, :, :]]
        add_gradients(_block_sums(chunk, x, maps, plan), held, x.weights, above, into, d_weights)
    return d.q, d.k, d.v, None, d.sinks.k, d.sinks.v, None, d_earlier, None, *d_weights


_CHUNKS = CustomGradient(reference.near_far, _forward, _backward)
