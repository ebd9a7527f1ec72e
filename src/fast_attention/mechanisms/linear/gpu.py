"""Linear attention by Triton kernels: sums of chunks, what is before each of them, and what queries read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import operation
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import Elementwise, FeatureMap, Features
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu
from fast_attention.gpu import calls, maps, operations, self_check
from fast_attention.gpu.configurations import WIDEST
from fast_attention.mechanisms.linear.decayed_sums import DecayedState
from fast_attention.mechanisms.linear.linear_state import LinearState

MAPS = EluPlusOne(), Relu(), Identity()  # by the number that the core has for them
CODES = maps.ELU, maps.RELU, maps.IDENTITY  # the kernels' numbers
FEW = 16  # new tokens up to which plain operations take a state on


def serves(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Any, number: int, **settings: Any) -> str:
    """Why kernels cannot compute linear attention with this map; empty where they can."""
    why = operation.gpu_unsupported_reason(q, k, v, widest=WIDEST)
    return why or self_check.unsupported_reason(self_check.elementwise(MAPS[number]), q, v, masked=key_mask is not None)


def advances(*tensors: Any, **settings: Any) -> str:
    """Why kernels cannot go on from a state; empty where they can."""
    (q, k, v), (kv, z, log_scale) = tensors[:3], tensors[7:]
    state = None if kv is None else LinearState(kv, z, log_scale)
    return serves(*tensors, **settings) or few(q, k, v, state) or scaled(state)


def few(q: Tensor, k: Tensor, v: Tensor, state: LinearState | DecayedState | None, *weights: Tensor | None) -> str:
    """Why plain operations take a state on by these tokens; empty where kernels do: of one token that of decoding."""
    if symbolic() or q.shape[-2] > FEW or (state is not None and calls.steps(q, k, v, *weights)):
        return ""
    return f"no more than {FEW} new tokens"


def scaled(state: LinearState | DecayedState | None) -> str:
    """Why kernels without scales cannot read a state; empty where they can."""
    if state is None:
        return ""
    return "a state with scales" if symbolic() or bool(state.log_scale.count_nonzero()) else ""


def attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, number: int, offset: float, eps: float, is_causal: bool
) -> Tensor:
    """Outputs (..., L, Ev): see ``linear_attention``."""
    kernel_set = operations.kernel_set(eps, CODES[number], offset)
    return calls.run(kernel_set, q, k, v, key_mask, is_causal=is_causal)


def further(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: None, key_rows: None, bias: None,
    *state: Tensor | None, number: int, offset: float, eps: float, is_causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Outputs of new tokens behind a state, and the three tensors of the state after them."""
    (kv, z, _), D = state, k.shape[-1]
    first = None if kv is None or z is None else torch.cat([kv.flatten(-2), z], -1)
    kernel_set = operations.kernel_set(eps, CODES[number], offset)
    decodes = calls.steps(q, k, v, first)
    out, last = calls.advance(kernel_set, q, k, v, key_mask, first, decodes=decodes)
    kv, k = last[..., : D * v.shape[-1]].unflatten(-1, (D, -1)), last[..., -D:]
    return out, kv, k, torch.zeros_like(k[..., :1])


def mapped(q: Tensor, k: Tensor, phi: FeatureMap) -> tuple[Tensor, Tensor, int, float]:
    """Queries and keys with the number of their map, or features of a map that kernels do not know."""
    assert isinstance(phi, Elementwise)
    if (known := maps.code(phi)) is not None:
        return q, k, *known
    features = phi.features(q), phi.features(k)
    assert all(isinstance(x, Features) and x.log_scale is None for x in features)
    return features[0].values, features[1].values, maps.IDENTITY, 0.0  # type: ignore[union-attr]
