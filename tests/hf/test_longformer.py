"""Longformer's and LED's encoder attention in tiles equals transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LEDConfig, LEDModel, LongformerConfig, LongformerModel

from fast_attention import core
from fast_attention.integrations import calls
from fast_attention.integrations.exact import longformer
from fast_attention.integrations.exact.longformer import attend
from fast_attention.integrations.modules import exchange_classes

needs_core = pytest.mark.skipif(bool(core.unavailable()), reason=core.unavailable() or "it serves")
LENGTH = 201  # which the models pad to 224 for layers with windows of 32 and 16


def built(kind: str, **settings: Any) -> nn.Module:
    """An encoder with large weights, so that attention is far from even."""
    torch.manual_seed(0)
    windows, most = [32, 16], settings.pop("most", 256)
    rates = {"attention_probs_dropout_prob": settings.pop("rate", 0.0), "hidden_dropout_prob": 0.0}
    if kind == "longformer":
        config = LongformerConfig(
            hidden_size=48, num_attention_heads=3, intermediate_size=32, num_hidden_layers=2, vocab_size=50,
            attention_window=windows, max_position_embeddings=most, pad_token_id=1, **rates,
        )  # fmt: skip
        model: nn.Module = LongformerModel(config, add_pooling_layer=False)
    else:
        config = LEDConfig(
            d_model=48, encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=32, decoder_ffn_dim=32,
            encoder_layers=2, decoder_layers=1, vocab_size=50, attention_window=windows,
            max_encoder_position_embeddings=most, max_decoder_position_embeddings=64, dropout=0.0,
            attention_dropout=rates["attention_probs_dropout_prob"],
        )  # fmt: skip
        model = LEDModel(config).encoder
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def exchanged(model: nn.Module) -> nn.Module:
    """A copy with our classes."""
    model = copy.deepcopy(model)
    exchange_classes(model, exact=True)
    return model


def tokens(batch: int, *masked: tuple[int, int, int]) -> Tensor:
    """Which are tokens: in these rows not those from the second number to the third."""
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    for row, first, stop in masked:
        mask[row, first:stop] = 0
    return mask


def globals_at(*rows: list[int]) -> Tensor:
    """The global tokens of every row."""
    mask = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for row, places in enumerate(rows):
        mask[row, places] = 1
    return mask


def zero_but_for_rounding(name: str, largest: float) -> float:
    """The model's ``largest`` gradient, to compare with it a gradient that is zero in exact arithmetic; else 0.

    A bias of keys moves all scores of a query alike. What is left of its gradient is noise, in both as much.
    """
    return largest if name.endswith(("key.bias", "key_global.bias")) else 0.0


PADDED = tokens(4, (0, 150, LENGTH), (1, 0, 60), (2, 90, 120), (3, 0, LENGTH))
CASES = {
    "windows": (tokens(1), None),
    "padded right, left, within, and all": (PADDED, None),
    "one global token": (tokens(1), globals_at([0])),
    "several, as many as there are, and none": (tokens(3), globals_at([0], [3, 90, 200], [])),
    "many": (tokens(2), globals_at(list(range(40)), list(range(100, 160)))),
    "padded, with global tokens": (PADDED, globals_at([0, 149], [60, 61, 130], [80, 130], [])),
}


@pytest.mark.parametrize("kind", ["longformer", "led"])
@pytest.mark.parametrize("case", CASES)
def test_equal_outputs_and_gradients(kind: str, case: str) -> None:
    mask, global_mask = CASES[case]
    model = built(kind)
    ours = exchanged(model)
    ids = torch.randint(2, 50, mask.shape)
    chosen = torch.randn(*mask.shape, 48)
    results = []
    for each in (model, ours):
        embeds = nn.functional.embedding(ids, torch.randn(50, 48, generator=torch.Generator().manual_seed(1)))
        embeds.requires_grad_()
        out = each(inputs_embeds=embeds, attention_mask=mask, global_attention_mask=global_mask)[0]
        parameters = [p for name, p in each.named_parameters() if "embed" not in name]
        results.append((out, torch.autograd.grad((out * chosen).sum(), [embeds, *parameters], allow_unused=True)))
    (out, gradients), (our_out, our_gradients) = results
    assert (our_out - out).abs().max() <= 2e-5 * out.abs().max()
    largest = max(float(x.abs().max()) for x in gradients if x is not None)
    names = ["embeds", *(name for name, _ in model.named_parameters() if "embed" not in name)]
    for name, theirs, of_ours in zip(names, gradients, our_gradients, strict=True):
        assert (theirs is None) == (of_ours is None)
        if theirs is not None and of_ours is not None:
            least = zero_but_for_rounding(name, largest) or 1e-3 * largest
            assert (of_ours - theirs).abs().max() <= 1e-4 * max(float(theirs.abs().max()), least), name


@pytest.mark.parametrize("kind", ["longformer", "led"])
def test_low_precision_is_as_near_as_the_original(kind: str) -> None:
    mask, global_mask = CASES["padded, with global tokens"]
    model = built(kind)
    call = {"input_ids": torch.randint(2, 50, mask.shape), "attention_mask": mask, "global_attention_mask": global_mask}
    with torch.no_grad():
        exact = model(**call)[0]
        low, ours = (each.bfloat16()(**call)[0].float() for each in (copy.deepcopy(model), exchanged(model)))
    assert (ours - exact).norm() <= 1.1 * (low - exact).norm()


class Largest(TorchDispatchMode):
    """Notes the most numbers that a tensor made inside has in memory."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return out


@needs_core
@pytest.mark.parametrize("kind", ["longformer", "led"])
def test_no_tensor_of_all_pairs(kind: str) -> None:
    model = built(kind, most=2050)
    call = {"input_ids": torch.randint(2, 50, (1, 2048)), "attention_mask": torch.ones(1, 2048, dtype=torch.long)}
    most = []
    for each in (model, exchanged(model)):
        with torch.no_grad(), Largest() as largest:
            each(**call, global_attention_mask=(torch.arange(2048) < 2).long()[None])
        most.append(largest.most)
    assert most[0] >= 2048**2
    assert most[1] <= 2048 * 128


@needs_core
@pytest.mark.parametrize("kind", ["longformer", "led"])
def test_unusual_calls_run_the_original(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(kind)
    ours, lengths = exchanged(model), list[int]()

    def counted(q: Tensor, *args: Any, **settings: Any) -> Tensor:
        lengths.append(q.shape[1])
        return attend(q, *args, **settings)

    monkeypatch.setattr(longformer, "attend", counted)
    call = {"input_ids": torch.randint(2, 50, (1, LENGTH)), "attention_mask": tokens(1)}
    short = {name: x[:, :80] for name, x in call.items()}
    with torch.no_grad():
        matrices = [each(**call, output_attentions=True).attentions for each in (model, ours)]
        assert all(torch.equal(a, b) for a, b in zip(*matrices, strict=True))
        assert torch.equal(ours(**short)[0], model(**short)[0])
        with calls.original():
            assert torch.equal(ours(**call)[0], model(**call)[0])
        assert not lengths
        ours(**call)
        with calls.forced():
            ours(**short)
    assert lengths == [LENGTH, LENGTH, 80, 80]


def test_undone_by_the_first_base() -> None:
    model = built("longformer")
    ours = exchanged(model)
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in model.named_modules()]
    for before, module in zip(model.modules(), ours.modules(), strict=True):
        if type(module) is not type(before):
            assert type(module).__bases__[0] is type(before)
            assert type(module).__name__ == type(before).__name__
            form = getattr(module, "exact_form", None)
            assert form is None or form()[1] == longformer.SHORTEST


def test_dropout_in_training() -> None:
    model = exchanged(built("longformer", rate=0.3)).train()
    call = {"input_ids": torch.randint(2, 50, (1, LENGTH)), "global_attention_mask": globals_at([0, 50])}
    torch.manual_seed(3)
    first, second = model(**call)[0], model(**call)[0]
    torch.manual_seed(3)
    assert torch.equal(model(**call)[0], first)
    assert not torch.allclose(first, second)


def sequence(**sizes: int) -> list[Tensor]:
    torch.manual_seed(2)
    shape = sizes.get("heads", 2), sizes.get("length", 48), 4
    return [torch.randn(*shape) for _ in range(3)]


@needs_core
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("columns", [None, torch.tensor([1, 2, 40])])
def test_the_same_with_all_scores_at_once(dropout: float, columns: Tensor | None) -> None:
    """Outputs and gradients of a window, with the weights that the same seed drops."""
    masked = torch.arange(48) >= 45
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in sequence()]
        given: dict[str, Any] = {"scale": 0.7, "dropout": dropout, "seed": 3, "reach": 5}
        given["columns"] = () if columns is None else longformer.intervals(columns.tolist())
        run = attend if dtype == torch.float32 else attend.reference
        out = run(*leaves, ~masked[None], None, None, None, **given)
        found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for ours, theirs in zip(*found, strict=True):
        assert float((ours.detach() - theirs.detach()).abs().max()) <= 5e-6 * float(theirs.detach().abs().max())


@needs_core
def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    """With values of one, an output is the sum of the weights that are left."""
    q, k, v = sequence(heads=8, length=256)
    v = torch.ones_like(v)

    def sums(seed: int) -> Tensor:
        return attend(q * 0, k, v, None, None, None, None, scale=1.0, reach=20, columns=(), dropout=0.25, seed=seed)

    first = sums(1)
    assert abs(float(first[:, 20:-20].mean()) - 1.0) < 0.02
    assert abs(float(first[:, 20:-20, 0].var()) - 0.25 / 0.75 / 41) < 0.002
    assert torch.equal(sums(1), first)
    assert not torch.allclose(sums(2), first)
