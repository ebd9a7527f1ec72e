"""Hybrid attention whose near keys are those of chosen blocks: the others enter as the sums of whole blocks.

Chosen blocks with a linear remainder are those of SLA (Zhang et al. 2025, arXiv 2509.24006) and of SPLA (arXiv
2601.22379), which subtracts the chosen blocks from the sums of all. Here the sums of the others are added up, by a
matrix of zeros and ones between blocks of queries and of keys: subtracting leaves only rounding where the chosen blocks
hold nearly all of the weight, and the far part may then even be negative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.blocks import count, join, split, split_mask, split_row
from fast_attention.engine.kv_cache import append
from fast_attention.engine.precision import in_float32
from fast_attention.engine.scan import FLOOR
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.far_sums import FarSums, block_sums
from fast_attention.mechanisms.hybrid.reference import attend_near
from fast_attention.mechanisms.hybrid.sink_tokens import SinkTokens
from fast_attention.mechanisms.linear.kernelised import Kernelised
from fast_attention.mechanisms.linear.reference import masked_keys
from fast_attention.mechanisms.sparse import choosing
from fast_attention.mechanisms.sparse.reference import take
from fast_attention.mechanisms.sparse.selected import Selected


@in_float32
def attend(
    q: Tensor, k: Tensor, v: Tensor, w: Any, learned_sinks: Tensor | None, near: Selected, far: Kernelised[Any],
    *, first: int, last: int, key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Outputs over the blocks that each block of queries chose, the sink tokens, and the sums of all other blocks.

    The exponentials of ``learned_sinks`` (H,) add to normalisers.
    """
    size, (phi_q, phi_k) = near.block_size, far.per_token(w)
    dispatch.record("chosen blocks exact, the others as sums of features", f"{near!r} leaves blocks out")
    table = choosing.of_blocks(q, k, key_mask, size=size, topk=near.topk)
    sinks, others = SinkTokens.of(k, v, append(None, k, v, key_mask).visible, first=first, last=last)
    sinks = SinkTokens(sinks.k[..., None, :, :], sinks.v[..., None, :, :], sinks.position[..., None, :])
    queries, keys = phi_q(q), masked_keys(phi_k, k, others)
    row = None if queries.log_scale is None else split_row(queries.log_scale, size)
    sums = block_sums(keys, v, start=0, block=size, number=count(k.shape[-2], size))
    sums = _without(sums, table)
    chosen, visible = table.clamp(min=0), split_mask(others, size)
    visible = visible.expand(*k.shape[:-2], *visible.shape[-2:])[..., None]
    visible = ((table >= 0)[..., None] & take(visible, chosen)[..., 0]).flatten(-2)
    near_k, near_v = (take(split(x, size), chosen).flatten(-3, -2) for x in (k, v))
    out = attend_near(
        split(q, size),
        near_k,
        near_v,
        visible,
        sinks,
        Features(split(queries.values, size), row),
        sums,
        None,
        None if learned_sinks is None else learned_sinks[:, None],
    )
    return join(out, q.shape[-2])


def _without(blocks: FarSums, table: Tensor) -> FarSums:
    """For every block of queries the sums of all blocks of keys that ``table`` (..., blocks, choices) does not name."""
    number = blocks.log_scale.shape[-1]
    numbers = torch.arange(number, device=table.device)
    named = (table[..., None] == numbers).any(-2)
    scales = blocks.log_scale[..., None, :].masked_fill(named, float("-inf"))
    largest = scales.detach().amax(-1).clamp(min=FLOOR)
    weights = (scales - largest[..., None]).exp()
    return FarSums((weights @ blocks.sums.flatten(-2)).unflatten(-1, blocks.sums.shape[-2:]), largest)
