"""Near and far keys under one normaliser: ``out_i = sum_j a_ij v_j / sum_j a_ij``, plain and differentiable.

``a_ij`` is ``exp(q_i . k_j / sqrt(d))`` where key j is near query i or a sink token, and ``phi_q(q_i) . phi_k(k_j)``
elsewhere. A block of queries reads a span of whole blocks of keys around it. For the keys outside the span, which are
summed up and enter as one more key, the logarithm of the product of features is the logit.
So one softmax normalises everything, and the exponential of a large number is never taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine import masks, offsets
from fast_attention.engine.blocks import count, join, slices, smaller, split, split_row
from fast_attention.engine.decay import state_sums
from fast_attention.engine.numerics import no_less
from fast_attention.engine.offsets import Positions
from fast_attention.engine.operation import Operation, like_queries
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.tracing import exporting, symbolic, traced
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.linear import linear_state
from fast_attention.mechanisms.linear.kernelised import TokenMap
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.reference import masked_keys
from fast_attention.mechanisms.sparse.block_local import BlockLocal

MISSING = 2**62  # the position of a sink token that does not exist


class SinkTokens(NamedTuple):
    """The first and last visible keys, which every query weighs exactly, with values and positions.

    Positions (..., 1, G) count keys from the first one given; those of missing tokens are ``MISSING``.
    """

    k: Float[Tensor, "*batch sinks width"]
    v: Float[Tensor, "*batch sinks values"]
    position: Int[Tensor, "*#batch sinks"]

    @property
    def present(self) -> Bool[Tensor, "*#batch sinks"]:
        """Whether each of them exists."""
        return self.position < MISSING // 2

    @staticmethod
    def of(
        k: Tensor, v: Tensor, visible: Bool[Tensor, "*#batch keys"], *, first: int, last: int, before: int | Tensor = 0
    ) -> tuple[SinkTokens, Bool[Tensor, "*#batch keys"]]:
        """The first and last visible keys, each once, and which keys are visible beside them.

        ``before`` counts the visible keys of an earlier part of the sequence (..., 1, 1).
        """
        position, others = SinkTokens.positions(visible, first=first, last=last, before=before)
        return SinkTokens.at(position, k, v), others

    @staticmethod
    def positions(
        visible: Bool[Tensor, "*#batch keys"], *, first: int, last: int, before: int | Tensor = 0
    ) -> tuple[Int[Tensor, "*#batch sinks"], Bool[Tensor, "*#batch keys"]]:
        """Where they stand, and which keys are visible beside them."""
        length, number = visible.shape[-1], first + last
        if isinstance(before, int) and not traced() and length >= number and bool(visible.all()):
            others = visible.clone()
            others[..., :first] = False
            others[..., length - last :] = False
            position = torch.arange(number, device=visible.device)
            position[first:] += length - number
            return position.expand(*visible.shape[:-1], number), others
        rank = visible.cumsum(-1)
        chosen = visible & ((rank + before <= first) | (rank > rank[..., -1:] - last))
        position = torch.where(chosen, torch.arange(length, device=visible.device), MISSING)
        position = pad(position, (0, number), value=MISSING).sort(-1).values[..., :number]
        return position, visible & ~chosen

    @staticmethod
    def at(position: Int[Tensor, "*#batch sinks"], k: Tensor, v: Tensor) -> SinkTokens:
        """Select the keys and values at these positions."""
        index = position.clamp(max=k.shape[-2] - 1)
        return SinkTokens(_take(k, index), _take(v, index), position)

    def append(self, later: SinkTokens, number: int) -> SinkTokens:
        """The ``number`` earliest of these and later ones."""
        position, order = torch.cat([self.position, later.position], -1).sort(dim=-1, stable=True)
        order = order[..., :number]
        k, v = torch.cat([self.k, later.k], -2), torch.cat([self.v, later.v], -2)
        return SinkTokens(_take(k, order), _take(v, order), position[..., :number])


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Tokens at positions (..., 1, G), for all heads; ``take_along_dim`` would fix a traced length."""
    return x.gather(-2, index[..., None].expand(*x.shape[:-2], index.shape[-1], x.shape[-1]))


class Plan(NamedTuple):
    """Where blocks of queries, their spans and the blocks of far keys lie; positions count keys."""

    is_causal: bool
    start: int  # the position of the first query
    block: int  # tokens of a block
    query_blocks: int
    keys_left: int  # keys of a span before its block
    keys_right: int  # and after it
    first: int  # the position of the first block of keys
    before: int  # blocks of keys before the first span

    @staticmethod
    def of(near: BlockLocal, length: int, keys: int, start: int, *, is_causal: bool) -> Plan:
        """Whole blocks, counted from the first key, for queries from position ``start`` on, which begins a block."""
        end, rest = start + length if symbolic() else max(start + length, 1), keys - start
        block = near.block_size
        keys_left = smaller(near.before, end // block) * block
        keys_right = 0 if is_causal else smaller(near.after, rest // block + 1) * block
        first = start - keys_left
        before = max(0, -(-first // block))
        return Plan(
            is_causal, start, block, count(length, block), keys_left, keys_right, first - before * block, before
        )

    @property
    def span(self) -> int:
        """Keys that a block of queries reads."""
        return self.keys_left + self.block + self.keys_right

    @property
    def span_blocks(self) -> int:
        """Blocks of keys in a span; 0 where causal, since nothing after a span is visible."""
        single = not symbolic() and self.query_blocks == 1  # its last query is the last token
        return 0 if self.is_causal or single else self.span // self.block

    @property
    def key_blocks(self) -> int:
        """Blocks of keys that are summed up."""
        steps = self.query_blocks if exporting() else self.query_blocks - 1  # the last of a traced length is
        return self.before + steps + self.span_blocks  # padding: see blocks.py


class FarSums(NamedTuple):
    """Sums over blocks of keys, divided by ``exp(log_scale)``."""

    sums: Float[Tensor, "*batch blocks C values_and_one"]  # sum_j phi(k_j) [v_j, 1]
    log_scale: Float[Tensor, "*batch blocks"]

    @staticmethod
    def of(state: LinearState) -> FarSums:
        """The sums that a state of linear attention holds, as one block."""
        sums = torch.cat([state.kv, state.k[..., None]], -1)
        return FarSums(sums.unsqueeze(-3), state.log_scale[..., :1])

    def narrow(self, start: int, number: int) -> FarSums:
        """The sums of ``number`` blocks from block ``start`` on."""
        return FarSums(self.sums.narrow(-3, start, number), self.log_scale.narrow(-1, start, number))

    def flip(self) -> FarSums:
        """The last block first."""
        return FarSums(self.sums.flip(-3), self.log_scale.flip(-1))


def block_sums(
    keys: Features, v: Float[Tensor, "*batch keys values"], *, start: int, block: int, number: int
) -> FarSums:
    """The sums over each of ``number`` blocks of keys from position ``start`` on, some of which may hold no keys."""

    def blocks(x: Tensor) -> Tensor:
        return slices(x, block=block, keys_left=0, keys_right=0, number=number, start=start)

    values_and_one, largest = blocks(torch.cat([v, torch.ones_like(v[..., :1])], -1)), None
    if keys.log_scale is not None:
        inside = blocks(torch.ones_like(keys.log_scale[..., None], dtype=torch.bool))
        log_scale = blocks(keys.log_scale[..., None]).masked_fill(~inside, FLOOR)
        largest = log_scale.detach().amax(-2)
        values_and_one = values_and_one * (log_scale - largest[..., None]).exp()
    sums = blocks(keys.values).mT @ values_and_one
    return FarSums(sums, torch.zeros_like(sums[..., 0, 0]) if largest is None else largest[..., 0])


def sums_outside(blocks: FarSums, earlier: FarSums, plan: Plan) -> FarSums:
    """For every block of queries, the sums of the keys before its span and, unless causal, of those after it.

    ``earlier`` is the sum of all keys before the blocks.
    """
    before = _prefix_sums(earlier, blocks).narrow(plan.before, plan.query_blocks)
    if plan.is_causal:
        return before
    nothing = FarSums(torch.zeros_like(earlier.sums), torch.full_like(earlier.log_scale, FLOOR))
    after = _prefix_sums(nothing, blocks.flip()).flip().narrow(plan.before + plan.span_blocks, plan.query_blocks)
    largest = torch.maximum(before.log_scale, after.log_scale)
    rescaled = [part.sums * (part.log_scale - largest).exp()[..., None, None] for part in (before, after)]
    return FarSums(rescaled[0] + rescaled[1], largest)


def _prefix_sums(first: FarSums, blocks: FarSums) -> FarSums:
    """``first``, then the sums up to the end of every block: one more than there are blocks."""
    sums, log_scale = torch.cat([first.sums, blocks.sums], -3), torch.cat([first.log_scale, blocks.log_scale], -1)
    running_max = cummax(log_scale, -1)
    prefix = state_sums((sums * (log_scale - running_max).exp()[..., None, None]).flatten(-2), running_max)
    return FarSums(prefix.unflatten(-1, sums.shape[-2:]), running_max)


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    visible: Bool[Tensor, "*#batch keys"],
    sinks: SinkTokens,
    near: BlockLocal,
    maps: tuple[TokenMap, TokenMap],
    *,
    start: int,
    is_causal: bool,
    earlier: LinearState | None = None,
    bias: Positions | None = None,
    learned_sinks: Float[Tensor, "heads"] | None = None,
    near_part: tuple[Tensor, Tensor] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Outputs over the ``visible`` keys, the sink tokens and the sums of all ``earlier`` keys.

    The first query stands at position ``start``. ``maps`` are those of queries and keys, ``bias`` is what near keys'
    scores gain by offsets, and the exponentials of ``learned_sinks`` (H,) add to normalisers. A ``near_part`` is what a
    kernel made of all near keys, sink tokens among them: outputs, and the logarithms of normalisers (..., L, 1).
    """
    length, keys, size = q.shape[-2], k.shape[-2], near.block_size
    before = FarSums.of(linear_state.empty(maps[1](k[..., :1, :]), v) if earlier is None else earlier)
    if is_causal and not traced() and length == 1 and start // size <= near.before:  # a step: every key is near
        numbers = offsets.between(bias, -start, keys, q)[0]
        outside = FarSums(before.sums[..., 0, :, :], before.log_scale[..., 0])
        hidden, unknown = ~visible[..., None, :], ~sinks.present[..., None, :]
        added = None if numbers is None else numbers[:, None]
        return attend_near(q, k, v, hidden, sinks, unknown, maps[0](q), outside, added, learned_sinks)
    front = start % size  # whole blocks are padded in front
    rows = [q, *(near_part or ())]
    q, *of_near = (pad(x, (0, 0, front, 0)) for x in rows) if symbolic() or front else rows
    plan = Plan.of(near, length + front, keys, start - front, is_causal=is_causal)
    numbers = offsets.between(bias, 1 - plan.keys_left - size, size + plan.span - 1, q)[0]
    features = maps[0](q), masked_keys(maps[1], k, visible)
    tensors = q, k, v, visible, *sinks, *features[0], *features[1], *before, numbers, learned_sinks
    out = _NODE(*tensors, *(of_near or (None, None)), plan=plan)
    return out[..., front:, :] if symbolic() or front else out


def _near_and_far(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sink_k: Tensor, sink_v: Tensor, sinks_at: Tensor,
    phi_q: Tensor, scale_q: Tensor | None, phi_k: Tensor, scale_k: Tensor | None, sums: Tensor, log_scale: Tensor,
    numbers: Tensor | None, learned_sinks: Tensor | None, near_out: Tensor | None, near_log: Tensor | None,
    *, plan: tuple[Any, ...],
) -> Tensor:  # fmt: skip
    """Outputs of blocks of queries over their spans, the sink tokens and the keys outside every span.

    ``sums`` over ``exp(log_scale)`` are those of all earlier keys; ``numbers`` (heads, offsets) are what near keys'
    scores gain by the offsets of a block's span. ``near_out`` and ``near_log`` stand for all keys of a span.
    """
    plan, earlier = Plan(*plan), FarSums(sums, log_scale)
    block, number, device = plan.block, plan.query_blocks, q.device
    blocks = earlier.narrow(0, 0)
    if exporting() or plan.key_blocks:
        blocks = block_sums(Features(phi_k, scale_k), v, start=plan.first, block=block, number=plan.key_blocks)
    outside = sums_outside(blocks, earlier, plan)

    def around(x: Tensor) -> Tensor:
        sides = {"keys_left": plan.keys_left, "keys_right": plan.keys_right}
        return slices(x, block=block, **sides, number=number, start=plan.start)

    first = plan.start + torch.arange(number, device=device)[:, None] * block
    sinks = SinkTokens(sink_k[..., None, :, :], sink_v[..., None, :, :], sinks_at[..., None, :])
    at, ends = first + torch.arange(block, device=device), sinks.position[..., None, :]
    unknown, hidden = ~sinks.present[..., None, :], ~around(visible[..., None])[..., 0][..., None, :]
    if plan.is_causal:
        unknown = unknown | (ends > at[..., None])
        hidden = hidden | ~masks.band(block, plan.keys_left, plan.keys_right, left=None, right=0, device=device)
    near_part: Sequence[Tensor] = ()
    if near_out is not None and near_log is not None:  # which hold the sink tokens of the span
        near_part, begin = (split(near_out, block), split(near_log, block)), first[..., None] - plan.keys_left
        unknown = unknown | ((ends >= begin) & (ends < begin + plan.span))
    queries = Features(split(phi_q, block), None if scale_q is None else split_row(scale_q, block))
    added = None if numbers is None else offsets.toeplitz(numbers, block)[:, None]
    learned = None if learned_sinks is None else learned_sinks[:, None]
    near = split(q, block), around(k), around(v), hidden
    return join(attend_near(*near, sinks, unknown, queries, outside, added, learned, near_part), q.shape[-2])


_NODE = Operation(_near_and_far, empty=like_queries)


def attend_near(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, sinks: SinkTokens, unknown: Tensor, queries: Features,
    outside: FarSums, added: Tensor | None, learned_sinks: Float[Tensor, "*#batch"] | None,
    near_part: Sequence[Tensor] = (),
) -> Float[Tensor, "*batch length values"]:  # fmt: skip
    """Outputs over near keys but the ``hidden`` ones, sink tokens but the ``unknown`` ones, and the keys ``outside``.

    ``added`` is what scores of near keys gain. A ``near_part`` stands for near keys: outputs, logarithms of weights.
    """
    q = q * q.shape[-1] ** -0.5
    if near_part:
        v, near = near_part
    else:
        near = q @ k.mT if added is None else q @ k.mT + added
        near = torch.where(hidden, float("-inf"), near)
    logits = [near, (q @ sinks.k.mT).masked_fill(unknown, float("-inf"))]
    weights, far = _softmax(logits, queries, outside, learned_sinks)
    of_near, of_sinks = weights[..., : near.shape[-1]], weights[..., near.shape[-1] :]
    return far + (of_near * v if near_part else of_near @ v) + of_sinks @ sinks.v


def _softmax(
    logits: list[Tensor], queries: Features, outside: FarSums, learned_sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The weights of all logits, and the weighted mean of the keys ``outside``."""
    sums = queries.values @ outside.sums
    denominator = sums[..., -1]
    negligible = denominator < least(denominator)
    total = no_less(_log(denominator, queries.log_scale, outside.log_scale[..., None]), FLOOR)  # finite: if alone
    weights = masks.masked_softmax(torch.cat([*logits, total[..., None]], -1), None, learned_sinks)
    mean = sums[..., :-1] / denominator.masked_fill(negligible, 1.0)[..., None]  # first: a weight may be far larger
    weight = weights[..., -1].masked_fill(negligible, 0.0)
    return weights[..., :-1], weight[..., None] * mean


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
