"""Caches keys and values for decoding, where a mechanism can forget none of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KVCache(NamedTuple):
    """All keys (..., H, S, E) and values (..., H, S, Ev) so far; ``visible`` (..., 1, S) is their key mask."""

    k: Tensor
    v: Tensor
    visible: Tensor


def append(cache: KVCache | None, k: Tensor, v: Tensor, key_mask: Tensor | None) -> KVCache:
    """The cache with N more keys (..., H, N, E) and values (..., H, N, Ev) behind it."""
    visible = torch.ones_like(v[..., :1, :, 0], dtype=torch.bool) if key_mask is None else key_mask
    visible = visible.expand(*v.shape[:-3], 1, v.shape[-2])
    if cache is None:
        return KVCache(k, v, visible)
    return KVCache(torch.cat([cache.k, k], -2), torch.cat([cache.v, v], -2), torch.cat([cache.visible, visible], -1))


def last(cache: KVCache, size: int) -> KVCache:
    """The last ``size`` tokens, cloned, or a long prompt would be kept alive by them."""
    start = max(cache.k.shape[-2] - size, 0)
    k, v = (x[..., start:, :].clone() for x in (cache.k, cache.v))
    return KVCache(k, v, cache.visible[..., start:].clone())
