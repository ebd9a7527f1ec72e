"""Attention by features in the compiled core: one call there, one back (``core/source/features.h``).

Maps that take every number by itself, and exponentials of random features, are computed inside; features of any other
map are made before, and taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import core
from fast_attention.engine import operation, trace
from fast_attention.engine.heads import short
from fast_attention.engine.operation import Fast, Operation
from fast_attention.engine.precision import widen
from fast_attention.feature_maps.feature_map import FeatureMap
from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu

SECTION = 256  # tokens of one item of work
NUMBERS = {EluPlusOne: 0, Relu: 1, Identity: 2}  # of maps inside
EXPONENTIAL = 3
Arguments = tuple[Tensor | None, ...]  # q, k, v, key mask; rows of queries and of keys, bias; a state's three tensors


class OutOfRangeError(ArithmeticError):
    """Sums left the range of float32."""


def obstacle(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> str:
    """Why the core cannot take a call; empty where it can. ``others``: weights and states, in float32."""
    if why := operation.obstacle(q, k, v, even=True):
        return why
    if q.dtype not in operation.HALVES_AND_SINGLE or any(x is not None and x.dtype != torch.float32 for x in others):
        return "more than 32 bits"
    return core.unavailable()


def few(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why plain sums serve a call without states as well: many short sequences; empty where the core is to be taken."""
    return "many short sequences, whose pairs are less than a state of each" if short(q, k, v) else ""


def rule(plain: Callable[..., Any]) -> Operation:
    """The core's passes beside a plain form, ``(*arguments, map, eps, is_causal, advances) -> outputs``.

    ``map`` is a feature map inside, or None for exponentials. With ``advances`` a call is behind a state and has the
    state after it; without, it has outputs only. In 16 bits the plain form has wide arguments.
    """

    def wide(q: Tensor, *others: Tensor | None, **settings: Any) -> Any:
        out = plain(*widen((q, *others)), **settings)
        return (out[0].to(q.dtype), *out[1:]) if isinstance(out, tuple) else out.to(q.dtype)

    return Operation(wide, cpu=Fast(_forward, _backward))


def attend(rule: Operation, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, **settings: Any) -> Tensor:
    """Outputs of a call without states; causal queries are the last of the sequence, and those before it see nothing.

    Raises:
        OutOfRangeError: Not all of them are finite.
    """
    extra = q.shape[-2] - k.shape[-2] if settings["is_causal"] else 0
    why = "causal" if settings["is_causal"] else "every query sees every key"
    trace.record("compiled core, sums over sections", why, section=SECTION)
    out = rule(q[..., max(extra, 0) :, :], k, v, *others, None, None, None, advances=False, **settings)
    return F.pad(out, (0, 0, extra, 0)) if extra > 0 else out


def advance(rule: Operation, *arguments: Tensor | None, **settings: Any) -> tuple[Tensor, ...]:
    """Causal outputs of new tokens, and the state after them: kv (..., C, Ev), k (..., C) and log scales (..., C).

    Raises:
        OutOfRangeError: Not all outputs are finite.
    """
    trace.record("compiled core, sums over sections", "behind a state", section=SECTION)
    return rule(*arguments, is_causal=True, advances=True, **settings)


def _heads(x: Tensor, axes: int = 4) -> Tensor:
    """With two leading sizes, and the numbers of a token side by side."""
    lead = x.ndim - axes + 2
    if lead != 2:
        x = x.reshape(-1, *x.shape[lead - 1 :]) if lead > 2 else x[(None,) * (2 - lead)]
    return x if x.stride(-1) == 1 or (x.shape[-1] == 1 and x.is_contiguous()) else x.contiguous()


def _call(arguments: Arguments, number: int, offset: float, eps: float, is_causal: bool) -> list[Any]:
    """What both passes are given."""
    q, k, v, key_mask, rows, key_rows, bias, kv, z, log_scale = arguments
    assert q is not None
    assert k is not None
    assert v is not None
    mask = None if key_mask is None else _heads(key_mask.expand(k.shape[:-1]), 3).view(torch.uint8)
    lead = q.shape[:-2]
    weights = [None if x is None else _heads(x.expand(*lead, *x.shape[-2:])) for x in (rows, key_rows, bias)]
    weights[2] = None if weights[2] is None else weights[2][..., 0, :]
    state = [None if x is None else x.contiguous() for x in (kv, z, log_scale if number == EXPONENTIAL else None)]
    return [_heads(q), _heads(k), _heads(v), mask, *weights, *state, number, offset, eps, is_causal]


def _number(map: FeatureMap | None) -> tuple[int, float]:
    return (EXPONENTIAL, 0.0) if map is None else (NUMBERS[type(map)], getattr(map, "offset", 0.0))


def _sections(tokens: int) -> int:
    return -(-tokens // SECTION)


def _memory(x: Tensor, lead: int, sections: int, features: int, values: int) -> Tensor:
    """Sums before each of some sections, and after the last."""
    padded = -(-features // 32) * 32
    return x.new_empty(lead * (sections + 1) * padded * (-(-values // 32) * 32 + 2), dtype=torch.float32)


def _sizes(call: list[Any]) -> tuple[int, int, int, int]:
    """Heads of all sequences, sections of queries, sections of keys, and features."""
    (q, k), rows, is_causal = call[:2], call[4], call[13]
    queries = _sections(q.shape[2])
    keys = _sections(k.shape[2] - q.shape[2]) + queries if is_causal else _sections(k.shape[2])
    return q.shape[0] * q.shape[1], queries, keys, q.shape[3] if rows is None else rows.shape[2]


def _forward(
    *arguments: Tensor | None,
    keep: bool,
    map: FeatureMap | None,
    eps: float,
    is_causal: bool,
    advances: bool,
) -> tuple[Any, tuple[Tensor, ...]]:
    number, offset = _number(map)
    call = _call(arguments, number, offset, eps, is_causal)
    q, v = arguments[0], arguments[2]
    assert q is not None
    assert v is not None
    lead, _, keys, features = _sizes(call)
    # the gradient of a denominator would lose its digits with an output in 16 bits
    out = q.new_empty((*call[0].shape[:-1], v.shape[-1]), dtype=torch.float32 if keep else q.dtype)
    planes = 2 if number == EXPONENTIAL else 1
    denominators = q.new_empty(planes * lead * q.shape[-2], dtype=torch.float32)
    states, last = _memory(q, lead, keys, features, v.shape[-1]), [None] * 3
    if advances:
        shape = (*q.shape[:-2], features)
        last = [out.new_empty(*shape, v.shape[-1], dtype=torch.float32), *out.new_empty(2, *shape, dtype=torch.float32)]
        if number != EXPONENTIAL:
            last[2].zero_()
    finite = torch.ops.fast_attention_core.features_forward(*call, out, denominators, states, *last)
    if not finite:
        raise OutOfRangeError
    outputs = out.to(q.dtype).view(*q.shape[:-1], v.shape[-1])
    return ((outputs, *last) if advances else outputs), ((out, denominators, states) if keep else ())


def _backward(
    inputs: Arguments, outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    *, map: FeatureMap | None, eps: float, is_causal: bool, advances: bool,
) -> Arguments:  # fmt: skip
    number, offset = _number(map)
    call = _call(inputs, number, offset, eps, is_causal)
    lead, queries, keys, features = _sizes(call)
    (q, k, v), (rows, key_rows, bias) = call[:3], inputs[4:7]
    d_state: list[Tensor | None] = [x.contiguous() for x in gradients[1:3]] if advances else [None, None]
    # a compiler's tensors may overlap, a gradient's must not
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    d_first = [None if x is None else x.new_empty(x.shape) for x in inputs[7:9]]
    wanted = [x is not None and x.requires_grad for x in (rows, key_rows, bias)]
    width, padded = -(-q.shape[3] // 32) * 32, -(-features // 32) * 32
    places = [(queries, features, width), (keys, features, width), (queries + keys, padded)]
    learned = [
        q.new_zeros(*q.shape[:2], *place, dtype=torch.float32) if want else None
        for want, place in zip(wanted, places, strict=True)
    ]
    torch.ops.fast_attention_core.features_backward(
        *call, *kept, _heads(gradients[0]), *d_state, *grads, _memory(q, lead, queries, features, v.shape[-1]),
        *d_first, *learned,
    )  # fmt: skip
    d_weights: list[Tensor | None] = []
    for part, like in zip(learned, (rows, key_rows, bias), strict=True):
        if part is None or like is None:
            d_weights.append(None)
            continue
        whole = part.sum(2).view(*inputs[0].shape[:-2], *part.shape[3:])  # type: ignore[union-attr]
        whole = whole[..., None, : like.shape[-1]] if part.ndim == 4 else whole[..., : like.shape[-1]]
        d_weights.append(whole.sum_to_size(like.shape))
    shaped = [x.view(like.shape) for x, like in zip(grads, inputs[:3], strict=True)]  # type: ignore[union-attr]
    return *shaped, None, *d_weights, *d_first, None
