"""A text padded in front is generated from as alone: states, caches of keys, caches of a fixed size, beams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fast_attention import Unsupported, cache_argument, catalogue, swap

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
WANTED = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
STATES = (
    "BlockLocal(block_size=4)", "Adapted(mechanism=BlockLocal(block_size=4), rank=2)", "Selected(block_size=4)",
    "Hybrid(near=BlockLocal(block_size=4))", "ByLength(long=BlockLocal(block_size=4), above=8)", "DenseSynthesizer",
    "AFTLocal(window=4)", "Sinkhorn(block_size=4)",
)  # fmt: skip
KEYS = ("RandomSynthesizer", "FactorizedRandomSynthesizer", "MixtureSynthesizer")  # kept in transformers' own cache
NONE = ("AFTFull", "BigBird(block_size=2)")  # which keep nothing


def swapped(name: str, kind: str = "Llama", **settings: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, max_position_embeddings=64, num_key_value_heads=2, **settings
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    swap(model, name)
    for parameter in model.parameters():  # so that no token leads everywhere
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def prompts(hidden: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts of which one is padded, and one has not begun where the others have their tenth token."""
    tokens = torch.randint(8, 99, (3, 13), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(13) >= torch.tensor([[hidden], [0], [11]])
    return tokens * mask, mask.long()


def ends(model: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The new tokens of the padded batch, and of each text alone without a cache."""
    tokens, mask = prompts()
    together = model.generate(tokens, attention_mask=mask, **WANTED, **options)[:, 13:]
    beams = {name: x for name, x in options.items() if name == "num_beams"}
    rows = [row[kept.bool()][None] for row, kept in zip(tokens, mask, strict=True)]
    alone = [model.generate(row, use_cache=False, **WANTED, **beams)[:, row.shape[1] :] for row in rows]
    return together, torch.cat(alone)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", [*STATES, *KEYS])
def test_texts_are_generated_from_as_alone(name: str, beams: int) -> None:
    together, alone = ends(swapped(name), num_beams=beams)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", NONE)
def test_without_a_cache_too(name: str) -> None:
    assert catalogue.parse(name).traits.memory is None
    together, alone = ends(swapped(name), use_cache=False)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", [*KEYS, "ReLUAttention"])
def test_a_cache_of_a_fixed_size_changes_nothing(name: str) -> None:
    together, alone = ends(swapped(name), cache_implementation="static")
    assert torch.equal(together, alone)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_positions_that_a_cache_has_dropped_are_refused(options: dict[str, Any]) -> None:
    model = swapped("RandomSynthesizer", "Mistral", sliding_window=5)
    tokens, mask = prompts()
    assert model.generate(tokens, attention_mask=mask, **WANTED, use_cache=False).shape == (3, 21)
    with pytest.raises(Unsupported, match=r"counts positions from a text's first token.*dropped.*use_cache=False"):
        model.generate(tokens, attention_mask=mask, **WANTED, **options)


def test_a_prompt_in_parts_begins_where_its_tokens_do() -> None:
    """A text whose first part is nothing but padding has not begun."""
    model, (tokens, mask) = swapped("BlockLocal(block_size=4)"), prompts()
    name = cache_argument.name_of(model.forward) or ""
    wanted, cache, outs = model(tokens, attention_mask=mask, use_cache=False).logits, None, []
    for start, end in ((0, 6), (6, 10), (10, 11), (11, 13)):
        out = model(tokens[:, start:end], attention_mask=mask[:, :end], **{name: cache}, use_cache=True)
        cache = out[name]
        outs.append(out.logits)
    torch.testing.assert_close(torch.cat(outs, 1)[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)
