"""Which way attention from random features goes: in blocks with a written-out gradient, or in one piece."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import dispatch
from fast_attention.engine.bounds import bounded
from fast_attention.engine.custom_gradient import CustomGradient, Tensors
from fast_attention.engine.tracing import traced
from fast_attention.engine.workspace import Workspace
from fast_attention.mechanisms.linear import fast_favor_causal, fast_favor_noncausal, linear_state, reference
from fast_attention.mechanisms.linear.fast_favor_causal import Part
from fast_attention.mechanisms.linear.fast_favor_sums import Kept, Running, blocks, chunk_of
from fast_attention.mechanisms.linear.linear_state import LinearState
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

SHORT = 64  # tokens: below, blocks cost more than they save
TOKENS = 512  # in one chunk, of all heads of a group


def attend(
    phi: RandomFeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Heads,
    *,
    is_causal: bool,
    key_mask: Tensor | None,
) -> Tensor:
    """Outputs (..., L, Ev) for queries (..., L, d), keys (..., S, d), values (..., S, Ev) and rows (..., m, d)."""
    why = _against(phi, q, k, heads, is_causal=is_causal)
    if why:
        dispatch.record("features of the whole sequence at once", why)
        return _plain(q, k, v, key_mask, *heads, phi=phi, is_causal=is_causal)
    extra = q.shape[-2] - k.shape[-2] if is_causal else 0
    if extra > 0:  # the first queries see nothing
        return F.pad(attend(phi, q[..., extra:, :], k, v, heads, is_causal=True, key_mask=key_mask), (0, 0, extra, 0))
    lead, flat = _flat(q, k, v, heads, key_mask)
    if is_causal:
        dispatch.record("features chunk by chunk, with a running state", "causal", chunk=chunk_of(phi, heads.rows))
    else:
        dispatch.record("features block by block", "every query sees all keys", block=fast_favor_noncausal.BLOCK)
    out = (CAUSAL if is_causal else WHOLE)(*flat, phi=phi)
    return out.reshape(*lead, *out.shape[-2:])


def advance(
    phi: RandomFeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Heads,
    state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:
    """Causal outputs of a stretch that follows ``state``, and the state after it."""
    tensors = (q, k, v, *heads, *(state or ()))
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if wanted or _against(phi, q, k, heads, is_causal=True):
        if q.shape[-2] == 1 and state is not None and key_mask is None:
            return _step(phi, q, k, v, heads, state)
        keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, key_mask)
        sums, state = reference.advance(phi.plain(q, heads).free, keys, v, state)
        return linear_state.normalise(sums), state
    lead, flat = _flat(q, k, v, heads, key_mask)
    count, width, values = flat[0].shape[0], phi.width(heads.rows), v.shape[-1]
    G, g, unit = q.new_zeros(count, width, values), q.new_zeros(count, 1, width), phi.units(q, flat[4])
    if state is not None:
        G.copy_(state.kv.reshape(G.shape))
        g.copy_(state.k.reshape(g.shape))
        unit.copy_(state.log_scale.reshape(unit.shape))
    out = _chunks(*flat, phi=phi, keep=False, carry=(G, g, unit))[0]
    after = LinearState(G.view(*lead, width, values), g.view(*lead, width), unit.view(*lead, -1))
    return out.reshape(*lead, *out.shape[-2:]), after


def _step(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState
) -> tuple[Tensor, LinearState]:
    """One token: features of query and key together, one pass over the state to fade it and add to it, one to read."""
    if heads.key_rows is None:
        both = phi.plain(torch.cat([q, k], -2), heads)
        queries, keys = reference.sliced(both, slice(0, 1)), reference.sliced(both, slice(1, 2))
    else:
        queries, keys = phi.plain(q, heads), phi.plain(k, heads.keys)
    sums, state = reference.step(queries.free, keys, v, state)
    return linear_state.normalise(sums), state


def _against(phi: RandomFeatureMap, q: Tensor, k: Tensor, heads: Heads, *, is_causal: bool) -> str:
    """Why blocks would not do; empty where they do."""
    if traced():
        return "traced"
    if q.device.type != "cpu":
        return "not on a CPU"
    if is_causal and not phi.exponential:  # sums that cancel would show by which unit a later key makes them go
        return "causal sums of features of either sign"
    return f"at most {SHORT} tokens" if max(q.shape[-2], k.shape[-2]) <= SHORT else ""


def _flat(
    q: Tensor, k: Tensor, v: Tensor, heads: Heads, key_mask: Tensor | None
) -> tuple[torch.Size, tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]]:
    """The leading sizes, and all tensors with these as one: q, k, v, mask, and those of the heads."""
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, heads.rows)))

    q, k = bounded(q), bounded(k)

    def flat(x: Tensor) -> Tensor:
        return x.expand(*lead, -1, -1).reshape(-1, *x.shape[-2:])

    mask = None if key_mask is None else key_mask.expand(*lead, k.shape[-2]).reshape(-1, k.shape[-2])
    rows, bias, key_rows = (None if x is None else flat(x) for x in heads)
    assert rows is not None
    return lead, (flat(q), flat(k), flat(v), mask, rows, bias, key_rows)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *of_heads: Any, phi: RandomFeatureMap, is_causal: bool
) -> Tensor:
    heads = Heads(*of_heads)
    keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, mask)
    return linear_state.normalise(reference.attend(phi.plain(q, heads).free, keys, v, is_causal=is_causal))


def _groups(count: int, size: int) -> list[slice]:
    several = max(1, TOKENS // size)
    return [slice(at, min(at + several, count)) for at in range(0, count, several)]


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *of_heads: Any, phi: RandomFeatureMap, keep: bool,
    carry: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """All groups of heads forward; ``carry`` (G, g, unit) is where they begin, and is left where they end."""
    heads = Heads(*of_heads)
    rows, count = heads.rows, len(q)
    size, width, units = chunk_of(phi, rows), phi.width(rows), phi.units(q, rows)
    order = blocks(size, q.shape[1], k.shape[1])
    places, held = (len(order), count) if keep else (1, count)
    kept = Kept(
        q.new_empty(held, places, width, v.shape[-1]), q.new_empty(held, places, 1, width),
        q.new_empty(held, places, 1, units.shape[-1]), q.new_empty(held, places, 1, units.shape[-1]),
    )  # fmt: skip
    out, over, workspace = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_zeros(q.shape[:2]), Workspace(q)
    for some in _groups(count, size):
        part = Part(q[some], k[some], v[some], heads.some(some), None if mask is None else mask[some], phi, workspace)
        G, g, unit = (x[some] for x in carry) if carry else (
            q.new_zeros(len(part.q), width, v.shape[-1]), q.new_zeros(len(part.q), 1, width),
            units[some],
        )  # fmt: skip
        sums = Running(G, g)
        end = fast_favor_causal.forward(part, order, kept.some(some), sums, unit, out[some], over[some])
        if carry:
            sums.read(G, g)
            unit.copy_(end)
    return out, (*kept, over) if keep else ()


def _chunks_back(
    inputs: Tensors, outputs: tuple[Tensor, ...], kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *,
    phi: RandomFeatureMap,
) -> Tensors:  # fmt: skip
    q, k, v, mask, *of_heads = inputs
    assert q is not None
    assert k is not None
    assert v is not None
    *places, over = kept
    heads = Heads(*cast("list[Tensor]", of_heads))
    size, workspace, learned = (
        chunk_of(phi, heads.rows),
        Workspace(q),
        heads.mapped(torch.zeros_like) if heads.trained else None,
    )
    order = blocks(size, q.shape[1], k.shape[1])
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for some in _groups(len(q), size):
        part = Part(q[some], k[some], v[some], heads.some(some), None if mask is None else mask[some], phi, workspace,
                    learned and learned.some(some))  # fmt: skip
        fast_favor_causal.backward(part, order, Kept(*places).some(some), outputs[0][some], over[some],
                                   gradients[0][some], (dq[some], dk[some], dv[some]))  # fmt: skip
    return dq, dk, dv, None, *(learned or (None, None, None))


WHOLE = CustomGradient(
    lambda *x, phi: _plain(*x, phi=phi, is_causal=False),
    fast_favor_noncausal.forward,
    fast_favor_noncausal.backward,
)
CAUSAL = CustomGradient(
    lambda *x, phi: _plain(*x, phi=phi, is_causal=True),
    _chunks,
    _chunks_back,
)
