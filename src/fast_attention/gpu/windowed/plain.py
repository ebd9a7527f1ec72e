"""The function that these kernels compute, in operations that autograd follows: as many terms as a window has keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine.decay import decayed_sums, spread
from fast_attention.engine.scan import FLOOR, running_max
from fast_attention.gpu.pooling.plain import gated_outputs, keys_and_terms


def scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, band: Tensor, is_causal: bool, strict: bool,
    keep: bool = True,
) -> Tensor:  # fmt: skip
    """Outputs: see ``operations.window_scan``."""
    keys, both = keys_and_terms(k, v, key_mask)
    reach = band.shape[-1] // 2
    parts = [
        (_moved(keys, by, FLOOR) + band[..., by + reach, None], _moved(both, by, 0.0))
        for by in range(-reach, 1 if is_causal else reach + 1)
    ]
    if not strict:
        tops, sums = _running(keys, both)
        parts.append((_moved(tops, -reach - 1, FLOOR), _moved(sums, -reach - 1, 0.0)))
    if not (strict or is_causal):
        tops, sums = (x.flip(-2) for x in _running(keys.flip(-2), both.flip(-2)))
        parts.append((_moved(tops, reach + 1, FLOOR), _moved(sums, reach + 1, 0.0)))
    top = torch.stack([x.detach() for x, _ in parts]).amax(0)
    total = torch.zeros_like(parts[0][1])
    for x, y in parts:
        total = total + spread((x - top).exp(), 2 * k.shape[-1]) * y
    return gated_outputs(q, total, gated=True)


def _running(keys: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """The largest key up to each, and sums over its exponential."""
    tops = running_max(keys.detach())
    return tops, decayed_sums(spread((keys - tops).exp(), both.shape[-1]) * both, tops)


def _moved(x: Tensor, by: int, value: float) -> Tensor:
    """Token t + ``by`` in place of token t."""
    length = x.shape[-2]
    by = max(min(by, length), -length)
    return F.pad(x, (0, 0, max(-by, 0), max(by, 0)), value=value)[..., max(by, 0) : max(by, 0) + length, :]
