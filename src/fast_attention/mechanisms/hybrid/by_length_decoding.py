"""Decoding by length: the state of the mechanism for few keys until all sequences have more, then that of the other.

Where the first is exact attention, whose cache holds all keys, the second reads them out of it when the first sequence
crosses: before that the state is a cache, and when all have crossed, it is the second's alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.heads import repeated, viewed
from fast_attention.engine.kv_cache import KVCache, append, behind
from fast_attention.engine.tracing import traced
from fast_attention.mechanisms.dense.softmax import Softmax, softmax_attention
from fast_attention.mechanisms.hybrid.by_length_rows import Part, covered


class ByLengthState(NamedTuple):
    """The states of both mechanisms, as far as they are needed."""

    count: Any  # visible keys so far: a number while all sequences have as many, else a tensor (..., 1, 1)
    short: Any  # None once every sequence has more keys than above
    long: Any  # None as long as the keys can be read from the state of ``short``


class NewTokens(NamedTuple):
    """Tokens that a state has not read yet."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None

    def some(self, start: int, end: int) -> NewTokens:
        """Those from number ``start`` up to ``end``."""
        if end - start == self.v.shape[-2]:
            return self
        q, k, v = (x[..., start:end, :] for x in self[:3])
        return NewTokens(q, k, v, None if self.key_mask is None else self.key_mask[..., start:end])

    def after(self, part: Part, state: Any) -> tuple[Tensor, Any]:
        """A mechanism's outputs behind its ``state``, and its state after them."""
        if isinstance(part.mechanism, Softmax):
            cache = append(state, self.k, self.v, self.key_mask)
            attend = partial(covered, short=part, is_causal=True)
            return viewed(attend, self.q, cache.k, cache.v, key_mask=cache.visible), cache
        k, v = _read(part, self.q.shape[-3], self.k, self.v)
        return part.mechanism.advance(self.q, k, v, part.w, state, key_mask=self.key_mask)

    def read_by(self, part: Part, state: Any) -> Any:
        """A mechanism's state after them, where their outputs are not wanted."""
        if part.mechanism.traits.memory != "constant":
            return self.after(part, state)[1]
        k, v = _read(part, self.q.shape[-3], self.k, self.v)
        summary = part.mechanism.summary(k, v, part.w, key_mask=self.key_mask)
        return summary if state is None else part.mechanism.merged(state, summary)


class NewRows(NamedTuple):
    """Which of the new tokens are rows of ``short``: all up to ``first``, and of some sequences those up to ``end``."""

    first: int
    end: int
    few: Tensor | None  # (..., 1, N), True for rows of ``short``; None where the two are equal
    count: Any  # as in the state, after these tokens

    @staticmethod
    def of(count: Any, key_mask: Tensor | None, v: Tensor, above: int) -> NewRows:
        """For new tokens with values ``v`` behind ``count`` visible keys."""
        length = v.shape[-2]
        if key_mask is None and isinstance(count, int):
            first = min(max(above - count, 0), length)
            return NewRows(first, first, None, count + length)
        visible = torch.ones_like(v[..., :1, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        number = count + visible.expand(*v.shape[:-3], 1, length).cumsum(-1)
        few = number <= above
        if traced():
            return NewRows(0, length, few, number[..., -1:])
        rows = few.sum(-1)
        return NewRows(int(rows.min()), int(rows.max()), few, number[..., -1:])


def advance(
    new: NewTokens, state: ByLengthState | None, short: Part, long: Part, *, above: int
) -> tuple[Tensor, ByLengthState]:
    """Outputs of new tokens behind ``state``, and the state after them."""
    if state is not None and state.short is None:
        dispatch.record(long.mechanism.expression, "every sequence has more keys than above", above=above)
        out, late = new.after(long, state.long)
        return out, ByLengthState(state.count, None, late)
    held = ByLengthState(0, None, None) if state is None else state
    rows, length = NewRows.of(held.count, new.key_mask, new.v, above), new.v.shape[-2]
    early, after = new.some(0, rows.end).after(short, held.short) if rows.end else (None, held.short)
    late, readable = held.long, _readable(short, long)
    if readable and late is None and held.short is not None and rows.first < length:
        dispatch.record(
            f"{long.mechanism.expression} reads the cache", "a sequence has more keys than above", above=above
        )
        k, v = _read(long, new.q.shape[-3], *held.short[:2])
        late = NewTokens(k, k, v, held.short.visible).read_by(long, None)
    if rows.first and (rows.first < length or late is not None or not readable):
        late = new.some(0, rows.first).read_by(long, late)
    outs = [] if early is None else [early[..., : rows.first, :]]
    if rows.first < length:
        out, late = new.some(rows.first, length).after(long, late)
        both = rows.end - rows.first
        if early is not None and rows.few is not None:
            few = rows.few[..., rows.first : rows.end, None]
            outs.append(torch.where(few, early[..., rows.first :, :], out[..., :both, :]))
        outs.append(out[..., both:, :])
    out = outs[0] if len(outs) == 1 else torch.cat(outs, -2)
    return out, ByLengthState(rows.count, after if rows.end == length else None, late)


def exact_step(
    q: Tensor, k: Tensor, v: Tensor, state: Any, short: Softmax, *, above: int
) -> tuple[Tensor, ByLengthState] | None:
    """What ``advance`` gives, at once, for new visible tokens behind visible ones, all of them rows of ``short``.

    ``state`` is one that ``advance`` made; None where these are not such tokens, or do not fit its cache.
    """
    if not isinstance(state, ByLengthState) or not isinstance(state.count, int) or state.long is not None:
        return None
    count, held = state.count + k.shape[-2], state.short
    if count > above or not isinstance(held, KVCache) or k.dtype != held.k.dtype or k.shape[:-2] != held.k.shape[:-2]:
        return None
    keys, values = behind(held.k, k), behind(held.v, v)
    visible = held.visible[..., :1].expand(*held.visible.shape[:-1], count)  # all are
    cache = KVCache(keys, values, visible)
    if q.shape[-2] == 1 and not torch.is_grad_enabled() and q.dtype != torch.float16:
        dispatch.record("torch's fused kernel", "one query that sees all keys")
        shares = q.shape[-3] != keys.shape[-3]
        out = F.scaled_dot_product_attention(q, keys, values, scale=short.scale, enable_gqa=shares)
    else:
        attend = partial(softmax_attention, scale=short.scale, is_causal=q.shape[-2] > 1)
        out = viewed(attend, q, keys, values, key_mask=None)
    return out, ByLengthState(count, cache, None)


def _read(part: Part, heads: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as a mechanism reads: ``heads``, or fewer where its cache is shared."""
    if not part.mechanism.shares_cache:
        k, v = repeated(heads, k=k, v=v)
    return k, v


def _readable(short: Part, long: Part) -> bool:
    """Whether the state of ``long`` follows from the keys and values that the state of ``short`` holds."""
    traits = long.mechanism.traits
    is_read = traits.memory in ("constant", "window") and traits.reads in ("qkv", "kv")
    return is_read and isinstance(short.mechanism, Softmax)
