"""Computes chosen rows of any mechanism's attention matrix, without the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fast_attention import catalogue, checks
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
    """Rows of the matrix A for which the mechanism's outputs are ``A V``: the weights of every key for chosen queries.

    The vector-Jacobian product of ``A V`` with respect to V is ``A^T G`` for output gradients G. A column of G that is
    one at query i and zero elsewhere gives row i, so that one forward pass and one backward pass for every E rows
    suffice. Both take the mechanism's own fast path: memory grows as it does there, plus that of the rows. The rows are
    exact, not sampled, for random features, negative weights and sums other than one, too.

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
        TypeError: ``queries`` are no whole numbers.
        ValueError: A position is outside of the queries; sizes, dtypes or weights do not fit.
    """
    chosen: Any = catalogue.parse(mechanism)
    if not isinstance(chosen, Attention):
        raise Unsupported(f"{chosen!r} mixes whole tokens: no query gives weights to keys")
    if not chosen.traits.matrix:
        raise chosen.refuse("attention maps: its outputs are no A V with one A for all channels", "matrix")
    checks.tensors(q=q, k=k)
    positions = _positions(queries, q)
    with torch.inference_mode(False), torch.enable_grad():
        q, k, key_mask, attn_mask = (_detached(x) for x in (q, k, key_mask, attn_mask))
        width = q.shape[-1]  # of V: as wide as the queries, so that fused kernels serve
        v = q.new_zeros(*k.shape[:-1], width).requires_grad_()
        out = chosen(q, k, v, w, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask)
        rows = q.new_empty(*q.shape[:-2], len(positions), k.shape[-2])
        for start in range(0, len(positions), width):
            chunk = positions[start : start + width]
            grad_out = torch.zeros_like(out)
            grad_out[..., chunk, range(len(chunk))] = 1.0
            retain = start + width < len(positions)
            grad_v = torch.autograd.grad(out, v, grad_out, retain_graph=retain)[0]
            rows[..., start : start + len(chunk), :] = grad_v[..., : len(chunk)].mT
    return rows.detach()


def _detached(x: Any) -> Any:
    """The tensor without its graph, and outside of inference mode."""
    return None if x is None else x.clone() if x.is_inference() else x.detach()


def _positions(queries: Sequence[int] | Tensor, q: Tensor) -> list[int]:
    """The positions, counted from the start."""
    length, numbers = q.shape[-2], queries.tolist() if isinstance(queries, Tensor) else queries
    if not isinstance(numbers, Iterable) or not all(
        isinstance(i, Integral) and not isinstance(i, bool) for i in numbers
    ):
        raise TypeError(f"queries must be a row of whole numbers, positions of queries; got {queries!r}")
    positions = [int(i) for i in numbers]
    outside = [i for i in positions if not -length <= i < length]
    if outside:
        raise ValueError(f"queries names {outside[0]}, and q has {length} tokens: give {-length} to {length - 1}")
    return [i % length for i in positions]
