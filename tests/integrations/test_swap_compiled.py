"""Swapped models under ``torch.compile(fullgraph=True)``: no break in the graph, and what the uncompiled ones give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import cache_argument, swap
from tests.integrations.test_swap import build, gradients, inputs, out, real


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def compiled(model: Any, backend: str = "eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


ONE = {
    "Bert": {"num_hidden_layers": 1},
    "Llama": {"num_hidden_layers": 1},
    "Bart": {"encoder_layers": 1, "decoder_layers": 1},
    "Mistral": {"num_hidden_layers": 1, "sliding_window": 12},
    "ModernBert": {"num_hidden_layers": 2, "local_attention": 24},
}


@pytest.mark.parametrize("name", ["Bert", "Llama", "Bart"])
def test_a_swapped_model_compiles_in_one_graph(name: str) -> None:
    """Without padding; gradients are compared with it."""
    if name == "Bart" and torch.__version__ < "2.12":
        pytest.skip("Dynamo 2.11 takes no copy.deepcopy, which transformers' Bart calls: not swapped it breaks too")
    model = build(name, **ONE[name])
    swap(model, "LinearAttention")
    given = inputs(model, 11)
    with torch.no_grad():
        torch.testing.assert_close(out(compiled(model), given), out(model, given))


@pytest.mark.parametrize(("name", "reach"), [("Mistral", 11), ("ModernBert", 12)])
def test_windows_in_a_compiled_model(name: str, reach: int) -> None:
    """Exact; a mechanism that sees more is refused beyond the window, and serves within."""
    model = build(name, **ONE[name])
    long = inputs(model, 31)
    with torch.no_grad():
        if name == "ModernBert":  # whose windows reach to both sides
            swap(model, "Softmax")
            torch.testing.assert_close(out(compiled(model), long), out(model, long))
        swap(model, "LinearAttention")
        short = inputs(model, reach + 1)
        torch.testing.assert_close(out(compiled(model), short), out(model, short))
        with pytest.raises(Exception, match=f"sees {reach} tokens back"):
            out(compiled(model), long)


def test_gradients_of_a_compiled_swapped_model() -> None:
    model = build("Bert", **ONE["Bert"])
    swap(model, "FavorPlus(num_features=16)")
    given = inputs(model, padded="right")
    before = gradients(model, real(out(model, given), given))
    after = gradients(model, real(out(compiled(model, "aot_eager"), given), given))
    for a, b in zip(after, before, strict=True):
        if a is not None:
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("mechanism", ["LinearAttention", "Hybrid"])
def test_a_compiled_model_keeps_its_state(mechanism: str) -> None:
    """Stretch by stretch with transformers' cache; the second stretch leaves its length open."""
    model = build("Llama", **ONE["Llama"])
    swap(model, mechanism)
    tokens = inputs(model, 9)["input_ids"]
    fast, cache, rows = compiled(model), None, []
    name = cache_argument.name_of(model.forward)
    with torch.no_grad():
        whole = model(tokens).logits
        for part in (tokens[:, :5], tokens[:, 5:]):
            found = fast(part, **{name: cache}, use_cache=True)
            cache = found[name]
            rows.append(found.logits)
        torch.testing.assert_close(torch.cat(rows, 1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mechanism", ["Softmax", "Local(window=(3, 0))"])
def test_packed_rows_in_a_compiled_model_are_kept_apart(mechanism: str) -> None:
    """By mechanisms that take a mask of every pair: one graph for rows that are packed and rows that are not."""
    model = build("Llama", **ONE["Llama"])
    swap(model, mechanism)
    tokens, one = inputs(model, 11)["input_ids"], torch.arange(11).repeat(2, 1)
    several, fast = torch.cat([one[:, :4], one[:, :7]], 1), compiled(model, "aot_eager")
    for places in (one, several):
        given = {"input_ids": tokens, "position_ids": places, "use_cache": False}
        before, after = model(**given).logits, fast(**given).logits
        torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
        for a, b in zip(gradients(model, after), gradients(model, before), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
    apart = model(tokens[:, 4:], use_cache=False).logits
    torch.testing.assert_close(after[:, 4:], apart, atol=1e-5, rtol=1e-4)


def test_packed_rows_in_a_compiled_model_are_refused() -> None:
    """By mechanisms without a mask. The graph cannot know how many sequences there will be; it sees that there are
    several, and says so.
    """
    model = build("Llama", **ONE["Llama"])
    swap(model, "LinearAttention")
    tokens, places = inputs(model, 11)["input_ids"], torch.arange(11).repeat(2, 1)
    fast = compiled(model)

    def run(places: Tensor) -> Tensor:
        return fast(tokens, position_ids=places, use_cache=False).logits

    with torch.no_grad():
        torch.testing.assert_close(run(places), model(tokens, use_cache=False).logits)
        with pytest.raises(RuntimeError, match=r"sequences packed in one row.*What would work: the model uncompiled"):
            run(torch.cat([places[:, :4], places[:, :7]], 1))
