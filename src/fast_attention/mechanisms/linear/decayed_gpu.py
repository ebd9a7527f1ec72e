"""Linear attention whose sums decay, by Triton kernels: causal calls, new tokens behind a state, and both directions.

Not causal, the kernels run twice, for the keys up to each query and, from the end, for those behind it; numerators and
denominators, a column of ones beside the values, are added in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import operation
from fast_attention.engine.precision import in_float32
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap
from fast_attention.feature_maps.features import Identity
from fast_attention.gpu import calls, decayed, plain, self_check
from fast_attention.gpu.configurations import WIDEST
from fast_attention.mechanisms.linear import gpu
from fast_attention.mechanisms.linear.decayed_sums import DecayedState

NOTHING = -1e4  # the logarithm of a decay of which float32 keeps nothing


def serves(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *state: Tensor, phi: FeatureMap,
    normalize: bool, eps: float, is_causal: bool,
) -> str:  # fmt: skip
    """Why kernels cannot compute this call; empty where they can."""
    ones = normalize and not is_causal
    if why := operation.gpu_unsupported_reason(q, k, v, widest=WIDEST - ones):
        return why
    if not isinstance(phi, Elementwise):
        return "a feature map that is not elementwise"
    if log_decay.ndim == k.ndim:
        return "a decay for every channel"
    if not is_causal:  # heads as ``attend`` has them then
        q, v = (q.new_empty((0, x.shape[-1] + one), dtype=torch.float32) for x, one in ((q, 0), (v, ones)))
    case = self_check.decayed(phi, normalized=normalize and is_causal)
    return self_check.unsupported_reason(case, q, v, masked=key_mask is not None)


def advances(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *state: Tensor, advances: bool,
    **settings: Any,
) -> str:  # fmt: skip
    """Why kernels cannot compute causal outputs, or go on from a state; empty where they can."""
    before = DecayedState(*state) if state else None
    why = serves(q, k, v, log_decay, key_mask, is_causal=True, **settings)
    return why or (gpu.few(q, k, v, before, log_decay) or gpu.scaled(before) if advances else "")


def further(*tensors: Any, advances: bool, **settings: Any) -> Any:
    """``advance`` of the tensors of a state."""
    q, k, v, log_decay, key_mask, *state = tensors
    out, after = advance(q, k, v, log_decay, key_mask, DecayedState(*state) if state else None, **settings)
    return (out, *after) if advances else out


def begun(log_decay: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """``log_decay`` (..., L), which lets nothing pass where a sequence of ``lengths`` begins."""
    starts = [start for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False) if length > 0]
    return log_decay.index_fill(-1, torch.tensor(starts, device=log_decay.device), NOTHING)


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, normalize: bool,
    eps: float, is_causal: bool,
) -> Tensor:  # fmt: skip
    """Outputs (..., L, Ev); ``log_decay`` (..., L) in float32."""
    causal = partial(further, advances=False)
    if not is_causal:
        return in_float32(both_sides)(
            q, k, v, log_decay, key_mask, phi=phi, normalize=normalize, eps=eps, advance=causal
        )
    return causal(q, k, v, log_decay, key_mask, phi=phi, normalize=normalize, eps=eps)


def both_sides(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, normalize: bool,
    eps: float, advance: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Keys up to each query, and from the end those behind it: sums up to the next key, faded by that key's decay.

    ``advance`` computes causal outputs. Channels that decay by themselves fade in the features of queries.
    """
    by_channel = log_decay.ndim == k.ndim
    if by_channel:
        q, k, phi = phi(q), phi(k), Identity()
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1) if normalize else v
    settings = {"phi": phi, "normalize": False, "eps": eps}
    left = advance(q, k, v, log_decay, key_mask, **settings)
    axis = -2 if by_channel else -1
    to_next = _next(log_decay, axis)
    decay_factor = to_next.exp() if by_channel else to_next.exp()[..., None]
    mask = None if key_mask is None else _next(key_mask, -1).flip(-1)
    q, k, v = (x.flip(-2) for x in (q * decay_factor if by_channel else q, _next(k, -2), _next(v, -2)))
    right = advance(q, k, v, _next(to_next, axis).flip(axis), mask, **settings)
    sums = left + (right.flip(-2) if by_channel else right.flip(-2) * decay_factor)
    return plain.quotient(sums, eps) if normalize else sums


def _next(x: Tensor, dim: int) -> Tensor:
    """Token behind every token; zeros behind the last."""
    return F.pad(x.narrow(dim, 1, x.shape[dim] - 1), (0, 0) * (-1 - dim) + (0, 1))


def advance(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, state: DecayedState | None, *,
    phi: FeatureMap, normalize: bool, eps: float,
) -> tuple[Tensor, DecayedState]:  # fmt: skip
    """Causal outputs of tokens behind ``state``, and the state after them; ``log_decay`` (..., L) in float32."""
    D, lead = k.shape[-1], q.shape[:-2]
    logs = calls.as_heads(log_decay[..., None], lead)[..., 0]
    first = None if state is None else torch.cat([state.kv.flatten(-2), state.k], -1)
    q, k, code, offset = gpu.mapped(q, k, phi)
    kernel_set, _ = decayed.kernel_set(logs, eps, code, offset, normalize)
    decodes = calls.steps(q, k, v, first, log_decay)
    out, last = calls.advance(kernel_set, q, k, v, key_mask, first, decodes=decodes)
    kv, k = last[..., : D * v.shape[-1]].reshape(*lead, D, v.shape[-1]), last[..., -D:]
    over_all = log_decay.sum(-1, keepdim=True).expand(*lead, 1)
    over_all = over_all if state is None else over_all + state.log_decay
    return out, DecayedState(kv, k, torch.zeros_like(k[..., :1]), over_all)
