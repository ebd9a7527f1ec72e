"""Calls the kernels of chunk sums: grids, strides and the memory of results.

Tensors are (B, H, n, width) with any strides but the last, which is 1; states (B, H, D E + D) in float32, sums of
products first. A key mask is (B, H, n) in bytes.
"""

# pyright: reportCallIssue=false
# Triton's decorator says nothing of warps, and hides that constants are named.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu import gradients, reading, steps, sums
from fast_attention.gpu.calls import some, strides
from fast_attention.gpu.configurations import STEP, Configuration, configuration
from fast_attention.gpu.decays import Decays


@dataclass(frozen=True)
class Launch:
    """Arguments that all calls of one computation share."""

    code: int
    offset: float
    sizes: Configuration
    precision: str
    decays: Decays | None = None
    normalized: bool = True

    @classmethod
    def of(
        cls, x: Tensor, v: Tensor, code: int, offset: float, log_decay: Tensor | None = None, *, normalized: bool = True
    ) -> Launch:
        """For tokens ``x`` that are mapped by map number ``code``; float32 keeps float32's digits."""
        exact = x.dtype == torch.float32 or v.dtype == torch.float32
        sizes = configuration(x.shape[-1], v.shape[-1], exact=exact)
        decays = None if log_decay is None else Decays.of(log_decay, sizes.chunk)
        return cls(code, offset, sizes, "tf32x3" if exact else "tf32", decays, normalized)

    def options(self, mask: Tensor | None = None) -> dict[str, Any]:
        """Constants of a kernel over tiles."""
        chunk, block, columns, values, warps, stages = self.sizes
        return {
            "MAP": self.code, "DECAYED": self.decays is not None, "HAS_MASK": mask is not None,
            "PRECISION": self.precision, "CHUNK": chunk, "BT": block, "BD": columns, "BE": values,
            "num_warps": warps, "num_stages": stages,
        }  # fmt: skip

    def chunks(self, length: int) -> int:
        """How many chunks ``length`` tokens are."""
        return -(-length // self.sizes.chunk)

    def blocks(self, length: int) -> int:
        """How many blocks ``length`` tokens are."""
        return -(-length // self.sizes.block)

    def sums(
        self, x: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None, *,
        factors: Tensor | None = None, weights: Tensor | None = None, backwards: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The sums before every chunk (behind it) and over all tokens, ``first`` included."""
        (batch, heads, length, D), E = x.shape, v.shape[-1]
        count, numbers = self.chunks(length), D * E + D
        states = x.new_empty((batch, heads, count, numbers), dtype=torch.float32)
        parts = -(-D // self.sizes.columns) * -(-E // self.sizes.values)
        decays = None if self.decays is None else self.decays.since if backwards else self.decays.until
        sums.chunk_sums[(batch * heads * count * parts,)](
            x, v, some(factors, x), some(weights, x), some(decays, x), some(mask, x), states, heads, length, D, E,
            count, self.offset, *x.stride()[:3], *v.stride()[:3], *strides(mask), WEIGHTED=factors is not None,
            **self.options(mask),
        )  # fmt: skip
        last = x.new_empty((batch, heads, numbers), dtype=torch.float32)
        size = 1024
        totals = None if self.decays is None else self.decays.totals
        sums.running_sums[(batch * heads * -(-numbers // size),)](
            states, some(first, states), last, some(totals, states), states, numbers, count, REVERSED=backwards,
            HAS_FIRST=first is not None, DECAYED=totals is not None, PACKED=False, BLOCK=size, num_warps=4,
        )  # fmt: skip
        return states, last

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, states: Tensor, eps: float, *, is_causal: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Outputs, one over their denominators, and if ``keep`` what rounding took of them.

        Noncausal, k is not read and ``states`` are sums over all keys.
        """
        (batch, heads, length, D), E = q.shape, v.shape[-1]
        out = v.new_empty((batch, heads, length, E), dtype=q.dtype)
        keep = keep and out.dtype != torch.float32
        rest = out.new_empty(out.shape if keep else (0,))
        factors = q.new_empty((batch, heads, length), dtype=torch.float32)
        count = states.shape[2] if is_causal else 1
        parts = -(-E // self.sizes.values)
        reading.outputs[(batch * heads * self.blocks(length) * parts,)](
            q, k, v, some(mask, q), states, *self._since(q), out, rest, factors, heads, length, k.shape[2], D, E, count,
            self._low, eps, self.offset, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides(mask),
            CAUSAL=is_causal, NORMALIZED=self.normalized, KEEP=keep, **self.options(mask),
        )  # fmt: skip
        return out, factors, rest

    def weights(self, out: Tensor, rest: Tensor, grad: Tensor, factors: Tensor) -> Tensor:
        """The gradients of the denominators."""
        batch, heads, length, E = grad.shape
        if not self.normalized:
            return torch.zeros_like(factors)
        weights = torch.empty_like(factors)
        rows, values = min(self.sizes.block, 32), self.sizes.values
        sums.row_products[(batch * heads * -(-length // rows),)](
            out, rest, grad, factors, weights, heads, length, E, *grad.stride()[:3], HAS_REST=rest.numel() > 0,
            BT=rows, BE=values, num_warps=4,
        )  # fmt: skip
        return weights

    def of_queries(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grad: Tensor, factors: Tensor, weights: Tensor,
        states: Tensor, *, is_causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of queries, and of the logarithms of what they read, a row for each program's columns."""
        (batch, heads, length, D), E = q.shape, v.shape[-1]
        out, parts = q.new_empty((batch, heads, length, D)), -(-D // self.sizes.columns)
        of_logs = self._of_logs(q, parts)
        count = states.shape[2] if is_causal else 1
        gradients.of_queries[(batch * heads * self.blocks(length) * parts,)](
            q, k, v, some(mask, q), grad, factors, weights, states, *self._since(q), out, of_logs, heads, length,
            k.shape[2], D, E, count, self._low, self.offset, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *strides(mask), *grad.stride()[:3], CAUSAL=is_causal, **self.options(mask),
        )  # fmt: skip
        return out, of_logs

    def of_keys(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grad: Tensor, factors: Tensor, weights: Tensor,
        states: Tensor, *, is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of keys, of values and of the logarithms as ``of_queries`` has them.

        Noncausal, nothing of queries is read but ``states``.
        """
        (batch, heads, keys, D), E = k.shape, v.shape[-1]
        dk, dv = k.new_empty((batch, heads, keys, D)), v.new_empty((batch, heads, keys, E))
        count, blocks = states.shape[2] if is_causal else 1, batch * heads * self.blocks(keys)
        shared = heads, q.shape[2], keys, D, E, count, self._low, self.offset, *q.stride()[:3], *k.stride()[:3]
        masked, rest = strides(mask), {"CAUSAL": is_causal, **self.options(mask)}
        decays = (q, q) if self.decays is None else (self.decays.until, self.decays.logs)
        parts = -(-D // self.sizes.columns)
        of_logs = self._of_logs(k, parts)
        gradients.of_keys[(blocks * parts,)](
            q, k, v, some(mask, q), grad, factors, weights, states, *decays, dk, of_logs, *shared, *v.stride()[:3],
            *masked, *grad.stride()[:3], **rest,
        )  # fmt: skip
        gradients.of_values[(blocks * -(-E // self.sizes.values),)](
            q, k, some(mask, q), grad, factors, states, *decays, dv, *shared, *masked, *grad.stride()[:3], **rest
        )
        return dk, dv, of_logs

    @property
    def _low(self) -> int:
        """How far behind the logarithms lies what rounding took of them."""
        return 0 if self.decays is None else self.decays.logs[0].numel()

    def _since(self, other: Tensor) -> tuple[Tensor, Tensor]:
        return (other, other) if self.decays is None else (self.decays.since, self.decays.logs)

    def _of_logs(self, x: Tensor, parts: int) -> Tensor:
        shape = (0,) if self.decays is None else (*x.shape[:2], parts, x.shape[2])
        return x.new_empty(shape, dtype=torch.float32)


def step(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: Tensor, eps: float, code: int, offset: float,
    decay: Tensor | None = None, *, normalized: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output of one token behind a state, and the state after it; ``decay`` (B, H): what the state is times."""
    (batch, heads, _, D), E = q.shape, v.shape[-1]
    out, following = v.new_empty((batch, heads, 1, E), dtype=q.dtype), state.new_empty(state.shape)
    steps.elementwise[(batch * heads * -(-E // STEP),)](
        q, k, v, some(mask, q), state, some(decay, state), out, following, heads, D, E, eps, offset, *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], *strides(mask), MAP=code, DECAYED=decay is not None, NORMALIZED=normalized,
        HAS_MASK=mask is not None, BD=STEP, BE=STEP, num_warps=4,
    )  # fmt: skip
    return out, following
