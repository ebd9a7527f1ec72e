"""LARA: nearer to softmax with more draws, and nearer than draws around zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fast_attention import LARA, Bound, FavorPlus, Shape, Softmax, Unsupported
from tests.cases import qkv


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())


def errors_of(mechanism: object, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The mean over some draws."""
    exact, several = Softmax()(q, k, v), []
    for seed in range(8):
        torch.manual_seed(seed)
        several.append(error(Bound(mechanism, Shape(2, 8)).double().to(q.device)(q, k, v), exact))  # type: ignore[arg-type]
    return sum(several) / len(several)


def test_the_error_falls_with_the_draws(device: torch.device) -> None:
    q, k, v = qkv(256, device=device, scale=0.7)
    errors = [errors_of(LARA(num_landmarks=number), q, k, v) for number in (4, 32, 256)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


def test_draws_where_the_data_is_are_nearer_than_draws_around_zero(device: torch.device) -> None:
    """Queries and keys that all lie to one side: random features around zero hardly see them."""
    q, k, v = qkv(128, device=device)
    q, k = q + 2.0, k + 2.0
    near, around_zero = (errors_of(m, q, k, v) for m in (LARA(num_landmarks=32), FavorPlus(num_features=32)))
    assert near < 0.7 * around_zero


def test_what_it_cannot_do_is_refused_by_name(device: torch.device) -> None:
    bound = Bound(LARA(num_landmarks=4), Shape(2, 8)).double().to(device)
    q, k, v = qkv(9, 12, device=device)
    with pytest.raises(Unsupported, match=r"LARA\(num_landmarks=4\) does not support cross attention"):
        bound(q, k, v)
    with pytest.raises(Unsupported, match=r"does not support is_causal=True"):
        bound(k, k, v, is_causal=True)
    with pytest.raises(ValueError, match="num_landmarks must be at least 1"):
        LARA(num_landmarks=0)
