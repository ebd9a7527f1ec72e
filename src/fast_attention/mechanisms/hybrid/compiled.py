"""Hybrid in the compiled core, one call there and one back: near keys as tiles, sums of features outside of them, sink
tokens, joined by their normalisers (``core/source/hybrid.h``).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine import offsets, operation, tiles, trace
from fast_attention.engine.offsets import Positions
from fast_attention.engine.operation import Fast, NotServed, Operation
from fast_attention.engine.precision import widen
from fast_attention.engine.tiles import four_axes
from fast_attention.mechanisms.hybrid import reference
from fast_attention.mechanisms.linear.compiled import gradients_of_weights, parts_of_weights
from fast_attention.mechanisms.linear.core_map import EXPONENTIAL, CoreMap
from fast_attention.mechanisms.linear.kernelised import per_token
from fast_attention.mechanisms.sparse.block_local import BlockLocal

PATH = f"{trace.CORE}: near keys in tiles, far ones as sums of features"


NOT_FINITE = "outputs that are not finite"
MOST = 2**21  # sums of a head, 8 MiB, that stay in memory of the thread that makes them


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, maps: CoreMap | None) -> str:
    """Why the core cannot take a call; empty where it can."""
    if why := operation.unsupported_reason(q, k, v, even=True) or tiles.against(q, k, v):
        return why
    if maps is None:
        return "features that the core does not make"
    wide = any(x is not None and x.dtype == torch.float64 for x in maps[2:])
    return "weights of more than 32 bits" if wide else ""


def attend(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch keys width"],
    v: Float[Tensor, "*batch keys values"],
    key_mask: Bool[Tensor, "*#batch keys"] | None,
    others: Bool[Tensor, "*#batch keys"],
    sinks: Int[Tensor, "*#batch sinks"],
    near: BlockLocal,
    maps: CoreMap,
    *,
    is_causal: bool,
    bias: Positions | None,
    learned: Float[Tensor, "heads"] | None,
) -> Float[Tensor, "*batch length values"]:
    """Outputs over near keys, far ones and sink tokens at the positions ``sinks``, which ``others`` leaves out."""
    extra = max(q.shape[-2] - k.shape[-2], 0) if is_causal else 0  # queries that see nothing
    low, high = -(near.before + 1) * near.block_size + 1, (near.after + 1) * near.block_size - 1
    numbers = offsets.between(bias, low, high - low + 1, q)[0]
    batch_shape = q.shape[:-2]
    rows = (None if x is None else x.expand(*batch_shape, *x.shape[-2:]) for x in widen(maps[2:]))
    out = _HYBRID(
        q[..., extra:, :], k, v, key_mask if numbers is None else others, others, sinks, numbers, learned, *rows,
        near=near, **maps.settings, first=low + k.shape[-2] - q.shape[-2] + extra, is_causal=is_causal,
    )  # fmt: skip
    return pad(out, (0, 0, extra, 0)) if extra else out


def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, others: Tensor, position: Tensor, numbers: Tensor | None,
    learned: Tensor | None, rows: Tensor | None, key_rows: Tensor | None, bias: Tensor | None,
    *, near: BlockLocal, number: int, offset: float, first: int, is_causal: bool,
) -> Tensor:  # fmt: skip

    maps = CoreMap(number, offset, rows, key_rows, bias).maps(unbiased=True)
    sinks = reference.SinkTokens.at(position, k, v)
    return reference.attend(
        q, k, v, others, sinks, near, per_token(maps), start=k.shape[-2] - q.shape[-2], is_causal=is_causal,
        bias=_positions(numbers, near), learned_sinks=learned,
    )  # fmt: skip


def _positions(numbers: Tensor | None, near: BlockLocal) -> Positions | None:
    """Numbers of all offsets within near blocks, as a function of offsets."""
    if numbers is None:
        return None
    lowest = -(near.before + 1) * near.block_size + 1
    return lambda at: offsets.Terms(numbers[:, (at - lowest).clamp(0, numbers.shape[1] - 1)])


def _call(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, others: Tensor, position: Tensor, numbers: Tensor | None,
    learned: Tensor | None, rows: Tensor | None, key_rows: Tensor | None, bias: Tensor | None,
    *, near: BlockLocal, number: int, offset: float, first: int, is_causal: bool,
) -> list[Any]:  # fmt: skip
    """Arguments that both passes are given."""
    batch_shape, (length, keys) = q.shape[:-2], (q.shape[-2], k.shape[-2])
    masks = (
        None if x is None else four_axes(x.contiguous().expand(*batch_shape, -1)[..., None])[..., 0]
        for x in (key_mask, others, position)
    )
    seen, summed, ends = masks
    terms = (None if x is None else x.detach().float().contiguous() for x in (numbers, learned))
    weights = [None if x is None else four_axes(x) for x in (rows, key_rows, bias)]
    weights[2] = None if weights[2] is None else weights[2][..., 0, :]
    plan = tiles.blocks(length, keys, near.block_size, near.before, near.after, is_causal)
    place = [near.block_size, near.before, near.after, int(is_causal), number]
    tokens, factor = (four_axes(x) for x in (q, k, v)), float(q.shape[-1] ** -0.5)
    return [*tokens, seen, summed, ends, *terms, plan.tiles, plan.ranges, *weights, first, factor, place, offset]


class _Sizes:
    """How many blocks, sections and sums a call has, as ``interface.h`` counts them."""

    def __init__(self, call: list[Any]) -> None:
        q, k, v, rows, (block, *_, number) = *call[:3], call[10], call[15]
        self.heads, length, keys = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
        self.features = rows.shape[2] if number == EXPONENTIAL else q.shape[3]
        section = 1 if block > 128 else 8 if block < 32 else 256 // block
        queries, key_blocks = (keys - 1) // block - (keys - length) // block + 1, -(-keys // block)
        self.queries, self.keys = -(-queries // section), -(-key_blocks // section)
        padded = -(-self.features // 32) * 32
        state = self.heads * padded * (-(-v.shape[3] // 32) * 32 + 2)
        self.sums, self.gradients = (key_blocks + 2 * self.queries) * state, (queries + 2 * self.keys) * state

    def of_threads(self, numbers: int) -> bool:
        """Whether threads have memory of their own for these, a head at a time."""
        return self.heads >= 2 * torch.get_num_threads() and numbers <= self.heads * MOST


def _forward(*arguments: Any, keep: bool, **settings: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    call = _call(*arguments, **settings)
    q, v, sizes = arguments[0], arguments[2], _Sizes(call)

    def memory(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    out, sums = memory(*call[0].shape[:-1], v.shape[-1]), memory(*q.shape[:-1], 2)
    planes = 2 if call[15][4] == EXPONENTIAL else 1
    states = memory(sizes.sums) if keep or not sizes.of_threads(sizes.sums) else None
    saved = out, sums, memory(planes, sizes.heads, q.shape[-2]), states
    if not torch.ops.fast_attention_core.hybrid_forward(*call, *saved):
        raise NotServed(NOT_FINITE)
    return out.to(q.dtype).view(*q.shape[:-1], v.shape[-1]), (saved if keep else ())  # type: ignore[return-value]


def _backward(
    inputs: tuple[Any, ...], outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...], gradients: tuple[Tensor, ...],
    **settings: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    call = _call(*inputs, **settings)
    (q, k, v), sizes, gradient = call[:3], _Sizes(call), four_axes(gradients[0])
    numbers, learned, *weights = inputs[6:]

    def memory(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    dq = memory(*q.shape)
    dk, dv = (memory(*x.shape[:-1], -(-x.shape[-1] // tiles.ALIGNED) * tiles.ALIGNED) for x in (k, v))
    ends = memory(sizes.heads, sizes.queries, call[5].shape[-1], dk.shape[-1] + dv.shape[-1])
    d_numbers = None if numbers is None or not numbers.requires_grad else memory(q.shape[0], *numbers.shape).zero_()
    d_states = None if sizes.of_threads(sizes.gradients) else memory(sizes.gradients)
    parts = parts_of_weights(weights, q, sizes.queries, sizes.keys, sizes.features, sizes.features)
    torch.ops.fast_attention_core.hybrid_backward(
        *call, *saved, gradient, dq, dk, dv, ends, d_states, d_numbers, *parts
    )
    d_weights = gradients_of_weights(parts, weights, inputs[0].shape[:-2])
    d_learned = None
    if learned is not None and learned.requires_grad:
        sums = saved[1].view(*inputs[0].shape[:-1], 2)
        d_learned = tiles.sink_gradient(
            learned, tiles.log_normalisers(sums), gradients[0].float(), saved[0].view_as(gradients[0])
        )
    d_tokens = (
        dx[..., : x.shape[-1]].reshape(x.shape).to(x.dtype) for dx, x in zip((dq, dk, dv), inputs, strict=False)
    )
    d_numbers = None if d_numbers is None or numbers is None else d_numbers.sum(0).to(numbers.dtype)
    return *d_tokens, None, None, None, d_numbers, d_learned, *d_weights


_HYBRID = Operation(
    _plain,
    cpu=Fast(
        _forward, _backward, halves=True, path=PATH, why=lambda *tensors, near, **settings: f"{near!r} leaves keys out"
    ),
    compute=torch.float32,
    path="near keys exact, far ones as sums of features",
)
