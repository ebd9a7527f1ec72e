"""Linear attention whose sums decay, by Triton kernels: causal calls, and new tokens behind a state."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap
from fast_attention.gpu import cases, decayed, self_check, walking
from fast_attention.gpu.configurations import WIDEST
from fast_attention.mechanisms.linear import gpu
from fast_attention.mechanisms.linear.decayed_sums import DecayedState

NOTHING = -1e4  # the logarithm of a decay of which float32 keeps nothing


def obstacle(
    q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, key_mask: Tensor | None, *, normalize: bool, is_causal: bool
) -> str:
    """Why kernels cannot compute this call; empty where they can."""
    if why := dispatch.gpu_obstacle(q, k, v, widest=WIDEST):
        return why
    if not is_causal:
        return "decays on both sides"
    if not isinstance(phi, Elementwise):
        return "a feature map that is not elementwise"
    return self_check.obstacle(cases.decayed(phi, normalized=normalize), q, v, masked=key_mask is not None)


def uneven(log_decay: Tensor, k: Tensor) -> str:
    """Why kernels cannot take these decays; empty where they can."""
    return "a decay for every channel" if log_decay.ndim == k.ndim else ""


def begun(log_decay: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """``log_decay`` (..., L), which lets nothing pass where a sequence of ``lengths`` begins."""
    starts = [start for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False) if length > 0]
    return log_decay.index_fill(-1, torch.tensor(starts, device=log_decay.device), NOTHING)


def advance(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, key_mask: Tensor | None, state: DecayedState | None, *,
    phi: FeatureMap, normalize: bool, eps: float,
) -> tuple[Tensor, DecayedState]:  # fmt: skip
    """Causal outputs of tokens behind ``state``, and the state after them; ``log_decay`` (..., L) in float32."""
    keep, D, lead = walking.trains(q, k, v, log_decay), k.shape[-1], q.shape[:-2]
    logs = walking.as_heads(log_decay[..., None], lead)[..., 0]
    first = None if state is None else torch.cat([state.kv.flatten(-2), state.k], -1)
    q, k, code, offset = gpu.mapped(q, k, phi)
    forms, _ = decayed.forms(logs, eps, code, offset, keep, normalize)
    decodes = walking.steps(q, k, v, first, log_decay)
    out, last = walking.further(forms, q, k, v, key_mask, first, decodes=decodes)
    kv, k = last[..., : D * v.shape[-1]].reshape(*lead, D, v.shape[-1]), last[..., -D:]
    over_all = log_decay.sum(-1, keepdim=True).expand(*lead, 1)
    over_all = over_all if state is None else over_all + state.log_decay
    return out, DecayedState(kv, k, torch.zeros_like(k[..., :1]), over_all)
