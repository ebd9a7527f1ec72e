"""Attends with fewer heads of keys and values than of queries (Ainslie et al. 2023, arXiv 2305.13245), without copies.

Where a query's position does not matter, the queries of all heads that share keys become one longer sequence; in causal
order, those of mechanisms with all scores become a batch whose keys are one view. Others get repeated keys and values.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fast_attention import checks, invariance
from fast_attention.engine import heads
from fast_attention.engine.tracing import traced
from fast_attention.mechanism import Attention


def attend(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, v: Tensor, w: Any = (), *, is_causal: bool = False,
    key_mask: Tensor | None = None, attn_mask: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Call a mechanism with queries (..., H, L, E), keys (..., G, S, E) and values (..., G, S, Ev), G a divisor of H.

    Args:
        mechanism: The mechanism.
        q, k, v: Query head h gets the keys and values of head h // (H / G).
        w: Weights, as in the mechanism's call, for H heads.
        is_causal: As in the mechanism's call, and so are ``key_mask``, ``attn_mask`` and ``dropout``.
        key_mask: Boolean (..., S), True = may be seen.
        attn_mask: Boolean or additive.
        dropout: Probability with which an attention weight is dropped.

    Raises:
        ValueError: G does not divide H, or other sizes do not fit.
    """
    options: Any = {"is_causal": is_causal, "key_mask": key_mask, "attn_mask": attn_mask, "dropout": dropout}
    heads.divide(q.shape[-3], k=k, v=v)
    checks.heads(q, k, v, alike=False, grouped=True)
    groups, length = k.shape[-3], q.shape[-2]
    if groups == v.shape[-3] == q.shape[-3]:
        return mechanism(q, k, v, w, **options)
    folds = not is_causal or length == 1  # a last query alone sees all keys
    shares = mechanism.unordered and (folds or mechanism.traits.order >= 2)  # passes in chunks copy a view, twice
    open_scores = attn_mask is not None or dropout != 0.0
    if not shares or open_scores or invariance.asked() or traced() or groups != v.shape[-3] or 0 in q.shape:
        k, v = heads.repeated(q.shape[-3], k=k, v=v)
        return mechanism(q, k, v, w, **options)
    times = q.shape[-3] // groups
    together = q.unflatten(-3, (groups, times))
    if folds:
        out = mechanism(together.flatten(-3, -2), k, v, w, key_mask=key_mask)
        return out.unflatten(-2, (times, length)).flatten(-4, -3)
    batch = q.shape[:-3]
    size = math.prod(batch) * groups

    def shared(x: Tensor) -> Tensor:
        return x.reshape(size, 1, *x.shape[-2:]).expand(-1, times, -1, -1)

    if key_mask is not None:
        key_mask = key_mask[..., None, :].expand(*batch, groups, -1).reshape(size, -1)
    out = mechanism(
        together.reshape(size, times, length, -1), shared(k), shared(v), w, is_causal=True, key_mask=key_mask
    )
    return out.reshape(*batch, groups * times, length, -1)
