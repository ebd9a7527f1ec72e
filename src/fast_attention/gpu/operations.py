"""Kernels as operations, for eager code, ``torch.compile`` and autograd: one form for all families of them.

A family has launches (``launching``), and the same functions in operations that autograd follows: for gradients of
gradients and the self-check. Triton is imported by the first call. Tensors are (B, H, n, width), states (B, H, numbers)
in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.operation import Fast, Operation
from fast_attention.gpu.calls import as_bytes, contiguous, launched

Passed = tuple[Any, tuple[Tensor, ...]]  # outputs; what is saved, with what rounding took of outputs in sixteen bits
Gradients = tuple[Tensor | None, ...]


class Operations(NamedTuple):
    """Scans ``(q, k, v, key_mask, first, *weights)``, sums ``(k, v, key_mask, *weights)`` over all keys, and what
    queries read of these, ``(q, sums, *weights)``; ``step``: as a scan behind a state, of one token, without gradients.
    """

    scan: Operation
    sums: Operation
    read: Operation
    step: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, launch: Callable[..., Any], scan: Callable[..., Any], sums: Callable[..., Any], read: Callable[..., Any]
    ) -> Operations:
        """The operations of ``launch(tokens, width of values, *weights, **settings)`` and of references."""
        kernels = _Kernels(launch)

        def operation(plain: Callable[..., Any], forward: Any, backward: Any, outputs: int = 1) -> Operation:
            fast = Fast(launched(forward), launched(backward), halves=True, like=forward, outputs=outputs)
            return Operation(plain, cuda=fast, compute=torch.float32)

        return cls(
            operation(scan, kernels.scan, kernels.scan_vjp, outputs=2), operation(sums, kernels.sums, kernels.sums_vjp),
            operation(read, kernels.read, kernels.read_vjp), launched(kernels.step),
        )  # fmt: skip


class _Kernels:
    """Forward and backward passes of a family; on tensors without memory nothing is launched."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch = launch

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, *weights: Any, keep: bool,
        **settings: Any,
    ) -> Passed:  # fmt: skip
        run, mask = self.launch(q, v.shape[-1], *weights, **settings), as_bytes(key_mask, k)
        return run.scan(*contiguous(q, k, v), mask, None if first is None else first.contiguous(), keep=keep)

    def scan_vjp(self, inputs: Any, outputs: Any, saved: Any, gradients: Any, **settings: Any) -> Gradients:
        (q, k, v, key_mask, first, *weights), (out, last), (grad, d_last) = inputs, outputs, gradients
        run, mask = self.launch(q, v.shape[-1], *weights, **settings), as_bytes(key_mask, k)
        q, k, v, grad = contiguous(q, k, v, grad)
        tokens, read, after = (q, k, v, mask, grad), (out, *saved), run.over_scales(d_last, last)
        dq, of_queries, of_denominators, later_sums, whole = run.of_queries(tokens, read, after, is_causal=True)
        dk, dv, of_keys = run.of_keys(tokens, read, of_denominators, later_sums, is_causal=True)
        d_first = None if first is None else run.at_scales(whole, first)
        of_weights = run.of_weights(q, k, of_queries, of_keys, (last, d_last))[: len(weights)]
        return dq, dk, dv, None, d_first, *of_weights

    def sums(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *weights: Any, keep: bool, **settings: Any) -> Passed:
        run, mask = self.launch(k, v.shape[-1], *weights, **settings), as_bytes(key_mask, k)
        return run.sums(*contiguous(k, v), mask, None)[1], ()

    def sums_vjp(self, inputs: Any, outputs: Any, saved: Any, gradients: Any, **settings: Any) -> Gradients:
        (k, v, key_mask, *weights), (sums,), (d_sums,) = inputs, outputs, gradients
        run, mask = self.launch(k, v.shape[-1], *weights, **settings), as_bytes(key_mask, k)
        (k, v), state = contiguous(k, v), run.over_scales(d_sums, sums)
        dk, dv, of_keys = run.of_keys((None, k, v, mask, None), None, None, state, is_causal=False)
        return dk, dv, None, *run.of_weights(None, k, None, of_keys)[: len(weights)]

    def read(self, q: Tensor, sums: Tensor, *weights: Any, keep: bool, **settings: Any) -> Passed:
        run, (q,) = self.launch(q, sums.shape[-1] // q.shape[-1] - 1, *weights, **settings), contiguous(q)
        out, *saved = run.outputs(q, None, None, None, sums.contiguous(), is_causal=False, keep=keep)
        return out, tuple(saved)

    def read_vjp(self, inputs: Any, outputs: Any, saved: Any, gradients: Any, **settings: Any) -> Gradients:
        (q, sums, *weights), (out,), (grad,) = inputs, outputs, gradients
        run, (q, grad) = self.launch(q, out.shape[-1], *weights, **settings), contiguous(q, grad)
        tokens, read = (q, None, None, None, grad), (out, *saved, sums.contiguous())
        dq, of_queries, *_, whole = run.of_queries(tokens, read, None, is_causal=False)
        return dq, run.of_all(whole, sums), *run.of_weights(q, None, of_queries, None)[: len(weights)]

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, *weights: Any, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        run, mask = self.launch(q, v.shape[-1], *weights, **settings), as_bytes(key_mask, k)
        return run.step(*contiguous(q, k, v), mask, state.contiguous())
