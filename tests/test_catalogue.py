"""parse builds values from their spelling, executes nothing, and says what is wrong in the caller's words."""

from __future__ import annotations

import re

import pytest
import torch

import fast_attention
from fast_attention import Unsupported, catalogue


def test_names_values_and_instances_are_accepted() -> None:
    softmax = fast_attention.Softmax(scale=0.5)
    assert (
        catalogue.parse("Softmax(scale=0.5)")
        == softmax
        == catalogue.parse(" Softmax(0.5) ")
        == catalogue.parse(softmax)
    )
    assert catalogue.parse("Softmax(scale=-1.0)").scale == -1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Sofmax", "Did you mean Softmax"),
        ("softmax", "Did you mean Softmax"),
        ("Softmax(sale=1)", "no setting 'sale'; its settings are: scale"),
        ("Softmax(1, 2)", "has 1 settings and got 2 values"),
        ("Softmax(", "write a name, or a call"),
        ("Softmax(scale=open('x'))", "no mechanism or value is called 'open'"),
        ("Softmax(scale=1 + 1)", "settings are numbers"),
        ("__import__('os').system('true')", "settings are numbers"),
        ("3", "is not a mechanism"),
        ("FavorPlus(num_features='a')", "num_features must be at least 1, a whole number"),
        ("FavorPlus(num_features=1.5)", "num_features must be at least 1, a whole number"),
        ("LinearAttention(eps=-1)", "eps must be at least 0.0, a number"),
        ("LinearAttention(feature_map=Custom())", "function"),
    ],
)
def test_errors_name_the_mistake(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="(?s).*" + re.escape(said)):
        catalogue.parse(text)


def test_attention_takes_names_and_reprs() -> None:
    q, k, v = (torch.randn(2, 3, 9, 4) for _ in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(fast_attention.attention(q, k, v, "Softmax"), exact)
    torch.testing.assert_close(fast_attention.attention(q, k, v, "Softmax(scale=0.5)"), exact)
    torch.testing.assert_close(fast_attention.attention(q, k, v), exact)


def test_attention_refuses_mixers_and_learned_weights() -> None:
    q = torch.randn(2, 3, 9, 4)
    with pytest.raises(Unsupported, match="mixes whole tokens"):
        fast_attention.attention(q, q, q, "FNet")
    with pytest.raises(Unsupported, match="has learned weights"):
        fast_attention.attention(q, q, q, "AFTFull")
