"""The kernels of chunk sums that fade from token to token, as torch operations: causal, and one step of decoding.

Tensors are as in ``operations``; ``log_decay`` (B, H, n) in float32 are the logarithms, none above zero, by which every
token multiplies what was before it. Not ``normalized``, outputs are numerators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu import plain
from fast_attention.gpu.operations import scan_like
from fast_attention.gpu.registering import as_bytes, contiguous, differentiable, empty, operation, zeros
from fast_attention.gpu.walking import Forms

Results = tuple[Tensor, ...]
TOKENS, MAP = "Tensor q, Tensor k, Tensor v, Tensor? key_mask", "float eps, int code, float offset"


def _launch(x: Tensor, v: Tensor, log_decay: Tensor, code: int, offset: float, normalized: bool) -> Any:
    from fast_attention.gpu.launching import Decays, Launch

    run = Launch.of(x, v, code, offset)
    return Launch(code, offset, run.sizes, run.precision, Decays.of(log_decay, run.sizes.chunk), normalized)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor, eps: float,
    code: int, offset: float, keep: bool, normalized: bool,
) -> Results:  # fmt: skip
    run, mask = _launch(q, v, log_decay, code, offset, normalized), as_bytes(key_mask, k)
    q, k, v = contiguous(q, k, v)
    states, last = run.sums(k, v, mask, None if first is None else first.contiguous())
    out, factors, rest = run.outputs(q, k, v, mask, states, eps, is_causal=True, keep=keep)
    return out, last, factors, rest, states


def _scan_like(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, first: Any, log_decay: Tensor, eps: float, code: int,
    offset: float, keep: bool, normalized: bool,
) -> Results:  # fmt: skip
    return scan_like(q, k, v, key_mask, first, eps, code, offset, keep)


def _scan_vjp(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, log_decay: Tensor, out: Tensor, last: Tensor,
    factors: Tensor, rest: Tensor, states: Tensor, grad: Tensor, d_last: Tensor, code: int, offset: float,
    normalized: bool,
) -> Results:  # fmt: skip
    run, mask = _launch(q, v, log_decay, code, offset, normalized), as_bytes(key_mask, k)
    q, k, v, grad = contiguous(q, k, v, grad)
    weights = run.weights(out, rest, grad, factors)
    behind, d_first = run.sums(q, grad, None, d_last.contiguous(), factors=factors, weights=weights, backwards=True)
    dq, of_queries = run.of_queries(q, k, v, mask, grad, factors, weights, states, is_causal=True)
    dk, dv, of_keys = run.of_keys(q, k, v, mask, grad, factors, weights, behind, is_causal=True)
    totals = of_queries.sum(-2, dtype=torch.float64) - of_keys.sum(-2, dtype=torch.float64)
    totals[..., -1] += (d_last.double() * last).sum(-1)  # what the sums of all decays from the first token on get
    return dq, dk, dv, d_first, totals.flip(-1).cumsum(-1).flip(-1).to(log_decay.dtype)


def _step(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor, log_decay: Tensor, eps: float, code: int,
    offset: float, normalized: bool,
) -> Results:  # fmt: skip
    from fast_attention.gpu import launching

    (q, k, v), decay, mask = contiguous(q, k, v), log_decay.exp().contiguous(), as_bytes(key_mask, k)
    return launching.step(q, k, v, mask, state.contiguous(), eps, code, offset, decay, normalized=normalized)


decayed_scan = operation(
    "decayed_scan", f"{TOKENS}, Tensor? first, Tensor log_decay, {MAP}, bool keep, bool normalized",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)", _scan, _scan_like,
)  # fmt: skip
_decayed_scan_vjp = operation(
    "decayed_scan_backward",
    f"{TOKENS}, Tensor log_decay, Tensor out, Tensor last, Tensor factors, Tensor rest, Tensor states, Tensor grad, "
    "Tensor d_last, int code, float offset, bool normalized",
    "(Tensor, Tensor, Tensor, Tensor, Tensor)", _scan_vjp,
    lambda q, k, v, mask, log_decay, out, last, *x: empty(q, k, v, last, log_decay),
)  # fmt: skip
decayed_step = operation(  # without a gradient
    "decayed_step", f"{TOKENS}, Tensor state, Tensor log_decay, {MAP}, bool normalized", "(Tensor, Tensor)", _step,
    lambda q, k, v, mask, state, *x: (q.new_empty((*q.shape[:-1], v.shape[-1])), *empty(state)),
)  # fmt: skip


def _of_scan(given: Any, results: Any, gradients: Any, numbers: Any) -> Results:
    q, k, v, key_mask, _, log_decay = given
    out, last, *kept = results
    code, offset, _, normalized = numbers[1:]
    grad, d_last = zeros(gradients[0], out), zeros(gradients[1], last)
    dq, dk, dv, d_first, d_decay = _decayed_scan_vjp(
        q, k, v, key_mask, log_decay, out, last, *kept, grad, d_last, code, offset, normalized
    )
    return dq, dk, dv, None, d_first, d_decay  # type: ignore[return-value]


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor, eps: float,
    code: int, offset: float, keep: bool = True, normalized: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``decayed_scan`` in operations that autograd follows, chunk after chunk."""
    D, E, outs = q.shape[-1], v.shape[-1], []
    x, keys, values = plain.features(q, code, offset), *plain.masked(k, v, key_mask, code, offset)
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    state = values.new_zeros((*q.shape[:-2], D, E + 1)) if first is None else plain.apart(first, D, E)
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
    return out.to(q.dtype), plain.together(state)


differentiable(decayed_scan, plain_scan, _of_scan, tensors=6, visible=2)


def forms(log_decay: Tensor, eps: float, code: int, offset: float, keep: bool, normalized: bool) -> tuple[Forms, Forms]:
    """The kernels and their plain twins, for tokens that decay so; not causal there are none."""

    def scan(form: Any, keep: bool) -> Any:
        return lambda q, k, v, mask, first: form(
            q, k, v, mask, first, log_decay[..., : q.shape[-2]], eps, code, offset, keep, normalized
        )[:2]

    def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        return decayed_step(q, k, v, mask, state, log_decay[..., :1], eps, code, offset, normalized)

    return Forms(scan(decayed_scan, keep), None, None, step), Forms(
        scan(plain_scan, keep), None, None, scan(plain_scan, keep)
    )
