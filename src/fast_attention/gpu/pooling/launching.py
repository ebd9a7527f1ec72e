"""Calls the kernels of pools: grids, strides and the memory of results.

Tensors are (B, H, n, C) with any strides but the last, which is 1; pools (B, H, 3 C) in float32.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# As in ``gpu/launching.py``.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu.calls import power, some, strides
from fast_attention.gpu.pooling import gradients, kernels

CHANNELS = 64  # that a program takes
SHORTEST, LONGEST = 64, 1024  # tokens of a chunk


def _chunk(length: int) -> int:
    """About as many tokens as there are chunks, so that neither walk is long."""
    return min(max(power(math.isqrt(length)), SHORTEST), LONGEST)


class Launch:
    """The kernels over one sequence: chunks side by side, channels among programs of one warp, two channels a lane."""

    def __init__(self, x: Tensor, begins: Tensor | None = None) -> None:
        """For tokens ``x``; ``begins`` (chunks,): which chunks are the first of a packed sequence."""
        self.batch, self.heads, self.length, self.width = x.shape
        self.begins = begins
        self.size = _chunk(self.length) if begins is None else self.length // len(begins)
        self.chunks = -(-self.length // self.size)
        self.channels = min(power(self.width), CHANNELS)
        self.walks = self.batch * self.heads * -(-self.width // self.channels)
        self.like = x

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that kernels are told."""
        return self.heads, self.length, self.width, self.size, self.chunks

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for results of this batch and these heads."""
        return self.like.new_empty((self.batch, self.heads, *sizes), dtype=dtype)

    @property
    def options(self) -> dict[str, int]:
        """Constants of every kernel."""
        return {"BC": self.channels, "num_warps": 1}

    def pools(self, k: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The pools before every chunk and over all tokens, ``first`` included."""
        pools, last = self.empty(self.chunks, 3 * self.width), self.empty(3 * self.width)
        kernels.chunk_pools[(self.walks * self.chunks,)](
            k, v, some(mask, k), pools, *self.sizes, *k.stride()[:3], *v.stride()[:3], *strides(mask),
            HAS_MASK=mask is not None, **self.options,
        )  # fmt: skip
        kernels.running_pools[(self.walks,)](
            pools, some(first, pools), last, some(self.begins, pools), self.width, self.chunks,
            HAS_FIRST=first is not None, PACKED=self.begins is not None, **self.options,
        )  # fmt: skip
        return pools, last

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pools: Tensor | None, last: Tensor | None, *,
        is_causal: bool, gated: bool, keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Outputs; if ``keep`` what rounding took of them and, causal, the logarithms of denominators.

        Noncausal, keys and values are not read. ``last``: memory for the pool behind all tokens, which are one chunk.
        """
        out = self.empty(self.length, self.width, dtype=q.dtype)
        logs = self.empty(self.length, self.width) if keep and is_causal else self.empty(0)
        rounded = keep and out.dtype != torch.float32
        rest = torch.empty_like(out) if rounded else out.new_empty(0)
        kernels.outputs[(self.walks * self.chunks,)](
            q, k, v, some(mask, q), some(pools, q), out, rest, logs, some(last, q), *self.sizes, *q.stride()[:3],
            *k.stride()[:3], *v.stride()[:3], *strides(mask), CAUSAL=is_causal, GATED=gated,
            HAS_FIRST=pools is not None, HAS_MASK=mask is not None, LOGGED=keep and is_causal, ROUNDED=rounded,
            ENDS=last is not None, **self.options,
        )  # fmt: skip
        return out, rest, logs

    def of_queries(
        self, q: Tensor, out: Tensor, rest: Tensor, logs: Tensor, grad: Tensor, after: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, the sums behind every chunk, and all of them; noncausal without ``after``."""
        dq = q.new_empty(q.shape) if gated else torch.zeros_like(q)
        sums, last = self.empty(self.chunks, 3 * self.width), self.empty(3 * self.width)
        causal = after is not None
        gradients.of_queries[(self.walks * self.chunks,)](
            q, out, rest, grad, logs, sums, dq, *self.sizes, *q.stride()[:3], *grad.stride()[:3], CAUSAL=causal,
            GATED=gated, HAS_REST=rest.numel() > 0, **self.options,
        )  # fmt: skip
        gradients.running_sums[(self.walks,)](
            sums, some(after, sums), last, some(self.begins, sums), self.width, self.chunks, CAUSAL=causal,
            PACKED=self.begins is not None, **self.options,
        )  # fmt: skip
        return dq, sums, last

    def of_keys(
        self, k: Tensor, v: Tensor, mask: Tensor | None, sums: Tensor, queries: tuple[Tensor, ...] | None, *,
        gated: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of keys and values; ``queries``: what ``of_queries`` read, causal."""
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        q, out, rest, logs, grad = queries or (k, k, k, k, k)
        given: tuple[Any, ...] = q, k, v, some(mask, k), out, rest, grad, logs, sums, dk, dv
        gradients.of_keys[(self.walks * self.chunks,)](
            *given, *self.sizes, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides(mask), *grad.stride()[:3],
            CAUSAL=queries is not None, GATED=gated, HAS_REST=queries is not None and rest.numel() > 0,
            HAS_MASK=mask is not None, **self.options,
        )  # fmt: skip
        return dk, dv
