"""Left padding: a sequence whose first tokens ``key_mask`` hides is computed as the one that begins behind them.

Mechanisms that count positions from the first token (blocks, tables, levels) would count the padding too. None of them
knows of it: a call moves each sequence to the front and its outputs back, or is made once for all that begin alike; in
decoding, sequences that begin alike share a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.decoding import Rows
from fast_attention.engine.tracing import replaced, traced
from fast_attention.traits import Unsupported

Call = Callable[..., Any]  # of some sequences, as a mechanism is called


def begins(key_mask: Bool[Tensor, "*batch keys"]) -> Int[Tensor, "*batch"]:
    """The number of hidden tokens before each sequence's first visible one; 0 where none is visible."""
    return key_mask.to(torch.uint8).argmax(-1)


def may_begin_late(mechanism: Any, key_mask: Tensor | None, *, streams: bool = False) -> bool:
    """Whether positions count from the first token and some sequence begins behind it, as far as numbers are known.

    A sequence whose tokens are all hidden has not begun where it ``streams``.

    Raises:
        Unsupported: Positions are places in a grid.
    """
    if key_mask is None or mechanism.traits.positions == "relative" or key_mask.numel() == 0:
        return False
    if not traced():
        if key_mask.is_cpu and bool(key_mask[..., 0].all()):
            return False
        may_read_mask = key_mask.is_cpu or mechanism.traits.positions == "grid"
        if may_read_mask and not streams and not bool(begins(key_mask).any()):
            return False
    if mechanism.traits.positions == "grid":
        _refuse(mechanism, begins(key_mask), "traits.positions is 'grid', which has no shorter text")
        return False
    return True


def attend(
    mechanism: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, attn_mask: Tensor | None, *,
    is_causal: bool,
) -> Tensor:  # fmt: skip
    """Outputs of ``call(q, k, v, key_mask=, attn_mask=)``, a mechanism's, whose sequences may begin late.

    As many queries as keys are those of the same tokens. Fewer causal ones are those of the last.
    """
    batch, queries, keys = q.shape[:-3], q.shape[-2], k.shape[-2]
    mask, q, k, v = (_flat(x, batch) for x in (key_mask.expand(*batch, keys), q, k, v))
    first = begins(mask)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]) if attn_mask.ndim > 2 else attn_mask
        attn_mask = attn_mask.expand(*batch, 1, *attn_mask.shape[-2:]) if attn_mask.ndim == 2 else attn_mask
        attn_mask = _flat(attn_mask, batch)
    if queries == keys:
        out = _attend_moved(call, q, k, v, mask, attn_mask, first)
    elif not traced():
        out = _attend_alike(call, q, k, v, mask, attn_mask, first, is_causal=is_causal)
    elif is_causal:  # queries before them complete those of all keys
        more = (0, 0, keys - queries, 0)
        rows = attn_mask if attn_mask is None or attn_mask.shape[-2] == 1 else pad(attn_mask, more)
        out = _attend_moved(call, pad(q, more), k, v, mask, rows, first)
        out = pad(out, (0, 0, queries - keys, 0))
    else:
        _refuse(mechanism, first, "traced code cannot count positions of cross attention from there")
        out = call(q, k, v, key_mask=mask, attn_mask=attn_mask)
    if is_causal:  # queries in front of all keys see nothing
        positions = torch.arange(keys - queries, keys, device=q.device)
        out = out.masked_fill((positions < first[:, None])[:, None, :, None], 0.0)
    return out.reshape(*batch, *out.shape[1:])


def mix(call: Call, x: Tensor, key_mask: Tensor) -> Tensor:
    """Outputs of ``call(x, key_mask=)`` of tokens (..., N, E), whose sequences may begin late."""
    batch = x.shape[:-2]
    mask, rows = _flat(key_mask.expand(x.shape[:-1]), batch), _flat(x, batch)
    first = begins(mask)
    out = call(_rolled(rows, first), key_mask=_rolled(mask[..., None], first)[..., 0])
    return _rolled(out, -first).reshape(x.shape)


def of_function(mechanism: Any, function: Call, arguments: dict[str, Any]) -> Tensor:
    """Outputs of a pure function that computes a mechanism, with a ``key_mask`` (..., 1, S), or of x (..., S)."""
    mask, x = arguments["key_mask"], arguments["v" if "v" in arguments else "x"]
    flags = mask[..., 0, :] if "v" in arguments and x.ndim > 2 else mask
    if not may_begin_late(mechanism, flags):
        return function(**arguments)
    if "v" not in arguments:
        return mix(lambda x, *, key_mask: function(**{**arguments, "x": x, "key_mask": key_mask}), x, flags)
    names = {name for name in ("q", "k", "v", "attn_mask") if name in arguments}

    def call(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor, attn_mask: Tensor | None) -> Tensor:
        moved = {"q": q, "k": k, "v": v, "attn_mask": attn_mask}
        return function(**{**arguments, **{name: moved[name] for name in names}, "key_mask": key_mask[:, None]})

    q, k, v = (arguments[name] if x.ndim > 2 else arguments[name][None] for name in "qkv")
    pairs, is_causal = arguments.get("attn_mask"), arguments.get("is_causal", False)
    out = attend(mechanism, call, q, k, v, flags, pairs, is_causal=is_causal)
    return out if x.ndim > 2 else out[0]


def keys_to_front(k: Tensor, v: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys (..., H, S, E), values and ``key_mask`` (..., 1, S) with each sequence's padding behind its tokens."""
    batch = v.shape[:-3]
    mask = _flat(key_mask.expand(*batch, 1, v.shape[-2]), batch)
    first = begins(mask[:, 0])
    k, v, visible = (_rolled(_flat(x, batch), first) for x in (k, v, mask[..., None]))
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in (k, v, visible[..., 0]))  # type: ignore[return-value]


def _attend_moved(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, attn_mask: Tensor | None, first: Tensor
) -> Tensor:
    """Outputs where every sequence is moved to the front, its padding behind it, and back."""
    if attn_mask is not None:
        attn_mask = attn_mask if attn_mask.shape[-2] == 1 else _rolled(attn_mask, first)
        attn_mask = attn_mask if attn_mask.shape[-1] == 1 else _rolled(attn_mask.mT, first).mT
    moved = _rolled(mask[..., None], first)[..., 0]
    out = call(*(_rolled(x, first) for x in (q, k, v)), key_mask=moved, attn_mask=attn_mask)
    return _rolled(out, -first)


def _attend_alike(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, attn_mask: Tensor | None, first: Tensor, *,
    is_causal: bool,
) -> Tensor:  # fmt: skip
    """Outputs of one call for all sequences that begin alike, without the padding in front."""
    queries, keys = q.shape[-2], k.shape[-2]
    out = v.new_zeros(*q.shape[:-1], v.shape[-1])
    for begin in first.unique().tolist():
        rows = (first == begin).nonzero()[:, 0]
        start = min(max(begin - (keys - queries), 0), queries) if is_causal else 0
        pairs = None if attn_mask is None else attn_mask[rows]
        if pairs is not None:
            pairs = pairs if pairs.shape[-2] == 1 else pairs[..., start:, :]
            pairs = pairs if pairs.shape[-1] == 1 else pairs[..., begin:]
        parts = q[rows, :, start:], k[rows, :, begin:], v[rows, :, begin:]
        part = call(*parts, key_mask=mask[rows, begin:], attn_mask=pairs)
        out = out.index_put((rows,), pad(part.to(out.dtype), (0, 0, start, 0)))
    return out


def advance(
    mechanism: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Any
) -> tuple[Tensor, Any]:
    """``call(q, k, v, state, key_mask=)``, a mechanism's ``advance``, of sequences some of which begin late.

    ``state`` is None or ``Rows``; where all begin alike, the next one is the mechanism's own.
    """
    batch, number = q.shape[:-3], q.shape[-2]
    if traced():
        if state is not None or key_mask is None:
            raise Unsupported(f"{mechanism!r}: traced code cannot continue texts that begin at different tokens")
        _refuse(mechanism, torch.where(key_mask[..., 0], 0, 1), "traced code cannot count positions from there")
        return call(q, k, v, None, key_mask=key_mask[..., None, :])
    mask = torch.ones(*batch, number, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    mask, q, k, v = (_flat(x, batch) for x in (mask.expand(*batch, number), q, k, v))
    before = Rows(torch.full_like(mask[:, 0], -1, dtype=torch.long), 0, ()) if state is None else state
    starts = mask.any(-1) & (before.begin < 0)
    begin = torch.where(starts, before.length + begins(mask), before.begin)
    known, out, states = before.places(), None, []
    after = Rows(begin, before.length + number, ())
    for place in after.places():
        rows, start = (begin == place).nonzero()[:, 0], max(place - before.length, 0)
        visible = mask[rows, start:]
        part, new = call(
            q[rows, :, start:], k[rows, :, start:], v[rows, :, start:],
            before.states[known.index(place)] if place in known else None,
            key_mask=None if bool(visible.all()) else visible[:, None],
        )  # fmt: skip
        states.append(new)
        out = part.new_zeros(*q.shape[:-1], v.shape[-1]) if out is None else out
        out = out.index_put((rows,), pad(part, (0, 0, start, 0)))
    out = v.new_zeros(*q.shape[:-1], v.shape[-1]) if out is None else out
    out = out.reshape(*batch, *out.shape[1:])
    if len(states) == 1 and len(batch) == 1 and bool((begin >= 0).all()):
        return out, states[0]
    return out, replaced(after, states=tuple(states))


def _refuse(mechanism: Any, first: Tensor, why: str) -> None:
    """Raise ``Unsupported`` where a sequence begins late, or let a traced graph fail where one does."""
    words = (
        f"{mechanism!r} does not support a key_mask that hides a sequence's first tokens ({why}). What would work: "
        "padding behind its tokens"
    )
    if traced():
        torch._assert_async((first == 0).all(), words)  # pyright: ignore[reportPrivateImportUsage]
    elif bool(first.any()):
        raise Unsupported(words)


def _flat(x: Tensor, batch: torch.Size) -> Tensor:
    """Sequences along one axis, of any number of leading axes."""
    return x if len(batch) == 1 else x.reshape(-1, *x.shape[len(batch) :])


def _rolled(x: Tensor, by: Int[Tensor, "batch"]) -> Tensor:
    """Tokens (B, ..., N, E), those of each sequence moved to the front by its own number of places, around the end."""
    number = x.shape[-2]
    places = torch.arange(number, device=x.device) + by[:, None]
    places = torch.where(places < 0, places + number, places)
    places = torch.where(places < number, places, places - number)  # ONNX has no remainder by an open size
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x.movedim(-2, 1)[rows, places].movedim(1, -2)
