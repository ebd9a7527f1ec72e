"""Calls the kernels of pools with biases in a window: grids, strides and the memory of results.

Tensors are (B, H, n, C) with any strides but the last, which is 1; biases (H or 1, n or 1, taps) in float32.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# As in ``gpu/launching.py``.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.gpu.pointers import power, some, strides
from fast_attention.gpu.windowed import gradients, kernels

CHANNELS = {16: 32, 32: 32, 64: 16}  # that a program takes, by the tokens of its tiles
WARPS = {16: 4, 32: 8, 64: 8}
SCANNED = 32  # pools that are added up at a time
PROGRAMS = 1024  # that gradients of biases are cut into at least, where there are heads enough


def tile_of(reach: int) -> int:
    """Tokens of a tile: small where the window is."""
    return next((size for size in (16, 32) if reach <= size), 64)


class Biases(NamedTuple):
    """Biases, the largest one of every query's window, and how far below that the least weight lies."""

    band: Tensor  # (H or 1, n or 1, taps)
    shift: Tensor  # (H or 1, n or 1)
    lowest: Tensor  # ()

    @classmethod
    def of(cls, band: Tensor, *, is_causal: bool, strict: bool) -> Biases:
        """Of a band."""
        visible = band[..., : band.shape[-1] // 2 + 1] if is_causal else band
        shift, least = visible.amax(-1), visible.amin(-1)
        if not strict:
            shift, least = shift.clamp(min=0.0), least.clamp(max=0.0)
        return cls(band.contiguous(), shift.contiguous(), (least - shift).amin())

    @property
    def strides(self) -> tuple[int, ...]:
        """Of heads and positions; 0 where one serves all."""
        return tuple(x.stride(i) if x.shape[i] > 1 else 0 for x in self[:2] for i in range(2))


class Launch:
    """What all calls over one sequence share."""

    def __init__(self, x: Tensor, band: Tensor, *, is_causal: bool, strict: bool) -> None:
        """For tokens ``x`` and their biases."""
        self.batch, self.heads, self.length, self.width = x.shape
        self.reach, self.like = band.shape[-1] // 2, x
        self.size = tile_of(self.reach)
        self.blocks = -(-self.length // self.size)
        self.channels = min(max(power(self.width), 16), CHANNELS[self.size])
        self.walks = self.batch * self.heads * -(-self.width // self.channels)
        self.biases = Biases.of(band, is_causal=is_causal, strict=strict)
        self.is_causal, self.strict = is_causal, strict
        self.kind = {"CAUSAL": is_causal, "STRICT": strict}
        self.options = {"BT": self.size, "BC": self.channels, "num_warps": WARPS[self.size]}

    def pools(self) -> Tensor:
        """Memory for the pools of all tiles."""
        return self.like.new_empty((self.batch, self.heads, self.blocks, 3 * self.width), dtype=torch.float32)

    def running(self, pools: Tensor, *, before: bool, behind: bool) -> tuple[Tensor, Tensor]:
        """Pools of every tile and those before it, and of it and those behind; unread memory in place of others."""
        sides = pools.clone() if before and behind else pools, pools
        for side, asked, backwards in zip(sides, (before, behind), (False, True), strict=True):
            if asked:
                kernels.running_pools[(self.walks,)](
                    side, self.width, self.blocks, BACKWARDS=backwards, BN=SCANNED, BC=self.channels, num_warps=8
                )
        return sides

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs; if ``keep`` what rounding took of them, and the logarithms of denominators."""
        out, like = q.new_empty(q.shape), self.like
        logs = like.new_empty(q.shape if keep else (0,), dtype=torch.float32)
        rounded = keep and out.dtype != torch.float32
        rest = out.new_empty(out.shape if rounded else (0,))
        pools = q
        if not self.strict:
            pools = self.pools()
            kernels.tile_pools[(self.walks * self.blocks,)](
                k, v, some(mask, k), pools, self.heads, self.length, self.width, self.blocks, *k.stride()[:3],
                *v.stride()[:3], *strides(mask), HAS_MASK=mask is not None, **self.options,
            )  # fmt: skip
        far = (pools, pools) if self.strict else self.running(pools, before=True, behind=not self.is_causal)
        kernels.outputs[(self.walks * self.blocks,)](
            q, k, v, some(mask, q), *self.biases, *far, out, rest, logs, *self._sizes, self.blocks, *q.stride()[:3],
            *k.stride()[:3], *v.stride()[:3], *strides(mask), *self.biases.strides, HAS_MASK=mask is not None,
            LOGGED=keep, ROUNDED=rounded, **self.kind, **self.options,
        )  # fmt: skip
        return out, rest, logs

    def of_queries(
        self, q: Tensor, out: Tensor, rest: Tensor, logs: Tensor, grad: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Gradients of queries, and pools of queries before every tile of keys and behind it."""
        dq, pools = q.new_empty(q.shape), self.pools()
        gradients.of_queries[(self.walks * self.blocks,)](
            q, out, rest, grad, logs, self.biases.shift, dq, pools, self.heads, self.length, self.width, self.blocks,
            *q.stride()[:3], *grad.stride()[:3], *self.biases.strides[2:], HAS_REST=rest.numel() > 0, **self.options,
        )  # fmt: skip
        if self.strict:
            return dq, (pools, pools)
        return dq, self.running(pools, before=not self.is_causal, behind=True)

    def of_keys(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, read: tuple[Tensor, ...], far: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of keys and values; ``read``: outputs, what rounding took, gradients, logarithms."""
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        gradients.of_keys[(self.walks * self.blocks,)](
            q, k, v, some(mask, q), *self.biases, *read, *far, dk, dv, *self._sizes, self.blocks,
            *self._strides(q, k, v, mask, read[2]), HAS_REST=read[1].numel() > 0, HAS_MASK=mask is not None,
            **self.kind, **self.options,
        )  # fmt: skip
        return dk, dv

    def of_biases(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, read: tuple[Tensor, ...]
    ) -> Tensor:  # fmt: skip
        """Gradients of biases, in their shape."""
        band, near = self.biases.band, -(-self.reach // self.size)
        groups, taps = band.shape[0], band.shape[-1]
        members = self.batch * self.heads // groups
        tiles = self.blocks * (near + 1 if self.is_causal else 2 * near + 1) * groups
        parts = min(members, max(1, PROGRAMS // tiles))
        gradient = torch.zeros(parts, groups, self.length, taps, dtype=torch.float32, device=q.device)
        gradients.of_biases[(tiles * parts,)](
            q, k, v, some(mask, q), *self.biases, *read, gradient, *self._sizes, self.blocks, groups, members, parts,
            *self._strides(q, k, v, mask, read[2]), HAS_REST=read[1].numel() > 0, HAS_MASK=mask is not None,
            **self.kind, **self.options,
        )  # fmt: skip
        return gradient.sum(0).sum_to_size(band.shape)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.heads, self.length, self.width, self.reach

    def _strides(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grad: Tensor
    ) -> tuple[Any, ...]:  # fmt: skip
        of_tokens = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides(mask), *grad.stride()[:3])
        return *of_tokens, *self.biases.strides
