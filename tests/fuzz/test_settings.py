"""Settings of wrong types and sizes: a value that prints and parses, or a refusal of one line."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import strategies as st

from fast_attention import Shape, catalogue
from tests.fuzz.kit import fuzz

SETTINGS = [(name, field.name) for name in catalogue.names() for field in fields(type(catalogue.default(name)))]
VALUES: list[Any] = [
    "a", "", b"a", True, False, None, 0, 1, -1, 3, 10**30, 1.5, -0.5, float("nan"), float("inf"), (), (1,), (2, 2),
    ("a", "b"), [1], {}, object(), 1j, ..., int, print,
]  # fmt: skip


@fuzz("settings of mechanisms", examples=400, setting=st.sampled_from(SETTINGS), value=st.sampled_from(VALUES))
def test_a_setting_is_taken_or_refused(setting: tuple[str, str], value: Any) -> None:
    name, field = setting
    kind = type(catalogue.default(name))
    try:
        made = kind(**{field: value})
    except ValueError as error:
        said = str(error)
        assert "\n" not in said
        assert field in said or name in said
        return
    assert not isinstance(value, float) or value == value, f"{made!r} took a NaN"
    if callable(value):
        return  # any function may be a feature map, which no text spells
    assert catalogue.parse(repr(made)) == made
    assert hash(made) == hash(catalogue.parse(repr(made)))


@fuzz("sizes of shapes", examples=60, sizes=st.lists(st.sampled_from(VALUES), min_size=3, max_size=3))
def test_a_shape_is_of_whole_numbers(sizes: list[Any]) -> None:
    try:
        shape = Shape(*sizes)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = "Shape("
        assert all(type(size) is int for size in (shape.heads, shape.head_dim, shape.max_len))
    assert refusal.startswith("Shape(")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Softmax(scale='a')", r"Softmax\(scale='a'\): scale must be a finite number or None"),
        ("Softmax(scale=True)", r"scale must be a finite number or None"),
        ("Softmax(scale=1e400)", r"scale must be a finite number or None"),
        ("RandomSynthesizer(trainable='no')", r"trainable must be True or False"),
        ("RandomSynthesizer(trainable=1)", r"trainable must be True or False"),
        ("Local(window='a')", r"window must be"),
        ("GMLP(toeplitz=None)", r"GMLP\(toeplitz=None\): toeplitz must be True or False"),
        ("-" * 100_000 + "1", r"100,001 characters"),
        ("(" * 100_000, r"100,000 characters"),
        ("-" * 9_000 + "1", r"settings are|is not a mechanism"),
        ("Softmax(" * 900, r"is not a mechanism"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        catalogue.parse(text)
