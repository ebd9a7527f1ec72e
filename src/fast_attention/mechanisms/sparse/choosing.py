"""Chooses the blocks of keys whose mean is nearest to a block of queries, or to one query.

Choices are made in float64, whatever the inputs are: two blocks that score alike to the last digit would else be told
apart differently by a pass, by its steps in decoding and by a compiler. A choice has no gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.blocks import count, split, split_mask
from fast_attention.engine.opaque import opaque
from fast_attention.engine.tracing import symbolic

SCORES = 2**18  # of some queries and all blocks that are held at one time, 2 MiB
NEVER = float("-inf")


def shown(x: Tensor, key_mask: Tensor | None, size: int) -> Bool[Tensor, "*#batch blocks size"]:
    """Which tokens of every block of ``x`` (..., length, width) are visible."""
    mask = torch.ones(1, x.shape[-2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask
    return split_mask(mask, size)


def pooled(
    x: Float[Tensor, "*batch length width"], counted: Bool[Tensor, "*#batch blocks size"], *, every: bool = False
) -> Float[Tensor, "*batch blocks width"]:
    """The mean over the ``counted`` tokens of each block, ``every`` one of the sequence if so, in float64; or zeros."""
    blocks = split(x.detach(), counted.shape[-1])
    blocks = blocks if every else blocks.masked_fill(~counted[..., None], 0.0)
    return _sums(blocks) / counted.sum(-1, keepdim=True).clamp(min=1)


def _sums(blocks: Float[Tensor, "*batch blocks size width"]) -> Float[Tensor, "*batch blocks width"]:
    """``blocks.sum(-2, dtype=torch.float64)``, which would make a copy of all in float64 on a CPU, head by head."""
    if dispatch.obstacle(blocks) or blocks.dtype == torch.float64 or blocks.dim() < 4:
        return blocks.sum(-2, dtype=torch.float64)
    heads = blocks.flatten(0, -4)
    copy = heads.new_empty(heads.shape[1:], dtype=torch.float64)
    sums = copy.new_empty(len(heads), copy.shape[0], copy.shape[2])
    for head, out in zip(heads, sums, strict=True):
        torch.sum(copy.copy_(head), -2, out=out)
    return sums.view(*blocks.shape[:-2], blocks.shape[-1])


def _table(q: Tensor, k: Tensor, key_mask: Tensor | None, *, size: int, topk: int) -> Tensor:
    return q.new_empty(*q.shape[:-2], count(q.shape[-2], size), topk, dtype=torch.int64)


@opaque(_table)
def of_blocks(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    key_mask: Bool[Tensor, "*#batch2 length"] | None,
    *,
    size: int,
    topk: int,
) -> Int[Tensor, "*batch blocks topk"]:
    """For each block of queries its own block and the ``topk - 1`` others with the largest products of means.

    -1 where there are no more blocks with a visible key. Both means are those of visible tokens; a block of queries
    without any takes all of its own.
    """
    visible, every = shown(k, key_mask, size), key_mask is None
    alive = visible.any(-1, keepdim=True)
    scores = pooled(q, visible | ~alive, every=every) @ pooled(k, visible, every=every).mT
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
    q, length = q.detach(), q.shape[-2]
    if symbolic():
        return _of_some(q, means, alive, size=size, start=start, number=number)
    rows, parts = max(SCORES // max(means[..., 0].numel(), 1), 1), []
    for first in range(0, length, rows):
        queries = q[..., first : first + rows, :]
        past = (start + first + queries.shape[-2] - 1) // size  # blocks that the last of them may choose
        some = {"size": size, "start": start + first, "number": number}
        parts.append(_of_some(queries, means[..., :past, :], alive[..., :past], **some))
    return torch.cat(parts, -2)


def _of_some(q: Tensor, means: Tensor, alive: Tensor, *, size: int, start: int, number: int) -> Tensor:
    block = (torch.arange(q.shape[-2], device=q.device) + start) // size
    past = torch.arange(means.shape[-2], device=q.device) < block[:, None]
    return _best((q.double() @ means.mT).masked_fill(~(alive[..., None, :] & past), NEVER), number)


def _best(scores: Float[Tensor, "*batch rows blocks"], number: int) -> Int[Tensor, "*batch rows number"]:
    """The blocks of the ``number`` largest scores, -1 where fewer are more than minus infinity."""
    if symbolic() or scores.shape[-1] < number:
        scores = torch.nn.functional.pad(scores, (0, number), value=NEVER)
    values, blocks = scores.topk(number, sorted=False)
    return blocks.masked_fill(values == NEVER, -1)
