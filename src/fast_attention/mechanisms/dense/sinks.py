"""Exact attention with sinks (OpenAI 2025, arXiv 2508.10925): a learned score of each head takes weight, with no value.

``out_i = sum_j e^{s_ij} v_j / (sum_j e^{s_ij} + e^{sink_h})`` is exact attention's output times
``sigmoid(log_sum_i - sink_h)``, so that torch's fused kernel serves: it gives its logarithmic normaliser, and given the
one that holds the sink its gradient is right.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.fused import flash_backward, flash_forward, open_attention, takes_flash
from fast_attention.engine.tiling import shares, sink_gradient


def obstacle(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> str:
    """Why the fused kernel cannot be used; empty where it can."""
    if why := dispatch.obstacle(q, k, v):
        return why
    if is_causal and q.shape[-2] != k.shape[-2]:
        return "causal with fewer queries than keys"
    flat = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    low = q.dtype.itemsize < 4 or torch.is_autocast_enabled("cpu")
    return "low precision" if low else "" if takes_flash(*flat, is_causal=is_causal) else "sizes that differ"


def sink_attention(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads keys width"],
    v: Float[Tensor, "*batch heads keys values"],
    sinks: Float[Tensor, "heads"],
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """Exact attention whose every normaliser is larger by ``e^sink``, without masks, where there is no ``obstacle``."""
    dispatch.record("torch's fused kernel", "its outputs are weighed against the sinks")
    flat = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    out = _sunk(*flat, sinks, is_causal=is_causal, scale=float(q.shape[-1] ** -0.5 if scale is None else scale))
    return out.view(*q.shape[:-1], v.shape[-1])


def _plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    return open_attention(q, k, v, None, is_causal=is_causal, scale=scale, sinks=sinks)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *, keep: bool, is_causal: bool, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, (log_sums,) = flash_forward(q, k, v, None, keep=keep, is_causal=is_causal, scale=scale)
    out.mul_(shares(log_sums, sinks[:, None])[..., None])
    return out, (torch.logaddexp(log_sums, sinks[:, None].to(log_sums.dtype)),) if keep else ()


def _backward(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradient: tuple[Tensor, ...],
    *, is_causal: bool, scale: float,
) -> Tensors:  # fmt: skip
    q, k, v, sinks = inputs
    sizes = {"is_causal": is_causal, "scale": scale}
    gradients = flash_backward((q, k, v, None), outputs, kept, gradient, **sizes)
    return *gradients[:3], sink_gradient(sinks, kept[0], gradient[0], outputs[0])


_sunk = CustomGradient(_plain, _forward, _backward)
