"""The kernels of chunk sums as operations: for eager code, ``torch.compile`` and autograd.

Tensors are (B, H, n, width); states are (B, H, D E + D) in float32, ``sum_j phi(k_j) v_j^T`` in a row and
``sum_j phi(k_j)`` behind it. ``code`` and ``offset`` name the feature map (``maps``). ``log_decay`` (B, H, n) in
float32 are the logarithms, none above zero, by which every token multiplies what was before it; causal calls alone have
them. Not ``normalized``, outputs are numerators. Triton is imported by the first call.

``plain_scan`` and its like are the same functions in operations that autograd follows: for second derivatives and the
self-check.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.gpu.calls import KernelSet, as_bytes, contiguous, kernels, launched, rest_like
from fast_attention.gpu.configurations import configuration
from fast_attention.gpu.maps import ELU, RELU, SMALLEST

Results = tuple[Tensor, ...]
Passed = tuple[Any, Results]  # outputs; what is saved, with what rounding took of outputs in sixteen bits
CHUNK = 128  # tokens


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor | None = None, *,
    eps: float, code: int, offset: float, normalized: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first state, and the state after all keys: the reference of ``chunk_scan``."""
    D, E, outs = q.shape[-1], v.shape[-1], []
    x, keys, values = _features(q, code, offset), *_masked(k, v, key_mask, code, offset)
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    state = values.new_zeros((*q.shape[:-2], D, E + 1)) if first is None else _unpacked(first, D, E)
    for start in range(0, q.shape[-2], CHUNK):
        at = slice(start, start + CHUNK)
        queries, chunk = x[..., at, :], keys[..., at, :]
        pairs, logs = (queries @ chunk.mT).tril(), None
        if log_decay is not None:
            logs = log_decay[..., at].double().cumsum(-1)
            between = logs[..., :, None] - logs[..., None, :]
            pairs = pairs * between.masked_fill(between > 0, 0.0).exp().to(x.dtype)
            queries = queries * logs.exp().to(x.dtype)[..., None]
            chunk = chunk * (logs[..., -1:] - logs).exp().to(x.dtype)[..., None]
        outs.append(queries @ state + pairs @ values[..., at, :])
        state = state if logs is None else logs[..., -1, None, None].exp().to(x.dtype) * state
        state = state + chunk.mT @ values[..., at, :]
    sums = torch.cat(outs, -2)
    out = _quotient(sums, eps) if normalized else sums[..., :-1]
    return out.to(q.dtype), _packed(state)


def plain_sums(k: Tensor, v: Tensor, key_mask: Tensor | None, *, code: int, offset: float) -> Tensor:
    """``sum_j phi(k_j) v_j^T`` in a row, and ``sum_j phi(k_j)`` behind it."""
    keys, values = _masked(k, v, key_mask, code, offset)
    return _packed(keys.mT @ torch.cat([values, torch.ones_like(values[..., :1])], -1))


def plain_read(q: Tensor, sums: Tensor, *, eps: float, code: int, offset: float) -> Tensor:
    """Read sums over all keys for every query."""
    D = q.shape[-1]
    return _quotient(_features(q, code, offset) @ _unpacked(sums, D, sums.shape[-1] // D - 1), eps).to(q.dtype)


def _features(x: Tensor, code: int, offset: float) -> Tensor:
    """The map of every number."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.elu(x) + 1.0 if code == ELU else x.relu() + offset if code == RELU else x


def _masked(k: Tensor, v: Tensor, key_mask: Tensor | None, code: int, offset: float) -> tuple[Tensor, Tensor]:
    """Features of keys, and values, zeros where hidden."""
    keys, values = _features(k, code, offset), v.to(torch.promote_types(v.dtype, torch.float32))
    if key_mask is None:
        return keys, values
    masked = ~key_mask[..., None]
    return keys.masked_fill(masked, 0.0), values.masked_fill(masked, 0.0)


def _quotient(sums: Tensor, eps: float) -> Tensor:
    """Numerators over the denominators that lie behind them."""
    denominator = sums[..., -1:] + eps
    nothing = denominator.abs() < SMALLEST
    return (sums[..., :-1] / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


def _unpacked(state: Tensor, D: int, E: int) -> Tensor:
    """(..., D E + D) as (..., D, E + 1)."""
    return torch.cat([state[..., : D * E].unflatten(-1, (D, E)), state[..., D * E :, None]], -1)


def _packed(state: Tensor) -> Tensor:
    """(..., D, E + 1) as (..., D E + D)."""
    return torch.cat([state[..., :-1].flatten(-2), state[..., -1]], -1)


def _launch(
    x: Tensor, v: Tensor, code: int, offset: float, log_decay: Tensor | None = None, *, normalized: bool = True
) -> Any:
    from fast_attention.gpu.launching import Launch

    return Launch.of(x, v, code, offset, log_decay, normalized=normalized)


@launched
def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor | None, *,
    keep: bool, eps: float, code: int, offset: float, normalized: bool = True,
) -> Passed:  # fmt: skip
    run, mask = _launch(q, v, code, offset, log_decay, normalized=normalized), as_bytes(key_mask, k)
    q, k, v = contiguous(q, k, v)
    states, last = run.sums(k, v, mask, None if first is None else first.contiguous())
    out, factors, rest = run.outputs(q, k, v, mask, states, eps, is_causal=True, keep=keep)
    return (out, last), (factors, rest, states)


def _scan_like(q: Tensor, k: Tensor, v: Tensor, *others: Any, keep: bool, **settings: Any) -> Passed:
    (batch, heads, length, D), E = q.shape, v.shape[-1]
    chunk = configuration(D, E, exact=False).chunk
    wide = q.new_empty((batch, heads, D * E + D), dtype=torch.float32)
    states = wide.new_empty((batch, heads, (length + chunk - 1) // chunk, D * E + D))
    out = q.new_empty((batch, heads, length, E))
    return (out, wide), (wide.new_empty((batch, heads, length)), rest_like(out, keep), states)


@launched
def _scan_vjp(
    inputs: Any, outputs: Any, saved: Any, gradients: Any, *, eps: float, code: int, offset: float,
    normalized: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (q, k, v, key_mask, first, log_decay), (out, last), (grad, d_last) = inputs, outputs, gradients
    factors, rest, states = saved
    run, mask = _launch(q, v, code, offset, log_decay, normalized=normalized), as_bytes(key_mask, k)
    q, k, v, grad = contiguous(q, k, v, grad)
    weights = run.weights(out, rest, grad, factors)
    d_carry, d_first = run.sums(q, grad, None, d_last.contiguous(), factors=factors, weights=weights, backwards=True)
    dq, of_queries = run.of_queries(q, k, v, mask, grad, factors, weights, states, is_causal=True)
    dk, dv, of_keys = run.of_keys(q, k, v, mask, grad, factors, weights, d_carry, is_causal=True)
    d_first, d_decay = None if first is None else d_first, None
    if log_decay is not None:
        totals = of_queries.sum(-2, dtype=torch.float64) - of_keys.sum(-2, dtype=torch.float64)
        totals[..., -1] += (d_last.double() * last).sum(-1)  # what the sums of all decays from the first token on get
        d_decay = totals.flip(-1).cumsum(-1).flip(-1).to(log_decay.dtype)
    return dq, dk, dv, None, d_first, d_decay


@launched
def _step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, log_decay: Tensor | None, *, eps: float,
    code: int, offset: float, normalized: bool,
) -> Results:  # fmt: skip
    from fast_attention.gpu import launching

    (q, k, v), decay = contiguous(q, k, v), None if log_decay is None else log_decay.exp().contiguous()
    mask = as_bytes(key_mask, k)
    return launching.step(q, k, v, mask, state.contiguous(), eps, code, offset, decay, normalized=normalized)


@launched
def _sums(k: Tensor, v: Tensor, key_mask: Tensor | None, *, keep: bool, code: int, offset: float) -> Passed:
    mask = as_bytes(key_mask, k)
    return _launch(k, v, code, offset).sums(*contiguous(k, v), mask, None)[1], ()


def _sums_like(k: Tensor, v: Tensor, key_mask: Any, *, keep: bool, **settings: Any) -> Passed:
    return k.new_empty((*k.shape[:2], k.shape[-1] * v.shape[-1] + k.shape[-1]), dtype=torch.float32), ()


@launched
def _sums_vjp(
    inputs: Any, outputs: Any, saved: Any, gradients: Any, *, code: int, offset: float
) -> tuple[Tensor | None, ...]:
    (k, v, key_mask), (d_sums,) = inputs, gradients
    run, mask = _launch(k, v, code, offset), as_bytes(key_mask, k)
    k, v = contiguous(k, v)
    return *run.of_keys(k, k, v, mask, v, d_sums, d_sums, d_sums.contiguous(), is_causal=False)[:2], None


@launched
def _read(q: Tensor, sums: Tensor, *, keep: bool, eps: float, code: int, offset: float) -> Passed:
    (q,), v = contiguous(q), q.new_empty((*q.shape[:2], 1, sums.shape[-1] // q.shape[-1] - 1))
    run = _launch(q, v, code, offset)
    out, *saved = run.outputs(q, q, v, None, sums.contiguous(), eps, is_causal=False, keep=keep)
    return out, tuple(saved)


def _read_like(q: Tensor, sums: Tensor, *, keep: bool, **settings: Any) -> Passed:
    out = q.new_empty((*q.shape[:-1], sums.shape[-1] // q.shape[-1] - 1))
    return out, (sums.new_empty(q.shape[:-1]), rest_like(out, keep))


@launched
def _read_vjp(
    inputs: Any, outputs: Any, saved: Any, gradients: Any, *, eps: float, code: int, offset: float
) -> tuple[Tensor | None, ...]:
    (q, sums), (factors, rest) = inputs, saved
    q, grad = contiguous(q, gradients[0])
    run = _launch(q, grad, code, offset)
    weights = run.weights(outputs[0], rest, grad, factors)
    d_sums = run.sums(q, grad, None, None, factors=factors, weights=weights)[1]
    return run.of_queries(q, q, grad, None, grad, factors, weights, sums.contiguous(), is_causal=False)[0], d_sums


chunk_scan = kernels(plain_scan, _scan, _scan_vjp, _scan_like, outputs=2)
key_sums = kernels(plain_sums, _sums, _sums_vjp, _sums_like)
read_sums = kernels(plain_read, _read, _read_vjp, _read_like)


def kernel_set(
    eps: float, code: int, offset: float, log_decay: Tensor | None = None, *, normalized: bool = True
) -> KernelSet:
    """The kernels with one map, of tokens that decay so; these are causal only."""
    of_map: Any = {"code": code, "offset": offset}
    settings: Any = {"eps": eps, "normalized": normalized, **of_map}

    def decays(x: Tensor) -> Tensor | None:
        return None if log_decay is None else log_decay[..., : x.shape[-2]]

    return KernelSet(
        lambda q, k, v, mask, first: chunk_scan(q, k, v, mask, first, decays(q), **settings),
        None if log_decay is not None else lambda k, v, mask: key_sums(k, v, mask, **of_map),
        None if log_decay is not None else lambda q, sums: read_sums(q, sums, eps=eps, **of_map),
        lambda q, k, v, mask, state: _step(q, k, v, mask, state, decays(q), **settings),
    )
