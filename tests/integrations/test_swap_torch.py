"""``nn.MultiheadAttention`` in other people's models: windows, several places of one module, what is left alone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import swap, swap_back
from fast_attention.mechanism import Unsupported

attention = functools.partial(nn.MultiheadAttention, 16, 2, batch_first=True)


class Block(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class AttentionPoolingHead(Block):
    """As SigLIP's, whose one query is learned."""


class Decoding(nn.Module):
    """As DETR's decoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.multihead_attn = attention(), attention()


@pytest.mark.parametrize("window", ["Local(window=2)", "BlockLocal(block_size=4)", "ByLength(long=Local(window=2))"])
def test_cross_attention_keeps_all_keys(window: str) -> None:
    crossing = {"torch.multihead_attn", "detr.multihead_attn", "pool.attn", "cross_attn"}
    model = nn.ModuleDict({
        "torch": nn.TransformerDecoderLayer(16, 2, 32), "detr": Decoding(), "pool": AttentionPoolingHead(attention()),
        "cross_attn": attention(), "own": Block(attention()),
    })  # fmt: skip
    report = swap(model, window)
    assert {layer.name for layer in report.unchanged} == crossing
    assert {layer.name for layer in report.replaced} == {"torch.self_attn", "detr.self_attn", "own.attn"}
    assert all("another sequence, in which" in layer.why for layer in report.unchanged)
    assert {layer.name for layer in swap(model, "BigBird").unchanged} == crossing


def test_a_part_of_which_nothing_can_be_swapped_is_in_the_report() -> None:
    model = nn.ModuleDict({"a": AttentionPoolingHead(attention()), "b": AttentionPoolingHead(attention())})
    report = swap(model, {"a.*": "Local(window=2)", "b.*": "Softmax"})
    assert [layer.name for layer in report.unchanged] == ["a.attn"]
    with pytest.raises(Unsupported, match=r"no attention layer of ModuleDict was swapped: .* no place to begin"):
        swap(model, "Local(window=2)")


@torch.no_grad()
def test_windows_refuse_another_sequence_when_called() -> None:
    """Where nothing says before that a layer attends to another sequence: also of the same length."""
    model = Block(attention()).eval()
    exact, x = copy.deepcopy(model), torch.randn(2, 9, 16)
    swap(model, "Local(window=2)")
    wanted = model(x)
    assert not torch.allclose(wanted, exact(x), atol=1e-4)
    views = [x.transpose(0, 1).transpose(0, 1) for _ in range(3)]
    assert torch.equal(model.attn(*views, need_weights=False)[0], wanted)
    assert torch.equal(model.attn(value=x, key=x, query=x, need_weights=False)[0], wanted)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), wanted)
    for copied in (model, copy.deepcopy(model)):
        for other in (x[:, :1], x.clone(), x.flip(1)):
            with pytest.raises(Unsupported, match=r"attn, swapped for Local\(window=2\), was called with another"):
                copied.attn(other, x, value=x)
    swap(model, "LinearAttention")
    assert model.attn(x[:, :1], x, x, need_weights=False)[0].shape == (2, 1, 16)


def test_one_module_in_several_models_is_replaced_in_all() -> None:
    shared = attention()
    model: Any = nn.Sequential(Block(shared), Block(attention()), Block(shared)).eval()
    report = swap(model, "FavorPlus(num_features=8)")
    assert model[0].attn is model[2].attn is not shared
    assert [layer.name for layer in report.replaced] == ["0.attn", "1.attn"]
    assert "the same module is 2.attn" in str(report)
    assert [layer.name for layer in swap(model, {"2.*": "LinearAttention"}).replaced] == ["2.attn"]
    assert model[0].attn is model[2].attn is not shared
    assert swap_back(model)
    assert model[0].attn is model[2].attn is shared
    assert not swap_back(model)


def test_an_attention_itself_is_refused() -> None:
    bare = attention()
    with pytest.raises(Unsupported, match=r"MultiheadAttention is itself an attention.*What would work"):
        swap(bare, "LinearAttention")
    assert [*bare._modules] == ["out_proj"]
    model = Block(bare)
    swap(model, "LinearAttention")
    assert not swap_back(model.attn)
    assert "" not in model.attn._modules


def test_subclasses_and_made_parameters_are_kept_and_told() -> None:
    class Other(nn.MultiheadAttention):
        pass

    old, new = attention(), attention()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(old, "in_proj_weight")
    nn.utils.parametrizations.weight_norm(new, "in_proj_weight")
    model = nn.ModuleList([Other(16, 2), old, new, attention()])
    report = swap(model, "LinearAttention")
    assert [layer.name for layer in report.replaced] == ["3"]
    for layer, why in zip(report.unchanged, ("its class", "its parameters are made", "its class"), strict=True):
        assert why in layer.why


@torch.no_grad()
def test_hooks_are_there_again() -> None:
    called = []
    model = Block(attention(bias=False))
    model.attn.register_forward_hook(lambda module, args, out: called.append(1))
    names, x = [*model.state_dict()], torch.randn(1, 5, 16)
    before = model(x)
    assert "its hooks are not called before it is swapped back" in str(swap(model, "LinearAttention"))
    assert [*model.state_dict()] == names
    model = copy.deepcopy(model).double()
    model(x.double())
    assert len(called) == 1
    model.attn.in_proj_weight.data *= 2
    assert swap_back(model)
    assert not torch.allclose(model(x.double()), before.double(), atol=1e-4), "the present weights"
    assert len(called) == 2


@pytest.mark.parametrize("training", [True, False])
def test_a_causal_hint_without_a_mask_is_refused(training: bool) -> None:
    """Torch raises in training; without gradients it ignores the hint, and every token sees all."""
    model, x = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1), torch.randn(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    swap(model.train(training), "LinearAttention()")
    assert model(x, mask, is_causal=True).shape == x.shape
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn: is_causal=True is a hint about a mask"):
        model(x, is_causal=True)
