"""Operations of attention from random features: the compiled core, kernels for GPUs, or plain sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import trace
from fast_attention.engine.operation import Fast, Operation, like_queries, unsupported_reason
from fast_attention.engine.precision import in_float32
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import Map
from fast_attention.mechanisms.linear import compiled, favor_gpu, feature_chunks, reference
from fast_attention.mechanisms.linear.favor_gpu import MAPS
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap

CORE: Any = {"number": compiled.EXPONENTIAL, "offset": 0.0, "eps": 0.0}


def attend(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Outputs (..., L, Ev) for queries (..., L, d), keys (..., S, d), values (..., S, Ev) and rows (..., m, d)."""
    if not phi.exponential:
        why = unsupported_reason(q, k, v) or "features of either sign"
        return _plain_sums(phi, q, k, v, heads, is_causal=is_causal, key_mask=key_mask, because=why)
    if not symbolic() and heads.rows.shape[:-2] != q.shape[-heads.rows.ndim : -2]:
        lead = torch.broadcast_shapes(q.shape[:-2], heads.rows.shape[:-2])
        q, k, v = (x.expand(*lead, -1, -1) for x in (q, k, v))
    return exponentials(q, k, v, key_mask, *heads, hyperbolic=phi.pairs, is_causal=is_causal)


def exponential_sums(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *heads: Any, hyperbolic: bool, is_causal: bool
) -> Tensor:
    """``phi(q_i)^T G / phi(q_i)^T g`` over the keys that query i may see."""
    return _summed(MAPS[hyperbolic], q, k, v, Heads(*heads), is_causal=is_causal, key_mask=key_mask, because=None)


def _path(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *heads: Any, hyperbolic: bool, **_: Any) -> str:
    return feature_chunks.path(_maps(MAPS[hyperbolic]), heads, q, k, v)


def _maps(phi: RandomFeatureMap) -> feature_chunks.Maps:
    def maps(*weights: Any) -> tuple[Map, Map]:
        heads = Heads(*weights)
        return (lambda x: phi.plain(x, heads)), (lambda x: phi.plain(x, heads.keys))

    return maps


def _summed(phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, **settings: Any) -> Tensor:
    return feature_chunks.feature_attention(_maps(phi), [*heads], q, k, v, **settings)


_plain_sums = in_float32(_summed)


def further_exponentials(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Any, hyperbolic: bool, is_causal: bool
) -> tuple[Tensor, ...]:
    """Causal outputs of new tokens behind a state, and the three tensors of the state after them."""
    state = None if others[3] is None else LinearState(*others[3:])
    out, after = _advance(MAPS[hyperbolic], q, k, v, Heads(*others[:3]), state, key_mask)
    return out, *after


def _advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, key_mask)
    sums, state = reference.advance(phi.plain(q, heads).free, keys, v, state)
    return normalise(sums), state


_plain_advance = in_float32(_advance)


def _rows(rows: Tensor | None, hyperbolic: bool) -> Tensor | None:
    """Rows of all features, as the core takes them."""
    if rows is None:
        return None
    return torch.cat([rows.float(), -rows.float()], -2) if hyperbolic else rows.float()


def _given(tensors: Any, hyperbolic: bool) -> Any:
    q, k, v, key_mask, rows, bias, key_rows, *state = tensors
    rows, own = _rows(rows, hyperbolic), _rows(key_rows, hyperbolic)
    return q, k, v, key_mask, rows, rows if own is None else own, None if bias is None else bias.float(), *state


def forward(*tensors: Any, hyperbolic: bool, **settings: Any) -> Any:
    """The core's outputs and, behind a state, the state after them."""
    return compiled.forward(*_given(tensors, hyperbolic), **CORE, **settings)


def backward(
    inputs: Any, outputs: Any, kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *, hyperbolic: bool,
    **settings: Any,
) -> compiled.Arguments:  # fmt: skip
    """Gradients of tokens, rows, biases and states."""
    rows, bias, key_rows = inputs[4:7]
    learned = tuple(x is not None and x.requires_grad for x in (rows, rows if key_rows is None else key_rows, bias))
    found = compiled.backward(_given(inputs, hyperbolic), outputs, kept, gradients, learned=learned, **CORE, **settings)
    dq, dk, dv, _, d_rows, d_own, d_bias, *d_state = found
    if key_rows is None:
        d_rows, d_own = None if d_rows is None or d_own is None else d_rows + d_own, None
    if hyperbolic:
        d_rows, d_own = (
            None if x is None else x[..., : rows.shape[-2], :] - x[..., rows.shape[-2] :, :] for x in (d_rows, d_own)
        )
    pairs = ((d_rows, rows), (d_bias, bias), (d_own, key_rows))
    return dq, dk, dv, None, *(None if d is None or x is None else d.to(x.dtype) for d, x in pairs), *d_state


exponentials = Operation(
    exponential_sums,
    cpu=Fast(
        forward, backward, serves=compiled.serves, even=3, halves=True, path=compiled.PATH, why=compiled.why,
        sizes=compiled.sizes,
    ),
    cuda=Fast(favor_gpu.attend, None, serves=favor_gpu.serves, halves=True),
    compute=torch.float32,
    empty=like_queries,
    path=_path,
)  # fmt: skip
further = Operation(
    further_exponentials,
    cpu=Fast(
        partial(forward, advances=True), partial(backward, advances=True), serves=compiled.advances, even=3,
        halves=True, path=compiled.PATH, why="behind a state", sizes=compiled.sizes,
    ),
    cuda=Fast(favor_gpu.further, None, serves=favor_gpu.advances, halves=True),
    compute=torch.float32,
    path="plain sums",
)  # fmt: skip


def advance(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, state: LinearState | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Causal outputs of new tokens behind ``state``, and the state after them."""
    if not phi.exponential:
        trace.record("plain sums", unsupported_reason(q, k, v) or "features of either sign")
        return _plain_advance(phi, q, k, v, heads, state, key_mask)
    before = (None, None, None) if state is None else state
    out, *after = further(q, k, v, key_mask, *heads, *before, hyperbolic=phi.pairs, is_causal=True)
    return out, LinearState(*after)
