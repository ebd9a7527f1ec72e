"""Near keys by torch's FlexAttention, with the logarithms of its normalisers; far ones by products of features.

Every part of a query's keys gives the mean of its values and the logarithm of its weights: the near keys, the sums over
blocks of far ones, sink tokens. A softmax over these logarithms makes one mean of all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine.blocks import join, split
from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import Features
from fast_attention.gpu import flex, patterns
from fast_attention.mechanisms.hybrid import reference
from fast_attention.mechanisms.hybrid.reference import FarSums, Plan, SinkTokens, block_sums, sums_outside
from fast_attention.mechanisms.linear import linear_state
from fast_attention.mechanisms.linear.kernelised import Kernelised
from fast_attention.mechanisms.linear.reference import masked_keys
from fast_attention.mechanisms.sparse.block_local import BlockLocal
from fast_attention.mechanisms.sparse.selected import Selected


class Part(NamedTuple):
    """The logarithm of the weights of some keys, and the mean of their values by these."""

    log: Float[Tensor, "*batch length"]
    mean: Float[Tensor, "*batch length values"]


def unsupported_reason(
    near: BlockLocal | Selected, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool
) -> str:
    """Why this call does not run this way; empty where it does."""
    if isinstance(near, Selected):
        return "chosen blocks"
    if near.bias is not None:
        return "a bias"
    if not symbolic() and near.covers(q.shape[-2], k.shape[-2], is_causal=is_causal):
        return "all keys are near"
    return patterns.unsupported_reason(q, k, v, key_mask, logged=True)


def near_part(
    near: BlockLocal, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Outputs of queries over their near keys alone, and the logarithms of their normalisers."""
    sides = {"before": near.before, "after": near.after}
    pattern = patterns.blocks(q, k, near.block_size, **sides, is_causal=is_causal)
    return flex.attend_with_logs(q, k, v, pattern, key_mask, scale=near.scale)


@in_float32
def merge_near_and_far(
    near_out: Tensor, near_log: Tensor, q: Tensor, k: Tensor, v: Tensor, others: Tensor, sinks: SinkTokens,
    learned: Tensor | None, far: Kernelised[Any], w: Any, near: BlockLocal, *, is_causal: bool,
) -> Tensor:  # fmt: skip
    """Outputs over all parts; ``others`` (..., 1, S): the visible keys, near and far, but for the sink tokens."""
    length, keys = q.shape[-2], k.shape[-2]
    start = keys - length
    front = start % near.block_size
    plan = Plan.of(near, length + front, keys, start - front, is_causal=is_causal)
    phi_q, phi_k = far.per_token(w)
    queries, features = phi_q(pad(q, (0, 0, front, 0))), masked_keys(phi_k, k, others)
    far_part = _outside(queries, features, v, plan)
    far_part = Part(*(x[..., front : front + length, :] for x in (far_part.log[..., None], far_part.mean)))
    parts = [Part(near_log.clamp(min=FLOOR)[..., None], near_out), far_part]
    if sinks.k.shape[-2]:
        parts.append(_sinks(near, q, sinks, start, is_causal=is_causal))
    logs = [part.log for part in parts]
    if learned is not None:
        logs.append(learned[:, None, None].expand(near_log[..., None].shape))
    weights = torch.cat(torch.broadcast_tensors(*logs), -1).softmax(-1)
    return sum(weights[..., i : i + 1] * part.mean for i, part in enumerate(parts))  # type: ignore[return-value]


def _outside(queries: Features, keys: Features, v: Tensor, plan: Plan) -> Part:
    """The far keys outside of the span of a block of queries."""
    blocks = block_sums(keys, v, start=plan.first, block=plan.block, number=plan.key_blocks)
    none = linear_state.empty(Features(keys.values[..., :1, :], _first(keys.log_scale)), v)
    outside = sums_outside(blocks, FarSums.of(none), plan)
    rows = split(queries.values, plan.block) @ outside.sums
    scale = None if queries.log_scale is None else split(queries.log_scale[..., None], plan.block)[..., 0]
    length = queries.values.shape[-2]
    denominator = rows[..., -1:]
    negligible = denominator < reference.least(denominator)
    log = denominator.masked_fill(negligible, 1.0).log() + outside.log_scale[..., None, None]
    log = log if scale is None else log + scale[..., None]
    mean = rows[..., :-1] / denominator.masked_fill(negligible, 1.0)
    log, mean = log.masked_fill(negligible, FLOOR), mean.masked_fill(negligible, 0.0)
    return Part(join(log, length)[..., 0], join(mean, length))


def _sinks(near: BlockLocal, q: Tensor, sinks: SinkTokens, start: int, *, is_causal: bool) -> Part:
    """Sink tokens, where they are not near and not yet to come; the first query stands at position ``start``."""
    logs, position = q @ sinks.k.mT * q.shape[-1] ** -0.5, sinks.position[..., None, :]
    at = start + torch.arange(q.shape[-2], device=q.device)[:, None]
    block_offset = position.div(near.block_size, rounding_mode="floor") - at.div(near.block_size, rounding_mode="floor")
    hidden = ~sinks.present[..., None, :] | ((block_offset >= -near.before) & (block_offset <= near.after))
    hidden = hidden | (position > at) if is_causal else hidden
    logs = logs.masked_fill(hidden, FLOOR)
    weights = logs.softmax(-1).masked_fill(hidden, 0.0)
    return Part(logs.logsumexp(-1, keepdim=True), weights @ sinks.v)


def _first(log_scale: Tensor | None) -> Tensor | None:
    return None if log_scale is None else log_scale[..., :1]
