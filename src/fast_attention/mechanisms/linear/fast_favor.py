"""Attention from random features by the path that suits the call: chunk by chunk, or plain sums.

Attention from random features, every query to every key: all chunks of keys are summed, then queries read the sums.

Where a chunk holds a larger feature than all before it, the sums so far are rescaled to it. Arguments are flat:
q (N, L, d), k (N, S, d), v (N, S, Ev), mask (N, S) or None, and of ``Heads`` rows (N, m, d), bias (N, 1, m) or None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.numerics import bounded
from fast_attention.engine.opaque import like_queries, opaque
from fast_attention.engine.precision import in_float32
from fast_attention.engine.recurrence import Chunk, flat, groups, masked_rows
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.linear import fast_favor_causal, favor_gpu, gpu, linear_state, reference
from fast_attention.mechanisms.linear.fast_favor_causal import RunningSums, inverse, keys_vjp
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

SHORT, SHORT_CAUSAL = 64, 128  # tokens up to which chunks cost more than they save


def attend(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Outputs (..., L, Ev) for queries (..., L, d), keys (..., S, d), values (..., S, Ev) and rows (..., m, d)."""
    settings: Any = {"is_causal": is_causal, "key_mask": key_mask}
    if why := favor_gpu.obstacle(phi, q, k, v, heads, masked=key_mask is not None):
        dispatch.unserved(q, why)
        return _attend(phi, q, k, v, heads, **settings)
    return favor_gpu.attend(phi, q, k, v, heads, **settings)


@in_float32
def _attend(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """``attend`` without kernels for GPUs."""
    if is_causal and phi.exponential:
        return _positive_causal(q, k, v, key_mask, *heads, hyperbolic=phi.pairs)
    return _chosen(phi, q, k, v, heads, is_causal=is_causal, key_mask=key_mask)


@opaque(like_queries)
def _positive_causal(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: Tensor, bias: Tensor | None,
    key_rows: Tensor | None, *, hyperbolic: bool,
) -> Tensor:  # fmt: skip
    """Chunks that look at numbers, which a compiler would have feature by feature."""
    phi = RandomFeatureMap("hyperbolic" if hyperbolic else "positive")
    return _chosen(phi, q, k, v, Heads(rows, bias, key_rows), is_causal=True, key_mask=key_mask)


TOKENS = 2048  # of a chunk, of one head or of several short ones: enough for two threads to share each call
SUMMED = 4  # chunks added to a running sum before it moves into the total


def _groups(x: Tensor) -> list[list[Chunk]]:
    size = min(TOKENS, x.shape[1])
    return groups(len(x), x.shape[1], size, together=max(1, TOKENS // size))


def _chunks(x: Tensor) -> Iterator[Chunk]:
    return (chunk for chunks in _groups(x) for chunk in chunks)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *weights: Tensor | None, phi: RandomFeatureMap, keep: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs (N, L, Ev), and for the gradient G (N, C, Ev), g and log scales (N, 1, C), 1 / denominators (N, L)."""
    heads, workspace = Heads(*cast("list[Tensor]", weights)), Workspace(q)
    state = _summarise(k, v, masked_rows(mask, k), heads.keys, phi, workspace)
    G, g, log_scale = state
    out, inv_denominator = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2])
    for chunk in _chunks(q):
        rows = chunk.rows
        values = phi.queries(chunk.of(q), heads.some(rows), log_scale[rows], workspace)
        numerator = torch.bmm(values, G[rows])
        factor = chunk.of(inv_denominator)
        factor.copy_(inverse(values.mul_(g[rows]).sum(-1)))
        torch.mul(numerator, factor[..., None], out=chunk.of(out))
    return out, (*state, inv_denominator) if keep else ()


def _summarise(
    k: Tensor, v: Tensor, masked: Tensor | None, heads: Heads, phi: RandomFeatureMap, workspace: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums G and g over all keys, and their log scales (N, 1, C)."""
    count, width = len(k), phi.width(heads.rows)
    G, g = k.new_zeros(count, width, v.shape[-1]), k.new_zeros(count, 1, width)
    log_scales = phi.first_log_scale(k, count, heads.rows)
    for chunks in _groups(k):
        rows = chunks[0].rows
        sums, log_scale = RunningSums(G[rows], g[rows], SUMMED), log_scales[rows]
        for chunk in chunks:
            hidden = None if masked is None else chunk.of(masked)
            values, half = phi.keys(chunk.of(k), heads.some(rows), hidden, workspace)
            scales = values if phi.exponential else half
            running_max = torch.maximum(log_scale, scales.amax(1, keepdim=True))
            rescale = (log_scale - running_max).exp_()
            log_scale = running_max
            phi.finish(values, half, log_scale)
            sums.rescale(rescale)
            sums.add(values, chunk.of(v))
        sums.read(G[rows], g[rows])
        log_scales[rows] = log_scale
    return G, g, log_scales


def backward(
    inputs: Tensors, outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *,
    phi: RandomFeatureMap,
) -> Tensors:  # fmt: skip
    """Gradients of q, k and v, and of trained rows and bias."""
    q, k, v, mask, *weights = cast("list[Tensor]", inputs)
    (out,), (G, g, log_scale, inv_denominator), (grad,) = outputs, kept, gradients
    workspace, heads = Workspace(q), Heads(*weights)
    d_heads = heads.mapped(torch.zeros_like) if heads.trained else None
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dG, dg = torch.zeros_like(G), torch.zeros_like(g)
    for chunk in _chunks(q):
        rows, x = chunk.rows, chunk.of(q)
        values = phi.queries(x, heads.some(rows), log_scale[rows], workspace)
        d_numerator = chunk.of(grad) * chunk.of(inv_denominator)[..., None]
        d_denominator = torch.linalg.vecdot(d_numerator, chunk.of(out)).neg_()
        d = torch.bmm(d_numerator, G[rows].mT, out=workspace("d", *values.shape))
        d.addcmul_(d_denominator[..., None], g[rows])
        dG[rows].baddbmm_(values.mT, d_numerator)
        dg[rows].baddbmm_(d_denominator[:, None], values)
        phi.vjp(d, values, x, heads.some(rows), workspace, chunk.of(dq), False, d_heads and d_heads.some(rows))
    masked = masked_rows(mask, k)
    for chunk in _chunks(k):
        rows, hidden = chunk.rows, None if masked is None else chunk.of(masked)
        keys_vjp(chunk.of(k), chunk.of(v), heads.some(rows), hidden, phi, workspace, log_scale[rows],
                 (dG[rows], dg[rows]), (chunk.of(dk), chunk.of(dv)), d_heads and d_heads.some(rows))  # fmt: skip
    return dq, dk, dv, None, *(d_heads or (None, None, None))


def _chosen(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    why = _against(phi, q, k, is_causal=is_causal)
    if why:
        dispatch.record("features of the whole sequence at once", why)
        return _plain(q, k, v, key_mask, *heads, phi=phi, is_causal=is_causal)
    extra = q.shape[-2] - k.shape[-2] if is_causal else 0
    if extra > 0:  # the first queries see nothing
        out = _chosen(phi, q[..., extra:, :], k, v, heads, is_causal=True, key_mask=key_mask)
        return F.pad(out, (0, 0, extra, 0))
    lead, tensors = _flat(q, k, v, heads, key_mask)
    if is_causal:
        size = fast_favor_causal.tokens(phi, heads.rows)
        dispatch.record("features chunk by chunk, with a running state", "causal", chunk=size)
    else:
        dispatch.record("features block by block", "every query sees all keys", block=TOKENS)
    out = CAUSAL(*tensors, *_begin(phi, tensors), phi=phi)[0] if is_causal else NONCAUSAL(*tensors, phi=phi)
    return out.reshape(*lead, *out.shape[-2:])


def advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Causal outputs of new tokens behind ``state``, and the state after them."""
    if why := favor_gpu.obstacle(phi, q, k, v, heads, masked=key_mask is not None) or gpu.few(q, k, v, state, *heads):
        dispatch.unserved(q, why)
        return _advance(phi, q, k, v, heads, state, key_mask)
    return favor_gpu.advance(phi, q, k, v, heads, state, key_mask)


@in_float32
def _advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """``advance`` without kernels for GPUs."""
    if _against(phi, q, k, is_causal=True):
        if q.shape[-2] == 1 and state is not None and key_mask is None:
            return _step(phi, q, k, v, heads, state)
        keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, key_mask)
        sums, state = reference.advance(phi.plain(q, heads).free, keys, v, state)
        return normalise(sums), state
    lead, tensors = _flat(q, k, v, heads, key_mask)
    first = _begin(phi, tensors)
    if state is not None:
        first = tuple(x.reshape(like.shape) for x, like in zip(state, first, strict=True))
    out, *after = CAUSAL(*tensors, *first, phi=phi)
    out, G, g, log_scale = (x.reshape(*lead, *x.shape[-2:]) for x in (out, *after))
    return out, LinearState(G, g[..., 0, :], log_scale[..., 0, :])


def _step(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState
) -> tuple[Tensor, LinearState]:
    """One token: features of query and key together, one pass to rescale the state and add to it, one to read it."""
    if heads.key_rows is None:
        both = phi.plain(torch.cat([q, k], -2), heads)
        queries, keys = reference.sliced(both, slice(0, 1)), reference.sliced(both, slice(1, 2))
    else:
        queries, keys = phi.plain(q, heads), phi.plain(k, heads.keys)
    sums, state = reference.step(queries.free, keys, v, state)
    return normalise(sums), state


def _against(phi: RandomFeatureMap, q: Tensor, k: Tensor, *, is_causal: bool) -> str:
    """Why chunks would not do; empty where they do."""
    if why := dispatch.obstacle(q, k):
        return why
    if is_causal and not phi.exponential:  # sums that cancel would show by which scale a later key makes them go
        return "causal sums of features of either sign"
    short = SHORT_CAUSAL if is_causal else SHORT
    return f"at most {short} tokens" if max(q.shape[-2], k.shape[-2]) <= short else ""


def _flat(q: Tensor, k: Tensor, v: Tensor, heads: Heads, key_mask: Tensor | None) -> tuple[torch.Size, Any]:
    """The leading sizes, and all tensors with these as one: q, k, v, mask, and the weights of the heads."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, heads.rows)))
    tensors, weights = (
        [None if x is None else flat(x.expand(*lead, -1, -1)) for x in each]
        for each in ((bounded(q), bounded(k), v), heads)
    )
    mask = None if key_mask is None else key_mask.expand(*lead, k.shape[-2]).reshape(-1, k.shape[-2])
    return lead, (*tensors, mask, *weights)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *weights: Any, phi: RandomFeatureMap, is_causal: bool
) -> Tensor:
    heads = Heads(*weights)
    keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, mask)
    return normalise(reference.attend(phi.plain(q, heads).free, keys, v, is_causal=is_causal))


def _begin(phi: RandomFeatureMap, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The state before the first key of flat heads: sums (N, C, Ev) and (N, 1, C), and log scales."""
    (q, _, v), rows = tensors[:3], tensors[4]
    count, width = len(q), phi.width(rows)
    sums = q.new_zeros(count, width, v.shape[-1]), q.new_zeros(count, 1, width)
    return *sums, phi.first_log_scale(q, count, rows)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *others: Any, phi: RandomFeatureMap
) -> tuple[Tensor, ...]:
    """What the chunks compute, in operations that autograd follows; all queries see the first of more keys."""
    heads, (G, g, log_scale), extra = Heads(*others[:3]), others[3:], k.shape[-2] - q.shape[-2]
    state = LinearState(G, g[..., 0, :], log_scale[..., 0, :])
    keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, mask)
    if extra:
        first, keys = reference.sliced(keys, slice(0, extra)), reference.sliced(keys, slice(extra, None))
        state = linear_state.combine(state, linear_state.summarise(first, v[..., :extra, :]))
    sums, state = reference.advance(phi.plain(q, heads).free, keys, v[..., extra:, :], state)
    return normalise(sums), state.kv, state.k[..., None, :], state.log_scale[..., None, :]


NONCAUSAL = CustomGradient(lambda *x, phi: _plain(*x, phi=phi, is_causal=False), forward, backward)
CAUSAL = CustomGradient(_causal, fast_favor_causal.forward, fast_favor_causal.backward)
