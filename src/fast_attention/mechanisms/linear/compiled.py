"""Attention by features in the compiled core: one call there, one back (``core/source/features.h``).

Maps that take every number by itself and random features are computed inside; features of any other map are made
before, and taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import core
from fast_attention.engine.heads import several
from fast_attention.engine.operation import HALVES_AND_SINGLE, NotServed
from fast_attention.engine.tiles import four_axes
from fast_attention.mechanisms.linear.core_map import EXPONENTIAL as EXPONENTIAL
from fast_attention.mechanisms.linear.core_map import TRIGONOMETRIC as TRIGONOMETRIC

SECTION = 256  # tokens of one item of work
PATH = "compiled core, sums over sections"
Arguments = tuple[Tensor | None, ...]


class Inputs(NamedTuple):
    """Tensors from which the core's features operation computes linear attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    rows: Tensor | None = None  # of queries' random features, (..., C, d)
    key_rows: Tensor | None = None
    bias: Tensor | None = None  # of exponents, (..., 1, C)
    kv: Tensor | None = None  # the three tensors of a state
    z: Tensor | None = None
    log_scale: Tensor | None = None
    log_decay: Tensor | None = None  # logarithms of decays (..., L, 1), or (..., L, C) for every feature


def serves(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Tensor | None, **settings: Any) -> str:
    """Why the core cannot take a call without a state, nor ought to; empty where it can."""
    return advances(q, k, v, key_mask, *others) or (
        "many short sequences, whose pairs are less than a state of each" if several(q, k, v) else ""
    )


def advances(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Tensor | None, **settings: Any) -> str:
    """Why the core cannot take a call behind a state; empty where it can. ``others``: weights and states."""
    for x in (q, *others):
        if x is not None and x.dtype not in HALVES_AND_SINGLE:
            return "more than 32 bits"
    return core.unavailable()


def why(*tensors: Tensor | None, is_causal: bool, **settings: Any) -> str:
    """Reason that ``explain`` gives for a call without a state."""
    if len(tensors) > 10 and tensors[10] is not None:
        return "sums that decay"
    return "causal" if is_causal else "every query sees every key"


def sizes(*tensors: Tensor | None, **settings: Any) -> dict[str, int]:
    """Sizes that ``explain`` gives for every call."""
    return {"section": SECTION}


def _call(
    inputs: Inputs, number: int, offset: float, eps: float, normalize: bool, is_causal: bool
) -> list[Any]:  # fmt: skip
    """Arguments that both passes are arguments."""
    q, k, v, key_mask, rows, key_rows, bias, kv, z, log_scale, decay = inputs
    if key_mask is not None:
        key_mask = four_axes(key_mask.contiguous().expand(k.shape[:-1])[..., None])[..., 0].view(torch.uint8)
    batch_shape = q.shape[:-2]
    weights = [None if x is None else four_axes(x.expand(*batch_shape, *x.shape[-2:])) for x in (rows, key_rows, bias)]
    weights[2] = None if weights[2] is None else weights[2][..., 0, :]
    scales = log_scale.expand_as(z) if log_scale is not None and z is not None and number >= EXPONENTIAL else None
    state = [None if x is None else x.contiguous() for x in (kv, z, scales)]
    if decay is not None:
        decay = decay.expand(*batch_shape, -1, -1)
        decay = four_axes(decay if decay.stride(-1) == 1 else decay.contiguous())
    return [*map(four_axes, (q, k, v)), key_mask, *weights, *state, decay, number, offset, eps, normalize, is_causal]


def _sections(tokens: int) -> int:
    return -(-tokens // SECTION)


def _memory(x: Tensor, heads: int, sections: int, features: int, values: int) -> Tensor:
    """Sums before each of some sections, and after the last."""
    padded = -(-features // 32) * 32
    return x.new_empty(heads * (sections + 1) * padded * (-(-values // 32) * 32 + 2), dtype=torch.float32)


def _sizes(call: list[Any]) -> tuple[int, int, int, int]:
    """Heads of all sequences, sections of queries, sections of keys, and features."""
    (q, k), rows, number, is_causal = call[:2], call[4], call[11], call[-1]
    queries = _sections(q.shape[2])
    keys = _sections(k.shape[2] - q.shape[2]) + queries if is_causal else _sections(k.shape[2])
    features = q.shape[3] if rows is None else rows.shape[2] * (2 if number == TRIGONOMETRIC else 1)
    return q.shape[0] * q.shape[1], queries, keys, features


def forward(
    q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, keep: bool, number: int, offset: float, eps: float,
    is_causal: bool, normalize: bool = True, advances: bool = False,
) -> tuple[Any, tuple[Tensor, ...]]:  # fmt: skip
    """Outputs; with ``advances`` the state after the call too: kv (..., C, Ev), k (..., C) and log scales, (..., C) of
    exponentials and (..., 1) else.

    Causal queries are the last of the sequence, and those before it see nothing. Without ``normalize`` outputs are
    numerators.

    Raises:
        NotServed: Not all outputs are finite.
    """
    front = _front(q, k, is_causal)
    call = _call(Inputs(q[..., front:, :], k, v, *others), number, offset, eps, normalize, is_causal)
    heads, _, keys, features = _sizes(call)
    # the gradient of a denominator would lose its digits with an output in 16 bits
    out = q.new_empty((*call[0].shape[:-1], v.shape[-1]), dtype=torch.float32 if keep else q.dtype)
    planes = 2 if number >= EXPONENTIAL else 1
    denominators = q.new_empty(planes * heads * (q.shape[-2] - front), dtype=torch.float32)
    states, last = _memory(q, heads, keys, features, v.shape[-1]), []
    if advances:
        shape = (*q.shape[:-2], features)
        last = [out.new_empty(*each, dtype=torch.float32) for each in ((*shape, v.shape[-1]), shape)]
        last.append(torch.empty_like(last[1]) if number >= EXPONENTIAL else torch.zeros_like(last[1][..., :1]))
    written = (*last[: 3 if number >= EXPONENTIAL else 2], None, None, None)[:3]
    finite = torch.ops.fast_attention_core.features_forward(*call, out, denominators, states, *written)
    if number == TRIGONOMETRIC and advances:
        last[2] = last[2][..., :1]
    if not finite and number < EXPONENTIAL:  # random features have scales already
        raise NotServed("outputs that are not finite in one scale")
    outputs = out.to(q.dtype).view(*q.shape[:-2], q.shape[-2] - front, v.shape[-1])
    outputs = F.pad(outputs, (0, 0, front, 0)) if front else outputs
    return ((outputs, *last) if advances else outputs), ((out, denominators, states) if keep else ())


def backward(
    arguments: Arguments, outputs: Any, saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *, number: int,
    offset: float, eps: float, is_causal: bool, normalize: bool = True, advances: bool = False,
) -> Arguments:  # fmt: skip
    """Gradients of tokens, rows, bias, state and decays."""
    whole = arguments[0]
    assert whole is not None
    front = _front(whole, arguments[1], is_causal)
    inputs = Inputs(whole[..., front:, :], *arguments[1:])  # type: ignore[arg-type]
    call = _call(inputs, number, offset, eps, normalize, is_causal)
    heads, queries, keys, features = _sizes(call)
    (q, k, v), weights = call[:3], inputs[4:7]
    d_state: list[Tensor | None] = [x.contiguous() for x in gradients[1:3]] if advances else [None, None]
    # a compiler's tensors may overlap, a gradient's must not
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    d_first = [None if x is None else x.new_empty(x.shape) for x in inputs[7:9]]
    rows, decay = 0 if call[4] is None else call[4].shape[2], call[10]
    parts = parts_of_weights(weights, q, queries, keys, rows, features)
    d_decay = None if decay is None else torch.zeros_like(decay)
    torch.ops.fast_attention_core.features_backward(
        *call, *saved, four_axes(gradients[0][..., front:, :]), *d_state, *grads,
        _memory(q, heads, queries, features, v.shape[-1]), *d_first, *parts, d_decay,
    )  # fmt: skip
    if d_decay is not None:
        d_decay = _decays(d_decay, whole, arguments[10], outputs[1:3], d_state)
    d_weights = gradients_of_weights(parts, weights, whole.shape[:-2])
    dq, dk, dv = (x.view(like.shape) for x, like in zip(grads, inputs[:3], strict=True))  # type: ignore[union-attr]
    dq = F.pad(dq, (0, 0, front, 0)) if front else dq
    return (dq, dk, dv, None, *d_weights, *d_first, None, d_decay)[: len(arguments)]


def parts_of_weights(
    weights: Sequence[Tensor | None], q: Tensor, queries: int, keys: int, rows: int, features: int
) -> list[Tensor | None]:
    """Memory for gradients of rows, rows of keys and bias, where they are wanted: a part for each section."""
    width, padded = -(-q.shape[3] // 32) * 32, -(-features // 32) * 32
    places = [(queries, rows, width), (keys, rows, width), (queries + keys, padded)]
    return [
        q.new_zeros(*q.shape[:2], *place, dtype=torch.float32) if x is not None and x.requires_grad else None
        for x, place in zip(weights, places, strict=True)
    ]


def gradients_of_weights(
    parts: list[Tensor | None], weights: Sequence[Tensor | None], batch_shape: tuple[int, ...]
) -> list[Tensor | None]:
    """The gradients of rows, rows of keys and bias from the parts of all sections."""
    gradients: list[Tensor | None] = []
    for part, like in zip(parts, weights, strict=True):
        total = None
        if part is not None and like is not None:
            total = part.sum(2).view(*batch_shape, *part.shape[3:])
            total = total[..., None, : like.shape[-1]] if part.ndim == 4 else total[..., : like.shape[-1]]
            total = total.sum_to_size(like.shape)
        gradients.append(total)
    return gradients


def _decays(d_sums: Tensor, q: Tensor, like: Tensor | None, state: Any, d_state: list[Tensor | None]) -> Tensor:
    """Gradients of decays from those of the sums of decays up to every token; the state decays with the last one."""
    assert like is not None
    total = d_sums.double().view(*q.shape[:-1], like.shape[-1])
    if d_state[0] is not None and d_state[1] is not None:
        by_feature = (d_state[0] * state[0]).sum(-1) + d_state[1] * state[1]
        total[..., -1, :] += by_feature if like.shape[-1] > 1 else by_feature.sum(-1, keepdim=True)
    return total.flip(-2).cumsum(-2).flip(-2).to(like.dtype).sum_to_size(like.shape)


def _front(q: Tensor, k: Tensor | None, is_causal: bool) -> int:
    """How many queries see nothing."""
    return max(q.shape[-2] - k.shape[-2], 0) if is_causal and k is not None else 0
