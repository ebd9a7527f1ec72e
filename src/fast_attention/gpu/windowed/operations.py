"""The kernels of pools with biases in a window as one torch operation, and the call that a mechanism makes.

Tokens are (B, H, n, C); ``band`` (H or 1, n or 1, taps) in float32: ``band[h, i, o]`` is the bias of key
``i + o - taps // 2``. ``strict``: no other keys are seen; ``keep``: as ``gpu.pooling.operations`` has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.gpu.registering import as_bytes, contiguous, differentiable, empty, operation, rest_like
from fast_attention.gpu.walking import trains
from fast_attention.gpu.windowed import plain

Results = tuple[Tensor, ...]
TOKENS = "Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor band"


def _launch(x: Tensor, band: Tensor, is_causal: bool, strict: bool) -> Any:
    from fast_attention.gpu.windowed.launching import Launch

    return Launch(x, band, is_causal=is_causal, strict=strict)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, band: Tensor, is_causal: bool, strict: bool, keep: bool
) -> Results:
    q, k, v = contiguous(q, k, v)
    return _launch(k, band, is_causal, strict).outputs(q, k, v, as_bytes(key_mask, k), keep=keep)


def _scan_like(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, band: Any, is_causal: bool, strict: bool, keep: bool
) -> Results:
    (out,) = empty(q)
    return out, rest_like(out, keep), q.new_empty(q.shape if keep else (0,), dtype=torch.float32)


def _scan_vjp(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, band: Tensor, out: Tensor, rest: Tensor, logs: Tensor,
    grad: Tensor, is_causal: bool, strict: bool, trained: bool,
) -> Results:  # fmt: skip
    (q, k, v, grad), mask, run = contiguous(q, k, v, grad), as_bytes(key_mask, k), _launch(k, band, is_causal, strict)
    dq, far = run.of_queries(q, out, rest, logs, grad)
    read = out, rest, grad, logs
    dk, dv = run.of_keys(q, k, v, mask, read, far)
    return dq, dk, dv, run.of_biases(q, k, v, mask, read) if trained else torch.zeros_like(band)


window_scan = operation(
    "window_scan", f"{TOKENS}, bool is_causal, bool strict, bool keep", "(Tensor, Tensor, Tensor)", _scan, _scan_like
)  # fmt: skip
_window_scan_vjp = operation(
    "window_scan_backward",
    f"{TOKENS}, Tensor out, Tensor rest, Tensor logs, Tensor grad, bool is_causal, bool strict, bool trained",
    "(Tensor, Tensor, Tensor, Tensor)", _scan_vjp, lambda q, k, v, mask, band, *x: empty(q, k, v, band),
)  # fmt: skip


def _of_scan(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    is_causal, strict, keep = numbers
    if not keep:
        results = window_scan(*given, is_causal, strict, True)
    band = given[4]
    dq, dk, dv, d_band = _window_scan_vjp(*given, *results, gradients[0], is_causal, strict, band.requires_grad)
    return dq, dk, dv, None, d_band  # type: ignore[return-value]


differentiable(window_scan, plain.scan, _of_scan, tensors=5, visible=1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, band: Tensor, *, is_causal: bool, strict: bool
) -> Tensor:
    """Outputs (..., H, n, C) of heads in any number of sequences."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    q, k, v = (_as_heads(x, lead) for x in (q, k, v))
    mask = None if key_mask is None else _as_heads(key_mask[..., None], lead)[..., 0]
    dispatch.record(f"{dispatch.KERNEL}: tiles of a window between pools", "on a GPU", window=band.shape[-1] // 2 + 1)
    near = min(band.shape[-1] // 2, k.shape[-2] - 1)
    middle = band.shape[-1] // 2
    band = band.float()[..., middle - near : middle + near + 1]
    out = window_scan(q, k, v, mask, band, is_causal, strict, trains(q, k, v, band))[0]
    return out.reshape(*lead, *out.shape[-2:])


def _as_heads(x: Tensor, lead: torch.Size) -> Tensor:
    """(..., H, n, width) as (B, H, n, width)."""
    return x.expand(*lead, *x.shape[-2:]).reshape(-1, lead[-1], *x.shape[-2:])
