"""Chooses the blocks of keys whose mean is nearest to a block of queries, or to one query.

Choices are made in float64, whatever the inputs are: two blocks that score alike to the last digit would else be told
apart differently by a pass, by its steps in decoding and by a compiler. A choice has no gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine.blocks import count, split, split_mask
from fast_attention.engine.opaque import opaque
from fast_attention.engine.tracing import symbolic

SCORES = 2**20  # of some queries and all blocks that are held at one time, 8 MiB
NEVER = float("-inf")


def pooled(
    x: Float[Tensor, "*batch length width"], counted: Bool[Tensor, "*#batch blocks size"]
) -> Float[Tensor, "*batch blocks width"]:
    """The mean over the ``counted`` tokens of each block, in float64; zeros where there are none."""
    blocks = split(x.detach(), counted.shape[-1]).double()
    total = blocks.masked_fill(~counted[..., None], 0.0).sum(-2)
    return total / counted.sum(-1, keepdim=True).clamp(min=1)


def _table(q: Tensor, k: Tensor, key_mask: Tensor, *, size: int, topk: int) -> Tensor:
    return q.new_empty(*q.shape[:-2], count(q.shape[-2], size), topk, dtype=torch.int64)


@opaque(_table)
def of_blocks(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    key_mask: Bool[Tensor, "*#batch2 length"],
    *,
    size: int,
    topk: int,
) -> Int[Tensor, "*batch blocks topk"]:
    """For each block of queries its own block and the ``topk - 1`` others with the largest products of means.

    -1 where there are no more blocks with a visible key. Both means are those of visible tokens; a block of queries
    without any takes all of its own.
    """
    visible = split_mask(key_mask, size)
    alive = visible.any(-1, keepdim=True)
    scores = pooled(q, visible | ~alive) @ pooled(k, visible).mT
    scores = scores.masked_fill(~alive.mT, NEVER)
    block = torch.arange(scores.shape[-1], device=q.device)
    return _best(scores.masked_fill(block[:, None] == block, float("inf")), topk)


def _choices(q: Tensor, means: Tensor, alive: Tensor, *, size: int, start: int, number: int) -> Tensor:
    return q.new_empty(*q.shape[:-1], number, dtype=torch.int64)


@opaque(_choices)
def of_tokens(
    q: Float[Tensor, "*batch length width"],
    means: Float[Tensor, "*batch blocks width"],
    alive: Bool[Tensor, "*#batch2 blocks"],
    *,
    size: int,
    start: int,
    number: int,
) -> Int[Tensor, "*batch length number"]:
    """For each query, the first at position ``start``, the ``number`` blocks before its own of the largest products.

    -1 where there are no more such blocks ``alive``, with a visible key.
    """
    length, q = q.shape[-2], q.detach()
    rows = length if symbolic() else max(SCORES // max(means[..., 0].numel(), 1), 1)
    blocks, parts = torch.arange(means.shape[-2], device=q.device), []
    for first in range(0, length, rows) if not symbolic() else (0,):
        queries = q[..., first : first + rows, :].double()
        position = torch.arange(queries.shape[-2], device=q.device) + (start + first)
        may = alive[..., None, :] & (blocks < (position // size)[:, None])
        parts.append(_best((queries @ means.mT).masked_fill(~may, NEVER), number))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _best(scores: Float[Tensor, "*batch rows blocks"], number: int) -> Int[Tensor, "*batch rows number"]:
    """The blocks of the ``number`` largest scores, -1 where fewer are more than minus infinity."""
    filled = torch.nn.functional.pad(scores, (0, number), value=NEVER)  # however few blocks there are
    values, blocks = filled.topk(number)
    return blocks.masked_fill(values == NEVER, -1)
