"""Grouped heads: fewer heads of keys and values than of queries (Ainslie et al. 2023, arXiv 2305.13245)."""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.engine.tracing import exporting


def repeated(heads: int, **grouped: Tensor) -> list[Tensor]:
    """Keys and values (..., G, S, E), each head as often in a row as makes ``heads`` of them: head h gets h // (H / G).

    Args:
        heads: Heads H of the queries.
        grouped: What is repeated, by the name that errors call it.

    Raises:
        ValueError: G does not divide H.
    """
    made = []
    for name, x in grouped.items():
        own = x.shape[-3] if x.ndim > 2 else 0
        if own < 1 or heads % own:
            raise ValueError(
                f"q has {heads} heads and {name} has shape {tuple(x.shape)}: its heads, the third size from the end, "
                "must divide those of q"
            )
        made.append(x if own == heads else repeat(x, heads // own))
    return made


def repeat(x: Tensor, times: int) -> Tensor:
    """Heads (..., G, S, E), each ``times`` in a row."""
    if exporting():  # torch.export of 2.11 compares strides where axes are merged, and closes the length
        return x.index_select(-3, torch.arange(x.shape[-3] * times, device=x.device) // times)
    return x.repeat_interleave(times, -3)


def grouped(num_heads: int, num_kv_heads: int | None) -> int:
    """Heads of keys and values: ``num_kv_heads``, or as many as queries have.

    Raises:
        ValueError: They do not divide ``num_heads``.
    """
    found = num_heads if num_kv_heads is None else num_kv_heads
    if found < 1 or num_heads % found:
        raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
    return found
