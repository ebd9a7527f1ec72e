"""Multiplies matrices over tokens: in one product, and lower triangles in blocks of rows, which is half the work."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fast_attention.engine import operation, trace
from fast_attention.engine.chunks import chunks_of
from fast_attention.engine.heads import short
from fast_attention.engine.operation import Fast, Operation

BLOCK = 256  # rows: the triangle on the diagonal is multiplied whole


def affine(
    W: Float[Tensor, "rows length"], x: Float[Tensor, "*batch length width"], b: Float[Tensor, "rows"]
) -> Float[Tensor, "*batch rows width"]:
    """``W x + b`` along the tokens, in one pass over the result.

    One product for each sequence, so that W has no gradient per sequence to be summed; short sequences are one call.
    """
    trace.record("one product over all tokens", "every token is mixed from all", tokens=W.shape[1], rows=W.shape[0])
    flat = x.reshape(-1, *x.shape[-2:])
    if operation.unsupported_reason(W, x) or short(x[..., None, :, :]):
        out = torch.baddbmm(b[:, None], W.expand(flat.shape[0], -1, -1), flat)
    else:
        out = torch.stack([torch.addmm(b[:, None], W, tokens) for tokens in flat])
    return out.reshape(*x.shape[:-2], *out.shape[-2:])


def triangle(
    W: Float[Tensor, "length length"], x: Float[Tensor, "*batch length width"]
) -> Float[Tensor, "*batch length width"]:
    """``tril(W) x``: token i is mixed out of tokens up to i."""
    return W.tril() @ x


def _lower_forward(W: Tensor, x: Tensor, *, keep: bool) -> tuple[Tensor, tuple[()]]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for at in chunks_of(BLOCK, len(W)):
        i, j = at.start, at.stop
        diagonal = W[i:j, i:j].tril()
        for tokens, rows in zip(_sequences(x), _sequences(out), strict=True):
            torch.mm(diagonal, tokens[i:j], out=rows[i:j])
            rows[i:j].addmm_(W[i:j, :i], tokens[:i])
    return out, ()


def _lower_backward(
    inputs: tuple[Any, ...], outputs: Any, saved: Any, gradients: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    (W, x), (dW, dx) = inputs, (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs)
    for at in chunks_of(BLOCK, len(W)):
        i, j = at.start, at.stop
        weights = W[i:j, :j].tril(i)
        for tokens, grad, d_tokens in zip(*(_sequences(y) for y in (x, gradients[0], dx)), strict=True):
            dW[i:j, :j].addmm_(grad[i:j], tokens[:j].mT)
            d_tokens[:j].addmm_(weights.mT, grad[i:j])
        dW[i:j, i:j].tril_()
    return dW, dx


def _sequences(x: Tensor) -> tuple[Tensor, ...]:
    """One matrix for each sequence: views, where x allows it."""
    return x.reshape(-1, *x.shape[-2:]).unbind(0)


lower = Operation(
    triangle,
    cpu=Fast(
        _lower_forward, _lower_backward, serves=lambda W, x: "short" if W.shape[0] <= 2 * BLOCK else "",
        path="the triangle in blocks of rows", why="a row of blocks ends at the diagonal: half the work",
        sizes=lambda W, x: {"block": BLOCK},
    ),
    path="the whole triangle in one product",
)  # fmt: skip
