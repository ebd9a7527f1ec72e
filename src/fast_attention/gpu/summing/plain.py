"""The functions that kernels of scores which are sums compute, in operations that autograd follows.

With a the number of a query, b those of the n keys that it sees, their sums ``S0 = sum v_j``, ``S1 = sum b_j v_j`` and
``B = sum b_j``: outputs are ``(a S0 + S1) / divisor``, the divisor 1, ``n a + B``, or n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine import masks
from fast_attention.engine.scan import prefix_sums
from fast_attention.gpu.forms import Forms
from fast_attention.gpu.packing import one_by_one

NOTHING, SCORES, COUNT = 0, 1, 2  # by what outputs are divided
TINY = torch.finfo(torch.float32).tiny  # a sum of scores below it is none


def scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, begins: Tensor | None, divisor: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind first sums, and the sums after: see ``operations.score_scan``."""
    if begins is not None:
        return one_by_one(forms(divisor, dtype).scan, q, k, v, key_mask, first, begins)
    rows = prefix_sums(_terms(k, v, key_mask))
    if first is not None:
        rows = rows + _counted(first)[..., None, :].to(rows.dtype)
    return _outputs(q, rows, divisor, dtype), rows[..., -1, :]


def sums(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """The sums over some keys."""
    return _terms(k, v, key_mask).sum(-2)


def read(q: Tensor, state: Tensor, divisor: int, dtype: torch.dtype | None = None) -> Tensor:
    """What every query reads from one row of sums."""
    return _outputs(q, _counted(state)[..., None, :], divisor, dtype)


def forms(divisor: int, dtype: torch.dtype | None = None) -> Forms:
    """These functions; outputs in ``dtype``, without one in that of queries."""
    return Forms(
        lambda q, k, v, mask, first: scan(q, k, v, mask, first, None, divisor, dtype), sums,
        lambda q, state: read(q, state, divisor, dtype),
        lambda q, k, v, mask, state: scan(q, k, v, mask, state, None, divisor, dtype),
    )  # fmt: skip


def _terms(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """What every key adds to the sums; zeros where it is hidden."""
    k, v = (masks.drop(x.to(torch.promote_types(x.dtype, torch.float32)), key_mask) for x in (k, v))
    return torch.cat([v, k * v, k, masks.drop(torch.ones_like(k), key_mask)], -1)


def _counted(state: Tensor) -> Tensor:
    """Sums in a row; how many keys there were has no gradient."""
    width = state.shape[-1] // 4
    return torch.cat([state[..., : 3 * width], state[..., 3 * width :].detach()], -1)


def _outputs(q: Tensor, rows: Tensor, divisor: int, dtype: torch.dtype | None) -> Tensor:
    plain, weighted, scores, count = rows.chunk(4, -1)
    wide = q.to(rows.dtype)
    out = wide * plain + weighted
    if divisor == SCORES:
        total = count * wide + scores
        nothing = total <= TINY
        out = (out / total.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)
    elif divisor == COUNT:
        out = out / count.clamp(min=1.0)
    return out.to(dtype or q.dtype)
