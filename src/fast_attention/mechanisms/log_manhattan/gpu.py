"""Log attention, and Manhattan attention of signed differences, by Triton kernels: sums of scores, chunk beside chunk.

Scores are made by torch, in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.gpu import cases, self_check, walking
from fast_attention.gpu.packing import Chunks
from fast_attention.gpu.summing import operations
from fast_attention.gpu.summing.plain import NOTHING, SCORES
from fast_attention.mechanisms.log_manhattan.reference import KeySums

TOKENS = 64  # of a chunk of packed sequences
WIDEST = 1 << 16  # channels: any number, which a program takes a few of


def obstacle(*tensors: Tensor, key_mask: Tensor | None, divisor: int) -> str:
    """Why kernels cannot compute a call that reads ``tensors``, values last; empty where they can."""
    why, v = dispatch.gpu_obstacle(*tensors, widest=WIDEST), tensors[-1]
    return why or self_check.obstacle(cases.sums(divisor), v, v, masked=key_mask is not None)


def divisor(*, normalized: bool) -> int:
    """By what log attention divides."""
    return SCORES if normalized else NOTHING


def attend(
    a: Tensor, b: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool, divisor: int, dtype: torch.dtype
) -> Tensor:
    """``sum_j (a_i + b_j) v_j`` over the divisor, in ``dtype``."""
    forms = operations.forms(divisor, dtype)
    return walking.walk(forms, *_wide(a, b, v), key_mask, is_causal=is_causal)


def packed(
    a: Tensor, b: Tensor, v: Tensor, lengths: tuple[int, ...], key_mask: Tensor | None, *, divisor: int
) -> Tensor:
    """The same, causal, of sequences of so many tokens, one behind another."""
    rows = Chunks.of(lengths, TOKENS, v.device)
    forms = operations.forms(divisor, v.dtype, rows.begins)
    a, b, v = (rows.spread(x) for x in (a, b, v))
    return rows.gathered(walking.walk(forms, *_wide(a, b, v), rows.visible(key_mask), is_causal=True))


def advance(
    a: Tensor, b: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, *, divisor: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same of new tokens behind a row of sums, and the row after them: see ``gpu.summing.operations``."""
    decodes, forms = walking.steps(a, b, v, first), operations.forms(divisor, dtype)
    return walking.further(forms, *_wide(a, b, v), key_mask, first, decodes=decodes)


def row(state: KeySums | None, values: int) -> Tensor | None:
    """A state of log attention as kernels have it."""
    if state is None:
        return None
    count, plain, weighted, scores = state.sums[..., 0, :].tensor_split([1, 1 + values, 1 + 2 * values], -1)
    return torch.cat([plain, weighted, *(x.expand(*x.shape[:-1], values) for x in (scores, count))], -1)


def state(row: Tensor, scores: int) -> KeySums:
    """A row of sums as a state whose scores are so wide."""
    plain, weighted, wide, count = row[..., None, :].chunk(4, -1)
    return KeySums(torch.cat([count[..., :1], plain, weighted, wide[..., :scores]], -1))


def _wide(a: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One score for all channels as many, without a copy."""
    a, b = (x.expand(*x.shape[:-1], v.shape[-1]) for x in (a, b))
    return a, b, v
