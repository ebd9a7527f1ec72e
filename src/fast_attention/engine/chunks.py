"""Cuts long sequences into chunks that stay in a core's cache: running sums, and gradients of one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine.scan import accumulate_

NUMBERS = 1 << 18  # per chunk and tensor: a megabyte in float32, half of it a core's
TOKENS = 128  # at least, so that scans inside a chunk have rows to walk side by side


def chunks(x: Float[Tensor, "*batch length width"]) -> list[slice]:
    """Slices of the sequence axis that hold about ``NUMBERS`` numbers each."""
    length = x.shape[-2]
    size = max(TOKENS, NUMBERS * length // max(x.numel(), 1))
    return chunks_of(size, length)


def chunks_of(size: int, length: int) -> list[slice]:
    """Slices of ``size`` tokens, the last one with what remains."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def visible_counts(
    key_mask: Bool[Tensor, "*#batch2 keys"] | None, like: Float[Tensor, "*batch keys width"], *, is_causal: bool
) -> Float[Tensor, "*#batch2 rows 1"]:
    """Keys that may be seen: all of them, one row, or for every token those up to it."""
    if key_mask is None:
        length = like.shape[-2]
        numbers = torch.arange(1 if is_causal else length, length + 1, device=like.device)
    else:
        numbers = key_mask.cumsum(-1) if is_causal else key_mask.sum(-1, keepdim=True)
    return numbers[..., None].to(like)


def first_visible(
    x: Float[Tensor, "*batch keys width"], key_mask: Bool[Tensor, "*#batch2 keys"] | None
) -> Float[Tensor, "*batch 1 width"]:
    """The row of the first key that may be seen, the first row where there is none."""
    if key_mask is None:
        return x[..., :1, :]
    position = key_mask.to(torch.int8).argmax(-1, keepdim=True)[..., None]
    return x.gather(-2, position.expand(*x.shape[:-2], 1, x.shape[-1]))


class RunningSum:
    """A sum over chunks, carried in float64, so that none of them is lost."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, *terms: Float[Tensor, "*batch length #width"]) -> None:
        """Add the sums over a chunk of terms that stand side by side."""
        sums = [x.sum(-2, keepdim=True) for x in terms]
        part = (sums[0] if len(sums) == 1 else torch.cat(sums, -1)).double()
        self._sum = part if self._sum is None else self._sum.add_(part)

    def carry_(self, x: Float[Tensor, "*batch length width"], *, backwards: bool = False) -> Tensor:
        """Turn ``x`` into its prefix sums (``backwards``: suffix sums) behind all chunks before; returns those."""
        edge = x[..., -1:, :] if backwards else x[..., :1, :]
        before = torch.zeros_like(edge) if self._sum is None else self._sum.to(x.dtype, copy=True)
        self.add(x)
        edge.add_(before)
        accumulate_(x, backwards=backwards)
        return before

    def row(self, like: Tensor) -> Float[Tensor, "*batch 1 width"]:
        """The sum in the dtype of ``like``."""
        assert self._sum is not None
        return self._sum.to(like.dtype, copy=True)


def vjp(function: Callable[[Tensor], Any], z: Tensor) -> tuple[Any, Callable[..., Tensor]]:
    """``function(z)`` and its pullback: the gradient with respect to z from those of the result (or results)."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        y = function(z)

    def pullback(*gradients: Tensor) -> Tensor:
        outputs = y if isinstance(y, tuple) else (y,)
        return torch.autograd.grad(outputs, z, gradients)[0]

    return (tuple(part.detach() for part in y) if isinstance(y, tuple) else y.detach()), pullback


def sum_to_width(x: Float[Tensor, "*batch length width"], width: int) -> Tensor:
    """Summed over the channels where one weight served them all."""
    return x.sum(-1, keepdim=True) if width == 1 and x.shape[-1] > 1 else x
