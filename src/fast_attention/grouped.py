"""Attends with fewer heads of keys and values than of queries (Ainslie et al. 2023, arXiv 2305.13245), without copies.

Where a query's position does not matter, the queries of all heads that share keys become one longer sequence; in causal
order, those of mechanisms with all scores become a batch whose keys are one view. Others get repeated keys and values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fast_attention import checks
from fast_attention.engine import heads
from fast_attention.engine.tracing import traced
from fast_attention.mechanism import Attention


def attend(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, v: Tensor, w: Any = (), *, is_causal: bool = False,
    key_mask: Tensor | None = None, attn_mask: Tensor | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Call a mechanism with queries (..., H, L, E), keys (..., G, S, E) and values (..., G, S, Ev), G a divisor of H.

    Query head h gets the keys and values of head h // (H / G). All else is as in the mechanism's call, for H heads.

    Raises:
        ValueError: G does not divide H, or other sizes do not fit.
    """
    options: Any = {"is_causal": is_causal, "key_mask": key_mask, "attn_mask": attn_mask, "dropout": dropout}
    k, v = checks.grouped(q, k, v, shares=True)
    folds = not is_causal or q.shape[-2] == 1  # a last query alone sees all keys
    is_square = mechanism.traits.complexity_exponent >= 2
    shares = mechanism.unordered and (folds or is_square)  # passes in chunks copy a view, twice
    open_scores = attn_mask is not None or dropout != 0.0
    if not shares or open_scores or traced() or k.shape[-3] == q.shape[-3] or 0 in q.shape:
        k, v = heads.repeated(q.shape[-3], k=k, v=v)
        return mechanism(q, k, v, w, **options)

    def run(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None) -> Tensor:
        mask = None if key_mask is None else key_mask[..., 0, :]
        return mechanism(q, k, v, w, is_causal=not folds, key_mask=mask)

    share = heads.folded if folds else heads.viewed
    return share(run, q, k, v, key_mask=None if key_mask is None else key_mask[..., None, :])
