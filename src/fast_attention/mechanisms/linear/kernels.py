"""Kernels of chunk sums as operations: of elementwise features, whose sums may decay, and of exponentials.

Tokens are (B, H, n, width). States are rows of numbers (B, H, D E + D): ``sum_j phi(k_j) v_j^T``, and behind it
``sum_j phi(k_j)``; those of exponentials (B, H, D E + 2 D) end with the logarithms of what both are divided by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fast_attention.feature_maps.features import EluPlusOne, Identity, Relu
from fast_attention.gpu import self_check
from fast_attention.gpu.calls import KernelSet, one_by_one
from fast_attention.gpu.operations import Operations
from fast_attention.gpu.self_check import Case
from fast_attention.mechanisms.linear import reference
from fast_attention.mechanisms.linear.core_map import EXPONENTIAL, CoreMap
from fast_attention.mechanisms.linear.linear_state import LinearState, empty, normalise, read


def plain_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, log_decay: Tensor | None = None, *,
    eps: float, code: int, offset: float, normalized: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs behind a first state, and the state after all keys: the reference of ``chunk_scan``.

    ``code`` and ``offset`` name the feature map (``maps``). ``log_decay`` (B, H, n) in float32 are the logarithms, none
    above zero, by which every token multiplies what was before it. Not ``normalized``, outputs are numerators.
    """
    phi, decays = _map(code, offset), None if log_decay is None else log_decay[..., None]
    return _scan(phi(q), reference.masked_keys(phi, k, key_mask), v, first, decays, eps=eps, normalize=normalized)


def plain_sums(k: Tensor, v: Tensor, key_mask: Tensor | None, *, code: int, offset: float) -> Tensor:
    """The state after all keys."""
    return _row(reference.summarised(reference.masked_keys(_map(code, offset), k, key_mask), v))


def plain_read(q: Tensor, sums: Tensor, *, eps: float, code: int, offset: float) -> Tensor:
    """Read a state for every query."""
    return normalise(read(_map(code, offset)(q).free, _state(sums, q.shape[-1])), eps)


def plain_feature_scan(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, query_rows: Tensor,
    bias: Tensor | None, key_rows: Tensor, begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``plain_scan`` of exponentials: the reference of ``feature_scan``.

    Rows of queries and of keys are (H, D, width), a bias of the logarithms (H, D), which has no gradient. ``begins``
    (chunks,): which chunks are the first of a packed sequence.
    """
    if begins is not None:
        return one_by_one(plain_feature_scan, q, k, v, key_mask, first, begins, query_rows, bias, key_rows)
    phi = _exponential(query_rows, bias)(q)
    return _scan(phi, reference.masked_keys(_exponential(key_rows, bias), k, key_mask), v, first, scaled=True)


def plain_feature_sums(k: Tensor, v: Tensor, key_mask: Tensor | None, key_rows: Tensor, bias: Tensor | None) -> Tensor:
    """The state after all keys."""
    return _row(reference.summarised(reference.masked_keys(_exponential(key_rows, bias), k, key_mask), v), scaled=True)


def plain_feature_read(q: Tensor, sums: Tensor, query_rows: Tensor, bias: Tensor | None) -> Tensor:
    """Read a state for every query."""
    state = _state(sums, query_rows.shape[-2], scaled=True)
    return normalise(read(_exponential(query_rows, bias)(q).free, state))


def _map(code: int, offset: float) -> Any:
    return (Identity(), EluPlusOne(), Relu(offset))[code].features


def _exponential(rows: Tensor, bias: Tensor | None) -> Any:
    return CoreMap(EXPONENTIAL, 0.0, rows, rows, None if bias is None else bias[:, None]).maps()[0]


def _scan(
    queries: Any, keys: Any, v: Tensor, first: Tensor | None, decays: Tensor | None = None, *, scaled: bool = False,
    eps: float = 0.0, normalize: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    state = empty(keys, v)
    state = state if first is None else _state(first, state.k.shape[-1], scaled=scaled)
    if decays is None:
        sums, after = reference.advance(queries.free, keys, v, state)
        out = normalise(sums, eps) if normalize else sums.numerator
    else:
        out, after = reference.attention(queries, keys, v, state, decays, eps=eps, normalize=normalize)
    assert after is not None
    return out, _row(after, scaled=scaled)


def _state(row: Tensor, features: int, *, scaled: bool = False) -> LinearState:
    """A state of so many features from its numbers in a row; its scales have no gradient."""
    scales = row[..., -features:].detach() if scaled else row.new_zeros((*row.shape[:-1], 1))
    row = row[..., :-features] if scaled else row
    return LinearState(row[..., :-features].unflatten(-1, (features, -1)), row[..., -features:], scales)


def _row(state: LinearState, *, scaled: bool = False) -> Tensor:
    """The numbers of a state in a row; scales of all features together are multiplied in."""
    if scaled:
        return torch.cat([state.kv.flatten(-2), state.k, state.log_scale], -1)
    return torch.cat([state.kv.flatten(-2), state.k], -1) * state.log_scale.exp()


def _launch(*given: Any, **settings: Any) -> Any:
    from fast_attention.gpu.launching import Launch

    return Launch.elementwise(*given, **settings)


def _launch_features(*given: Any) -> Any:
    from fast_attention.gpu.launching import Launch

    return Launch.exponential(*given)


chunk_scan, key_sums, read_sums, _step = Operations.of(_launch, plain_scan, plain_sums, plain_read)
feature_scan, feature_sums, feature_read, _feature_step = Operations.of(
    _launch_features, plain_feature_scan, plain_feature_sums, plain_feature_read
)


def elementwise(
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


def exponential(query_rows: Tensor, key_rows: Tensor, bias: Tensor | None, begins: Tensor | None = None) -> KernelSet:
    """The kernels with one projection; ``begins``: of packed sequences, causal."""
    return KernelSet(
        lambda q, k, v, mask, first: feature_scan(q, k, v, mask, first, query_rows, bias, key_rows, begins),
        lambda k, v, mask: feature_sums(k, v, mask, key_rows, bias),
        lambda q, sums: feature_read(q, sums, query_rows, bias),
        lambda q, k, v, mask, state: _feature_step(q, k, v, mask, state, query_rows, bias, key_rows),
    )


def check_elementwise(code: int) -> Case:
    """The self-check of a map, by its number (``maps``)."""
    return Case.of(f"map {code}", lambda device: elementwise(1e-6, code, 0.0))


def check_decayed(code: int, *, normalized: bool) -> Case:
    """The self-check of sums that decay."""

    def make(device: torch.device) -> KernelSet:
        generator = torch.Generator(device).manual_seed(1)
        log_decay = -0.1 * torch.rand(1, 2, self_check.TOKENS, generator=generator, device=device)
        return elementwise(1e-6, code, 0.0, log_decay, normalized=normalized)

    return Case.of(f"decays {code} {normalized}", make)


def check_exponential(features: int, width: int) -> Case:
    """The self-check of so many exponentials, of heads so wide."""

    def make(device: torch.device) -> KernelSet:
        generator = torch.Generator(device).manual_seed(1)
        rows = torch.randn(2, features, width, generator=generator, device=device)
        return exponential(rows, rows, None)

    return Case.of(f"exponentials {features}", make)
