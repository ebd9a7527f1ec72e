"""timm's vision transformers: the same with exact attention swapped in, masks honoured or refused by name."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import Local2d, swap, swap_back
from fast_attention.conformance.robustness import difference_in_step
from fast_attention.mechanism import Unsupported
from tests.integrations.vision import PLACES, Attention, AttentionRope, Beit, EvaAttention, VisionTransformer
from tests.sparse.test_local2d import visible_keys

WIDTH, PIXELS = 32, (2, 3, 16, 16)


@pytest.fixture(autouse=True)
def timm_or_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in PLACES.items():
        monkeypatch.setitem(sys.modules, name, module)


def build(**settings: Any) -> Any:
    """17 tokens: 16 patches and one for the class."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 2, "num_heads": 4, "num_classes": 5}
    return VisionTransformer(**(sizes | settings)).eval()


def gradients(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(11))
    return torch.autograd.grad((x * weights).sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("settings", [{}, {"qkv_bias": False, "qk_norm": True, "scale_attn_norm": True}], ids=str)
def test_exact_attention_changes_nothing(settings: dict[str, Any], fused: bool, training: bool) -> None:
    model = build(**settings).train(training)
    for block in model.blocks:
        block.attn.fused_attn = fused
        block.attn.scale = 0.25  # that only the attention in single steps reads
    x = torch.randn(PIXELS)
    before, names = model(x), list(model.state_dict())
    slopes, modules = gradients(model, before), [block.attn for block in model.blocks]
    report = swap(model, "Softmax")
    assert [layer.name for layer in report.replaced] == ["blocks.0.attn", "blocks.1.attn"]
    assert list(model.state_dict()) == names
    after = model(x)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-4)
    for a, b in zip(slopes, gradients(model, after), strict=True):
        torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-3)
    assert swap_back(model)
    assert [block.attn for block in model.blocks] == modules
    assert torch.equal(model(x), before)
    assert not swap_back(model)


def test_gates_and_masks_of_one_layer() -> None:
    """timm's attention by itself: additive and boolean masks, a causal order, dropout in training."""
    block = nn.ModuleDict({"attn": Attention(WIDTH, 4, attn_drop=0.5, gated=True).eval()})
    x, seen = torch.randn(2, 9, WIDTH), torch.rand(2, 1, 9, 9) < 0.6
    seen[..., 0] = True
    asked = [{"attn_mask": seen}, {"attn_mask": torch.randn(1, 4, 9, 9)}, {"is_causal": True}]
    before = [block["attn"](x, **how) for how in asked]
    report = swap(block, "Softmax")
    for how, wanted in zip(asked, before, strict=True):
        torch.testing.assert_close(block["attn"](x, **how), wanted, atol=1e-5, rtol=1e-4)
    assert "not dropped" not in str(report)
    block.train()
    assert not torch.equal(block["attn"](x), block["attn"](x))
    assert "not dropped (the model drops 0.5)" in str(swap(block, "LinearAttention"))
    assert torch.equal(block["attn"](x), block["attn"](x))


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_tokens_needs_no_scores(additive: bool) -> None:
    """Of keys alone, or of all pairs of tokens, as NaFlex makes it: padded = shorter; any other is refused."""
    block = nn.ModuleDict({"attn": Attention(WIDTH, 4).eval()})
    swap(block, "LinearAttention")
    attn, x = block["attn"], torch.randn(2, 9, WIDTH)
    real = torch.arange(9) < 6

    def mask(seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape).masked_fill(~seen, float("-inf")) if additive else seen

    shorter = attn(x[:, :6])
    for seen in (real[None, None, None], (real[:, None] & real).expand(2, 1, 9, 9)):
        torch.testing.assert_close(attn(x, attn_mask=mask(seen))[:, :6], shorter, atol=1e-5, rtol=1e-4)
    with pytest.raises(Unsupported, match=r"LinearAttention\(\) does not support an arbitrary attn_mask"):
        attn(x, attn_mask=mask(torch.ones(9, 9).tril(3).bool()))
    with pytest.raises(Unsupported, match="an arbitrary attn_mask"):
        attn(x, attn_mask=torch.randn(9, 9))
    causal = attn(x, is_causal=True)
    torch.testing.assert_close(attn(x[:, :4], is_causal=True), causal[:, :4], atol=1e-5, rtol=1e-4)


def test_weights_are_shared_and_random_features_saved() -> None:
    model, x = build(), torch.randn(PIXELS)
    before = model(x)
    swap(model, {"blocks.1.*": "FavorPlus(num_features=16)"})
    out = model(x)
    assert not torch.allclose(out, before, atol=1e-4)
    torch.manual_seed(5)
    other = build()
    swap(other, {"blocks.1.*": "FavorPlus(num_features=16)"})
    assert not torch.equal(other(x), out)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), out)
    torch.testing.assert_close(copy.deepcopy(other)(x), out)
    with torch.no_grad():
        other.blocks[1].attn.proj.bias.fill_(1.0)
    swap_back(other.train())
    assert other.blocks[1].attn.training
    assert other.blocks[1].attn.proj.bias.eq(1).all()


def test_what_a_mechanism_needs_and_what_stays() -> None:
    report = swap(build(), {"blocks.0.*": "Linformer(rank=4)", "*": "FNet"}, max_len=17)
    assert [layer.mechanism for layer in report.layers] == ["Linformer(rank=4)", "Softmax()"]
    assert report.unchanged[0].why == "FNet() mixes whole tokens and takes no queries"
    with pytest.raises(ValueError, match="longest sequence"):
        swap(build(), "Linformer(rank=4)")
    beit = Beit(img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=4, num_classes=5)
    with pytest.raises(Unsupported, match=r"timm\.models\.beit\.Attention is not the attention of timm's plain"):
        swap(beit, "LinearAttention")
    both = nn.ModuleDict({"a": build(), "b": beit})
    report = swap(both, "LinearAttention")
    assert [layer.name for layer in report.unchanged] == ["b.blocks.0.attn"]
    assert len(report.replaced) == 2


ROTARY = {
    "EVA": (EvaAttention, {"qk_norm": True}),
    "EVA-02": (EvaAttention, {"qkv_fused": False, "gated": True}),
    "DINOv3": (EvaAttention, {"qkv_bias": False, "rotate_half": True, "num_prefix_tokens": 5, "scale_norm": False}),
    "a ViT": (AttentionRope, {"num_prefix_tokens": 0}),
    "grouped": (AttentionRope, {"qkv_fused": False, "num_kv_heads": 2, "gated": True, "rotate_half": True}),
}


def rotary(name: str) -> tuple[nn.ModuleDict, Tensor, Tensor, int]:
    """An attention, tokens and sines and cosines of 20 patches behind the prefix, and its length."""
    torch.manual_seed(0)
    kind, how = ROTARY[name]
    block = nn.ModuleDict({"attn": kind(WIDTH, 4, **({"norm_layer": nn.LayerNorm} | how))}).eval()
    with torch.no_grad():
        for weight in block.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    attention: Any = block["attn"]
    prefix = attention.num_prefix_tokens
    angles = torch.randn(20, WIDTH // 8)
    angles = torch.cat((angles, angles), -1) if "rotate_half" in how else angles.repeat_interleave(2, -1)
    return block, torch.randn(2, prefix + 20, WIDTH), torch.cat((angles.sin(), angles.cos()), -1), prefix


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions(name: str) -> None:
    """The modules of EVA and DINOv3: exact attention as before, masked or not, windows of the grid, and back."""
    block, x, rope, prefix = rotary(name)
    seen = torch.rand(2, 1, x.shape[1], x.shape[1]) < 0.6
    seen[..., 0] = True
    asked: list[dict[str, Any]] = [{"rope": rope}, {}, {"rope": rope[None, None], "attn_mask": seen}]
    asked += [{"rope": rope, "is_causal": True}]
    old, names = block["attn"], list(block.state_dict())
    before = [old(x, **how) for how in asked]
    slopes = [gradients(block, out) for out in before]
    swap(block, "Softmax")
    assert block["attn"] is not old
    assert list(block.state_dict()) == names
    for how, wanted, slope in zip(asked, before, slopes, strict=True):
        out = block["attn"](x, **how)
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
        for a, b in zip(gradients(block, out), slope, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    swap_back(block)
    assert block["attn"] is old
    window = Local2d(4, 5, window=3, num_prefix_tokens=prefix)
    wanted = old(x, rope=rope, attn_mask=visible_keys(window, x.shape[1]))
    swap(block, window)
    torch.testing.assert_close(block["attn"](x, rope=rope), wanted, atol=1e-5, rtol=1e-4)
    block.load_state_dict({key: value / 3 for key, value in block.state_dict().items()}, assign=True)
    present = dict(block.named_parameters())
    swap_back(block)
    assert all(weight is present[f"attn.{key}"] for key, weight in old.named_parameters())
    assert not torch.allclose(old(x, rope=rope), before[0], atol=1e-3)


def test_windows_of_a_vision_transformer() -> None:
    """The class token outside the grid; a grid that is not the model's is refused before anything runs."""
    model, x = build(), torch.randn(PIXELS)
    swap(model, "Local2d(4, 4, window=5, num_prefix_tokens=1)")
    torch.testing.assert_close(model(x), build()(x), atol=1e-5, rtol=1e-4)
    swap_back(model)
    swap(model, "Local2d(4, 4, window=3, num_prefix_tokens=1)")
    assert not torch.allclose(model(x), build()(x), atol=1e-4)
    swap_back(model)
    for wrong in ("Local2d(4, 5, num_prefix_tokens=1)", "Local2d(4, 4)", "BlockLocal2d()"):
        with pytest.raises(Unsupported, match="a grid of height=4, width=4, num_prefix_tokens=1"):
            swap(model, wrong)


@pytest.mark.parametrize("mechanism", ["Softmax", "FavorPlus(num_features=16)"])
def test_threads_autocast_and_compile(mechanism: str) -> None:
    """Calls and gradients at the same time are those one after another; autocast; one graph."""
    model, images = build(depth=1), [torch.randn(PIXELS) for _ in range(3)]
    swap(model, mechanism)

    def job(x: Tensor) -> tuple[Tensor, ...]:
        out = model(x)
        return out.detach(), *gradients(model, out)

    assert difference_in_step([lambda x=x: job(x) for x in images], model) < 1e-6
    before, slopes = job(images[0])[0], gradients(model, model(images[0]))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(images[0])
        torch.testing.assert_close(out.float(), before, atol=0.05, rtol=0.05)
        assert all(x.isfinite().all() for x in gradients(model, out))
    torch.compiler.reset()
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(images[0])
    torch.testing.assert_close(out, before, atol=1e-5, rtol=1e-4)
    for a, b in zip(gradients(model, out), slopes, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_tokens_in_a_compiled_model(additive: bool) -> None:
    """One graph; a mask that says more ends with an error there."""
    block = nn.ModuleDict({"attn": Attention(WIDTH, 4).eval()})
    swap(block, "LinearAttention")
    torch.compiler.reset()
    x, real = torch.randn(2, 9, WIDTH), torch.arange(9) < 6
    seen = (real[:, None] & real).expand(2, 1, 9, 9)
    others = torch.ones(9, 9).tril(3).bool().expand(2, 1, 9, 9)
    if additive:
        seen, others = (torch.zeros(m.shape).masked_fill(~m, float("-inf")) for m in (seen, others))
    attn = torch.compile(block["attn"], fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(attn(x, attn_mask=seen), block["attn"](x, attn_mask=seen))
        with pytest.raises(RuntimeError, match=r"more than which tokens are there.*What would work"):
            attn(x, attn_mask=others)
