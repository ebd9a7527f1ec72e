"""Calls the kernels of scores that are sums: grids, strides and the memory of results.

Tensors are (B, H, n, C) with any strides but the last, which is 1, for scores also 0; sums (B, H, 4 C) in float32, and
(B, H, 3 C) their gradients, for the number of keys has none.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# As in ``gpu/launching.py``.

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.gpu import sums
from fast_attention.gpu.channels import Walks
from fast_attention.gpu.pointers import some, strides
from fast_attention.gpu.summing import gradients, kernels
from fast_attention.gpu.summing.plain import NOTHING, SCORES

TILE = 16  # tokens that a program takes at a time; chunks are multiples
ROWS = 1024  # numbers that a program adds up between chunks


def _step(x: Tensor) -> int:
    """From a channel to the next."""
    return 0 if x.stride(-1) == 0 else 1


class Launch(Walks):
    """The kernels over one sequence."""

    @property
    def options(self) -> dict[str, int]:
        """Constants of every kernel."""
        return {"BT": TILE, "BC": self.channels, "num_warps": 4}

    def sums(self, k: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sums before every chunk and over all tokens, ``first`` included."""
        rows = self.empty(self.chunks, 4 * self.width)
        kernels.chunk_sums[(self.walks * self.chunks,)](
            k, v, some(mask, k), rows, *self.sizes, *k.stride()[:3], *v.stride()[:3], *strides(mask), K_STEP=_step(k),
            HAS_MASK=mask is not None, **self.options,
        )  # fmt: skip
        return rows, self.running(rows, first, backwards=False)

    def running(self, rows: Tensor, first: Tensor | None, *, backwards: bool) -> Tensor:
        """Every chunk's row becomes that of ``first`` and the chunks before (behind) it; returns all of them."""
        last = rows.new_empty((self.batch, self.heads, rows.shape[-1]))
        sums.running_sums[(self.batch * self.heads * -(-rows.shape[-1] // ROWS),)](
            rows, some(first, rows), last, rows, some(self.begins, rows), rows.shape[-1], self.chunks,
            REVERSED=backwards, HAS_FIRST=first is not None, DECAYED=False, PACKED=self.begins is not None, BLOCK=ROWS,
            num_warps=4,
        )  # fmt: skip
        return last

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sums: Tensor | None, last: Tensor | None, *,
        is_causal: bool, divisor: int, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Outputs; ``last``: memory for the sums behind all tokens, which are one chunk.

        Noncausal, keys and values are not read.
        """
        out = self.empty(self.length, self.width, dtype=dtype)
        kernels.outputs[(self.walks * self.chunks,)](
            q, k, v, some(mask, q), some(sums, q), out, some(last, q), *self.sizes, *q.stride()[:3], *k.stride()[:3],
            *v.stride()[:3], *strides(mask), CAUSAL=is_causal, DIVISOR=divisor, HAS_FIRST=sums is not None,
            ENDS=last is not None, Q_STEP=_step(q), K_STEP=_step(k), HAS_MASK=mask is not None, **self.options,
        )  # fmt: skip
        return out

    def of_queries(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sums: Tensor | None, grad: Tensor, *,
        is_causal: bool, divisor: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of queries, what each chunk's give, and, causal, what ``of_keys`` reads of every query."""
        dq, given = self.like.new_empty(q.shape, dtype=q.dtype), self.empty(self.chunks, 3 * self.width)
        stored = self.empty(self.length, self.width) if is_causal and divisor != NOTHING else grad
        products = torch.empty_like(stored) if is_causal and divisor == SCORES else stored
        gradients.of_queries[(self.walks * self.chunks,)](
            q, k, v, some(mask, q), some(sums, q), grad, given, dq, stored, products, *self.sizes, *q.stride()[:3],
            *k.stride()[:3], *v.stride()[:3], *strides(mask), *grad.stride()[:3], CAUSAL=is_causal, DIVISOR=divisor,
            HAS_FIRST=sums is not None, Q_STEP=_step(q), K_STEP=_step(k), HAS_MASK=mask is not None, **self.options,
        )  # fmt: skip
        return dq, given, stored, products

    def of_keys(
        self, k: Tensor, v: Tensor, mask: Tensor | None, given: Tensor, queries: tuple[Tensor, ...] | None, *,
        divisor: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of keys and values; ``queries``, causal: q, and what ``of_queries`` stored."""
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        q, stored, products = queries or (k, k, k)
        gradients.of_keys[(self.walks * self.chunks,)](
            q, k, v, some(mask, k), stored, products, given, dk, dv, *self.sizes, *q.stride()[:3], *k.stride()[:3],
            *v.stride()[:3], *strides(mask), *stored.stride()[:3], CAUSAL=queries is not None, DIVISOR=divisor,
            Q_STEP=_step(q), K_STEP=_step(k), HAS_MASK=mask is not None, **self.options,
        )  # fmt: skip
        return dk, dv
