"""Computes BigBird's block sparse attention in tiles: windows of blocks, two global blocks, and those drawn at random.

transformers computes the parts apart and writes all weights into a matrix of all pairs, asked for or not.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad, scaled_dot_product_attention
from transformers.models.big_bird import modeling_big_bird
from transformers.utils import output_capturing

from fast_attention import core
from fast_attention.engine import tiles
from fast_attention.engine.tiles import FAR, MOST_ROWS, Plan
from fast_attention.engine.tracing import traced
from fast_attention.integrations import calls

SHORTEST = 1024  # tokens
LEAST = 5  # blocks that the pattern needs; the model has full attention below more than these


class BigBirdBlockSparseAttention(modeling_big_bird.BigBirdBlockSparseAttention):
    """The attention module with the same parts."""

    def exact_form(self) -> tuple[str, int]:
        """Describe the form that runs with the compiled core, and from how many tokens on."""
        return f"near, global and random blocks of {self.block_size}, in tiles", SHORTEST

    def forward(
        self, hidden_states: Tensor, band_mask: Tensor | None = None, from_mask: Tensor | None = None,
        to_mask: Tensor | None = None, from_blocked_mask: Tensor | None = None, to_blocked_mask: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Same as transformers' module, which is called where attention matrices are returned."""
        length = hidden_states.shape[1]
        if (
            traced() or not hidden_states.is_cpu or core.unavailable() or not calls.runs_ours(length >= SHORTEST)
            or to_mask is None or length % self.block_size or length < LEAST * self.block_size
            or settings.get("output_attentions")
            or "attentions" in (output_capturing._active_collector.get() or ())
        ):  # fmt: skip
            return super().forward(
                hidden_states, band_mask, from_mask, to_mask, from_blocked_mask, to_blocked_mask, **settings
            )
        blocks = _random_blocks(self, length)
        rows = zip(hidden_states.unbind(), (to_mask[:, 0, 0] == 0).unbind(), strict=True)
        return torch.stack([_one_sequence(self, x, masked, blocks) for x, masked in rows]), None


def _random_blocks(module: Any, length: int) -> Tensor:
    """The blocks that transformers' own functions draw for each head: (heads, blocks - 2, choices)."""
    size, choices, heads = module.block_size, module.num_random_blocks, module.num_attention_heads
    if module.training:
        np.random.seed(module.seed)
    if length in (1024, 3072, 4096):
        most = module.max_seqlen
        drawn = [
            module._bigbird_block_rand_mask(most, most, size, size, choices, last_idx=1024)[: length // size - 2]
            for _ in range(heads)
        ]
    else:
        ends, numbers = module._get_rand_attn_plan(length, size, choices)
        drawn = module._bigbird_block_rand_mask_with_head(length, length, size, size, heads, ends, numbers)
    return torch.from_numpy(np.stack(drawn)).long()


def _one_sequence(
    module: Any, x: Float[Tensor, "length width"], masked: Bool[Tensor, "length"], blocks: Tensor
) -> Float[Tensor, "length width"]:
    """Attention over one sequence; padded positions get zeros."""
    size, heads = module.block_size, module.num_attention_heads
    q, k, v = (
        project(x).unflatten(-1, (heads, -1)).transpose(0, 1) for project in (module.query, module.key, module.value)
    )
    scale, seen = 1 / sqrt(module.attention_head_size), ~masked[None] if masked.any() else None
    inner = attend(q, k, v, seen, None, None, None, pad(blocks, (0, 0, 1, 1)), scale=scale, size=size)
    ends = torch.cat((torch.arange(size), torch.arange(len(x) - size, len(x))))
    visible = None if seen is None else seen[None, None]
    outer = scaled_dot_product_attention(q[None, :, ends], k[None], v[None], attn_mask=visible, scale=scale)[0]
    out = torch.cat((outer[:, :size], inner[:, size:-size], outer[:, size:]), 1).transpose(0, 1).flatten(1)
    return out if seen is None else out.masked_fill(masked[:, None], 0.0)


def plan(q: Tensor, k: Tensor, blocks: Int[Tensor, "heads number choices"], *, size: int) -> Plan:
    """The plan of blocks that see their neighbours, the first and the last, once each, and those that were drawn.

    A key counts once more for each block that was drawn and names it.
    """
    number = q.shape[-2] // size
    block = torch.arange(number)
    once = ((block[:, None] - block).abs() <= 1) | (block == 0) | (block == number - 1)
    counts = once + one_hot(blocks, number).sum(-2)  # (heads, blocks of queries, blocks of keys)
    first, count = counts.nonzero()[:, 2] * size, counts[counts > 0]
    ranges = [first, first + size, *(torch.full_like(first, x) for x in (-FAR, FAR, 0)), count]
    seen = (counts > 0).sum(-1)
    stop = seen.flatten().cumsum(0).view(seen.shape)
    step = -(-size // -(-size // MOST_ROWS))  # a tile lies in one block
    row = block[:, None] * size + torch.arange(0, size, step)
    end = torch.minimum(row + step, (block[:, None] + 1) * size)
    rows = torch.broadcast_tensors(row, end, (stop - seen)[..., None], stop[..., None])
    return Plan(torch.stack(rows, -1).flatten(1, 2)[None].int(), torch.stack(ranges, -1).int())


attend = tiles.operation(None, plan)
