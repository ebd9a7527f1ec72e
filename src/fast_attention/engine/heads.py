"""Repeats grouped heads: fewer of keys and values than of queries (Ainslie et al. 2023, arXiv 2305.13245).

Also multiplies tokens by weights of each head, without a copy of these for every short sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import operation
from fast_attention.engine.tracing import exporting

FEW = 63  # tokens up to which a sequence is short: what is made for each sequence weighs more than its tokens


def short(*tensors: Tensor) -> bool:
    """Whether tokens (..., H, n, E) are several sequences, each of few tokens, for which numbers decide on a CPU."""
    return not operation.unsupported_reason(*tensors) and several(*tensors)


def several(*tensors: Tensor) -> bool:
    """``short`` for ordinary tensors of a CPU."""
    for x in tensors:  # noqa: SIM110 (a generator costs a frame a tensor)
        if x.ndim <= 3 or x.shape[-2] > FEW or x.shape[:-3].numel() <= 1:
            return False
    return True


def by_head(
    x: Float[Tensor, "*batch n width"], W: Float[Tensor, "*heads width features"]
) -> Float[Tensor, "*batch n features"]:
    """``x @ W`` for weights of each head.

    ``torch.matmul`` copies the weights for every sequence, and so does their gradient. Of short sequences all tokens of
    a head are the rows of one product instead.
    """
    if W.ndim != 3 or not short(x) or W.shape[0] != x.shape[-3]:
        return x @ W
    W = W.clone(memory_format=torch.contiguous_format)  # last digits turn on the layout, which a saved model has not
    rows = x.movedim(-3, 0).flatten(1, -2)  # the tokens of all sequences, (H, ... n, E)
    return torch.bmm(rows, W).unflatten(1, (*x.shape[:-3], x.shape[-2])).movedim(0, -3)


def divide(heads: int, **grouped: Tensor) -> None:
    """Raise a ``ValueError`` unless the heads of keys and values (..., G, S, E), given by name, divide ``heads``."""
    for name, x in grouped.items():
        count = x.shape[-3] if x.ndim > 2 else 0
        if count < 1 or heads % count:
            raise ValueError(
                f"q has {heads} heads and {name} has shape {tuple(x.shape)}: its heads, the third size from the end, "
                "must divide those of q"
            )


def repeated(heads: int, **grouped: Tensor) -> list[Tensor]:
    """Repeat the heads of keys and values (..., G, S, E) until there are H: query head h gets head h // (H / G).

    Args:
        heads: Heads H of the queries.
        grouped: Keys and values, by the names that errors call them.

    Raises:
        ValueError: G does not divide H.
    """
    divide(heads, **grouped)
    counts = [heads // x.shape[-3] for x in grouped.values()]
    return [x if times == 1 else repeat(x, times) for x, times in zip(grouped.values(), counts, strict=True)]


def repeat(x: Tensor, times: int) -> Tensor:
    """Repeat every head of (..., G, S, E) ``times`` in a row."""
    if exporting():  # torch.export of 2.11 compares strides where axes are merged, and closes the length
        return x.index_select(-3, torch.arange(x.shape[-3] * times, device=x.device) // times)
    return x.repeat_interleave(times, -3)


def folded(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None) -> Tensor:
    """Outputs (..., H, L, Ev) of queries (..., H, L, E) with G heads of keys and values, each of which is read once.

    Args:
        attend: Called with ``q, k, v, key_mask=``; a query's output depends on no other query, head or position.
        q, k, v: Query head h gets the keys of head h // (H / G): queries of heads that share them are one sequence.
        key_mask: Boolean (..., 1, S).
    """
    length, times = q.shape[-2], q.shape[-3] // k.shape[-3]
    out = attend(q.unflatten(-3, (-1, times)).flatten(-3, -2), k, v, key_mask=key_mask)
    return out.unflatten(-2, (times, length)).flatten(-4, -3)


def viewed(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None) -> Tensor:
    """Call ``attend`` with repeated heads as views, without copies of keys and values: the same bits.

    Arguments are those of ``folded``; here outputs may depend on a query's position.
    """
    batch, groups = q.shape[:-3], k.shape[-3]
    if groups == q.shape[-3]:
        return attend(q, k, v, key_mask=key_mask)
    size, times = math.prod(batch) * groups, q.shape[-3] // groups

    def shared(x: Tensor) -> Tensor:
        return x.reshape(size, 1, *x.shape[-2:]).expand(-1, times, -1, -1)

    if key_mask is not None:
        key_mask = key_mask.expand(*batch, groups, -1).reshape(size, 1, -1)
    out = attend(q.reshape(size, times, *q.shape[-2:]), shared(k), shared(v), key_mask=key_mask)
    return out.reshape(*batch, groups * times, *out.shape[-2:])


def width(embed_dim: int, num_heads: int) -> int:
    """The width of each of ``num_heads`` heads in tokens of ``embed_dim``.

    Raises:
        ValueError: They are no whole numbers above 0, or heads do not divide tokens.
    """
    if not all(isinstance(each, Integral) and each > 0 for each in (embed_dim, num_heads)) or embed_dim % num_heads:
        raise ValueError(
            f"embed_dim={embed_dim!r} must be a positive multiple of num_heads={num_heads!r}, both whole numbers"
        )
    return embed_dim // num_heads


def grouped(num_heads: int, num_kv_heads: int | None) -> int:
    """Count the heads of keys and values: ``num_kv_heads``, or as many as queries have.

    Raises:
        ValueError: They do not divide ``num_heads``.
    """
    count = num_heads if num_kv_heads is None else num_kv_heads
    if not isinstance(count, Integral) or count < 1 or num_heads % count:
        raise ValueError(f"num_kv_heads={num_kv_heads!r} must divide num_heads={num_heads}")
    return count
