"""parse builds values from their spelling, executes nothing, and says what is wrong in the caller's words."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fast_attention
from experiments import tasks
from fast_attention import LinearAttention, Unsupported, catalogue, features
from fast_attention.catalogue import KNOWN, known, simple


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
        ("softmax", "'softmax' is spelt Softmax() here."),
        ("Softmax(sale=1)", "no setting 'sale'; its settings are: scale"),
        ("Softmax(1, None, True, 4)", "has 3 settings and got 4 values"),
        ("Softmax(", "write a name, or a call"),
        ("Softmax(scale=open('x'))", "no mechanism or value is called 'open'"),
        ("Softmax(scale=1 + 1)", "settings are numbers"),
        ("__import__('os').system('true')", "settings are numbers"),
        ("3", "is not a mechanism"),
        ("Relu", "'Relu' is not a mechanism: it is a setting, as in LinearAttention(feature_map=Relu())"),
        ("Value()", "no mechanism or value is called 'Value'"),
        (f"Softmax(scale={10**400})", "scale must be a finite number"),
        ("FavorPlus(num_features='a')", "num_features must be at least 1, a whole number"),
        ("FavorPlus(num_features=1.5)", "num_features must be at least 1, a whole number"),
        ("LinearAttention(eps=-1)", "eps must be at least 0.0, a number"),
        ("LinearAttention(feature_map=Custom())", "function"),
    ],
)
def test_errors_name_the_mistake(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="(?s).*" + re.escape(said)):
        catalogue.parse(text)


def settings_of_everything() -> list[tuple[type, str]]:
    """Every mechanism and every task with each of its settings."""
    kinds: list[Any] = [type(catalogue.default(name)) for name in catalogue.names()]
    kinds += [type(tasks.parse(name)) for name in ("copy", "listops", "byte-lm", "needle", "mnist-pixels")]
    return [(kind, field.name) for kind in kinds for field in fields(kind)]


@pytest.mark.parametrize(("kind", "setting"), settings_of_everything())
def test_a_setting_that_stands_twice_is_refused(kind: Any, setting: str) -> None:
    """By keyword twice, or by place and by keyword; also in a setting's own settings."""
    parse: Any = tasks.parse if kind.__module__ == tasks.__name__ else catalogue.parse
    at = [field.name for field in fields(kind)].index(setting)
    words = re.escape(f"{kind.__name__} has {setting} twice, 64 and 8: leave one out")
    for text in (
        f"{kind.__name__}({setting}=64, {setting}=8)",
        f"{kind.__name__}({'0, ' * at}64, {setting}=8)",
        f"{kind.__name__}({setting}={kind.__name__}({setting}=64, {setting}=8))",
    ):
        with pytest.raises(ValueError, match=words):
            parse(text)


@pytest.mark.parametrize("parse", [catalogue.parse, tasks.parse])
def test_what_is_no_text_is_told_in_one_line(parse: Any) -> None:
    for given in (
        None,
        3,
        b"Local",
        ["Local"],
        {},
        torch.zeros(9),
        torch.nn.ReLU(),
        torch.nn.ReLU,
        test_names_values_and_instances_are_accepted,
    ):
        with pytest.raises(TypeError, match=r"^a \w+ is a value or a text, such as .*; got ") as refused:
            parse(given)
        assert "\n" not in str(refused.value)
    for name in catalogue.names():
        kind: Any = type(catalogue.default(name))
        if parse is catalogue.parse:
            with pytest.raises(TypeError, match=f"^{name} is a class: write {name}\\(\\)$"):
                parse(kind)
    with pytest.raises(
        TypeError, match=re.escape("ALiBi() is not a mechanism: it is a setting, as in Softmax(bias=ALiBi())")
    ):
        catalogue.parse(fast_attention.ALiBi())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("Copy is a class: write Copy()")):
        tasks.parse(tasks.Copy)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_settings_whose_repr_is_an_expression() -> None:
    for value, text in (
        (fast_attention.Softmax(scale=1 / np.sqrt(64)), "Softmax(scale=0.125)"),
        (fast_attention.FavorPlus(num_features=np.int64(8)), "FavorPlus(num_features=8)"),  # type: ignore[arg-type]
        (fast_attention.Local(window=(np.int32(4), 2)), "Local(window=(4, 2))"),  # type: ignore[arg-type]
        (fast_attention.Shape(np.int64(2), 8), "Shape(heads=2, head_dim=8, max_len=0)"),  # type: ignore[arg-type]
    ):
        assert repr(value) == text
    with pytest.raises(ValueError, match="window must be"):
        fast_attention.Local(window=np.True_)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Performer", "Performer: FavorPlus()"),
        ("performer(num_features=64)", "Write FavorPlus()."),
        ("Reformer", "LSH()"),
        ("Longformer", "Local(window=128)"),
        ("sliding window", "Local(window=128)"),
        ("dilated attention", "Write Local(window=64, dilation=4)."),
        ("LongNet", "not here; nearest is Local(window=64, dilation=(1, 4, 16))"),
        ("Transformer-XL", "not here; nearest is BlockLocal(before=1, after=0, bias=TransformerXL())"),
        ("BLOOM", "Write Softmax(bias=ALiBi())."),
        ("Hedgehog", "Write LearnedFeatures()."),
        ("LoLCATs", "Write Hybrid(far=LearnedFeatures())."),
        ("Nyströmformer", "Write Nystrom()."),
        ("FlashAttention", "Write Softmax()."),
        ("sdpa", "Write Softmax()."),
        ("Mamba-2", "Mamba: not here"),
        ("Linear Transformer", "Write LinearAttention()."),
        ("Hybrid(far=Performer())", "Performer: FavorPlus()"),
        ("RWKV", "Write WKV()."),
        ("Hyena", "not here"),
        ("DeltaNet", "not here"),
        ("Sparse Transformer", "not here; nearest is BigBird()"),
        ("MLP-Mixer", "is spelt MLPMixer() here"),
        ("FAVOR+", "Write FavorPlus()."),
        ("FAVOR++", "Write FavorPlusPlus()."),
        ("FAVOR", "'FAVOR' is spelt Favor() here."),
        ("Fast Attention", "Fast Attention: Manhattan()"),
        ("Local Attention", "'Local Attention' is spelt Local() here."),
        ("linear self-attention", "is spelt LinearAttention() here."),
        ("Manhattan distance", "'Manhattan distance' is spelt Manhattan() here."),
        ("multi-head attention", "Write Softmax()."),
        ("Transformer", "Write Softmax()."),
        ("GQA", "num_kv_heads=...)). Write Softmax()."),
        ("gMLP", "'gMLP' is spelt GMLP() here."),
        ("Mixer", "Write MLPMixer()."),
        ("Big Bird", "'Big Bird' is spelt BigBird() here."),
        ("AFT-simple", "'AFT-simple' is spelt AFTSimple() here."),
        ("LSH attention", "'LSH attention' is spelt LSH() here."),
        ("SortCut Sinkhorn", "Write SortCut()."),
        ("Factorized Random Synthesizer", "is spelt FactorizedRandomSynthesizer() here."),
        ("Hybrid(far=FAVOR+())", "'FAVOR+' is not a name of ours. Performer: FavorPlus()"),
        ("Hybrid(near=block-local())", "'block-local' is spelt BlockLocal() here."),
    ],
)
def test_names_people_know_are_answered_with_ours(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        catalogue.parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [*catalogue.names(), *(name for each in KNOWN for name in each.names)])
def test_any_case_hyphen_and_plural_of_a_name_is_understood(name: str) -> None:
    """Of ours and of papers': in words, in capitals, with "attention" behind it."""
    known_as = known(name)
    answer = f"Write {known_as.write}." if known_as else f"is spelt {name}() here."
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name)
    written = {name.upper(), name.lower(), words, words.replace("-", " "), f"{name.upper()}()"}
    written |= {f"{name} attention", f"{name}s"} if re.fullmatch(r"(?!.*(ttention|Transformer))\w+", name) else set()
    for text in written - {name, f"{name}()"}:
        with pytest.raises(ValueError, match=re.escape(answer)):
            catalogue.parse(text)


def test_a_default_is_asked_for_by_a_known_name() -> None:
    with pytest.raises(ValueError, match=re.escape("Performer: FavorPlus()")):
        catalogue.default("Performer")


def test_the_table_of_known_names_is_sound() -> None:
    """Every answer can be parsed, no name is ours, none stands twice, and every name finds its own row."""
    names = [simple(name) for each in KNOWN for name in each.names]
    assert len(set(names)) == len(names)
    assert not {simple(name) for name in catalogue.names()} & set(names)
    for each in KNOWN:
        assert catalogue.parse(each.write)
        assert all(known(name) is each for name in each.names)
    assert known("Softmax") is None
    assert known("") is None


@dataclass(frozen=True, repr=False)
class Cubed(features.FeatureMap):
    """A kernel of a user, as the guide has it."""

    floor: float = 0.01

    def __call__(self, x: Tensor) -> Tensor:
        return x.relu() ** 3 + self.floor


def test_classes_of_users_are_read_once_they_are_imported() -> None:
    mechanism = LinearAttention(feature_map=Cubed(floor=0.5))
    assert catalogue.parse(repr(mechanism)) == mechanism
    with pytest.raises(ValueError, match="must be imported first"):
        catalogue.parse("LinearAttention(feature_map=Cubes())")
