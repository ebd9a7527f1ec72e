"""What one call of a mechanism runs of a family of kernels: all keys or those before each query, and decoding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.tracing import symbolic
from fast_attention.gpu.forms import Forms


def steps(q: Tensor, *others: Tensor | None) -> bool:
    """Whether these tokens are one, of which no gradient is wanted: decoding's kernel has none."""
    return not symbolic() and q.shape[-2] == 1 and not trains(q, *others)


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
