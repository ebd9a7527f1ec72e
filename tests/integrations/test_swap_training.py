"""A swapped model that is trained as ``Trainer`` trains one: layers that gradient checkpointing computes again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import swap

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99,
    "max_position_embeddings": 128,
}  # fmt: skip
TOKENS = torch.randint(5, 99, (2, 20), generator=torch.Generator().manual_seed(1))


def build(name: str, kind: str) -> Any:
    torch.manual_seed(3)
    return getattr(transformers, f"{name}{kind}")(getattr(transformers, f"{name}Config")(**SMALL))


def gradients(model: Any, loss: Any, *, reentrant: bool | None = None) -> list[Tensor]:
    """Of a copy of the model; ``reentrant``: how layers are computed again, None: they are not."""
    model = copy.deepcopy(model).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    loss(model).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # enabling has another name from transformers 5.24 on
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mechanism", ["Softmax", "Local(window=4)", "LearnedFeatures(num_features=8)"])
def test_layers_are_computed_again_with_the_tensors_of_the_call(mechanism: str, *, reentrant: bool) -> None:
    """``Trainer`` gives ``num_items_in_batch`` as a tensor, which Llama hands on to its attention function."""
    model = build("Llama", "ForCausalLM")
    swap(model, mechanism)

    def loss(model: Any) -> Tensor:
        return model(TOKENS, labels=TOKENS, num_items_in_batch=torch.tensor(38)).loss

    torch.testing.assert_close(gradients(model, loss, reentrant=reentrant), gradients(model, loss))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mechanism", ["Softmax", "Local(window=4)"])
@pytest.mark.parametrize("name", ["Bloom", "Llama"])
def test_layers_of_packed_rows_are_computed_again_text_by_text(name: str, mechanism: str, *, reentrant: bool) -> None:
    """Bloom does not hand the borders on to its attention function."""
    model = build(name, "ForCausalLM")
    swap(model, mechanism)

    def loss(model: Any) -> Tensor:
        return model(TOKENS[:1], seq_idx=torch.tensor([[0] * 8 + [1] * 12]), use_cache=False).logits.square().mean()

    torch.testing.assert_close(gradients(model, loss, reentrant=reentrant), gradients(model, loss))
