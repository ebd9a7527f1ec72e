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
from fast_attention.gpu import calls, maps, operations, self_check
from fast_attention.gpu.calls import Chunks, KernelSet
from fast_attention.gpu.configurations import WIDEST, WIDEST_PROJECTED, exponential
from fast_attention.gpu.exponential import operations as exponentials
from fast_attention.mechanisms.linear.compiled import EXPONENTIAL, TRIGONOMETRIC

CODES = maps.ELU, maps.RELU, maps.IDENTITY  # of maps by the number that the core has for them
FEW = 16  # new tokens up to which plain operations take a state on
NOTHING = -1e4  # the logarithm of a decay of which float32 keeps nothing


def serves(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: Tensor | None = None,
    key_rows: Tensor | None = None, bias: Tensor | None = None, kv: Tensor | None = None, z: Tensor | None = None,
    log_scale: Tensor | None = None, log_decay: Tensor | None = None, *, number: int, normalize: bool = True,
    **settings: Any,
) -> str:  # fmt: skip
    """Why kernels cannot compute this call; empty where they can."""
    unsupported = operation.gpu_unsupported_reason
    if rows is None:
        why, case = unsupported(q, k, v, widest=WIDEST), self_check.elementwise(CODES[number])
    else:
        why = unsupported(q, k, widest=WIDEST_PROJECTED) or unsupported(q, v, widest=WIDEST)
        case = self_check.exponential(rows.shape[-2], q.shape[-1])
        if number == TRIGONOMETRIC:
            return why or "features of either sign"
        if not why and bias is not None and bias.requires_grad:
            return "a bias that is trained"
    if log_decay is not None:
        if not why and log_decay.shape[-1] > 1:
            return "a decay for every channel"
        case = self_check.decayed(CODES[number], normalized=normalize)
    return why or self_check.unsupported_reason(case, q, v, masked=key_mask is not None)


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


def attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: Tensor | None = None,
    key_rows: Tensor | None = None, bias: Tensor | None = None, kv: None = None, z: None = None,
    log_scale: None = None, log_decay: Tensor | None = None, *, number: int, offset: float, eps: float,
    is_causal: bool, normalize: bool = True,
) -> Tensor:  # fmt: skip
    """Outputs (..., L, Ev)."""
    shapes = [x.shape[:-2] for x in (q, k, v)]
    if rows is None or key_rows is None:
        kernels = _elementwise(log_decay, torch.broadcast_shapes(*shapes), number, offset, eps, normalize)
    else:
        batch_shape = torch.broadcast_shapes(*shapes, rows.shape[:-2])
        kernels = _exponential(rows, key_rows, bias, batch_shape)
        q, k = clamp(q.expand(*batch_shape, *q.shape[-2:])), clamp(k)
    return calls.run(kernels, q, k, v, key_mask, is_causal=is_causal)


def advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: Tensor | None, key_rows: Tensor | None,
    bias: Tensor | None, kv: Tensor | None, z: Tensor | None, log_scale: Tensor | None,
    log_decay: Tensor | None = None, *, number: int, offset: float, eps: float, is_causal: bool,
    normalize: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Causal outputs of new tokens behind a state, and the three tensors of the state after them."""
    D, first, state = k.shape[-1], None, [kv, z]
    if rows is None or key_rows is None:
        kernels = _elementwise(log_decay, q.shape[:-2], number, offset, eps, normalize)
    else:
        kernels, D = _exponential(rows, key_rows, bias, q.shape[:-2]), rows.shape[-2]
        q, k, state = clamp(q), clamp(k), [kv, z, log_scale]
    if kv is not None:
        first = torch.cat([kv.flatten(-2), *(x for x in state[1:] if x is not None)], -1)
    decodes = calls.steps(q, k, v, first, rows, key_rows, bias, log_decay)
    out, last = calls.advance(kernels, q, k, v, key_mask, first, decodes=decodes)
    kv, z, *scales = last.split([D * v.shape[-1], *[D] * (len(state) - 1)], -1)
    return out, kv.unflatten(-1, (D, -1)), z, scales[0] if scales else torch.zeros_like(z[..., :1])


def packed(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, lengths: tuple[int, ...], rows: Tensor, key_rows: Tensor,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Causal outputs from exponentials of sequences of so many tokens, one behind another."""
    chunk = exponential(q.shape[-1], exact=q.dtype == torch.float32).forward.chunk
    chunks = Chunks.of(lengths, chunk, q.device)
    kernels = _exponential(rows, key_rows, bias, q.shape[:-2], chunks.begins)
    q, k, v = (chunks.spread(x) for x in (clamp(q), clamp(k), v))
    return chunks.gathered(calls.run(kernels, q, k, v, chunks.visible(key_mask), is_causal=True))


def begun(log_decay: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """``log_decay`` (..., L), which lets nothing pass where a sequence of ``lengths`` begins."""
    starts = [start for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False) if length > 0]
    return log_decay.index_fill(-1, torch.tensor(starts, device=log_decay.device), NOTHING)


def _elementwise(
    log_decay: Tensor | None, batch_shape: torch.Size, number: int, offset: float, eps: float, normalize: bool
) -> KernelSet:
    logs = None if log_decay is None else calls.as_heads(log_decay, batch_shape)[..., 0]
    return operations.kernel_set(eps, CODES[number], offset, logs, normalized=normalize)


def _exponential(
    rows: Tensor, key_rows: Tensor, bias: Tensor | None, batch_shape: torch.Size, begins: Tensor | None = None
) -> KernelSet:
    def flat(x: Tensor) -> Tensor:
        one_batch = len(batch_shape) == 2 and x.ndim == 3
        return (x if one_batch else x.expand(*batch_shape, *x.shape[-2:]).flatten(0, -3)).float()

    queries = flat(rows)
    keys = queries if key_rows is rows else flat(key_rows)
    return exponentials.kernel_set(queries, keys, None if bias is None else flat(bias)[:, 0], begins)
