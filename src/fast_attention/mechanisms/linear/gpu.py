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
from fast_attention.gpu.forms import Forms
from fast_attention.mechanisms.linear.decayed_sums import DecayedState
from fast_attention.mechanisms.linear.linear_state import LinearState

FEW = 16  # new tokens up to which plain operations take a state on


def obstacle(q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap, key_mask: Tensor | None) -> str:
    """Why kernels cannot compute linear attention with this map; empty where they can."""
    if why := dispatch.gpu_obstacle(q, k, v, widest=WIDEST):
        return why
    if not isinstance(phi, Elementwise):
        return "a feature map that is not elementwise"
    return self_check.obstacle(self_check.elementwise(phi), q, v, masked=key_mask is not None)


def few(q: Tensor, k: Tensor, v: Tensor, state: LinearState | DecayedState | None, *weights: Tensor | None) -> str:
    """Why plain operations take a state on by these tokens; empty where kernels do: of one token that of decoding."""
    if symbolic() or q.shape[-2] > FEW or (state is not None and steps(q, k, v, *weights)):
        return ""
    return f"no more than {FEW} new tokens"


def steps(q: Tensor, *others: Tensor | None) -> bool:
    """Whether these tokens are one, of which no gradient is wanted: decoding's kernel has none."""
    return not symbolic() and q.shape[-2] == 1 and not trains(q, *others)


def scaled(state: LinearState | DecayedState | None) -> str:
    """Why kernels without scales cannot read a state; empty where they can."""
    if state is None:
        return ""
    return "a state with scales" if symbolic() or bool(state.log_scale.count_nonzero()) else ""


def attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, phi: FeatureMap, eps: float, is_causal: bool
) -> Tensor:
    """Outputs (..., L, Ev): see ``linear_attention``."""
    keep = trains(q, k, v)
    q, k, code, offset = mapped(q, k, phi)
    return walk(operations.forms(eps, code, offset, keep), q, k, v, key_mask, is_causal=is_causal)


def advance(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: LinearState | None, *, phi: FeatureMap, eps: float
) -> tuple[Tensor, LinearState]:
    """Outputs of new tokens behind ``state``, and the state after them."""
    keep, D = trains(q, k, v), k.shape[-1]
    q, k, code, offset = mapped(q, k, phi)
    first = None if state is None else torch.cat([state.kv.flatten(-2), state.k], -1)
    forms, decodes = operations.forms(eps, code, offset, keep), steps(q, k, v, first)
    out, last = further(forms, q, k, v, key_mask, first, decodes=decodes)
    kv, k = last[..., : D * v.shape[-1]].unflatten(-1, (D, -1)), last[..., -D:]
    return out, LinearState(kv, k, torch.zeros_like(k[..., :1]))


def walk(forms: Forms, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Outputs (..., L, Ev) of queries that see all keys, or those before them, aligned to the end."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    (q, k, v), mask = (as_heads(x, lead) for x in (q, k, v)), _mask(key_mask, lead)
    dispatch.record(f"{dispatch.KERNEL}: chunks side by side", "on a GPU")
    if not is_causal:
        assert forms.sums is not None
        assert forms.read is not None
        out = forms.read(q, forms.sums(k, v, mask))
        return out.reshape(*lead, *out.shape[-2:])
    extra, first = k.shape[-2] - q.shape[-2], None
    if extra > 0:  # every query sees the first keys
        assert forms.sums is not None
        first = forms.sums(k[..., :extra, :], v[..., :extra, :], None if mask is None else mask[..., :extra])
        k, v, mask = k[..., extra:, :], v[..., extra:, :], None if mask is None else mask[..., extra:]
    out = forms.scan(q[..., max(-extra, 0) :, :], k, v, mask, first)[0]
    out = F.pad(out, (0, 0, -extra, 0)) if extra < 0 else out  # the first queries see nothing
    return out.reshape(*lead, *out.shape[-2:])


def further(
    forms: Forms, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor | None, *, decodes: bool
) -> tuple[Tensor, Tensor]:
    """Causal outputs of new tokens behind a state in a row, and the state after them; ``decodes``: see ``steps``."""
    lead = q.shape[:-2]
    (q, k, v), mask = (as_heads(x, lead) for x in (q, k, v)), _mask(key_mask, lead)
    first = None if state is None else state.float().expand(*lead, -1).reshape(*q.shape[:2], -1)
    if decodes and first is not None:
        dispatch.record(f"{dispatch.KERNEL}: one token", "on a GPU")
        out, last = forms.step(q, k, v, mask, first)
    else:
        dispatch.record(f"{dispatch.KERNEL}: chunks side by side", "on a GPU")
        out, last = forms.scan(q, k, v, mask, first)
    return out.reshape(*lead, *out.shape[-2:]), last.reshape(*lead, -1)


def trains(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may come."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def as_heads(x: Tensor, lead: torch.Size) -> Tensor:
    """``x`` as (B, H, n, width), without a copy where it has two leading sizes."""
    x = x.expand(*lead, *x.shape[-2:])
    return x if len(lead) == 2 else x.reshape(1, -1, *x.shape[-2:])


def _mask(key_mask: Tensor | None, lead: torch.Size) -> Tensor | None:
    return None if key_mask is None else as_heads(key_mask[..., None], lead)[..., 0]


def mapped(q: Tensor, k: Tensor, phi: FeatureMap) -> tuple[Tensor, Tensor, int, float]:
    """Queries and keys with the number of their map, or features of a map that kernels do not know."""
    assert isinstance(phi, Elementwise)
    if (known := maps.code(phi)) is not None:
        return q, k, *known
    features = phi.features(q), phi.features(k)
    assert all(isinstance(x, Features) and x.log_scale is None for x in features)
    return features[0].values, features[1].values, maps.IDENTITY, 0.0  # type: ignore[union-attr]
