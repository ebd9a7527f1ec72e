"""BigBird's block sparse attention in tiles equals transformers' own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import BigBirdConfig, BigBirdModel

from fast_attention import core, swap, swap_back
from fast_attention.integrations import calls
from fast_attention.integrations.exact import big_bird
from fast_attention.integrations.modules import exchange_classes

needs_core = pytest.mark.skipif(bool(core.unavailable()), reason=core.unavailable() or "it serves")
KIND = big_bird.BigBirdBlockSparseAttention


def pair(block_size: int) -> tuple[nn.Module, nn.Module]:
    """A model and a copy with our classes."""
    torch.manual_seed(0)
    config = BigBirdConfig(
        hidden_size=32, num_attention_heads=2, intermediate_size=32, num_hidden_layers=2, vocab_size=50,
        max_position_embeddings=4096, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, block_size=block_size,
    )  # fmt: skip
    model = BigBirdModel(config, add_pooling_layer=False)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    ours = copy.deepcopy(model)
    exchange_classes(ours, exact=True)
    return model, ours


def tokens(length: int, *padded: slice) -> Tensor:
    """Which are tokens, for each row with its padding."""
    mask = torch.ones(max(len(padded), 1), length, dtype=torch.long)
    for row, hidden in zip(mask, padded, strict=False):
        row[hidden] = 0
    return mask


CASES = {
    "a plan of the paper, whose blocks may be seen twice": (1024, ()),
    "a plan by heads, an odd length, padded right, left, within and all": (
        409, (slice(300, None), slice(0, 70), slice(100, 140), slice(None)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equal_outputs_and_gradients(case: str, training: bool) -> None:
    length, padded = CASES[case]
    mask = tokens(length, *padded)
    models = pair(16 if length < 1024 else 64)
    ids, results = torch.randint(2, 50, mask.shape), []
    chosen = torch.randn(*mask.shape, 32)
    for model in models:
        with calls.forced():
            out = model.train(training)(ids, attention_mask=mask)[0]
        # A bias of keys moves all scores of a query alike: its gradient is rounding, no larger than the original's.
        named = [(name, p) for name, p in model.named_parameters() if "embed" not in name]
        parameters = [p for name, p in named if not name.endswith("key.bias")]
        results.append((out, torch.autograd.grad((out * chosen).sum(), parameters)))
    (out, gradients), (our_out, our_gradients) = results
    assert (our_out - out).abs().max() <= 2e-5 * out.abs().max()
    largest = max(float(x.abs().max()) for x in gradients)
    for theirs, of_ours in zip(gradients, our_gradients, strict=True):
        assert (of_ours - theirs).abs().max() <= 1e-4 * max(float(theirs.abs().max()), 1e-3 * largest)


@needs_core
def test_unusual_calls_run_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours = pair(16)
    lengths, attend = list[int](), big_bird.attend

    def counted(q: Tensor, *args: object, **settings: object) -> Tensor:
        lengths.append(q.shape[1])
        return attend(q, *args, **settings)  # type: ignore[reportArgumentType]

    monkeypatch.setattr(big_bird, "attend", counted)
    ids = torch.randint(2, 50, (1, 1024))
    with torch.no_grad():
        for each in (model, ours):
            each.eval()
        matrices = [each(ids, output_attentions=True).attentions for each in (model, ours)]
        assert all(torch.equal(a, b) for a, b in zip(*matrices, strict=True))
        assert torch.equal(ours(ids[:, :512])[0], model(ids[:, :512])[0])
        with calls.original():
            assert torch.equal(ours(ids)[0], model(ids)[0])
        assert not lengths
        ours(ids)
    assert lengths == [1024, 1024]
    assert KIND.__bases__[0] is type(next(x for x in model.modules() if type(x).__name__ == KIND.__name__))


@needs_core
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_same_with_all_scores_at_once(dropout: float) -> None:
    """Outputs and gradients of blocks, with the weights that the same seed drops."""
    torch.manual_seed(2)
    tokens, blocks = [torch.randn(2, 48, 4) for _ in range(3)], torch.randint(0, 6, (2, 6, 2))
    seen, found = torch.arange(48)[None] < 45, []
    for dtype, run in ((torch.float32, big_bird.attend), (torch.float64, big_bird.attend.reference)):
        leaves = [x.to(dtype).requires_grad_() for x in tokens]
        out = run(*leaves, seen, None, None, None, blocks, scale=0.7, size=8, dropout=dropout, seed=5)
        found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        assert float((ours.detach() - theirs.detach()).abs().max()) <= 5e-6 * float(theirs.detach().abs().max())


def test_a_swap_does_not_run_the_model() -> None:
    """A short text changes BigBird's attention for good, so that no probe may be one."""
    config = BigBirdConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, block_size=16
    )
    model = BigBirdModel(config).eval()
    report = swap(model)
    assert model.attention_type == "block_sparse"
    assert [layer.faster_from for layer in report.layers] == [None if core.unavailable() else big_bird.SHORTEST]
    assert swap_back(model) != bool(core.unavailable())  # nothing was gained then, and the model is as it was
    assert type(model.encoder.layer[0].attention.self).__module__.startswith("transformers.")
