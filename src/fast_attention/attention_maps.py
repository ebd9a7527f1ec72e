"""Attention maps on demand: chosen rows of any mechanism's attention matrix, without the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fast_attention import catalogue
from fast_attention.mechanism import Attention, Mechanism, Unsupported


def attention_rows(
    mechanism: Mechanism[Any, Any] | str,
    q: Tensor,
    k: Tensor,
    w: Any = (),
    *,
    queries: Sequence[int] | Tensor,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Rows of the matrix A for which the mechanism's outputs are ``A V``: what chosen queries give to every key.

    The gradient of ``A V`` with respect to V, sent back from outputs G, is ``A^T G``. A column of G that is one at
    query i and zero elsewhere brings back row i, so that one forward pass and one backward pass for every E rows
    suffice. Both take the mechanism's own fast path: memory grows as it does there, plus that of the rows. The rows are
    exact, not sampled, and hold whatever the mechanism does: random features, negative weights, sums other than one.

    Args:
        mechanism: An attention with ``traits.matrix``, or its name or repr.
        q: Queries (..., H, L, E).
        k: Keys (..., H, S, E).
        w: Weights, as in a call of the mechanism (``bound.w`` of a ``Bound``).
        queries: R positions of queries; negative ones count from the end.
        is_causal: Query i sees keys up to i + S - L.
        key_mask: Boolean (..., S), True = may be seen.
        attn_mask: As in a call, for mechanisms with ``traits.mask``.

    Returns:
        (..., H, R, S) in the dtype of ``q``, detached; a query that may see nothing has a row of zeros.

    Raises:
        Unsupported: The mechanism has no such matrix (``traits.matrix``), or denies what was asked.
        ValueError: A position is outside of the queries; sizes, dtypes or weights do not fit.
    """
    chosen: Any = catalogue.parse(mechanism)
    if not isinstance(chosen, Attention):
        raise Unsupported(f"{chosen!r} mixes whole tokens: no query gives weights to keys")
    if not chosen.traits.matrix:
        raise chosen.refuse("attention maps: its outputs are no A V with one A for all channels", "matrix")
    places = _places(queries, q)
    with torch.inference_mode(False), torch.enable_grad():
        q, k, key_mask, attn_mask = (_ordinary(x) for x in (q, k, key_mask, attn_mask))
        width = q.shape[-1]  # of V: as wide as the queries, so that fused kernels serve
        v = q.new_zeros(*k.shape[:-1], width).requires_grad_()
        out = chosen(q, k, v, w, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask)
        rows = q.new_empty(*q.shape[:-2], len(places), k.shape[-2])
        for start in range(0, len(places), width):
            part = places[start : start + width]
            sent = torch.zeros_like(out)
            sent[..., part, range(len(part))] = 1.0
            more = start + width < len(places)
            back = torch.autograd.grad(out, v, sent, retain_graph=more)[0]
            rows[..., start : start + len(part), :] = back[..., : len(part)].mT
    return rows.detach()


def _ordinary(x: Any) -> Any:
    """The tensor without its history, and such that gradients may be taken through it."""
    return None if x is None else x.clone() if x.is_inference() else x.detach()


def _places(queries: Sequence[int] | Tensor, q: Tensor) -> list[int]:
    """The positions, counted from the start."""
    length = q.shape[-2]
    found = [int(i) for i in queries]
    wrong = [i for i in found if not -length <= i < length]
    if wrong:
        raise ValueError(f"queries names {wrong[0]}, and q has {length} tokens: give {-length} to {length - 1}")
    return [i % length for i in found]
