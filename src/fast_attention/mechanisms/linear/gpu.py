"""Linear attention by Triton kernels: sums of chunks, what is before each of them, and what queries read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap, Features
from fast_attention.gpu import maps, operations, self_check
from fast_attention.gpu.configurations import WIDEST
from fast_attention.mechanisms.linear.linear_state import LinearState

FEW = 16  # new tokens up to which plain operations take a state on


def obstacle(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap) -> str:
    """Why kernels cannot compute linear attention with this map; empty where they can."""
    if why := dispatch.gpu_obstacle(q, k, v, widest=WIDEST):
        return why
    if not isinstance(phi, Elementwise):
        return "a feature map that is not elementwise"
    return self_check.obstacle(q, v, phi)


def few(q: Tensor, state: LinearState | None) -> str:
    """Why plain operations take a state on by these tokens; empty where kernels do."""
    if not symbolic() and q.shape[-2] <= FEW:
        return f"no more than {FEW} new tokens"
    if state is None:
        return ""
    return "a state with scales" if symbolic() or bool(state.log_scale.count_nonzero()) else ""


def attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    """Outputs (..., L, Ev): see ``linear_attention``."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    (q, k, code, offset), v, mask = _mapped(_heads(q, lead), _heads(k, lead), phi), _heads(v, lead), None
    if key_mask is not None:
        mask = _heads(key_mask[..., None], lead)[..., 0]
    dispatch.record(f"{dispatch.KERNEL}: chunks side by side", "on a GPU")
    if not is_causal:
        sums = operations.key_sums(k, v, mask, code, offset)
        out = operations.read_sums(q, sums, eps, code, offset, _trains(q, k, v))[0]
        return out.reshape(*lead, *out.shape[-2:])
    extra, first = k.shape[-2] - q.shape[-2], None
    if extra > 0:  # every query sees the first keys
        early = None if mask is None else mask[..., :extra]
        first = operations.key_sums(k[..., :extra, :], v[..., :extra, :], early, code, offset)
        k, v, mask = k[..., extra:, :], v[..., extra:, :], None if mask is None else mask[..., extra:]
    out = operations.chunk_scan(q[..., max(-extra, 0) :, :], k, v, mask, first, eps, code, offset, _trains(q, k, v))[0]
    out = F.pad(out, (0, 0, -extra, 0)) if extra < 0 else out  # the first queries see nothing
    return out.reshape(*lead, *out.shape[-2:])


def advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState]:
    """Outputs of new tokens behind ``state``, and the state after them."""
    lead, D = q.shape[:-2], k.shape[-1]
    (q, k, code, offset), v, first = _mapped(_heads(q, lead), _heads(k, lead), phi), _heads(v, lead), None
    mask = None if key_mask is None else _heads(key_mask[..., None], lead)[..., 0]
    if state is not None:
        first = torch.cat([state.kv.flatten(-2), state.k], -1).float().expand(*lead, -1).reshape(*q.shape[:2], -1)
    dispatch.record(f"{dispatch.KERNEL}: chunks side by side", "on a GPU")
    out, last = operations.chunk_scan(q, k, v, mask, first, eps, code, offset, _trains(q, k, v))[:2]
    kv, k = last[..., : D * v.shape[-1]].reshape(*lead, D, -1), last[..., -D:].reshape(*lead, D)
    return out.reshape(*lead, *out.shape[-2:]), LinearState(kv, k, torch.zeros_like(k[..., :1]))


def _trains(*tensors: Tensor) -> bool:
    """Whether a backward pass may come."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _heads(x: Tensor, lead: torch.Size) -> Tensor:
    """``x`` as (B, H, n, width), without a copy where it has two leading sizes."""
    x = x.expand(*lead, *x.shape[-2:])
    return x if len(lead) == 2 else x.reshape(1, -1, *x.shape[-2:])


def _mapped(q: Tensor, k: Tensor, phi: FeatureMap) -> tuple[Tensor, Tensor, int, float]:
    """Queries and keys with the number of their map, or features of a map that kernels do not know."""
    assert isinstance(phi, Elementwise)
    if (known := maps.code(phi)) is not None:
        return q, k, *known
    features = phi.features(q), phi.features(k)
    assert all(isinstance(x, Features) and x.log_scale is None for x in features)
    return features[0].values, features[1].values, maps.IDENTITY, 0.0  # type: ignore[union-attr]
