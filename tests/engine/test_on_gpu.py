"""What mechanisms declare of a GPU: complete, and true of the plain forms, which a GPU runs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fast_attention import catalogue, explain
from fast_attention.engine import fused
from fast_attention.functional import implementation
from fast_attention.mechanism import Attention
from fast_attention.traits import BLOCKS, FLEX, FUSED, KERNELS, PARTS

DECLARED = {name: catalogue.default(name).traits.gpu for name in catalogue.names()}


def test_every_mechanism_says_it() -> None:
    assert all(DECLARED.values())


@pytest.mark.parametrize("name", [name for name, words in DECLARED.items() if words != PARTS])
def test_it_is_true_of_plain_forms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them call torch's fused attention, and which on more keys than one block sees."""
    keys: list[int] = []

    def counted(q: Any, k: Any, v: Any, **named: Any) -> Any:
        keys.append(k.shape[-2])
        return real(q, k, v, **named)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(fused.F, "scaled_dot_product_attention", counted)
    mechanism, length = catalogue.default(name), 1280
    with implementation("reference"):
        if isinstance(mechanism, Attention):
            explain(mechanism, *torch.randn(3, 1, 2, length, 16).unbind(), is_causal=mechanism.traits.modes[0])
        else:
            explain(mechanism, torch.randn(1, length, 32))
    assert bool(keys) == (DECLARED[name] in (FUSED, FLEX, BLOCKS))
    if DECLARED[name] in (FLEX, BLOCKS):
        assert min(keys) < length
    if DECLARED[name] == KERNELS:
        assert not keys


def test_explain_says_it() -> None:
    x = torch.randn(1, 2, 40, 16)
    assert f"on a GPU: {KERNELS}" in str(explain("FavorPlus()", x, x, x))
    assert f"on a GPU: {FUSED}" in str(explain("Softmax()", x, x, x))
