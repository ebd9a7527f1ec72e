"""Exact attention with scores that depend on positions, too: some queries against all keys, in tiles.

Exact attention whose scores gain a number for each offset, by torch's flash kernel without a mask of every pair.

In a block of queries in reverse order row r and column c have the offset number ``c + r`` and some: so the kernel's
additive mask is a view of the numbers themselves, in which rows overlap, and takes no memory. Keys that a ``key_mask``
hides get a channel more, of which all queries hold a one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks, offsets, tiles, trace
from fast_attention.engine.fused import biased_attention, flash_backward, flash_forward, takes_flash
from fast_attention.engine.offsets import Positions, Terms
from fast_attention.engine.operation import Fast, Operation, Tensors, like_queries
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tiles import shares, sink_gradient


def relative_attention(
    q: Float[Tensor, "*batch heads length width"],
    k: Float[Tensor, "*batch heads keys width"],
    v: Float[Tensor, "*batch heads keys values"],
    positions: Positions | None,
    sinks: Float[Tensor, "heads"] | None = None,
    *,
    is_causal: bool = False,
    key_mask: Bool[Tensor, "*#batch2 keys"] | None = None,
    attn_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "*batch heads length values"]:
    """``softmax(scale Q K^T + bias + mask) V`` with the bias of every offset; a query that sees nothing gets zeros.

    With ``sinks`` every normaliser is larger by ``e^sink``. The compiled core and torch's flash kernel hold a tile of
    scores at a time. All of them are held under an ``attn_mask``, with dropout, or where code is traced.
    """
    length, keys = q.shape[-2], k.shape[-2]
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    terms = offsets.between(positions, 1 - keys, length + keys - 1, q)
    if attn_mask is None and dropout == 0.0:
        return _relative(q, k, v, key_mask, *terms, sinks, is_causal=is_causal, scale=factor)
    trace.record("all scores at once", "positions or sinks add to them, under an attn_mask or with dropout")
    masked = {"attn_mask": attn_mask, "dropout": dropout}
    return _plain(q, k, v, key_mask, *terms, sinks, is_causal=is_causal, scale=factor, **masked)


BLOCK_ROWS, PARTS = 768, 8  # at least so many queries of a causal block, or as many as make so many blocks


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> str:
    """Why the kernel does not serve scores with numbers; empty where it does."""
    if is_causal and q.shape[-2] > k.shape[-2]:
        return "queries before the first key"
    if scale < 1e-6:
        return "a scale that loses the channel of masked keys"
    flat = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    return "" if takes_flash(*flat, scale=scale) else "sizes that differ"


class Inputs(NamedTuple):
    """Tensors that the kernel reads, with one axis before the heads."""

    q: Float[Tensor, "batch heads length channels"]
    k: Float[Tensor, "batch heads keys channels"]
    v: Float[Tensor, "batch heads keys channels"]
    numbers: Float[Tensor, "heads offsets"]  # minus infinity where causality hides
    sees: Bool[Tensor, "batch length"] | None  # whether a query sees any key; None: all do
    is_causal: bool
    scale: float

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor, *, is_causal: bool, scale: float
    ) -> Inputs:
        """From tensors with any axes; ``numbers`` are those of all offsets, those of the last query first."""
        batch_shape, keys, sees = q.shape[:-2], k.shape[-2], None
        numbers = numbers.detach().to(q.dtype)
        if is_causal:
            numbers = numbers.index_fill(1, torch.arange(keys, numbers.shape[1], device=q.device), float("-inf"))
        if key_mask is not None and not bool(key_mask.all()):
            visible = key_mask.expand(*batch_shape, keys)
            counts = visible.cumsum(-1)
            ends = (
                counts[..., keys - q.shape[-2] :] if is_causal else counts[..., -1:].expand(*batch_shape, q.shape[-2])
            )
            sees = ends > 0
            hidden = max(torch.finfo(q.dtype).min / 4 / scale, torch.finfo(q.dtype).min)
            channel = torch.zeros_like(k[..., :1]).masked_fill_(~visible[..., None], hidden)
            k = torch.cat([k.masked_fill(~visible[..., None], 0.0), channel], -1)
            q, v = F.pad(q, (0, 1), value=1.0), F.pad(v.masked_fill(~visible[..., None], 0.0), (0, 1))
            sees = sees.reshape(-1, *sees.shape[-2:])
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
        return Inputs(q, k, v, numbers, sees, is_causal, scale)

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks of queries, the keys that they may see, and what is added to their scores in reverse order."""
        length, keys, heads = self.q.shape[-2], self.k.shape[-2], self.q.shape[-3]
        rows, stride = max(BLOCK_ROWS, -(-length // PARTS)) if self.is_causal else length, self.numbers.stride(0)
        for first in range(0, length, rows):
            last = min(first + rows, length)
            end = last + keys - length if self.is_causal else keys
            sizes, start = (1, heads, last - first, end), self.numbers.storage_offset() + length - last
            yield slice(first, last), slice(0, end), self.numbers.as_strided(sizes, (0, stride, 1, 1), start)


def forward(x: Inputs, sinks: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Outputs (batch, heads, length, width), and the logarithms of normalisers (batch, heads, length)."""
    out, logs = x.q.new_empty(*x.q.shape[:-1], width), x.q.new_empty(x.q.shape[:-1])
    for rows, keys, added in x.blocks():
        inputs = x.q[..., rows, :].flip(-2), x.k[..., keys, :], x.v[..., keys, :]
        part, (log_sums,) = flash_forward(*inputs, added, keep=True, is_causal=False, scale=x.scale)
        out[..., rows, :], logs[..., rows] = part[..., :width].flip(-2), log_sums.flip(-1)
    if x.sees is not None:
        out.masked_fill_(~x.sees[..., None], 0.0)
    if sinks is not None:
        out.mul_(shares(logs, sinks[:, None])[..., None])
        logs = torch.logaddexp(logs, sinks[:, None].to(logs.dtype))
    return out, logs


def backward(
    x: Inputs, out: Tensor, logs: Tensor, gradient: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values and sinks, as ``x`` holds them, with the channel of masked keys."""
    d_sinks = None if sinks is None else sink_gradient(sinks, logs, gradient, out)
    gradient = gradient if x.sees is None else gradient.masked_fill(~x.sees[..., None], 0.0)
    out, gradient = (F.pad(y, (0, x.v.shape[-1] - y.shape[-1])) for y in (out, gradient))
    dq, dk, dv = (torch.zeros_like(y) for y in x[:3])
    for rows, keys, added in x.blocks():
        inputs = x.q[..., rows, :].flip(-2), x.k[..., keys, :], x.v[..., keys, :], added
        outputs, saved, grad_out = out[..., rows, :].flip(-2), logs[..., rows].flip(-1), gradient[..., rows, :].flip(-2)
        parts = flash_backward(inputs, (outputs,), (saved,), (grad_out,), is_causal=False, scale=x.scale)
        for total, where, part in ((dq, rows, parts[0]), (dk, keys, parts[1]), (dv, keys, parts[2])):
            assert part is not None
            total[..., where, :] += part.flip(-2) if total is dq else part
    return dq, dk, dv, d_sinks


@in_float32
def _plain(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, *, is_causal: bool, scale: float, first: int = 0, attn_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Relative attention by all scores at once; ``first`` belongs to the terms, which are those of all offsets."""
    length, keys = q.shape[-2], k.shape[-2]
    bias = None if numbers is None else offsets.scores(q, Terms(numbers, vectors), keys, scale=scale).to(q.dtype)
    mask = masks.visible(length, keys, is_causal=is_causal, key_mask=key_mask, device=q.device)
    if attn_mask is not None:
        mask = masks.merge(attn_mask, mask, q.dtype)
    if mask is not None and bias is not None:
        mask = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask
    return biased_attention(q, k, v, bias if mask is None else mask, dropout=dropout, scale=scale, sinks=sinks)


def _plan(q: Tensor, k: Tensor, *, is_causal: bool) -> tiles.Plan:
    return tiles.every_key(q.shape[-2], k.shape[-2], is_causal)


_compiled = tiles.operation(_plain, _plan)


def _plain_numbers(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor, sinks: Tensor | None,
    *, is_causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    return _plain(q, k, v, key_mask, numbers, None, sinks, is_causal=is_causal, scale=scale)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor, sinks: Tensor | None,
    *, keep: bool, is_causal: bool, scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    x = Inputs.of(q, k, v, key_mask, numbers, is_causal=is_causal, scale=scale)
    out, logs = forward(x, sinks, v.shape[-1])
    return out.view(*q.shape[:-1], v.shape[-1]), (logs,) if keep else ()


def _flash_backward(
    inputs: tuple[Any, ...], outputs: Tensors, saved: tuple[Tensor, ...], gradient: tuple[Tensor, ...],
    *, is_causal: bool, scale: float,
) -> Tensors:  # fmt: skip
    q, k, v, key_mask, numbers, sinks = inputs
    x = Inputs.of(q, k, v, key_mask, numbers, is_causal=is_causal, scale=scale)
    assert outputs[0] is not None
    out, grad = (y.reshape(-1, *y.shape[-3:]) for y in (outputs[0], gradient[0]))
    *gradients, d_sinks = backward(x, out, saved[0], grad, sinks)
    dq, dk, dv = (g[..., : y.shape[-1]].reshape(y.shape) for g, y in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv, None, None, d_sinks


_flash = Operation(_plain_numbers, cpu=Fast(_flash_forward, _flash_backward), compute=torch.float32)


def _serves(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, *, is_causal: bool, scale: float,
) -> str:  # fmt: skip
    """Why neither the core nor the flash kernel serves."""
    why = tiles.against(q, k, v)
    alone = numbers is not None and vectors is None and not numbers.requires_grad  # the kernel gives a mask no gradient
    return "" if why and alone and not unsupported_reason(q, k, v, is_causal=is_causal, scale=scale) else why


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, numbers: Tensor | None, vectors: Tensor | None,
    sinks: Tensor | None, *, is_causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    settings: Any = {"is_causal": is_causal, "scale": scale}
    if not tiles.against(q, k, v):
        trace.record(f"{trace.CORE}: softmax in tiles", "positions or sinks add to the scores")
        return _compiled(q, k, v, key_mask, numbers, vectors, sinks, first=1 - q.shape[-2], **settings)
    trace.record("the flash kernel", "what positions add is a view of a number for each offset")
    return _flash(q, k, v, key_mask, numbers, sinks, **settings)


_relative = Operation(
    _plain, cpu=Fast(_on_cpu, None, serves=_serves), empty=like_queries, path="all scores at once"
)  # fmt: skip
