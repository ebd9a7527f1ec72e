"""Generation leaves what it does not concern as it was: the model's mode, and whether gradients are taken."""

from __future__ import annotations

import warnings

import torch

from fast_attention.nn.generation import Sampling, generate, stream
from fast_attention.nn.models import Model, ModelConfig

CONFIG = ModelConfig(vocab_size=7, width=8, layers=1, heads=2, max_len=16, causal=True, dropout=0.5)


def test_a_sample_in_the_midst_of_training_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Model(CONFIG).train()
    model.norm.eval()
    modes = [module.training for module in model.modules()]
    for beams in (1, 2):
        first = generate(model, [[1, 2], [3]], new_tokens=6, beams=beams)
        assert first == generate(model, [[1, 2], [3]], new_tokens=6, beams=beams)  # without dropout
    assert [module.training for module in model.modules()] == modes
    tokens = stream(model, [[1]])
    next(tokens)
    assert torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == modes
    assert model(torch.tensor([[1, 2]])).requires_grad


def test_a_quantized_model_generates() -> None:
    model = Model(CONFIG).eval()
    with warnings.catch_warnings(action="ignore"):  # torch advises its successor, another package
        quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert len(generate(quantized, [[1, 2]], new_tokens=3)[0]) == 3


def test_the_least_temperature_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[0.3, float("-inf"), 0.5], [1e30, -1e30, 0.0]])
    for settings in ({"temperature": 1e-300}, {"temperature": 1e-300, "top_k": 2}, {"top_p": 1e-300}):
        assert Sampling(**settings).choose(logits).tolist() == [2, 0]
