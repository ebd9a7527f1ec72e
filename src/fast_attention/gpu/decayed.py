"""The kernels of chunk sums that fade from token to token, as operations: causal, and one step of decoding.

Tensors are as in ``operations``; ``log_decay`` (B, H, n) in float32 are the logarithms, none above zero, by which every
token multiplies what was before it. Not ``normalized``, outputs are numerators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu import plain
from fast_attention.gpu.calls import KernelSet
from fast_attention.gpu.operations import Passed, Results, scan_like
from fast_attention.gpu.tensors import as_bytes, contiguous, kernels, launched


def _launch(x: Tensor, v: Tensor, log_decay: Tensor, code: int, offset: float, normalized: bool) -> Any:
    from fast_attention.gpu.launching import Decays, Launch

    run = Launch.of(x, v, code, offset)
    return Launch(code, offset, run.sizes, run.precision, Decays.of(log_decay, run.sizes.chunk), normalized)


@launched
def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor, *, keep: bool,
    eps: float, code: int, offset: float, normalized: bool,
) -> Passed:  # fmt: skip
    run, mask = _launch(q, v, log_decay, code, offset, normalized), as_bytes(key_mask, k)
    q, k, v = contiguous(q, k, v)
    states, last = run.sums(k, v, mask, None if first is None else first.contiguous())
    out, factors, rest = run.outputs(q, k, v, mask, states, eps, is_causal=True, keep=keep)
    return (out, last), (factors, rest, states)


@launched
def _scan_vjp(
    inputs: Any, outputs: Any, saved: Any, gradients: Any, *, eps: float, code: int, offset: float, normalized: bool
) -> tuple[Tensor | None, ...]:
    (q, k, v, key_mask, first, log_decay), (out, last), (grad, d_last) = inputs, outputs, gradients
    factors, rest, states = saved
    run, mask = _launch(q, v, log_decay, code, offset, normalized), as_bytes(key_mask, k)
    q, k, v, grad = contiguous(q, k, v, grad)
    weights = run.weights(out, rest, grad, factors)
    d_carry, d_first = run.sums(q, grad, None, d_last.contiguous(), factors=factors, weights=weights, backwards=True)
    dq, of_queries = run.of_queries(q, k, v, mask, grad, factors, weights, states, is_causal=True)
    dk, dv, of_keys = run.of_keys(q, k, v, mask, grad, factors, weights, d_carry, is_causal=True)
    totals = of_queries.sum(-2, dtype=torch.float64) - of_keys.sum(-2, dtype=torch.float64)
    totals[..., -1] += (d_last.double() * last).sum(-1)  # what the sums of all decays from the first token on get
    d_first = None if first is None else d_first
    return dq, dk, dv, None, d_first, totals.flip(-1).cumsum(-1).flip(-1).to(log_decay.dtype)


@launched
def _step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, log_decay: Tensor, *, eps: float,
    code: int, offset: float, normalized: bool,
) -> Results:  # fmt: skip
    from fast_attention.gpu import launching

    (q, k, v), decay, mask = contiguous(q, k, v), log_decay.exp().contiguous(), as_bytes(key_mask, k)
    return launching.step(q, k, v, mask, state.contiguous(), eps, code, offset, decay, normalized=normalized)


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor, *,
    eps: float, code: int, offset: float, normalized: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``decayed_scan`` in operations that autograd follows, chunk after chunk."""
    D, E, outs = q.shape[-1], v.shape[-1], []
    x, keys, values = plain.features(q, code, offset), *plain.masked(k, v, key_mask, code, offset)
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    state = values.new_zeros((*q.shape[:-2], D, E + 1)) if first is None else plain.unpack_state(first, D, E)
    for i in range(0, q.shape[-2], plain.CHUNK):
        at = slice(i, i + plain.CHUNK)
        logs = log_decay[..., at].double().cumsum(-1)
        later = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=q.device).triu(1)
        between = (logs[..., :, None] - logs[..., None, :]).masked_fill(later, float("-inf")).exp().to(x.dtype)
        since, until = logs.exp().to(x.dtype)[..., None], (logs[..., -1:] - logs).exp().to(x.dtype)[..., None]
        inside, chunk = x[..., at, :], keys[..., at, :]
        outs.append((inside * since) @ state + (inside @ chunk.mT * between) @ values[..., at, :])
        state = since[..., -1:, :] * state + (chunk * until).mT @ values[..., at, :]
    sums = torch.cat(outs, -2)
    out = plain.quotient(sums, eps) if normalized else sums[..., :-1]
    return out.to(q.dtype), plain.pack_state(state)


decayed_scan = kernels(plain_scan, _scan, _scan_vjp, scan_like, outputs=2)


def kernel_set(
    log_decay: Tensor, eps: float, code: int, offset: float, normalized: bool
) -> tuple[KernelSet, KernelSet]:
    """The kernels and their plain twins, for tokens that decay so; not causal there are none."""
    settings: Any = {"eps": eps, "code": code, "offset": offset, "normalized": normalized}

    def scan(form: Any) -> Any:
        return lambda q, k, v, mask, first: form(q, k, v, mask, first, log_decay[..., : q.shape[-2]], **settings)

    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: Tensor) -> Any:
        return _step(q, k, v, mask, state, log_decay[..., :1], **settings)

    return KernelSet(scan(decayed_scan), None, None, step), KernelSet(scan(plain_scan), None, None, scan(plain_scan))
