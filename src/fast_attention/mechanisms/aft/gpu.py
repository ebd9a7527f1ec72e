"""AFT-simple by Triton kernels: pools of keys, chunk beside chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine import operation
from fast_attention.gpu import calls, self_check
from fast_attention.gpu.calls import Chunks
from fast_attention.gpu.pooling import operations
from fast_attention.mechanisms.aft.reference import Pool

TOKENS = 64  # of a chunk of packed sequences
WIDEST = 1 << 16  # channels: any number, which a program takes a few of


def serves(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> str:
    """Why kernels cannot compute this call; empty where they can."""
    why = operation.gpu_unsupported_reason(q, k, v, widest=WIDEST)
    return why or self_check.unsupported_reason(self_check.pools(), q, v, masked=key_mask is not None)


def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Outputs (..., L, C): see ``aft_simple``."""
    kernel_set = operations.kernel_set(gated=True)
    return calls.run(kernel_set, q, k, v, key_mask, is_causal=is_causal)


def packed(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], key_mask: Tensor | None) -> Tensor:
    """Causal outputs of sequences of so many tokens, one behind another."""
    rows = Chunks.of(lengths, TOKENS, q.device)
    kernel_set = operations.kernel_set(gated=True, begins=rows.begins)
    q, k, v = (rows.spread(x) for x in (q, k, v))
    return rows.gathered(calls.run(kernel_set, q, k, v, rows.visible(key_mask), is_causal=True))


def advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Pool | None
) -> tuple[Tensor, Pool]:  # fmt: skip
    """Outputs of new tokens behind ``state``, and the pool after them."""
    first = None if state is None else torch.cat([state.log_scale, state.sums], -1)[..., 0, :]
    kernel_set = operations.kernel_set(gated=True)
    out, last = calls.advance(kernel_set, q, k, v, key_mask, first, decodes=calls.steps(q, k, v, first))
    return out, Pool(last[..., None, : k.shape[-1]], last[..., None, k.shape[-1] :])
