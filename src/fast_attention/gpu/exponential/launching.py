"""Calls the kernels of exponential features: grids, strides and the memory of results.

Tokens are (B, H, n, width) with any strides but the last, which is 1; rows (H, D, width), bias (H, D) and states
(B, H, D E + 2 D) in float32: products, sums, and the logarithms of what both are divided by. A key mask is (B, H, n) in
bytes.
"""

# pyright: reportCallIssue=false
# Triton's decorator says nothing of warps, and hides that constants are named.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.gpu import sums as elementwise
from fast_attention.gpu.calls import power, some, strides
from fast_attention.gpu.configurations import STEP, Exponential, exponential
from fast_attention.gpu.exponential import gradients, reading, steps, sums, values


class Weights(NamedTuple):
    """Rows of queries and of keys, what is added to every logarithm, and whether gradients of rows are wanted."""

    queries: Tensor
    keys: Tensor
    bias: Tensor | None
    trained: bool


class Read(NamedTuple):
    """Results of a forward pass: outputs, what rounding took, one over the denominators, the logarithms over which."""

    out: Tensor
    rest: Tensor
    factors: Tensor
    shifts: Tensor


@dataclass(frozen=True)
class Launch:
    """Arguments that all calls of one computation share."""

    weights: Weights
    sizes: Exponential
    precision: str
    begins: Tensor | None = None

    @classmethod
    def of(
        cls, x: Tensor, queries: Tensor, keys: Tensor, bias: Tensor | None, *, trained: bool,
        begins: Tensor | None = None,
    ) -> Launch:  # fmt: skip
        """For tokens ``x`` and rows of queries and of keys; float32 keeps float32's digits.

        ``begins`` (chunks,) says which chunks are the first of a packed sequence.
        """
        exact, parts = x.dtype == torch.float32, _parts(keys, x)
        bias = None if bias is None else bias.contiguous()
        weights = Weights(parts if queries is keys else _parts(queries, x), parts, bias, trained)
        return cls(weights, exponential(x.shape[-1], exact=exact), "tf32x3" if exact else "tf32", begins)

    @property
    def features(self) -> int:
        """D."""
        return self.weights.keys.shape[-2]

    def options(self, width: int, mask: Tensor | None = None, *, backward: bool = False) -> dict[str, Any]:
        """Constants of a kernel over tiles."""
        chunk, block, columns, values, warps, stages = self.sizes.backward if backward else self.sizes.forward
        return {
            "HAS_BIAS": self.weights.bias is not None, "HAS_MASK": mask is not None, "PRECISION": self.precision,
            "CHUNK": chunk, "BT": block, "BD": columns, "BW": max(16, power(width)), "BE": values,
            "num_warps": warps, "num_stages": stages,
        }  # fmt: skip

    def sums(
        self, x: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None, *,
        read: Read | None = None, weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The sums before every chunk of keys, and over all keys, ``first`` included.

        With ``read`` and ``weights`` those of queries behind every chunk, and ``v`` gradients of outputs.
        """
        (batch, heads, length, width), E, backwards = x.shape, v.shape[-1], read is not None
        count, D = -(-length // self.sizes.forward.chunk), self.features
        states = x.new_empty((batch, heads, count, D * (E + 2)), dtype=torch.float32)
        parts = -(-D // self.sizes.forward.columns) * -(-E // self.sizes.forward.values)
        rows = self.weights.queries if backwards else self.weights.keys
        shifts, factors = (read.shifts, read.factors) if read is not None else (x, x)
        sums.chunk_sums[(batch * heads * count * parts,)](
            x, rows, some(self.weights.bias, rows), v, shifts, factors, some(weights, x), some(mask, x), states, heads,
            length, D, width, E, count, *self._last(width), *x.stride()[:3], *v.stride()[:3], *strides(mask),
            QUERIES=backwards, **self.options(width, mask),
        )  # fmt: skip
        last = x.new_empty((batch, heads, D * (E + 2)), dtype=torch.float32)
        size = 16
        sums.running_sums[(batch * heads * -(-D // size),)](
            states, some(first, states), last, some(self.begins, states), D, E, count, REVERSED=backwards,
            HAS_FIRST=first is not None, PACKED=self.begins is not None, BD=size, BE=power(E), num_warps=4,
        )  # fmt: skip
        return states, last

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, states: Tensor, *, is_causal: bool, keep: bool
    ) -> Read:
        """Outputs and what the backward pass needs. Noncausal, k is not read and ``states`` are sums over all keys."""
        (batch, heads, length, width), E = q.shape, v.shape[-1]
        out = v.new_empty((batch, heads, length, E), dtype=q.dtype)
        keep = keep and out.dtype != torch.float32
        rest = out.new_empty(out.shape if keep else (0,))
        factors, shifts = (q.new_empty((batch, heads, length), dtype=torch.float32) for _ in range(2))
        count, parts = states.shape[2] if is_causal else 1, -(-E // self.sizes.forward.values)
        reading.outputs[(batch * heads * -(-length // self.sizes.forward.block) * parts,)](
            q, k, v, *self._rows(), some(mask, q), states, out, rest, factors, shifts, heads, length, k.shape[2],
            self.features, width, E, count, *self._last(width), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *strides(mask), CAUSAL=is_causal, KEEP=keep, **self.options(width, mask),
        )  # fmt: skip
        return Read(out, rest, factors, shifts)

    def denominators(self, read: Read, grad: Tensor) -> Tensor:
        """The gradients of the denominators."""
        batch, heads, length, E = grad.shape
        weights, rows = torch.empty_like(read.factors), 32
        elementwise.row_products[(batch * heads * -(-length // rows),)](
            read.out, read.rest, grad, read.factors, weights, heads, length, E, *grad.stride()[:3],
            HAS_REST=read.rest.numel() > 0, BT=rows, BE=self.sizes.forward.values, num_warps=4,
        )  # fmt: skip
        return weights

    def of_queries(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grad: Tensor, read: Read, weights: Tensor,
        states: Tensor, *, is_causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of queries, and of their logarithms where rows are trained."""
        return self._of_tokens(gradients.of_queries, q, q, k, v, mask, grad, read, weights, states, is_causal)

    def of_keys(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grad: Tensor, read: Read, weights: Tensor,
        states: Tensor, *, is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of keys, of their logarithms where rows are trained, and of values.

        Noncausal, nothing of queries is read but ``states``.
        """
        dk, logs = self._of_tokens(gradients.of_keys, k, q, k, v, mask, grad, read, weights, states, is_causal)
        (batch, heads, keys, width), E = k.shape, v.shape[-1]
        dv, count = v.new_empty((batch, heads, keys, E)), states.shape[2] if is_causal else 1
        blocks, parts = -(-keys // self.sizes.backward.block), -(-E // self.sizes.backward.values)
        values.of_values[(batch * heads * blocks * parts,)](
            q, k, *self._rows(), some(mask, q), grad, read.factors, read.shifts, states, dv, heads, q.shape[2], keys,
            self.features, width, E, count, *self._last(width), *q.stride()[:3], *k.stride()[:3], *strides(mask),
            *grad.stride()[:3], CAUSAL=is_causal, **self.options(width, mask, backward=True),
        )  # fmt: skip
        return dk, logs, dv

    def _of_tokens(
        self, kernel: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grad: Tensor, read: Read,
        weights: Tensor, states: Tensor, is_causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        (batch, heads, length, width), D, trained = x.shape, self.features, self.weights.trained
        out = x.new_empty(x.shape)
        logs = x.new_empty((batch, heads, length, D) if trained else (0,), dtype=torch.float32)
        kernel[(batch * heads * -(-length // self.sizes.backward.block),)](
            q, k, v, *self._rows(), some(mask, q), grad, read.factors, read.shifts, weights, states, out, logs, heads,
            q.shape[2], k.shape[2], D, width, v.shape[-1], states.shape[2] if is_causal else 1, *self._last(width),
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides(mask), *grad.stride()[:3], CAUSAL=is_causal,
            TRAINED=trained, **self.options(width, mask, backward=True),
        )  # fmt: skip
        return out, logs

    def _last(self, width: int) -> tuple[int, float]:
        """How far behind rows lies what rounding took of them, and what tokens are multiplied by."""
        return self.weights.keys.numel() // 2, width**-0.25

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, bias, _ = self.weights
        return queries, keys, some(bias, keys)


def _parts(rows: Tensor, like: Tensor) -> Tensor:
    """Rows for products with tokens of sixteen bits: as two such numbers, behind each other."""
    if like.dtype == torch.float32:
        return rows.contiguous()
    high = rows.to(like.dtype)
    return torch.stack([high, (rows - high).to(like.dtype)])


def step(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: Tensor, weights: Weights
) -> tuple[Tensor, Tensor]:
    """The output of one token behind a state, and the state after it; rows in float32."""
    (batch, heads, _, width), E, D = q.shape, v.shape[-1], weights.keys.shape[-2]
    out, following = v.new_empty((batch, heads, 1, E), dtype=q.dtype), state.new_empty(state.shape)
    queries, keys, bias = (some(x, weights.keys).contiguous() for x in weights[:3])
    steps.exponential[(batch * heads * -(-E // STEP),)](
        q, k, v, queries, keys, bias, some(mask, q), state, out, following, heads, D, width, E, width**-0.25,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *strides(mask), HAS_BIAS=weights.bias is not None,
        HAS_MASK=mask is not None, BD=STEP, BW=power(width), BE=STEP, num_warps=4,
    )  # fmt: skip
    return out, following
