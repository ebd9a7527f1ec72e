"""Sums of features over keys outside the spans: of every block of keys, and of all before and after every span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import operation
from fast_attention.engine.blocks import slices
from fast_attention.engine.decay import state_sums
from fast_attention.engine.operation import Fast, Operation, Tensors
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.tracing import symbolic, traced
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.positions import Plan
from fast_attention.mechanisms.linear.linear_state import LinearState


class FarSums(NamedTuple):
    """Sums over blocks of keys, divided by ``exp(log_scale)``; blocks without keys may be left out of ``sums``."""

    sums: Float[Tensor, "*batch blocks C values_and_one"]  # sum_j phi(k_j) [v_j, 1]
    log_scale: Float[Tensor, "*batch blocks"]

    @staticmethod
    def of(state: LinearState) -> FarSums:
        """The sums that a state of linear attention holds, one block for each."""
        return FarSums(torch.cat([state.kv, state.k[..., None]], -1), state.log_scale[..., 0])

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
        return slices(x, block=block, behind=0, ahead=0, number=number, start=start)

    values_and_one, largest = blocks(torch.cat([v, torch.ones_like(v[..., :1])], -1)), None
    if keys.log_scale is not None:
        inside = blocks(torch.ones_like(keys.log_scale[..., None], dtype=torch.bool))
        log_scale = blocks(keys.log_scale[..., None]).masked_fill(~inside, FLOOR)
        largest = log_scale.detach().amax(-2)
        values_and_one = values_and_one * (log_scale - largest[..., None]).exp()
    sums = blocks(keys.values).mT @ values_and_one
    return FarSums(sums, torch.zeros_like(sums[..., 0, 0]) if largest is None else largest[..., 0])


def sums_outside(blocks: FarSums, earlier: FarSums, plan: Plan, *, begin: int = 0) -> FarSums:
    """For every block of queries, the sums of the keys before its span and, unless causal, of those after it.

    ``blocks`` are the sums of the blocks of keys, of few from ``begin`` on; ``earlier`` is that of all keys before.
    """
    log_scale = LogScales.of(blocks.log_scale, earlier.log_scale, plan).outside
    if not symbolic() and plan.few:
        return FarSums(_weighed(blocks, earlier, log_scale, plan, begin), log_scale)
    path = _plain if operation.obstacle(blocks.sums) else _CARRIED
    return FarSums(path(*blocks, *earlier, plan=plan), log_scale)


class LogScales(NamedTuple):
    """The largest logarithm of keys before each block, from each block on, and outside the span of each query block."""

    before: Float[Tensor, "*batch blocks_and_one"]
    after: Float[Tensor, "*batch blocks_and_one"]
    outside: Float[Tensor, "*batch query_blocks"]

    @staticmethod
    def of(log_scale: Tensor, earlier: Tensor, plan: Plan) -> LogScales:
        """From the log scales of the blocks of keys and of all keys before these."""
        before = cummax(torch.cat([earlier, log_scale], -1), -1)
        after = cummax(torch.cat([torch.full_like(earlier, FLOOR), log_scale.flip(-1)], -1), -1).flip(-1)
        outside = before.narrow(-1, plan.before, plan.query_blocks)
        if not plan.is_causal:
            outside = torch.maximum(outside, after.narrow(-1, plan.before + plan.span_blocks, plan.query_blocks))
        return LogScales(before, after, outside)


def _plain(sums: Tensor, log_scale: Tensor, first: Tensor, first_scale: Tensor, *, plan: Plan) -> Tensor:
    blocks, scales = FarSums(sums, log_scale), LogScales.of(log_scale, first_scale, plan)
    parts = [_prefix_sums(FarSums(first, first_scale), blocks).narrow(plan.before, plan.query_blocks)]
    if not plan.is_causal:
        nothing = FarSums(torch.zeros_like(first), torch.full_like(first_scale, FLOOR))
        suffix = _prefix_sums(nothing, blocks.flip()).flip()
        parts.append(suffix.narrow(plan.before + plan.span_blocks, plan.query_blocks))
    rescaled = [part.sums * (part.log_scale - scales.outside).exp()[..., None, None] for part in parts]
    return rescaled[0] if len(rescaled) == 1 else rescaled[0] + rescaled[1]


def _weighed(blocks: FarSums, earlier: FarSums, outside: Tensor, plan: Plan, begin: int) -> Tensor:
    """By one product with the weight of every block in every sum."""
    sums, log_scale = blocks
    index = torch.arange(log_scale.shape[-1], device=sums.device) - plan.before
    number = torch.arange(plan.query_blocks, device=sums.device)[:, None]
    inside = (index >= number) if plan.is_causal else (index >= number) & (index < number + plan.span_blocks)
    weights = (log_scale[..., None, :] - outside[..., None]).masked_fill(inside, float("-inf")).exp()
    results = (weights.narrow(-1, begin, sums.shape[-3]) @ sums.flatten(-2)).unflatten(-1, sums.shape[-2:])
    if not traced() and not bool(earlier.sums.any()):
        return results
    return results + earlier.sums * (earlier.log_scale - outside).exp()[..., None, None]


def _prefix_sums(first: FarSums, blocks: FarSums) -> FarSums:
    """``first``, then the sums up to the end of every block: one more than there are blocks."""
    sums, log_scale = torch.cat([first.sums, blocks.sums], -3), torch.cat([first.log_scale, blocks.log_scale], -1)
    running_max = cummax(log_scale, -1)
    prefix = state_sums((sums * (log_scale - running_max).exp()[..., None, None]).flatten(-2), running_max)
    return FarSums(prefix.unflatten(-1, sums.shape[-2:]), running_max)


Scaled = tuple[Tensor, Tensor]  # a tensor and its factor


class CarriedSum(NamedTuple):
    """One running sum over blocks: at each step it is rescaled, takes a term in, and is added to an output.

    Its gradient is such a sum in the other direction, with terms and outputs exchanged.
    """

    terms: Sequence[Scaled | None]
    outputs: Sequence[Scaled | None]
    rescales: Sequence[Tensor]  # factors of the sum between neighbouring steps

    def transposed(self) -> CarriedSum:
        """The sum that the gradient is."""
        return CarriedSum(self.outputs[::-1], self.terms[::-1], self.rescales[::-1])

    def run(self, carry: Tensor) -> Tensor:
        """All steps, starting from ``carry``, which becomes the last sum in place."""
        for step, (term, output) in enumerate(zip(self.terms, self.outputs, strict=True)):
            if step:
                carry.mul_(self.rescales[step - 1])
            if term is not None:
                carry.addcmul_(*term)
            if output is not None:
                output[0].addcmul_(carry, output[1])
        return carry


def _carried_sums(sums: Tensor, log_scale: Tensor, scales: LogScales, out: Tensor, plan: Plan) -> list[CarriedSum]:
    """The sums of keys before the spans and, unless causal, of those after, from ``sums`` added to ``out``."""
    before, after, outside = scales
    lead, last, end = plan.before, plan.before + plan.query_blocks - 1, plan.before + plan.span_blocks
    before, blocks, outputs = before[..., : last + 1], sums.unbind(-3), out.unbind(-3)
    carried = [
        CarriedSum(
            [None, *zip(blocks[:last], _factors(log_scale[..., :last] - before[..., 1:]), strict=True)],
            [*[None] * lead, *zip(outputs, _factors(before[..., lead:] - outside), strict=True)],
            _factors(before[..., :-1] - before[..., 1:]),
        )
    ]
    if not plan.is_causal:  # nothing is after the last span
        scale, after, outside = (t.flip(-1) for t in (log_scale[..., end:], after[..., end:-1], outside[..., :-1]))
        terms = list(zip(blocks[end:][::-1], _factors(scale - after), strict=True))
        results = list(zip(outputs[:-1][::-1], _factors(after - outside), strict=True))
        carried.append(CarriedSum(terms, results, _factors(after[..., :-1] - after[..., 1:])))
    return carried


def _factors(log_scales: Tensor) -> tuple[Tensor, ...]:
    """The factor (..., 1, 1) of every block."""
    return log_scales.exp()[..., None, None].unbind(-3)


def _forward(
    sums: Tensor, log_scale: Tensor, first: Tensor, first_scale: Tensor, *, plan: Plan, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out = sums.new_zeros(*sums.shape[:-3], plan.query_blocks, *sums.shape[-2:])
    carry = first[..., 0, :, :].clone()
    for carried in _carried_sums(sums, log_scale, LogScales.of(log_scale, first_scale, plan), out, plan):
        carried.run(carry)
        carry.zero_()
    return out, ()


def _backward(inputs: Tensors, outputs: Tensors, kept: Tensors, grad_out: tuple[Tensor, ...], *, plan: Plan) -> Tensors:
    sums, log_scale, first, first_scale = (x for x in inputs if x is not None)
    d_sums, scales = torch.zeros_like(sums), LogScales.of(log_scale, first_scale, plan)
    carried = _carried_sums(d_sums, log_scale, scales, grad_out[0], plan)
    d_first = [each.transposed().run(torch.zeros_like(first[..., 0, :, :])) for each in carried]
    return d_sums, None, d_first[0].unsqueeze(-3), None


_CARRIED = Operation(_plain, cpu=Fast(_forward, _backward))
