"""Caches keys and values for decoding, where a mechanism can forget none of them.

A step writes its token behind the others, into memory that has room for more: it copies none of those before. A cache
stays a value all the same. The memory notes which of its places are free, so that of two steps from one cache the
first takes the next place, and the second moves to memory of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.operation import on_gpu
from fast_attention.engine.tracing import traced, wrapped

_SMALL = 2**16  # numbers; to copy fewer takes no longer than to look for room


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
    return KVCache(concat_tokens(cache.k, k), concat_tokens(cache.v, v), torch.cat([cache.visible, visible], -1))


def last(cache: KVCache, size: int) -> KVCache:
    """The last ``size`` tokens, moved unless they are most of their memory, or a long prompt would be kept alive."""
    start = max(cache.k.shape[-2] - size, 0)
    k, v = (_compact(x[..., start:, :]) for x in (cache.k, cache.v))
    return KVCache(k, v, cache.visible[..., start:].clone())


def _compact(x: Tensor) -> Tensor:
    """A view (..., H, size, E), copied unless it is most of its memory, where the next tokens find room."""
    if x.numel() < _SMALL or _must_copy(x, x):
        return x.clone()
    if isinstance(getattr(x.untyped_storage(), "spare", None), Spare) and x.untyped_storage().nbytes() <= 2 * x.nbytes:
        return x
    return _with_room(x, x.shape[-2])


class Spare(NamedTuple):
    """Notes of memory (..., H, places, E) with room for more tokens."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    free: set[int]  # the first free place, until a step takes it


def concat_tokens(earlier: Tensor, later: Tensor) -> Tensor:
    """(..., H, S, E) and (..., H, N, E) one behind the other, as ``torch.cat`` gives them, often without a copy."""
    many = 4 * later.shape[-2] > earlier.shape[-2]  # so many that nothing is gained
    if many or earlier.numel() < _SMALL or _must_copy(earlier, later):
        return torch.cat([earlier, later], -2)
    length = earlier.shape[-2] + later.shape[-2]
    whole = _continued(earlier, length)
    if whole is None:
        whole = _with_room(earlier, length)
    whole[..., earlier.shape[-2] :, :].copy_(later)
    return whole


def _must_copy(earlier: Tensor, later: Tensor) -> bool:
    """Whether memory may not be written in place, for a gradient or a graph, or the tensors do not fit."""
    if torch.is_grad_enabled() or traced() or wrapped((earlier, later)):
        return True
    if on_gpu(earlier) and torch.cuda.is_current_stream_capturing():
        return True
    same_kind = earlier.dtype == later.dtype and earlier.device == later.device
    return not same_kind or earlier.shape[:-2] != later.shape[:-2] or earlier.shape[-1] != later.shape[-1]


def _continued(earlier: Tensor, length: int) -> Tensor | None:
    """``earlier`` with places behind it up to ``length``, which nobody else has; None where its memory has none."""
    spare: Any = getattr(earlier.untyped_storage(), "spare", None)
    if not isinstance(spare, Spare) or earlier.stride() != spare.strides:
        return None
    start, column = divmod(int(earlier.storage_offset()), spare.strides[-2])
    if column or earlier.shape[:-2] != spare.shape[:-2] or start + length > spare.shape[-2]:
        return None
    if earlier.is_inference() and not torch.is_inference_mode_enabled():  # torch forbids to write there
        return None
    try:
        spare.free.remove(start + earlier.shape[-2])  # at once, also where several threads decode from one cache
    except KeyError:
        return None
    spare.free.add(start + length)
    return earlier.as_strided((*earlier.shape[:-2], length, earlier.shape[-1]), spare.strides)


def _with_room(earlier: Tensor, length: int) -> Tensor:
    """A copy of ``earlier`` with free places behind it, in memory for a quarter more tokens than ``length``."""
    *batch, number, width = earlier.shape
    memory = earlier.new_empty(*batch, length + length // 4, width)
    memory.untyped_storage().spare = Spare(tuple(memory.shape), memory.stride(), {length})  # type: ignore[attr-defined]
    whole = memory[..., :length, :]
    whole[..., :number, :].copy_(earlier)
    return whole
