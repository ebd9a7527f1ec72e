"""Near keys by torch's fused kernel, far ones by products with sums of features, under one normaliser.

Beside inputs and outputs nothing is kept but the sums of the blocks of keys and a normaliser for each query; features
are made again, chunk by chunk, in the backward pass, whose other parts are written by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fast_attention.engine import offsets, operation
from fast_attention.engine.offsets import Positions
from fast_attention.engine.operation import Fast, Operation, Tensors
from fast_attention.engine.scan import FLOOR
from fast_attention.mechanisms.hybrid import far, key_sums, near, reference
from fast_attention.mechanisms.hybrid.arguments import Maps
from fast_attention.mechanisms.hybrid.call import Call, Gradients
from fast_attention.mechanisms.hybrid.far_sums import FarSums, sums_outside
from fast_attention.mechanisms.hybrid.positions import Chunk, Plan
from fast_attention.mechanisms.hybrid.sink_tokens import SinkTokens
from fast_attention.mechanisms.linear.kernelised import Kernelised, TokenMap
from fast_attention.mechanisms.linear.linear_state import LinearState, empty


def near_far_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    visible: Bool[Tensor, "*#batch keys"],
    sinks: SinkTokens,
    far: Kernelised[Any],
    w: Any,
    plan: Plan,
    *,
    earlier: LinearState | None = None,
    bias: Positions | None = None,
    learned_sinks: Tensor | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Outputs over the ``visible`` keys, the sink tokens and the sums of all ``earlier`` keys; ``w`` are the weights of
    ``far``, ``bias`` is what near keys' scores gain by offsets, and the exponentials of ``learned_sinks`` (H,) add to
    normalisers.
    """
    leaves, layout = tree_flatten(w)

    def maps(*weights: Any) -> tuple[TokenMap, TokenMap]:
        return far.per_token(tree_unflatten(weights, layout))

    pair = maps(*(x if x is None else x.detach() for x in leaves))
    probes = [phi.first(k.detach()) for phi in pair[0 if torch.is_grad_enabled() else 1 :]]
    sums, log_scale = FarSums.of(earlier or empty(probes[-1], v))
    numbers = offsets.between(bias, 1 - plan.behind - plan.block, plan.block + plan.span - 1, q)[0]
    trained = numbers is not None and torch.is_grad_enabled() and numbers.requires_grad
    tensors = (q, k, v, visible, *sinks, sums.unsqueeze(-3), log_scale.unsqueeze(-1), numbers, learned_sinks, *leaves)
    in_a_users_map = any(x.requires_grad for features in probes for x in features if x is not None)
    if operation.obstacle(q, k, v) or in_a_users_map or trained:  # the fused kernel gives a bias no gradient
        return reference.near_far(*tensors, maps=maps, plan=plan)
    if plan.is_causal and q.shape[-2] == 1 and plan.start <= plan.behind:  # every key is near
        if numbers is not None:  # of the offsets of these keys
            first = plan.behind + plan.block - 1 - plan.start
            numbers = numbers[:, first : first + k.shape[-2]]
        earlier_sums = FarSums(sums, log_scale)
        return reference.attend_near(q, k, v, visible, sinks, maps(*leaves)[0](q), earlier_sums, numbers, learned_sinks)
    return _TILES(*tensors, maps=maps, plan=plan)


def _forward(*tensors: Any, maps: Maps, plan: Plan, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    call = Call.of(tensors, maps, plan)
    sight = near.Sight.of(plan, call.tokens.q, tensors[9])
    blocks = key_sums.block_sums(call)
    outside = sums_outside(blocks, call.earlier, plan, begin=key_sums.held(call).start)
    q, k = call.tokens[:2]
    out, logs = torch.empty_like(q), q.new_empty(len(q), 2, q.shape[1])
    for chunk in plan.query_chunks(q, k):
        _write(call, chunk, outside, sight, out[:, chunk.queries], logs[..., chunk.queries])
    return call.unflattened(out, 1), (*blocks, out, logs) if keep else ()


def _write(call: Call, chunk: Chunk, outside: FarSums, sight: near.Sight, out: Tensor, logs: Tensor) -> None:
    """Write the outputs of a chunk of queries, the logarithms of their normalisers and of the units of far sums."""
    tokens = call.tokens.part(chunk)
    sums, log_scale = far.products(call, chunk, outside)
    denominator = sums[..., -1].contiguous()
    negligible = denominator < reference.least(sums)
    denominator.masked_fill_(negligible, 1.0)
    logits = call.logits(chunk)
    torch.log(denominator, out=logits[:, 1]).add_(log_scale).masked_fill_(negligible, FLOOR)  # finite: if alone
    parts = []
    for group in near.groups(call.plan, sight, chunk, tokens):
        part, log_sum = near.outputs(tokens, group, call.scale)
        group.queries.read(logits[:, 0, :, None])[..., 0] = log_sum
        parts.append((group.queries, part))
    logs[:, 1] = (log_scale + torch.zeros_like(denominator)).masked_fill_(negligible, float("-inf"))
    weights, logs[:, 0] = _normalised(logits, call.learned)
    if sum(rows.size * rows.number for rows, _ in parts) < out.shape[1]:
        out.zero_()
    for rows, part in parts:
        torch.mul(part, rows.read(weights[:, 0, :, None]), out=rows.read(out))
    far_weight = weights[:, 1].masked_fill_(negligible, 0.0).div_(denominator)
    out[..., : call.widths[1]].addcmul_(sums[..., :-1], far_weight[..., None])
    out.baddbmm_(weights[:, 2:].mT, call.sinks.v)


def _normalised(logits: Tensor, learned: Tensor | None) -> tuple[Tensor, Tensor]:
    """The softmax over axis 1, in place, beside scores without a value, and the logarithms of its normalisers."""
    largest = logits.amax(1) if learned is None else torch.maximum(logits.amax(1), learned)
    weights = logits.sub_(largest[:, None]).exp_()
    total = weights.sum(1)
    if learned is not None:
        total.add_((learned - largest).exp_())
    return weights.div_(total[:, None]), total.log_().add_(largest)


def _backward(
    inputs: tuple[Any, ...],
    outputs: Tensors,
    kept: tuple[Tensor, ...],
    grad_out: tuple[Tensor, ...],
    *,
    maps: Maps,
    plan: Plan,
) -> Tensors:
    call = Call.of(inputs, maps, plan)
    sight = near.Sight.of(plan, call.tokens.q, inputs[9])
    d = call.zeros(inputs[11:])
    out, logs, gradient = kept[2], kept[3], call.wide(grad_out[0])
    leaves = [sums.detach().requires_grad_() for sums in (kept[0], call.earlier.sums)]
    with torch.enable_grad():
        blocks, earlier = FarSums(leaves[0], kept[1]), FarSums(leaves[1], call.earlier.log_scale)
        outside = sums_outside(blocks, earlier, plan, begin=key_sums.held(call).start)
    fixed, d_outside = FarSums(outside.sums.detach(), outside.log_scale), torch.zeros_like(outside.sums)
    for chunk in plan.query_chunks(*call.tokens[:2]):
        tokens = chunk.queries
        above = _add_gradients(call, chunk, sight, out[:, tokens], logs[..., tokens], gradient[:, tokens], d)
        far.add_gradients(call, chunk, fixed, above, d, d_outside)
    d_blocks, d_earlier = torch.autograd.grad(outside.sums, leaves, d_outside, allow_unused=True)
    key_sums.add_block_gradients(call, d_blocks, d)
    d_sinks = call.unflattened(d.sinks.k, 0), call.unflattened(d.sinks.v, 1)
    d_earlier = None if d_earlier is None else d_earlier.view(inputs[7].shape)
    d_learned = call.of_learned(logs[:, 0], gradient, out)
    return d.q, d.k, d.v, None, *d_sinks, None, d_earlier, None, None, d_learned, *d.weights


def _add_gradients(
    call: Call, chunk: Chunk, sight: near.Sight, out: Tensor, logs: Tensor, gradient: Tensor, d: Gradients
) -> Tensor:
    """Add the gradients of near keys and sink tokens for a chunk of queries; that of the sums of far keys.

    A weight w over ``gradient * out``'s sum D: its logit has the gradient ``w (gradient v - D)``.
    """
    tokens, into, log_sums = call.tokens.part(chunk), d.tokens.part(chunk), logs[:, :1]
    for group in near.groups(call.plan, sight, chunk, tokens):
        near.add_gradients(tokens, into, group, out, log_sums, gradient, call.scale)
    total = torch.linalg.vecdot(gradient, out)[..., None]
    weights = call.logits(chunk)[:, 2:].sub_(log_sums).exp_()
    d.sinks.v.baddbmm_(weights, gradient)
    d_logits = torch.baddbmm(total.mT, call.sinks.v, gradient.mT, beta=-1).mul_(weights)
    into.q.baddbmm_(d_logits.mT, call.sinks.k, alpha=call.scale)
    d.sinks.k.baddbmm_(d_logits, tokens.q, alpha=call.scale)
    factors = (logs[:, 1] - log_sums[:, 0]).exp_()[..., None]
    above = gradient.new_empty(*gradient.shape[:-1], call.widths[1] + 1)
    torch.mul(gradient[..., : call.widths[1]], factors, out=above[..., :-1])
    torch.mul(total, -factors, out=above[..., -1:])
    return above


_TILES = Operation(reference.near_far, cpu=Fast(_forward, _backward))
