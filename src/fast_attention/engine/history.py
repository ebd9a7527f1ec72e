"""The state of decoding where nothing can be forgotten: all keys and values so far, and which of them may be seen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class History(NamedTuple):
    """All keys (..., H, S, E), values (..., H, S, Ev) and which may be seen (..., 1, S) so far."""

    k: Tensor
    v: Tensor
    seen: Tensor


def extend(history: History | None, k: Tensor, v: Tensor, key_mask: Tensor | None) -> History:
    """The history with a stretch of keys (..., H, N, E) and values (..., H, N, Ev) appended."""
    seen = torch.ones_like(v[..., :1, :, 0], dtype=torch.bool) if key_mask is None else key_mask
    seen = seen.expand(*v.shape[:-3], 1, v.shape[-2])
    if history is None:
        return History(k, v, seen)
    return History(torch.cat([history.k, k], -2), torch.cat([history.v, v], -2), torch.cat([history.seen, seen], -1))


def tail(history: History, size: int) -> History:
    """The last ``size`` tokens, cloned, or a long prompt would be kept alive by them."""
    start = max(history.k.shape[-2] - size, 0)
    k, v = (x[..., start:, :].clone() for x in (history.k, history.v))
    return History(k, v, history.seen[..., start:].clone())
