"""The pure functions in ``scaled_dot_product_attention``'s layout, and ``attention``, which takes any mechanism."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fast_attention import catalogue
from fast_attention.mechanism import Attention, Mechanism, Shape, Unsupported
from fast_attention.mechanisms.aft import aft_full as aft_full
from fast_attention.mechanisms.aft import aft_simple as aft_simple
from fast_attention.mechanisms.aft_local import aft_local as aft_local
from fast_attention.mechanisms.aft_local import conv_band as conv_band
from fast_attention.mechanisms.bigbird import bigbird_attention as bigbird_attention
from fast_attention.mechanisms.favor import favor_attention as favor_attention
from fast_attention.mechanisms.favor_plus import favor_plus_attention as favor_plus_attention
from fast_attention.mechanisms.favor_plus import generalised_attention as generalised_attention
from fast_attention.mechanisms.favor_plus_plus import favor_plus_plus_attention as favor_plus_plus_attention
from fast_attention.mechanisms.favor_plus_plus import optimal_damping as optimal_damping
from fast_attention.mechanisms.fnet import fourier_mix as fourier_mix
from fast_attention.mechanisms.gmlp import gated_mlp as gated_mlp
from fast_attention.mechanisms.linear import linear_attention as linear_attention
from fast_attention.mechanisms.local import block_local_attention as block_local_attention
from fast_attention.mechanisms.local import local_attention as local_attention
from fast_attention.mechanisms.log import log_attention as log_attention
from fast_attention.mechanisms.lsh import lsh_attention as lsh_attention
from fast_attention.mechanisms.manhattan import manhattan_attention as manhattan_attention
from fast_attention.mechanisms.mlp_mixer import token_mlp as token_mlp
from fast_attention.mechanisms.relu import relu_attention as relu_attention
from fast_attention.mechanisms.sinkhorn import sinkhorn_attention as sinkhorn_attention
from fast_attention.mechanisms.sinkhorn import sortcut_attention as sortcut_attention
from fast_attention.mechanisms.softmax import softmax_attention as softmax_attention
from fast_attention.ops.differences.manhattan import absolute_manhattan as absolute_manhattan
from fast_attention.ops.differences.manhattan import laplacian_manhattan as laplacian_manhattan
from fast_attention.ops.differences.manhattan import signed_manhattan as signed_manhattan
from fast_attention.ops.differences.manhattan import vector_manhattan as vector_manhattan
from fast_attention.ops.fusion import Fusion, fusing
from fast_attention.ops.precision import rebuild
from fast_attention.ops.scores.slots import convolved_attention as convolved_attention
from fast_attention.ops.scores.slots import linformer_attention as linformer_attention
from fast_attention.ops.scores.slots import pooled_attention as pooled_attention
from fast_attention.ops.scores.synthesis import synthesizer_attention as synthesizer_attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: Mechanism[Any, Any] | str = "Softmax",
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    compile: Fusion = "off",
) -> Tensor:
    """Attend with any mechanism that needs no learned weights.

    Args:
        q, k, v: Queries (..., H, L, E), keys (..., H, S, E), values (..., H, S, Ev).
        mechanism: A mechanism, its name (``"LinearAttention"``) or its repr (``"FavorPlus(num_features=64)"``).
            Random features and tables are drawn anew at each call from torch's global generator; to keep them,
            use ``Bound``.
        is_causal: Query i sees keys up to i + S - L.
        key_mask: Boolean (..., S), True = may be seen.
        compile: ``"auto"`` lets ``torch.compile`` fuse elementwise parts where a compiler works.

    Returns:
        Outputs (..., H, L, Ev).

    Raises:
        Unsupported: The mechanism is a mixer, has learned weights, or its traits deny what was asked.
        ValueError: No such mechanism, or sizes that do not fit.
    """
    mechanism = catalogue.parse(mechanism)
    if not isinstance(mechanism, Attention):
        raise Unsupported(f"{mechanism!r} mixes whole tokens and takes no queries: use TokenMixer or Bound")
    if mechanism.traits.learned:
        raise Unsupported(f"{mechanism!r} has learned weights: use MultiheadAttention, TokenMixer or Bound")
    w: Any = ()
    if mechanism.needs_weights:
        w = mechanism.weights(Shape(q.shape[-3], q.shape[-1], max_len=max(q.shape[-2], k.shape[-2])))
        w = _moved(w, q)
    if compile == "off":
        return mechanism(q, k, v, w, is_causal=is_causal, key_mask=key_mask)
    with fusing(compile):
        return mechanism(q, k, v, w, is_causal=is_causal, key_mask=key_mask)


def _moved(w: Any, like: Tensor) -> Any:
    if isinstance(w, Tensor):
        return w.to(like.device, like.dtype if w.is_floating_point() else None)
    if w is None or isinstance(w, nn.Parameter):
        return w
    return rebuild(w, [_moved(part, like) for part in w])
