"""Calls torch's fused attention so that its gradient can be differentiated again."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks, operation
from fast_attention.engine.numerics import no_less
from fast_attention.engine.operation import Fast, Operation
from fast_attention.engine.precision import in_float32, outside_autocast
from fast_attention.engine.tracing import exporting, transformed

TINY = torch.finfo(torch.float32).tiny
_FLASH = 1  # what torch._fused_sdp_choice calls the flash kernel: the one without second derivatives on a CPU


def fused_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``scaled_dot_product_attention``, on a CPU with every derivative: more than one gradient by way of all scores.

    ``mask`` (*batch, length, keys) is boolean or additive; ``is_causal`` goes without one. torch's kernels take four
    axes: with more it would hold all scores, so that those before the heads become one.
    """
    if q.ndim > 4:
        batch_shape = q.shape[:-3]
        mask = None if mask is None else mask.expand(*batch_shape, *mask.shape[-3:]).flatten(0, -4)
        q, k, v = (x.flatten(0, -4) for x in (q, k, v))
        out = fused_attention(q, k, v, mask, is_causal=is_causal, dropout=dropout, scale=scale)
        return out.unflatten(0, batch_shape)
    if mask is not None and mask.ndim == 3 and q.ndim == 4:  # with a mask of three axes torch's kernels hold all scores
        mask = mask[None]
    if is_causal and scale is not None and scale < TINY:  # torch's kernel masks before it scales, in float32: NaN
        q, scale = q * scale, 1.0
    if transformed() or (mask is not None and exporting()):
        return open_attention(q, k, v, mask, is_causal=is_causal, dropout=dropout, scale=scale)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    why = operation.unsupported_reason(q)
    custom = wanted and why in ("", operation.ASKED)  # the reference's derivatives go by the same kernel
    custom = custom and dropout == 0.0 and (mask is None or not mask.requires_grad)
    if custom and q.ndim < 4:  # from torch 2.15 on the flash kernel, for four axes only, is chosen for fewer as well
        mask = None if mask is None else mask[None]
        return fused_attention(q[None], k[None], v[None], mask, is_causal=is_causal, scale=scale)[0]
    if custom and torch.is_autocast_enabled("cpu"):
        q, k, v = (_cast(x) for x in (q, k, v))
        mask = mask if mask is None or mask.dtype == torch.bool else _cast(mask)
        return outside_autocast("cpu", fused_attention, q, k, v, mask, is_causal=is_causal, scale=scale)
    if custom and takes_flash(q, k, v, mask, is_causal=is_causal, scale=scale):
        if mask is not None and mask.dtype == torch.bool:  # the kernel reads numbers alone
            mask = mask.new_zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        return _differentiable(q, k, v, mask, is_causal=is_causal, scale=scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale)


def _cast(x: Tensor) -> Tensor:
    """Cast as autocast does before this operation."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype("cpu"))


@in_float32
def open_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    mask: Tensor | None,
    *,
    is_causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    sinks: Float[Tensor, "*#batch"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax attention by all scores at once, with derivatives of every kind and order.

    Exported programs take it too: ONNX's attention lets a row that sees nothing see everything. ``sinks`` are scores of
    one more key in every row, whose value is zero.
    """
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = masks.causal(q.shape[-2], k.shape[-2], q.device) if is_causal else None
    if mask is not None and mask.dtype != torch.bool:
        scores, mask = scores + no_less(mask, torch.finfo(mask.dtype).min), mask > float("-inf")
    if mask is not None:
        visible = mask if visible is None else mask & visible
    weights = masks.masked_softmax(scores, visible, sinks)
    return (F.dropout(weights, dropout) if dropout else weights) @ v


def blockwise_softmax(
    q: Float[Tensor, "*batch blocks rows width"],
    k: Float[Tensor, "*batch blocks span width"],
    v: Float[Tensor, "*batch blocks span values"],
    mask: Shaped[Tensor, "*#batch2 blocks #rows span"],
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
    has_bias: bool = False,
) -> Float[Tensor, "*batch blocks rows values"]:
    """Softmax attention of every block of queries over its own keys; a query that sees nothing gets zeros.

    The blocks stand where the fused kernels expect heads. A ``mask`` without leading axes is shared by all of them; one
    that ``has_bias`` holds numbers that may want a gradient.
    """
    if exporting() or sinks is not None or (has_bias and not operation.on_gpu(q)):
        # the fused kernels ask how strides compare, and ONNX's take four axes
        sinks = None if sinks is None else sinks[:, None]
        return open_attention(q, k, v, mask, dropout=dropout, scale=scale, sinks=sinks)
    batch_shape = q.shape[:-3]
    if not batch_shape:
        return blockwise_softmax(q[None], k[None], v[None], mask, dropout=dropout, scale=scale)[0]
    if mask.ndim > 3:
        mask = mask.expand(*batch_shape, *mask.shape[-3:]).flatten(0, -4)
    q, k, v = (x.flatten(0, -4) for x in (q, k, v))
    return fused_attention(q, k, v, mask, dropout=dropout, scale=scale).unflatten(0, batch_shape)


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    *, dropout: float = 0.0, scale: float | None = None, sinks: Float[Tensor, "*#batch"] | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention with an additive mask that may want a gradient, which torch's kernels for CPUs do not give."""
    if sinks is not None or bias is None or not operation.on_gpu(q):
        return open_attention(q, k, v, bias, dropout=dropout, scale=scale, sinks=sinks)
    return fused_attention(q, k, v, bias.expand(*q.shape[:-1], k.shape[-2]), dropout=dropout, scale=scale)


def takes_flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, scale: float | None = None
) -> bool:
    """Whether torch would run the flash kernel on these shapes and dtypes."""
    if transformed() or q.ndim != 4 or not q.is_cpu:  # another device's flash kernel is another function
        return False
    return torch.ops.aten._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, scale=scale) == _FLASH


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, keep: bool, is_causal: bool, scale: float | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The flash kernel's outputs, and its normalisers to keep."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = kernel(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, (log_sum,)


def flash_backward(
    inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...],
    gradient: tuple[Tensor, ...], *, is_causal: bool, scale: float | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of queries, keys and values."""
    q, k, v, mask = inputs
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return *kernel(gradient[0], q, k, v, outputs[0], saved[0], 0.0, is_causal, attn_mask=mask, scale=scale), None


_differentiable = Operation(open_attention, cpu=Fast(flash_forward, flash_backward, always=True))
