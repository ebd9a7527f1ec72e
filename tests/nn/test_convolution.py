"""The short causal convolution before queries, keys and values: its formula, its past, its state, its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import decoding
from fast_attention.nn import generation, saving
from fast_attention.nn.convolution import CausalConvolution
from fast_attention.nn.models import Model, ModelConfig

SPLITS = ([1] * 12, [12], [3, 1, 0, 8], [2, 2, 2, 6])


def layer(size: int, device: torch.device, width: int = 5) -> CausalConvolution:
    torch.manual_seed(size)
    made = CausalConvolution(width, size).double()
    made.weight.data.normal_()
    return made.to(device)


def inputs(device: torch.device, length: int = 12, width: int = 5) -> Tensor:
    return torch.randn(2, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).to(device)


def decoder(mechanism: str = "Softmax()", *, conv: int = 4, **options: Any) -> Model:
    torch.manual_seed(3)
    settings: dict[str, Any] = {"width": 16, "heads": 2, "positions": "none", "causal": True, **options}
    made = Model(ModelConfig(vocab_size=11, mechanism=mechanism, conv=conv, **settings)).double().eval()
    for parameter in made.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return made


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(1))


def loops(x: Tensor, weight: Tensor, key_mask: Tensor | None) -> Tensor:
    """The formula, number by number."""
    size, width = weight.shape
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for c in range(width):
                total = x.new_zeros(())
                for i in range(size):
                    if t - i >= 0 and (key_mask is None or key_mask[b, t - i]):
                        total = total + (weight[i, c] + (i == 0)) * x[b, t - i, c]
                rows.append(total)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 15])
def test_is_its_formula(size: int, masked: bool, device: torch.device) -> None:
    conv, x = layer(size, device), inputs(device).requires_grad_()
    key_mask = torch.ones(2, 12, dtype=torch.bool, device=device)
    key_mask[0, :3] = key_mask[0, 6] = key_mask[1, 9:] = False
    given = key_mask if masked else None
    found, wanted = conv(x, key_mask=given), loops(x, conv.weight, given)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(wanted)
    gradients = [torch.autograd.grad((y * probe).sum(), (x, conv.weight)) for y in (found, wanted)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_at_first_changes_nothing_and_learns(device: torch.device) -> None:
    conv, x = CausalConvolution(5, 4).double().to(device), inputs(device)
    assert torch.equal(conv(x), x)
    conv(x).square().sum().backward()
    assert conv.weight.grad is not None
    assert (conv.weight.grad != 0).all()
    torch.manual_seed(0)
    plain = Model(ModelConfig(vocab_size=11, width=16, heads=2, causal=True))
    torch.manual_seed(0)
    convolved = Model(ModelConfig(vocab_size=11, width=16, heads=2, causal=True, conv=4))
    assert torch.equal(plain(tokens(2, 9)), convolved(tokens(2, 9)))


def test_sees_itself_and_the_tokens_just_before(device: torch.device) -> None:
    """A changed token moves the outputs from its own on, ``size`` of them."""
    conv, x = layer(4, device), inputs(device)
    changed = x.clone()
    changed[:, 5] += 1
    moved = (conv(changed) != conv(x)).all(-1).all(0)
    assert moved.tolist() == [5 <= t < 9 for t in range(12)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("size", [1, 4, 15])
def test_any_split_gives_the_whole(size: int, split: list[int], device: torch.device) -> None:
    conv, x, recent, parts = layer(size, device), inputs(device), None, []
    key_mask = torch.ones(2, 12, dtype=torch.bool, device=device)
    key_mask[0, 6] = key_mask[1, :4] = False
    for part, visible in zip(x.split(split, 1), key_mask.split(split, 1), strict=True):
        before = None if recent is None else recent.clone()
        out, after = conv.decode(part, recent, key_mask=visible)
        assert before is None or torch.equal(before, recent)  # a state is a value
        assert after.untyped_storage().nbytes() == 8 * 2 * (size - 1) * 5  # and holds nothing else of the past
        parts, recent = [*parts, out], after
    assert torch.equal(torch.cat(parts, 1), conv(x, key_mask=key_mask))


def test_masked_tokens_may_hold_anything(device: torch.device) -> None:
    conv, x = layer(4, device), inputs(device)
    key_mask = torch.ones(2, 12, dtype=torch.bool, device=device)
    key_mask[:, :5] = False
    dirty = x.clone()
    dirty[:, 0], dirty[:, 4] = float("nan"), float("inf")
    dirty.requires_grad_()
    out = conv(dirty, key_mask=key_mask)
    assert torch.equal(out[:, 5:], conv(x[:, 5:]))
    out.sum().backward()
    assert dirty.grad is not None
    assert dirty.grad.isfinite().all()
    assert (dirty.grad[:, :5] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    conv, x = layer(15, device).to(dtype), inputs(device).to(dtype)
    wanted = loops(x.double(), conv.weight.double(), None).to(dtype)
    assert (conv(x) - wanted).abs().max() <= torch.finfo(dtype).eps * wanted.abs().max()
    assert conv(x).dtype == dtype


@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("mechanism", ["Softmax()", "LinearAttention()", "Local(window=3)", "DecayedLinearAttention()"])
def test_a_model_streams_in_any_split(mechanism: str, reversible: bool) -> None:
    made, x = decoder(mechanism, reversible=reversible), tokens(2, 12)
    whole = made(x)
    for split in SPLITS[:3]:
        state, parts = None, []
        for part in x.split([n for n in split if n], -1):
            out, state = made.decode(part, state)
            parts.append(out)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(whole, decoder(mechanism, reversible=reversible, conv=0)(x))


def test_a_model_never_sees_the_future() -> None:
    """Also through all layers and with gradients: row 6 depends on the tokens up to 6."""
    made, x = decoder("LinearAttention()", layers=3), tokens(1, 12)
    changed = x.clone()
    changed[:, 7:] = (x[:, 7:] + 1) % 11
    torch.testing.assert_close(made(changed)[:, :7], made(x)[:, :7], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mechanism", ["Softmax()", "LinearAttention()"])
def test_padding_of_a_model_is_inert(mechanism: str) -> None:
    """In front, where the convolution would see it, and behind."""
    made, x = decoder(mechanism), tokens(1, 9)
    for before, after in ((4, 0), (0, 4), (2, 2)):
        padded = torch.cat([tokens(1, before), x, tokens(1, after)], -1)
        key_mask = torch.tensor([[False] * before + [True] * 9 + [False] * after])
        found = made(padded, key_mask)[:, before : before + 9]
        torch.testing.assert_close(found, made(x), rtol=1e-9, atol=1e-10)


def test_states_of_beams_and_files(tmp_path: Path) -> None:
    made, x = decoder("LinearAttention()", layers=2), tokens(3, 12)
    _, state = made.decode(x[:, :7])
    decoding.save(state, tmp_path / "state")
    again = decoding.load(tmp_path / "state")
    assert torch.equal(made.decode(x[:, 7:], again)[0], made.decode(x[:, 7:], state)[0])
    index = torch.tensor([2, 0])
    chosen = made.decode(x[index, 7:], decoding.select(state, index))[0]
    torch.testing.assert_close(chosen, made(x[index])[:, 7:], rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match=r"holds earlier tokens of shape \(3, 3, 16\); this call needs \(1, 3, 16\)"):
        made.decode(x[:1, 7:], state)


def test_generation_is_recomputation() -> None:
    made = decoder("LinearAttention()")
    (found,) = generation.generate(made, [[1, 2, 3]], new_tokens=6)
    line = [1, 2, 3]
    for _ in range(6):
        line.append(int(made(torch.tensor([line]))[0, -1].argmax()))
    assert found == line[3:]


def test_saved_and_loaded_to_the_bit(tmp_path: Path) -> None:
    made = decoder("LinearAttention()", reversible=True).float()
    saving.save(made, tmp_path)
    again = saving.load(tmp_path)
    assert again.config == made.config
    assert again.config.conv == 4
    assert torch.equal(again(tokens(2, 9)), made(tokens(2, 9)))


@pytest.mark.parametrize(("options", "words"), [
    ({"conv": 4, "causal": False}, "conv=4.*for decoders: set causal=True"),
    ({"conv": -1}, "conv must be at least 0"),
    ({"conv": True}, "conv must be at least 0, a whole number"),
])  # fmt: skip
def test_settings_that_make_no_model(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**{"vocab_size": 11, "width": 16, "heads": 2, "causal": True, **options})


def test_bad_input_is_named(device: torch.device) -> None:
    with pytest.raises(ValueError, match="size must be at least 1"):
        CausalConvolution(5, 0)
    with pytest.raises(ValueError, match=r"key_mask has shape \(2, 11\); it must be \(2, 12\)"):
        layer(4, device)(inputs(device), key_mask=torch.ones(2, 11, dtype=torch.bool, device=device))
