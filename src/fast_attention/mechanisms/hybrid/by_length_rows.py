"""Rows of two mechanisms put together: those of ``short`` where a query sees few keys, those of ``long`` elsewhere.

What one of them need not compute is left out: causal rows by slices, whole sequences by gathering them out of the
batch. Where operations are traced and lengths are open, both compute all rows, and exact attention reads no more than
``above`` keys for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks, trace
from fast_attention.engine.tracing import exporting, traced
from fast_attention.mechanism import Attention
from fast_attention.mechanisms.dense.softmax import Softmax, softmax_attention

MISSING = 2**62  # the position of a visible key that does not exist


class Part(NamedTuple):
    """A mechanism with its weights."""

    mechanism: Attention[Any, Any]
    w: Any

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Outputs of the part."""
        return self.mechanism.attend(q, k, v, self.w, is_causal=is_causal, key_mask=key_mask)

    def last(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: int) -> Tensor:
        """Causal outputs of the part for all queries from number ``first`` on."""
        traits = self.mechanism.traits
        if not traits.cross or traits.needs_max_len:  # weights of a longest sequence count from the first query
            return self(q, k, v, is_causal=True, key_mask=key_mask)[..., first:, :]
        return self(q[..., first:, :], k, v, is_causal=True, key_mask=key_mask)


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width_of_keys"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch2 keys"] | None,
    short: Part,
    long: Part,
    *,
    above: int,
    is_causal: bool,
) -> Float[Tensor, "*batch length values"]:
    """Row i of ``short`` where query i may see at most ``above`` keys, of ``long`` elsewhere."""
    if exporting() or (key_mask is not None and k.shape[-2] > above and traced()):
        trace.record("both, and of each row one", "traced: numbers of visible keys are not known", above=above)
        return _both(q, k, v, key_mask, short, long, above=above, is_causal=is_causal)
    if k.shape[-2] <= above:
        record_short(short.mechanism, above)
        return covered(q, k, v, key_mask, short, is_causal=is_causal)
    if key_mask is None:
        return _unmasked(q, k, v, short, long, above=above, is_causal=is_causal)
    few = (key_mask.sum(-1) <= above).expand(*q.shape[:-3], 1).flatten()
    if bool(few.all()):
        return short(q, k, v, is_causal=is_causal, key_mask=key_mask)
    if not bool(few.any()):
        return _long(q, k, v, key_mask, short, long, above=above, is_causal=is_causal)
    trace.record("sequences apart by their visible keys", "some are short", short=int(few.sum()), above=above)
    batch, groups = q.shape[:-3], [x.nonzero()[:, 0] for x in (few, ~few)]
    mask = key_mask.expand(*batch, *key_mask.shape[-2:])
    (q, k, v, mask), (a, b) = (x.reshape(-1, *x.shape[len(batch) :]) for x in (q, k, v, mask)), groups
    outputs = [
        short(q[a], k[a], v[a], is_causal=is_causal, key_mask=mask[a]),
        _long(q[b], k[b], v[b], mask[b], short, long, above=above, is_causal=is_causal),
    ]
    return torch.cat(outputs)[torch.cat(groups).argsort()].unflatten(0, batch)


def record_short(short: Attention[Any, Any], above: int) -> None:
    """Record that ``short`` serves all rows."""
    trace.record(short.expression, "no more keys than above", above=above)


def covered(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, short: Part, *, is_causal: bool) -> Tensor:
    """The outputs of ``short`` for all rows.

    Exact attention with a mask is torch's own kernel, also where blocks of rows are faster: a model that was swapped
    gives the numbers that it gave, to the bit. With gradients the kernel's mask would hold a number for every pair.
    """
    if key_mask is None:
        return short(q, k, v, is_causal=is_causal, key_mask=None)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    exact = _unordered(short)
    if exact is None or traced() or wanted or bool(key_mask.all()):
        return short(q, k, v, is_causal=is_causal, key_mask=key_mask)
    length, keys = q.shape[-2], k.shape[-2]
    visible = masks.visible(length, keys, is_causal=is_causal and length > 1, key_mask=key_mask, device=q.device)
    return softmax_attention(q, k, v, attn_mask=visible, scale=exact.scale)


def _unordered(short: Part) -> Softmax | None:
    """Exact attention of dot products alone, wherever keys stand; None if it is another mechanism."""
    mechanism = short.mechanism
    return mechanism if isinstance(mechanism, Softmax) and mechanism.is_plain else None


def _unmasked(q: Tensor, k: Tensor, v: Tensor, short: Part, long: Part, *, above: int, is_causal: bool) -> Tensor:
    """More keys than ``above``, and all are visible but the later ones."""
    before = k.shape[-2] - q.shape[-2]
    if not is_causal or before >= above:
        trace.record(long.mechanism.expression, "every query sees more keys than above", above=above)
        return long(q, k, v, is_causal=is_causal, key_mask=None)
    trace.record(
        f"{short.mechanism.expression}, then {long.mechanism.expression}",
        "causal: by the query's position",
        above=above,
    )
    number = above - before
    early = short(q[..., :number, :], k[..., :above, :], v[..., :above, :], is_causal=True, key_mask=None)
    return torch.cat([early, long.last(q, k, v, None, number)], -2)


def _long(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, short: Part, long: Part, *, above: int, is_causal: bool
) -> Tensor:
    """Sequences with more than ``above`` visible keys: causal, their first rows are those of ``short``."""
    if not is_causal:
        return long(q, k, v, is_causal=False, key_mask=mask)
    few = counts(mask, q.shape[-2]) <= above
    rows = few.sum(-1)
    first, end = int(rows.min()), int(rows.max())
    if not end:
        return long(q, k, v, is_causal=True, key_mask=mask)
    keys = end + k.shape[-2] - q.shape[-2]  # negative where these queries stand before the first key
    late = long.last(q, k, v, mask, first)
    if keys <= 0:
        return F.pad(late, (0, 0, first, 0))
    early = short(q[..., :end, :], k[..., :keys, :], v[..., :keys, :], is_causal=True, key_mask=mask[..., :keys])
    between = torch.where(few[..., first:end, None], early[..., first:, :], late[..., : end - first, :])
    return torch.cat([early[..., :first, :], between, late[..., end - first :, :]], -2)


def _both(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, short: Part, long: Part, *, above: int, is_causal: bool
) -> Tensor:
    """All rows of both, one of which is taken: in operations that do not depend on how many keys are visible."""
    mask = torch.ones_like(k[..., :1, :, 0], dtype=torch.bool) if key_mask is None else key_mask
    number = counts(mask, q.shape[-2]) if is_causal else mask.sum(-1, keepdim=True)
    if (exact := _unordered(short)) is not None:
        early = _exact(q, k, v, mask, exact, above, is_causal=is_causal)
    else:
        early = short(q, k, v, is_causal=is_causal, key_mask=key_mask)
    return torch.where((number <= above)[..., None], early, long(q, k, v, is_causal=is_causal, key_mask=key_mask))


def counts(mask: Bool[Tensor, "*batch keys"], length: int) -> Int[Tensor, "*batch length"]:
    """How many of the keys each of the last ``length`` positions may see, causally."""
    number, position = mask.cumsum(-1), torch.arange(length, device=mask.device) + (mask.shape[-1] - length)
    return number[..., position.clamp(min=0)].masked_fill(position < 0, 0)


def _exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, short: Softmax, most: int, *, is_causal: bool) -> Tensor:
    """Softmax over the first ``most`` visible keys of every sequence, which are brought together."""
    keys = mask.shape[-1]
    position = torch.where(mask, torch.arange(keys, device=mask.device), MISSING)
    position = F.pad(position, (0, most), value=MISSING).sort(-1).values[..., :most]
    index = position.clamp(max=keys - 1)[..., None]
    k, v = (x.gather(-2, index.expand(*x.shape[:-2], most, x.shape[-1])) for x in (k, v))
    if not is_causal:
        return softmax_attention(q, k, v, key_mask=position < MISSING, scale=short.scale)
    visible = torch.arange(most, device=mask.device) < counts(mask, q.shape[-2])[..., None]
    return softmax_attention(q, k, v, attn_mask=visible, scale=short.scale)
