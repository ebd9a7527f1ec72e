"""Near and far keys under one normaliser: ``out_i = sum_j a_ij v_j / sum_j a_ij``, plain and differentiable.

``a_ij`` is ``exp(q_i . k_j / sqrt(d))`` where key j is near query i or a sink token, and ``phi_q(q_i) . phi_k(k_j)``
elsewhere. A block of queries reads a span of whole blocks of keys around it. For the keys outside the span, which are
summed up and enter as one more key, the logarithm of the product of features is the logit.
So one softmax normalises everything, and the exponential of a large number is never taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import masks, offsets
from fast_attention.engine.blocks import join, slices, split
from fast_attention.engine.numerics import no_less
from fast_attention.engine.operation import Operation, like_queries
from fast_attention.engine.scan import FLOOR
from fast_attention.engine.tracing import exporting, replaced
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.arguments import Arguments, Inputs, Maps
from fast_attention.mechanisms.hybrid.far_sums import FarSums, block_sums, sums_outside
from fast_attention.mechanisms.hybrid.positions import Plan
from fast_attention.mechanisms.hybrid.sink_tokens import SinkTokens
from fast_attention.mechanisms.linear.reference import masked_keys


class Sight(NamedTuple):
    """Which keys of its span a query of a block sees, the same for every head."""

    masked: Bool[Tensor, "block span"] | None  # not at all; None: it sees all
    position: Int[Tensor, "blocks block"]  # of the queries

    @staticmethod
    def of(plan: Plan, device: torch.device) -> Sight:
        """From where the blocks lie."""
        block, behind, ahead = plan.block, plan.behind, plan.ahead
        later = ~masks.band(block, behind, ahead, left=None, right=0, device=device) if plan.is_causal else None
        first = torch.arange(plan.query_blocks, device=device)[:, None] * block + plan.start
        return Sight(later, first + torch.arange(block, device=device))


def near_far(*tensors: Any, maps: Maps, plan: Plan) -> Float[Tensor, "*batch length values"]:
    """The outputs of all queries at once; ``tensors`` are those of ``Arguments`` in a flat tuple."""
    x = Arguments.of(tensors)
    queries, keys = maps(*x.weights)
    features = queries(x.q), masked_keys(keys, x.k, x.visible)
    numbers = dict(zip(plan._fields, plan, strict=True))
    return _NODE(*Inputs(*x[:5], *features, x.earlier, x.numbers, x.learned_sinks).flat(), **numbers)


def _near_and_far(*tensors: Any, **numbers: Any) -> Tensor:
    """Outputs from ``Inputs`` that hold the sums of all earlier keys in place of those outside every span."""
    x, plan = Inputs.of(*tensors), Plan(**numbers)
    blocks = x.outside.narrow(0, 0)
    if exporting() or plan.key_blocks:
        blocks = block_sums(x.keys, x.v, start=plan.first, block=plan.block, number=plan.key_blocks)
    whole = replaced(x, outside=sums_outside(blocks, x.outside, plan))
    return attend_spans(whole, Sight.of(plan, x.q.device), plan)


_NODE = Operation(_near_and_far, empty=like_queries)


def attend_spans(x: Inputs, sight: Sight, plan: Plan) -> Float[Tensor, "*batch length values"]:
    """Outputs of blocks of queries over their spans, the sink tokens and the keys outside every span."""
    block, q = plan.block, x.q * x.q.shape[-1] ** -0.5

    def around(x: Tensor) -> Tensor:
        return slices(x, block=block, behind=plan.behind, ahead=plan.ahead, number=plan.query_blocks, start=plan.start)

    def row(x: Tensor | None, cut: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if x is None else cut(x[..., None])[..., 0]

    visible, masked = x.visible, sight.masked
    if visible is None and not plan.inside(x.k.shape[-2]):
        visible = torch.ones(x.k.shape[-2], dtype=torch.bool, device=q.device)
    if visible is not None:
        outside = ~around(visible[..., None])[..., 0][..., None, :]
        masked = outside if masked is None else outside | masked
    sink_logits, unknown = split(q @ x.sinks.k.mT, block), ~x.sinks.present[..., None, None, :]
    if sight.masked is not None:
        unknown = unknown | (x.sinks.position[..., None, None, :] > sight.position[..., None])
    queries = Features(split(x.queries.values, block), row(x.queries.log_scale, lambda t: split(t, block)))
    exact = split(q, block) @ around(x.k).mT
    if x.numbers is not None:
        exact = exact + offsets.toeplitz(x.numbers, block)[:, None]
    logits = [exact if masked is None else torch.where(masked, float("-inf"), exact)]
    logits.append(sink_logits.masked_fill(unknown, float("-inf")))
    above = None if x.learned_sinks is None else x.learned_sinks[:, None]
    out, weights = (join(t, q.shape[-2]) for t in _softmax(logits, around(x.v), queries, x.outside, above))
    return out + weights @ x.sinks.v


def attend_near(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: SinkTokens, queries: Features, outside: FarSums,
    numbers: Float[Tensor, "heads keys"] | None, learned_sinks: Float[Tensor, "*#batch"] | None,
) -> Float[Tensor, "*batch length values"]:  # fmt: skip
    """``attend_spans`` where all keys are near and no sink token comes later: a step of decoding."""
    q = q * q.shape[-1] ** -0.5
    near = q @ k.mT if numbers is None else q @ k.mT + numbers[:, None]
    pairs = ((near, visible), (q @ sinks.k.mT, sinks.present))
    logits = [torch.where(visible[..., None, :], scores, float("-inf")) for scores, visible in pairs]
    out, weights = _softmax(logits, v, queries, outside, learned_sinks)
    return out + weights @ sinks.v


def _softmax(
    logits: list[Tensor], v: Tensor, queries: Features, outside: FarSums, learned_sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs over the keys with values ``v`` and those ``outside``; the weights of all other logits."""
    sums, keys = queries.values @ outside.sums, v.shape[-2]
    denominator = sums[..., -1]
    negligible = denominator < least(denominator)
    total = no_less(_log(denominator, queries.log_scale, outside.log_scale[..., None]), FLOOR)  # finite: if alone
    weights = masks.masked_softmax(torch.cat([*logits, total[..., None]], -1), None, learned_sinks)
    mean = sums[..., :-1] / denominator.masked_fill(negligible, 1.0)[..., None]  # first: a weight may be far larger
    weight = weights[..., -1].masked_fill(negligible, 0.0)
    return weights[..., :keys] @ v + weight[..., None] * mean, weights[..., keys:-1]


def _log(product: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """``a + b + log(product)``; minus infinity, without a gradient, where the product is too small to mean anything."""
    floor = least(product)
    negligible = product < floor
    logs = product.masked_fill(negligible, floor).log().masked_fill_(negligible, float("-inf"))
    logs = logs if a is None else logs.add_(a)
    return logs if b is None else logs.add_(b)


def least(product: Tensor) -> float:
    """Below this a product means nothing; rounded, that of a kernel that is never negative may even be."""
    info = torch.finfo(product.dtype)
    return info.tiny / info.eps
