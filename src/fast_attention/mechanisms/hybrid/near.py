"""Exact weights of near keys under a normaliser that they share with others: torch's fused kernel, block by block.

The kernel gives the logarithm of its own normaliser, so that its outputs can be weighed against anything else; and
given the logarithm of the whole normaliser, its gradient is that of the near keys' part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.offsets import toeplitz
from fast_attention.mechanisms.hybrid.call import Tokens
from fast_attention.mechanisms.hybrid.positions import Chunk, Plan

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def bias_of(visible: Bool[Tensor, "*some span"], dtype: torch.dtype) -> Float[Tensor, "*some span"] | None:
    """What is added to scores so that only ``visible`` keys get weight; None where all are visible."""
    return None if visible.all() else torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))


class Rows(NamedTuple):
    """``number`` runs of ``size`` tokens, ``step`` apart, which may overlap."""

    first: int
    size: int
    number: int
    step: int

    def read(self, x: Shaped[Tensor, "heads length E"]) -> Shaped[Tensor, "heads number size E"]:
        """A view of these tokens."""
        heads, token, number = x.stride()
        at = x.storage_offset() + self.first * token
        return x.as_strided(
            (len(x), self.number, self.size, x.shape[-1]), (heads, self.step * token, token, number), at
        )

    def add(self, gradient: Tensor, into: Tensor) -> None:
        """Add what belongs to these tokens, part by part where the runs overlap."""
        for begin in range(0, self.size, self.step):
            part = Rows(self.first + begin, min(self.step, self.size - begin), self.number, self.step)
            part.read(into).add_(gradient[:, :, begin : begin + self.step])


class Group(NamedTuple):
    """Blocks of queries whose spans are alike; with a bias, some rows of which may see nothing."""

    queries: Rows
    keys: Rows
    bias: Float[Tensor, "*some rows span"] | None
    sees: Bool[Tensor, "*some rows"] | None  # None: every row sees a key


class Sight(NamedTuple):
    """What a query of a block sees of its span."""

    near: Bool[Tensor, "block span"] | None  # None: all of it
    numbers: Float[Tensor, "heads block span"] | None = None  # what scores of near keys gain

    @staticmethod
    def of(plan: Plan, q: Tensor, numbers: Tensor | None) -> Sight:
        """From where the blocks lie, for the flattened heads of ``q``; ``numbers`` are of one sequence's heads."""
        device = q.device
        if numbers is not None:
            numbers = toeplitz(numbers.to(q.dtype), plan.block).repeat(len(q) // len(numbers), 1, 1)
        if not plan.is_causal:
            return Sight(None, numbers)
        return Sight(masks.band(plan.block, plan.behind, plan.ahead, left=None, right=0, device=device), numbers)


def aligned(plan: Plan, chunk: Chunk) -> Iterator[tuple[Rows, Rows, slice]]:
    """The queries of a chunk's blocks, the keys in their spans, and which columns of the spans these are: all blocks
    together that have all their queries and keys, the others one by one, without those that have no key.
    """
    length, keys = chunk.queries.stop - chunk.queries.start, chunk.keys.stop - chunk.keys.start
    block, first, width = plan.block, chunk.start - plan.behind, plan.span
    low = min(max(-(first // block), 0), chunk.number)
    high = max(min((keys - first - width) // block + 1, length // block, chunk.number), low)
    for n, number in [*((n, 1) for n in range(low)), (low, high - low), *((n, 1) for n in range(high, chunk.number))]:
        begin = first + n * block
        rows, left, right = min(block, length - n * block), max(-begin, 0), min(keys - begin, width)
        if number > 0 and right > left:
            columns = slice(left, right)
            yield Rows(n * block, rows, number, block), Rows(begin + left, right - left, number, block), columns


def groups(plan: Plan, sight: Sight, chunk: Chunk, tokens: Tokens) -> Iterator[Group]:
    """The blocks of a chunk: those whose spans lie inside the keys, the others one by one, without those whose span
    holds no key.
    """
    runs = [*aligned(plan, chunk)]
    for queries, keys, columns in runs if sight.near is not None or sight.numbers is not None else _paired(runs):
        near = None if sight.near is None else sight.near[: queries.size, columns]
        group = _group(queries, keys, near, tokens.masked)
        if sight.numbers is not None:
            numbers = sight.numbers[:, None, : queries.size, columns]
            group = group._replace(bias=numbers if group.bias is None else numbers + group.bias)
        yield group


def _paired(runs: list[tuple[Rows, Rows, slice]]) -> list[tuple[Rows, Rows, slice]]:
    """The first and the last block as one run of two where their spans are cut off alike; columns are of the first."""
    if len(runs) != 3:
        return runs
    (queries, keys, columns), middle, (others, their_keys, _) = runs
    if (queries.number, queries.size, keys.size) != (others.number, others.size, their_keys.size):
        return runs
    both = queries._replace(number=2, step=others.first - queries.first)
    return [(both, keys._replace(number=2, step=their_keys.first - keys.first), columns), middle]


def _group(queries: Rows, keys: Rows, visible: Tensor | None, masked: Tensor | None) -> Group:
    if visible is not None and bool(visible.all()):
        visible = None
    if masked is None:
        sees = None if visible is None else visible.any(-1)
        return Group(queries, keys, None if visible is None else bias_of(visible, torch.float32), sees)
    unmasked = ~keys.read(masked[..., None]).mT
    visible = unmasked if visible is None else visible & unmasked
    return Group(queries, keys, bias_of(visible, torch.float32), visible.any(-1))


def outputs(tokens: Tokens, group: Group, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs (heads, number, rows, Ev) over near keys alone, and the logarithms of their normalisers."""
    inputs = group.queries.read(tokens.q), group.keys.read(tokens.k), group.keys.read(tokens.v)
    out, log_sums = _forward(*inputs, 0.0, False, attn_mask=_like(group.bias, tokens.q), scale=scale)
    return out, log_sums if group.sees is None else log_sums.masked_fill(~group.sees, float("-inf"))


def add_gradients(
    tokens: Tokens, into: Tokens, group: Group, out: Tensor, log_sums: Tensor, grad_out: Tensor, scale: float
) -> None:
    """Add the gradients of queries, keys and values; ``log_sums`` are the logarithms of the whole normalisers."""
    rows, keys = group.queries, group.keys
    inputs = rows.read(grad_out), rows.read(tokens.q), keys.read(tokens.k), keys.read(tokens.v), rows.read(out)
    logs, bias = rows.read(log_sums.mT)[..., 0], _like(group.bias, tokens.q)
    gradients = _backward(*inputs, logs, 0.0, False, attn_mask=bias, scale=scale)
    for where, gradient, whole in zip((rows, keys, keys), gradients, into[:3], strict=True):
        where.add(gradient, whole)


def _like(bias: Tensor | None, q: Tensor) -> Tensor | None:
    if bias is None:
        return None
    bias = bias.to(q.dtype)
    return bias if bias.ndim in (2, 4) else bias.expand(1, 1, *bias.shape)
