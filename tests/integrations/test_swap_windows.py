"""Decoding in layers that see a window or a chunk only, behind a state that holds all tokens before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import cache_argument, swap
from fast_attention.mechanism import Unsupported

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
    "max_position_embeddings": 128, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
CHUNKS = {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 48, "no_rope_layers": [1, 1]}
TOKENS = torch.randint(5, 99, (2, 24), generator=torch.Generator().manual_seed(1))


def build(name: str, **sizes: Any) -> Any:
    torch.manual_seed(3)
    settings = CHUNKS if name == "Llama4Text" else {"sliding_window": 16}
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **sizes}, **settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def steps(model: Any, sizes: tuple[int, ...], forward: Any = None) -> Iterator[Tensor]:
    """The logits of the tokens in calls of so many each."""
    run, name = model if forward is None else forward, cache_argument.name_of(model.forward)
    cache, start = None, 0
    for size in sizes:
        found = run(TOKENS[:, start : start + size], use_cache=True, **{name: cache})
        cache, start = found[name], start + size
        yield found.logits


def decoded(model: Any, sizes: tuple[int, ...]) -> Tensor:
    """All of them."""
    return torch.cat([*steps(model, sizes)], 1)


@torch.no_grad()
@pytest.mark.parametrize(
    "mechanism", ["LinearAttention", "Hybrid(near=BlockLocal(block_size=4))", "Local(window=32)", "WKV"]
)
@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text", "Llama4Text"])
def test_what_sees_more_than_the_layer_is_refused_where_its_window_ends(name: str, mechanism: str) -> None:
    """As one pass over so many tokens is; up to there it is decoded."""
    model = build(name)
    swap(model, mechanism)
    inside = model(TOKENS[:, :16], use_cache=False).logits
    torch.testing.assert_close(decoded(model, (10, 1, 1, 1, 1, 1, 1)), inside, atol=2e-5, rtol=1e-4)
    wanted = r"under a mask of every pair behind" if "32" in mechanism else r"tokens back only, and .* would see more"
    for sizes in ((10, 1, 1, 1, 1, 1, 1, 1), (16, 1), (10, 8), (15, 4)):
        with pytest.raises(Unsupported, match=wanted if sizes[1] == 1 else r"would see more|in a cache"):
            decoded(model, sizes)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["Local(window=8)", "Local(window=15)", {"*0.*": "Local(window=8)"}, "Softmax"])
def test_windows_within_the_layers_are_decoded_beyond_it(mechanism: Any) -> None:
    model = build("Mistral")
    swap(model, mechanism)
    whole = model(TOKENS, use_cache=False).logits
    for sizes in ((10, *[1] * 14), (10, 8, 6), (20, 4)):
        torch.testing.assert_close(decoded(model, sizes), whole, atol=2e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_beside_one_that_keeps_its_window_is_refused_too(layer: int) -> None:
    """The mask is then about the keys that the other layer has kept."""
    model = build("Mistral")
    swap(model, {f"*.{layer}.*": "LinearAttention"})
    inside = model(TOKENS[:, :16], use_cache=False).logits
    torch.testing.assert_close(decoded(model, (10, 1, 5)), inside, atol=2e-5, rtol=1e-4)
    for sizes in ((10, 6, 1), (10, 6, 4), (10, 8)):
        with pytest.raises(Unsupported, match="tokens back only"):
            decoded(model, sizes)


@torch.no_grad()
def test_a_compiled_model_refuses_what_lies_beyond_the_window_too() -> None:
    model = build("Mistral", num_hidden_layers=1)
    swap(model, "LinearAttention")
    calls = steps(model, (15, 1, 1), torch.compile(model, backend="eager"))
    inside = model(TOKENS[:, :16], use_cache=False).logits
    torch.testing.assert_close(torch.cat([next(calls), next(calls)], 1), inside, atol=2e-5, rtol=1e-4)
    with pytest.raises(Unsupported, match=r"15 tokens back only"):
        next(calls)
