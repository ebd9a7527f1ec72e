"""What is refused is told in the caller's words, with what would work: names, classes, functions, denied traits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fast_attention import (
    Adapted,
    AFTFull,
    AFTLocal,
    AFTSimple,
    ALiBi,
    Attention,
    BlockLocal,
    Bound,
    ByLength,
    Hybrid,
    LinearAttention,
    Local,
    Mixer,
    MultiheadAttention,
    Shape,
    Softmax,
    TokenMixer,
    attention,
    attention_rows,
    catalogue,
    conformance,
    explain,
    exporting,
    extend,
    parallel,
    swap,
    swap_back,
)
from fast_attention.conversion import convert
from fast_attention.functional import local_attention
from fast_attention.refusals import granting

Q = torch.randn(1, 2, 4, 8)
DENIABLE = [
    *((trait, None) for trait in ("causal", "bidirectional", "padding", "cross", "mask", "rotary", "memory", "matrix")),
    ("export", None), ("approximates", None), ("memory", "constant"),
]  # fmt: skip


@pytest.mark.parametrize("name", catalogue.names())
def test_what_would_work_is_of_its_kind_and_costs_no_more(name: str) -> None:
    """Where some grant it at no higher cost, none of higher cost is named; its own family is named first."""
    mechanism = catalogue.default(name)
    kind: Any = Attention if isinstance(mechanism, Attention) else Mixer
    everything = {each: catalogue.default(each) for each in catalogue.names()}
    for trait, needed in DENIABLE:
        value = getattr(mechanism.traits, trait)
        if value == needed if needed else value:
            continue
        granted = granting(kind, trait, mechanism, needed)
        values = {each: getattr(one.traits, trait) for each, one in everything.items() if isinstance(one, kind)}
        able = [each for each, held in values.items() if (held == needed if needed else held)]
        exponent = {each: one.traits.complexity_exponent for each, one in everything.items()}
        cheap = [each for each in able if exponent[each] <= exponent[name]]
        assert set(granted) == set(cheap or able), trait
        assert not cheap or max(exponent[each] for each in granted) <= exponent[name], trait
        rooms = [type(everything[each]).__module__.rpartition(".")[0] for each in granted]
        kin = [room == type(mechanism).__module__.rpartition(".")[0] for room in rooms]
        assert kin == sorted(kin, reverse=True), (trait, granted)
        said = str(mechanism.refuse("this", trait, needed))
        assert (f"What would work: {granted[0]}()" if granted else "in the catalogue does") in said


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, batch_first=True)


TAKE_A_MECHANISM: dict[str, Callable[[Any], Any]] = {
    "attention": lambda m: attention(Q, Q, Q, m),
    "attention_rows": lambda m: attention_rows(m, Q, Q, queries=[0]),
    "Bound": lambda m: Bound(m, Shape(2, 8)),
    "MultiheadAttention": lambda m: MultiheadAttention(16, 2, mechanism=m),
    "TokenMixer": lambda m: TokenMixer(16, 2, m),
    "swap": lambda m: swap(encoder(), m),
    "swap by patterns": lambda m: swap(encoder(), {"*": m}),
    "conformance.of": conformance.of,
    "catalogue.parse": catalogue.parse,
    "catalogue.default": catalogue.default,
    "explain": lambda m: explain(m, Q, Q, Q),
    "parallel.strategy": lambda m: parallel.strategy(m, is_causal=False),
    "parallel.attend": lambda m: parallel.attend(m, Q, Q, Q, group=None),
    "parallel.decode": lambda m: parallel.decode(m, Q, Q, Q, group=None),
    "Adapted": lambda m: Adapted(m),
    "ByLength": lambda m: ByLength(long=m),
    "Hybrid": lambda m: Hybrid(near=m),
}


@pytest.mark.parametrize("function", TAKE_A_MECHANISM)
def test_a_class_or_a_function_is_no_mechanism(function: str) -> None:
    for given, words in ((Local, "write Local("), (local_attention, "local_attention"), (None, "None"), (3, "3")):
        if given is None and function == "swap":  # the model's own attention, computed as what it is
            continue
        with pytest.raises((TypeError, ValueError), match=re.escape(words)) as refused:
            TAKE_A_MECHANISM[function](given)
        assert "\n" not in str(refused.value)
        assert "<class" not in str(refused.value)


TAKE_A_MODEL: dict[str, Callable[[Any], Any]] = {
    "swap": lambda model: swap(model, "Local"),
    "swap_back": swap_back,
    "extend": lambda model: extend(model, 1024),
    "convert": lambda model: convert(model, "Local", lambda i: {}, []),
    "check_model": conformance.check_model,
    "exporting.program": lambda model: exporting.program(model, {}, {}),
    "exporting.save": lambda model: exporting.save(model, {}, "none", {}),
    "exporting.onnx": lambda model: exporting.onnx(model, {}, "none", {}),
    "parallelize": lambda model: parallel.parallelize(model, None),
}


@pytest.mark.parametrize("function", TAKE_A_MODEL)
def test_what_is_no_module_is_told_in_one_line(function: str) -> None:
    for given, words in (
        ("bert-base-uncased", "got the text 'bert-base-uncased': load it first, as in AutoModel.from_pretrained(...)"),
        (nn.Transformer, "got the class Transformer: write Transformer(...)"),
        (local_attention, "got the function local_attention: give the nn.Module that holds its attention"),
        (Local(), "got Local(), of type Local"), (None, "got None"), ([encoder()], "of type list"), ({}, "got {}"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"(model|module) must be an nn\.Module; .*" + re.escape(words)) as refused:
            TAKE_A_MODEL[function](given)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Softmax(bias=ALiBi), "Softmax(bias=ALiBi): ALiBi is a class: write ALiBi()"),  # type: ignore[arg-type]
        (lambda: Hybrid(near=BlockLocal), "Hybrid(near=BlockLocal): BlockLocal is a class: write BlockLocal()"),  # type: ignore[arg-type]
        (lambda: AFTLocal(window=0), "window must be at least 1, a whole number; without any, that is AFTSimple()"),
        (lambda: AFTFull(rank=0), "rank must be at least 1, a whole number; without any, that is AFTSimple()"),
        (lambda: Adapted(Local(), rank=0), "a whole number; without any, that is Local()"),
        (lambda: ByLength(long=LinearAttention(), above=0), "a whole number; without any, that is LinearAttention()"),
    ],
)
def test_a_setting_of_nothing_names_what_that_is(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_what_nothing_is_called_is_true() -> None:
    """AFT without biases is AFT-simple, and ``Adapted`` begins as its mechanism."""
    q, k, v = torch.randn(3, 2, 2, 9, 8, dtype=torch.float64)
    adapted = Adapted(Local(3), rank=1)
    for mechanism, other in ((AFTLocal(window=1), AFTSimple()), (AFTFull(rank=1), AFTSimple()), (adapted, Local(3))):
        bound = Bound(mechanism, Shape(2, 8, 9)).double()
        for parameter in bound.parameters():
            nn.init.zeros_(parameter)
        torch.testing.assert_close(bound(q, k, v), other(q, k, v))
