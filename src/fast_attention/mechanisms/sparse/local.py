"""Local attention: a query weighs the keys in a sliding window around it.

The window is Longformer's (Beltagy et al. 2020, arXiv 2004.05150) with the ends of FlashAttention's
``window_size=(left, right)``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.biases.bias import Bias, BiasMixin
from fast_attention.engine.blocks import join, split, split_mask, split_row
from fast_attention.engine.heads import viewed
from fast_attention.engine.kv_cache import KVCache, append, last
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.tracing import symbolic
from fast_attention.gpu import patterns
from fast_attention.mechanism import MaskedAttention, Traits
from fast_attention.mechanisms.sparse import banded
from fast_attention.traits import FLEX

Attend = Callable[..., Tensor]  # (q, k, v, key_mask=, attn_mask=), queries ending where keys end; by heads: dilation=


def dilated(
    attend: Attend,
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads keys width"],
    v: Float[Tensor, "*batch heads keys values"],
    *,
    dilation: int,
    is_causal: bool,
    key_mask: Bool[Tensor, "*#batch2 1 keys"] | None,
    attn_mask: Tensor | None,
) -> Float[Tensor, "*batch heads length values"]:
    """``attend`` among the tokens whose positions differ by multiples of ``dilation``.

    Both ends are padded to whole strides of ``dilation`` tokens, so that in every sequence queries again end where keys
    end. Padded keys are masked, except causally: there they stand behind every query.
    """
    length, keys = q.shape[-2], k.shape[-2]
    front = (keys - length) % dilation  # the first query's position within its stride
    if key_mask is None and not is_causal and (symbolic() or keys % dilation):
        key_mask = torch.ones(1, keys, dtype=torch.bool, device=k.device)
    visible = None if key_mask is None else split_mask(key_mask, dilation).movedim(-1, -3)
    if attn_mask is not None:
        attn_mask = _mask(attn_mask, length, keys, front, dilation)
    q = pad(q, (0, 0, front, 0)) if symbolic() or front else q
    strided = (split(x, dilation).movedim(-2, -4) for x in (q, k, v))  # (..., dilation, H, n, E)
    out = attend(*strided, key_mask=visible, attn_mask=attn_mask)
    out = join(out.movedim(-4, -2), front + length)
    return out[..., front:, :] if symbolic() or front else out


def by_heads(
    attend: Attend,
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads keys width"],
    v: Float[Tensor, "*batch heads keys values"],
    *,
    dilations: tuple[int, ...],
    key_mask: Bool[Tensor, "*#batch2 1 keys"] | None,
    attn_mask: Tensor | None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """``attend`` with ``dilation``, for head h the one at h modulo their number, and its ``bias`` and ``sinks``."""
    number, heads, parts = len(dilations), q.shape[-3], []
    for first, dilation in enumerate(dilations[:heads]):
        every = slice(first, None, number)
        mask = attn_mask
        if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = mask[..., every, :, :]
        turn = (x[..., every, :, :] for x in (q, k, v))
        part = None if bias is None else partial(_of_heads, bias, every)
        own_sinks = None if sinks is None else sinks[every]
        parts.append(attend(*turn, key_mask=key_mask, attn_mask=mask, dilation=dilation, bias=part, sinks=own_sinks))
    order = [h for first in range(number) for h in range(first, heads, number)]  # the heads of the parts
    places = sorted(range(heads), key=order.__getitem__)
    return torch.cat(parts, -3)[..., places, :, :]


def _of_heads(bias: Positions, chosen: slice, offsets: Tensor) -> Terms:
    return bias(offsets).of_heads(chosen)


def _mask(attn_mask: Tensor, length: int, keys: int, front: int, dilation: int) -> Tensor:
    """Mask of each dilated sequence from one of every query for every key: (..., dilation, #heads, n, m)."""
    full = attn_mask.expand(*attn_mask.shape[:-2], length, keys)
    full = pad(full, (0, 0, front, 0)) if attn_mask.ndim > 2 else pad(full, (0, 0, front, 0))[None]
    return split_row(split(full, dilation), dilation).diagonal(dim1=-3, dim2=-1).movedim(-1, -4)


def local_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    *,
    window: int | tuple[int, int] = 128,
    dilation: int | tuple[int, ...] = 1,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Positions | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """Softmax over the keys j with ``i - left <= j <= i + right``, both ends included; causal: ``right = 0``.

    ``window`` is (left, right), or one number for both. With S keys and L queries, i counts from S - L. O(n w d) time,
    O(n w) memory; a window over everything is softmax attention.
    With ``dilation`` the keys are ``i + m dilation`` for ``-left <= m <= right`` (arXiv 2004.05150, section 3.1); of
    several, head h takes the one at h modulo their number, and q, k and v are (..., H, L, E). ``bias`` gives what
    scores gain by offsets j - i, as ``engine.offsets`` has them; the exponentials of ``sinks`` (H,) add to normalisers.
    """
    m = Local(window, dilation=dilation) if symbolic() else _checked(window, dilation=dilation)
    if dilation != 1:
        run = partial(local_attention, window=window, is_causal=is_causal, dropout=dropout, scale=scale)
        if isinstance(dilation, tuple):
            return by_heads(
                run, q, k, v, dilations=dilation, key_mask=key_mask, attn_mask=attn_mask, bias=bias, sinks=sinks
            )
        run = partial(run, sinks=sinks)
        run = run if bias is None else partial(run, bias=lambda steps: bias(steps * dilation))
        return dilated(run, q, k, v, dilation=dilation, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask)
    left, right = m.sides
    return banded.attend(
        q, k, v, left=left, right=right, size=1, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask,
        dropout=dropout, scale=scale, bias=bias, sinks=sinks,
    )  # fmt: skip


TRAITS = Traits(
    paper="Beltagy et al. 2020, arXiv 2004.05150 (window); Kitaev et al. 2020, arXiv 2001.04451 (blocks)",
    formula="softmax over j in [i - left, i + right] of q_i k_j^T / sqrt(d), times v",
    cost="n w d",
    complexity_exponent=1.0,
    gpu=FLEX,
    causal=True,
    padding=True,
    cross=True,
    mask=True,
    rotary=True,
    memory="window",
    approximates="Softmax",
)


class NearKeys(BiasMixin, MaskedAttention[Any, KVCache]):  # type: ignore[reportIncompatibleVariableOverride]
    """Softmax over keys near the query, beyond which decoding keeps none."""

    scale: float | None
    dilation: int | tuple[int, ...] = 1

    @property
    @abstractmethod
    def reach(self) -> tuple[int, int, int]:
        """How many blocks before and after its own a query sees, and their tokens; 1: a window around the query."""

    @property
    def shares_cache(self) -> bool:  # type: ignore[override]
        """Whether all heads see the same."""
        return self.is_plain and isinstance(self.dilation, int)

    def covers(self, length: int, keys: int, *, is_causal: bool) -> bool:
        """Whether every one of ``length`` queries sees all ``keys``, as far as it may."""
        before, after, size = self.reach
        final = (keys - 1) // size
        near = before >= final and (is_causal or after >= final - (keys - length) // size)
        return near and self.dilation == 1

    def leaving(self, keys: int) -> int:
        """How many of the first of ``keys`` tokens, whole blocks, no later token sees.

        A state begins where a block begins, so that blocks are counted from its first key.
        """
        before, _, size = self.reach
        return max(keys // size - before, 0) * size

    def key_range(self, first: int, end: int) -> tuple[int, int]:
        """The positions of the first key that queries ``first`` to ``end - 1`` see, and of the one behind the last."""
        before, after, size = self.reach
        return (first // size - before) * size, ((end - 1) // size + after + 1) * size

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, state: KVCache | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, KVCache]:
        """Attend to near keys before the new tokens and to these; keep the tokens that later ones may see."""
        near = append(state, k, v, key_mask)
        out = viewed(partial(self.attend, w=w, is_causal=True), q, near.k, near.v, key_mask=near.visible)
        total = near.k.shape[-2]
        return out, last(near, total - self.leaving(total))

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """By FlexAttention, on a GPU; blocks are counted from every sequence's first token."""
        if self.dilation != 1 or not self.is_plain:
            return None
        before, after, size = self.reach
        after = patterns.CAUSAL if is_causal else after
        return patterns.attend_packed(q, k, v, lengths, before, after, key_mask, scale=self.scale, size=size)


@dataclass(frozen=True, repr=False)
class Local(NearKeys):
    """A sliding window: query i sees the keys from i - left to i + right.

    Args:
        window: Positions before and after the query that it sees, (left, right) or one number for both, itself not
            counted. With is_causal=True nothing after it is seen, whatever ``right`` says.
        scale: Factor on the dot products; None means 1/sqrt(width).
        dilation: Steps between the positions that are seen: with 4 every fourth one, and as many keys reach four times
            as far. Several, such as (1, 4), for as many heads in turn: head 0 takes the first, head 1 the second.
        bias: What scores gain by the distance of query and key: ``ALiBi()``, ``T5Buckets()`` or ``TransformerXL()``.
        sinks: Whether every head has a learned score more, of no value, that takes weight from all keys (gpt-oss).
    """

    window: int | tuple[int, int] = 128
    scale: float | None = None
    dilation: int | tuple[int, ...] = 1
    bias: Bias | None = None
    sinks: bool = False

    base_traits = TRAITS

    def __post_init__(self) -> None:
        """Check the settings."""
        pair = self.window if isinstance(self.window, tuple) else (self.window, self.window)
        if len(pair) != 2 or not all(isinstance(side, int) and side >= 0 for side in pair):
            raise ValueError(f"Local(window={self.window!r}): window must be a number >= 0 or a pair (left, right)")
        dilations = self.dilation if isinstance(self.dilation, tuple) else (self.dilation,)
        if not dilations or not all(isinstance(each, int) and each >= 1 for each in dilations):
            raise ValueError(
                f"Local(dilation={self.dilation!r}): dilation must be a number >= 1, or several (1, 4, 16)"
            )

    @property
    def sides(self) -> tuple[int, int]:
        """How many positions before and after the query the first and the last key stand that it sees."""
        left, right = self.window if isinstance(self.window, tuple) else (self.window, self.window)
        most = max(self.dilation) if isinstance(self.dilation, tuple) else self.dilation
        return left * most, right * most

    @property
    def reach(self) -> tuple[int, int, int]:
        """The sides of the window, which is counted in tokens."""
        return *self.sides, 1

    def of_heads(self, first: int, number: int, heads: int) -> Local:
        """The window of ``number`` heads from ``first`` on, of ``heads``: its first dilation is that head's."""
        if not isinstance(self.dilation, tuple):
            return self
        first %= len(self.dilation)
        return replace(self, dilation=self.dilation[first:] + self.dilation[:first])

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any,
        *, is_causal: bool, key_mask: Tensor | None, attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """Softmax inside the window under any mask."""
        q, bias = self.positions(q, w, self.scale)
        if self.dilation == 1:
            left, right = self.sides
            return banded.attend(
                q, k, v, left=left, right=right, size=1, is_causal=is_causal, key_mask=key_mask, attn_mask=attn_mask,
                dropout=dropout, scale=self.scale, bias=bias, sinks=self.sinks_of(w),
            )  # fmt: skip
        return local_attention(
            q, k, v, window=self.window, dilation=self.dilation, is_causal=is_causal, key_mask=key_mask,
            attn_mask=attn_mask, dropout=dropout, scale=self.scale, bias=bias, sinks=self.sinks_of(w),
        )  # fmt: skip


_checked = lru_cache(256)(Local)  # compilers do not take a cache
