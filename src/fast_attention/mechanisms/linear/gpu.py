"""Linear attention by Triton kernels: sums of chunks, what is before each of them, and what queries read.

Elementwise features and exponentials of projected tokens are made inside; sums may decay from token to token.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import operation
from fast_attention.engine.numerics import clamp
from fast_attention.engine.tracing import symbolic
from fast_attention.gpu import calls, maps, self_check
from fast_attention.gpu.calls import Chunks, KernelSet
from fast_attention.gpu.configurations import WIDEST, WIDEST_PROJECTED, exponential
from fast_attention.mechanisms.linear import kernels
from fast_attention.mechanisms.linear.compiled import EXPONENTIAL, TRIGONOMETRIC, Inputs

CODES = maps.ELU, maps.RELU, maps.IDENTITY  # of maps by the number that the core has for them
FEW = 16  # new tokens up to which plain operations take a state on
NOTHING = -1e4  # the logarithm of a decay of which float32 keeps nothing


def serves(*tensors: Any, number: int, normalize: bool = True, **settings: Any) -> str:
    """Why kernels cannot compute this call; empty where they can."""
    x, unsupported = Inputs(*tensors), operation.gpu_unsupported_reason
    if x.rows is None:
        why, case = unsupported(x.q, x.k, x.v, widest=WIDEST), kernels.check_elementwise(CODES[number])
    else:
        why = unsupported(x.q, x.k, widest=WIDEST_PROJECTED) or unsupported(x.q, x.v, widest=WIDEST)
        case = kernels.check_exponential(x.rows.shape[-2], x.q.shape[-1])
        if number == TRIGONOMETRIC:
            return why or "features of either sign"
        if not why and x.bias is not None and x.bias.requires_grad:
            return "a bias that is trained"
    if x.log_decay is not None:
        if not why and x.log_decay.shape[-1] > 1:
            return "a decay for every channel"
        case = kernels.check_decayed(CODES[number], normalized=normalize)
    return why or self_check.unsupported_reason(case, x.q, x.v, masked=x.key_mask is not None)


def advances(*tensors: Any, number: int, **settings: Any) -> str:
    """Why kernels cannot go on from a state; empty where they can: one token's way is that of decoding."""
    (q, k, v), (kv, _, log_scale) = tensors[:3], tensors[7:10]
    if why := serves(*tensors, number=number, **settings):
        return why
    if not (symbolic() or q.shape[-2] > FEW or (kv is not None and calls.steps(q, k, v, *tensors[4:7], *tensors[10:]))):
        return f"no more than {FEW} new tokens"
    if kv is not None and number < EXPONENTIAL and (symbolic() or bool(log_scale.count_nonzero())):
        return "a state with scales"
    return ""


def attend(*tensors: Any, number: int, offset: float, eps: float, is_causal: bool, normalize: bool = True) -> Tensor:
    """Outputs (..., L, Ev)."""
    x = Inputs(*tensors)
    q, k, v, shapes = x.q, x.k, x.v, [each.shape[:-2] for each in tensors[:3]]
    if x.rows is None or x.key_rows is None:
        kernel_set = _elementwise(x.log_decay, torch.broadcast_shapes(*shapes), number, offset, eps, normalize)
    else:
        batch_shape = torch.broadcast_shapes(*shapes, x.rows.shape[:-2])
        kernel_set = _exponential(x.rows, x.key_rows, x.bias, batch_shape)
        q, k = clamp(q.expand(*batch_shape, *q.shape[-2:])), clamp(k)
    return calls.run(kernel_set, q, k, v, x.key_mask, is_causal=is_causal)


def advance(
    *tensors: Any, number: int, offset: float, eps: float, is_causal: bool, normalize: bool = True
) -> tuple[Tensor, ...]:
    """Causal outputs of new tokens behind a state, and the three tensors of the state after them."""
    x = Inputs(*tensors)
    q, k, v, D, state = x.q, x.k, x.v, x.k.shape[-1], tensors[7:9]
    if x.rows is None or x.key_rows is None:
        kernel_set = _elementwise(x.log_decay, q.shape[:-2], number, offset, eps, normalize)
    else:
        kernel_set, D = _exponential(x.rows, x.key_rows, x.bias, q.shape[:-2]), x.rows.shape[-2]
        q, k, state = clamp(q), clamp(k), tensors[7:10]
    first = None if x.kv is None else torch.cat([x.kv.flatten(-2), *state[1:]], -1)
    decodes = calls.steps(q, k, v, first, x.rows, x.key_rows, x.bias, x.log_decay)
    out, last = calls.advance(kernel_set, q, k, v, x.key_mask, first, decodes=decodes)
    kv, z, *scales = last.split([D * v.shape[-1], *[D] * (len(state) - 1)], -1)
    return out, kv.unflatten(-1, (D, -1)), z, scales[0] if scales else torch.zeros_like(z[..., :1])


def packed(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, lengths: tuple[int, ...], rows: Tensor, key_rows: Tensor,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Causal outputs from exponentials of sequences of so many tokens, one behind another."""
    chunk = exponential(q.shape[-1], exact=q.dtype == torch.float32).forward.chunk
    chunks = Chunks.of(lengths, chunk, q.device)
    kernel_set = _exponential(rows, key_rows, bias, q.shape[:-2], chunks.begins)
    q, k, v = (chunks.spread(x) for x in (clamp(q), clamp(k), v))
    return chunks.gathered(calls.run(kernel_set, q, k, v, chunks.visible(key_mask), is_causal=True))


def begun(log_decay: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """``log_decay`` (..., L, 1), which lets nothing pass where a sequence of ``lengths`` begins."""
    starts = [start for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False) if length > 0]
    return log_decay.index_fill(-2, torch.tensor(starts, device=log_decay.device), NOTHING)


def _elementwise(
    log_decay: Tensor | None, batch_shape: torch.Size, number: int, offset: float, eps: float, normalize: bool
) -> KernelSet:
    logs = None if log_decay is None else calls.as_heads(log_decay, batch_shape)[..., 0]
    return kernels.elementwise(eps, CODES[number], offset, logs, normalized=normalize)


def _exponential(
    rows: Tensor, key_rows: Tensor, bias: Tensor | None, batch_shape: torch.Size, begins: Tensor | None = None
) -> KernelSet:
    def flat(x: Tensor) -> Tensor:
        one_batch = len(batch_shape) == 2 and x.ndim == 3
        return (x if one_batch else x.expand(*batch_shape, *x.shape[-2:]).flatten(0, -3)).float()

    queries = flat(rows)
    keys = queries if key_rows is rows else flat(key_rows)
    return kernels.exponential(queries, keys, None if bias is None else flat(bias)[:, 0], begins)
