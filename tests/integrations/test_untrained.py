"""The report of a swap says what each layer's outputs are worth before training, by what the mechanism declares."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from docs import measured
from fast_attention import catalogue, swap
from fast_attention.integrations.report import ESTIMATE, EXACT, NOTHING, cosines
from fast_attention.mechanism import Unsupported
from tests.integrations.test_swap import build, inputs, out

transformers = pytest.importorskip("transformers")
MINILM = r"swapped into a MiniLM, untrained: cosine of passages of ([\d,]+) tokens"
MORE = (
    "Softmax(scale=0.1)", "Softmax(sinks=True)", "Local(window=2)", "Local(window=4, bias=ALiBi())",
    "BlockLocal(block_size=4)", "Hybrid(near=BlockLocal(block_size=4), far=LearnedFeatures())",
    "Hybrid(near=BlockLocal(block_size=4))", "Adapted(mechanism=BlockLocal(block_size=4))",
    "Adapted(mechanism=Softmax())", "ByLength(short=Softmax(), long=LinearAttention(), above=8)",
    "ByLength(short=Local(window=2), long=Linformer(rank=4), above=8)",
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", [*catalogue.names(), *MORE])
def test_the_report_is_what_the_traits_say_and_what_the_model_computes(name: str) -> None:
    """Exact is what gives the model's own outputs, new numbers are counted, and what is learned promises nothing."""
    model, mechanism = build("Bert", initializer_range=0.5), catalogue.parse(name)
    given = {length: inputs(model, length) for length in (7, 40)}
    before = {length: out(model, each) for length, each in given.items()}
    try:
        report = swap(model, mechanism)
    except Unsupported:
        return
    (said,) = {layer.untrained for layer in report.replaced}
    equal = {n: torch.allclose(out(model, each), before[n], atol=1e-4) for n, each in given.items()}
    traits = mechanism.traits
    if said.startswith(EXACT) and "far keys" not in said:
        up_to = re.match(f"{EXACT} for queries that see at most ([0-9]+) keys", said)
        assert equal == {length: up_to is None or length <= int(up_to[1]) for length in equal}
    elif "Adapted" not in name and "ByLength" not in name:
        assert said.startswith(ESTIMATE) == (traits.approximates is not None)
        assert (NOTHING in said) == (traits.approximates is None)
    if traits.learned and "Adapted" not in name:
        assert f"{report.replaced[0].parameters:,} new numbers" in said
    if said.startswith(NOTHING):
        assert str(report).endswith(f"; 2 of them worth {NOTHING}")
        assert not equal[40] or name not in MORE
    assert f"    untrained: {said[:40]}" in str(report)


@torch.no_grad()
@pytest.mark.parametrize(("name", "wide", "window"), [("Mistral", "Local(window=(5, 0))", 5), ("ModernBert", "", 4)])
def test_the_window_that_a_layer_had_is_exact(name: str, wide: str, window: int) -> None:
    """And a narrower one is an estimate of it; so is any window in a layer that had none."""
    model = build(name)
    given = inputs(model, 30)
    before = out(model, given)
    wanted: Any = wide or {"layers.[12].*": f"Local(window={window})"}
    report = swap(model, wanted)
    assert {layer.untrained for layer in report.replaced} == {EXACT}
    torch.testing.assert_close(out(model, given), before, atol=1e-5, rtol=1e-4)
    narrower = swap(model, f"Local(window={window - 1})")
    assert all(layer.untrained.startswith(ESTIMATE) for layer in narrower.replaced)
    assert not torch.allclose(out(model, given), before, atol=1e-5)
    if name == "ModernBert":
        assert swap(model, "Local(window=4)").replaced[0].untrained.startswith(ESTIMATE)


def test_a_layers_own_positions_are_no_new_numbers() -> None:
    """They come with the layer: exact attention with them is what it was, a window with them an estimate."""
    model = build("T5")
    assert {layer.untrained for layer in swap(model, "Softmax").replaced} == {EXACT}
    assert all(layer.untrained.startswith(ESTIMATE) for layer in swap(model, "Local(window=4)").replaced)


def test_other_libraries_layers_and_kept_ones() -> None:
    model = nn.Transformer(16, 2, 1, 1, 16, batch_first=True).eval()
    report = swap(model, {"encoder.*": "Linformer(rank=4)", "*": "Softmax"}, max_len=32)
    assert [layer.untrained.split(":")[0] for layer in report.layers] == [NOTHING, EXACT, EXACT]
    kept = swap(model, {"encoder.*": "Softmax"}).unchanged
    assert [layer.untrained for layer in kept] == ["", ""]


def test_the_cosines_are_those_of_the_newest_records() -> None:
    found: dict[str, dict[int, str]] = {}
    for question, expression, answer, _, _ in sorted(measured.qualities(), key=lambda each: each[4].name):
        length = re.fullmatch(MINILM, question)
        if length and re.match(r"\w+\(", expression) and expression != "Softmax()":
            found.setdefault(expression, {})[int(length[1].replace(",", ""))] = answer
    assert found, "the records have such figures"
    assert found == cosines()
