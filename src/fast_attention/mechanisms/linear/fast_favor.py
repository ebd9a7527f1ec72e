"""Operations of attention from random features: the compiled core, kernels for GPUs, or plain sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine.operation import Fast, Operation, like_queries
from fast_attention.engine.tracing import symbolic
from fast_attention.mechanisms.linear import compiled, favor_gpu, reference
from fast_attention.mechanisms.linear.favor_gpu import MAPS
from fast_attention.mechanisms.linear.linear_state import LinearState, normalise
from fast_attention.mechanisms.linear.random_feature_map import Heads, RandomFeatureMap


def attend(
    phi: RandomFeatureMap, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, is_causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Outputs (..., L, Ev) for queries (..., L, d), keys (..., S, d), values (..., S, Ev) and rows (..., m, d)."""
    if not symbolic() and heads.rows.shape[:-2] != q.shape[-heads.rows.ndim : -2]:
        lead = torch.broadcast_shapes(q.shape[:-2], heads.rows.shape[:-2])
        q, k, v = (x.expand(*lead, -1, -1) for x in (q, k, v))
    return sums(q, k, v, key_mask, *heads, kind=phi.number, is_causal=is_causal)


def random_sums(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Any, kind: int, is_causal: bool
) -> Tensor:
    """``phi(q_i)^T G / phi(q_i)^T g`` over the keys that query i may see."""
    phi, heads = MAPS[kind], Heads(*others)
    keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, key_mask)
    return normalise(reference.attend(phi.plain(q, heads).free, keys, v, is_causal=is_causal))


def further_random_sums(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Any, kind: int, is_causal: bool
) -> tuple[Tensor, ...]:
    """Causal outputs of new tokens behind a state, and the three tensors of the state after them."""
    phi, heads, state = MAPS[kind], Heads(*others[:3]), None if others[3] is None else LinearState(*others[3:])
    keys = reference.masked_keys(lambda x: phi.plain(x, heads.keys), k, key_mask)
    found, after = reference.advance(phi.plain(q, heads).free, keys, v, state)
    return normalise(found), *after


def _core(kind: int) -> dict[str, Any]:
    number = compiled.EXPONENTIAL if MAPS[kind].exponential else compiled.TRIGONOMETRIC
    return {"number": number, "offset": 0.0, "eps": 0.0}


def _rows(rows: Tensor | None, kind: int) -> Tensor | None:
    """Rows as the core takes them: of all exponentials, or of pairs of a cosine and a sine."""
    if rows is None:
        return None
    return torch.cat([rows.float(), -rows.float()], -2) if MAPS[kind].kind == "hyperbolic" else rows.float()


def _given(tensors: Any, kind: int) -> Any:
    q, k, v, key_mask, rows, bias, key_rows, *state = tensors
    rows, own = _rows(rows, kind), _rows(key_rows, kind)
    return q, k, v, key_mask, rows, rows if own is None else own, None if bias is None else bias.float(), *state


def forward(*tensors: Any, kind: int, **settings: Any) -> Any:
    """The core's outputs and, behind a state, the state after them."""
    return compiled.forward(*_given(tensors, kind), **_core(kind), **settings)


def backward(
    inputs: Any, outputs: Any, kept: tuple[Tensor, ...], gradients: tuple[Tensor, ...], *, kind: int, **settings: Any
) -> compiled.Arguments:
    """Gradients of tokens, rows, biases and states."""
    rows, bias, key_rows = inputs[4:7]
    learned = tuple(x is not None and x.requires_grad for x in (rows, rows if key_rows is None else key_rows, bias))
    settings = {"learned": learned, **_core(kind), **settings}
    found = compiled.backward(_given(inputs, kind), outputs, kept, gradients, **settings)
    dq, dk, dv, _, d_rows, d_own, d_bias, *d_state = found
    if key_rows is None:
        d_rows, d_own = None if d_rows is None or d_own is None else d_rows + d_own, None
    if MAPS[kind].kind == "hyperbolic":
        d_rows, d_own = (
            None if x is None else x[..., : rows.shape[-2], :] - x[..., rows.shape[-2] :, :] for x in (d_rows, d_own)
        )
    pairs = ((d_rows, rows), (d_bias, bias), (d_own, key_rows))
    return dq, dk, dv, None, *(None if d is None or x is None else d.to(x.dtype) for d, x in pairs), *d_state


sums = Operation(
    random_sums,
    cpu=Fast(
        forward, backward, serves=compiled.serves, even=3, halves=True, path=compiled.PATH, why=compiled.why,
        sizes=compiled.sizes,
    ),
    cuda=Fast(favor_gpu.attend, None, serves=favor_gpu.serves, halves=True),
    compute=torch.float32,
    empty=like_queries,
    path="plain sums",
)  # fmt: skip
further = Operation(
    further_random_sums,
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
    before = (None, None, None) if state is None else state
    out, *after = further(q, k, v, key_mask, *heads, *before, kind=phi.number, is_causal=True)
    return out, LinearState(*after)
