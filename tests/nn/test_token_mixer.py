"""``TokenMixer``: any mechanism between the projections it reads, over whole sequences and streamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import Attention, MultiheadAttention, TokenMixer, Unsupported
from tests.cases import DEFAULTS, KINDS, some_keys

ATTENTIONS: list[Any] = [mechanism for mechanism in KINDS if isinstance(mechanism, Attention)]
STREAMING: list[Any] = [mechanism for mechanism in ATTENTIONS if mechanism.traits.memory]


def made(mechanism: Any, device: torch.device, **options: Any) -> TokenMixer:
    torch.manual_seed(5)
    return TokenMixer(16, 2, mechanism, max_len=32, **options).to(device, torch.float64)


def tokens(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, 16, dtype=torch.float64, device=device)


@pytest.mark.parametrize("mechanism", DEFAULTS, ids=repr)
def test_only_what_is_read_is_projected(mechanism: Any, device: torch.device) -> None:
    mixer = made(mechanism, device)
    own = {name.split(".")[0] for name in mixer.state_dict()}
    if not isinstance(mechanism, Attention):
        assert own <= {"attention"}
        return
    read = [part for part in mechanism.traits.inputs if part in "qkv"]
    assert mixer.in_proj.weight.shape == (16 * len(read), 16)
    assert mixer.out_proj.weight.shape == (16, 16)
    # Every row of the projection is used: none without a gradient.
    out = mixer(tokens(device, 2, 7), is_causal=mechanism.traits.modes[0])
    (gradient,) = torch.autograd.grad(out.square().sum(), mixer.in_proj.weight)
    assert (gradient.abs().amax(1) > 0).double().mean() > 0.9


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
def test_equals_multihead_attention_with_the_same_weights(mechanism: Any, device: torch.device) -> None:
    mixer = made(mechanism, device)
    module = MultiheadAttention(16, 2, mechanism=mechanism, max_len=32, batch_first=True).to(device, torch.float64)
    module.attention.load_state_dict(mixer.attention.state_dict())
    module.out_proj.load_state_dict(mixer.out_proj.state_dict())
    read = [part for part in "qkv" if part in mechanism.traits.inputs]
    weights, biases = mixer.in_proj.weight.view(-1, 16, 16), mixer.in_proj.bias.view(-1, 16)
    with torch.no_grad():
        for part, weight, bias in zip(read, weights, biases, strict=True):
            rows = slice(16 * "qkv".index(part), 16 * "qkv".index(part) + 16)
            module.in_proj_weight[rows], module.in_proj_bias[rows] = weight, bias
    x = tokens(device, 2, 7)
    key_mask = some_keys(2, 7, device) if mechanism.traits.padding else None
    for is_causal in mechanism.traits.modes:
        ignored = None if key_mask is None else ~key_mask
        expected = module(x, x, x, ignored, need_weights=False, is_causal=is_causal)[0]
        torch.testing.assert_close(mixer(x, is_causal=is_causal, key_mask=key_mask), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_any_leading_sizes(mechanism: Any, device: torch.device) -> None:
    mixer, is_causal = made(mechanism, device), mechanism.traits.modes[0]
    x = tokens(device, 2, 3, 7)
    out = mixer(x, is_causal=is_causal)
    assert out.shape == x.shape
    torch.testing.assert_close(mixer(x[1, 2], is_causal=is_causal), out[1, 2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mechanism", STREAMING, ids=repr)
@pytest.mark.parametrize("masked", [False, True])
def test_decode_in_any_split_is_one_pass(mechanism: Any, masked: bool, device: torch.device) -> None:
    if masked and not mechanism.traits.padding:
        pytest.skip("denied by traits")
    mixer = made(mechanism, device)
    x = tokens(device, 2, 11)
    key_mask = some_keys(2, 11, device) if masked else None
    whole = mixer(x, is_causal=True, key_mask=key_mask)
    for split in ((1,) * 11, (4, 1, 6), (11,)):
        state, outs, start = None, [], 0
        for size in split:
            part = slice(start, start + size)
            out, state = mixer.decode(x[:, part], state, key_mask=None if key_mask is None else key_mask[:, part])
            outs.append(out)
            start += size
        torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mechanism", DEFAULTS, ids=repr)
def test_what_traits_deny_is_refused_by_name(mechanism: Any, device: torch.device) -> None:
    mixer, x, name, traits = made(mechanism, device), tokens(device, 2, 5), type(mechanism).__name__, mechanism.traits
    seen = torch.ones(2, 5, dtype=torch.bool, device=device)
    order = {"is_causal": traits.modes[0]}
    asked: list[tuple[str, bool, Any]] = [
        ("causal", traits.causal, {"is_causal": True}),
        ("bidirectional", traits.bidirectional, {"is_causal": False}),
        ("padding", traits.padding, {"key_mask": seen, **order}),
        ("mask", traits.mask, {"attn_mask": torch.eye(5, dtype=torch.bool, device=device), **order}),
        ("mask", traits.mask, {"dropout": 0.5, **order}),
    ]
    for trait, granted, options in asked:
        if granted:
            assert mixer(x, **options).isfinite().all()
        else:
            with pytest.raises(Unsupported, match=f"{name}.*traits.{trait}"):
                mixer(x, **options)
    if traits.memory is None:
        with pytest.raises(Unsupported, match=f"{name}.*traits.memory"):
            mixer.decode(x)


def test_settings(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"embed_dim=10.*num_heads=3"):
        TokenMixer(10, 3)
    plain = TokenMixer(16, 2, "Softmax(scale=1.0)", bias=False, device=device, dtype=torch.bfloat16)
    assert set(plain.state_dict()) == {"in_proj.weight", "out_proj.weight"}
    assert plain(tokens(device, 2, 5).bfloat16()).dtype == torch.bfloat16
    assert "Softmax(scale=1.0)" in repr(plain)


def test_compile_and_export(device: torch.device) -> None:
    mixer, x = made("Softmax", device), tokens(device, 2, 6)
    compiled = torch.compile(mixer, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, is_causal=True), mixer(x, is_causal=True))
    length = torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(mixer.eval(), (x,), dynamic_shapes={"x": {1: length}}).module()
    y = tokens(device, 2, 13)
    torch.testing.assert_close(exported(y), mixer(y))
    assert isinstance(mixer, nn.Module)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("mechanism", [m for m in KINDS if m.traits.padding], ids=repr)
def test_padded_tokens_may_hold_anything(mechanism: Any, value: float, device: torch.device) -> None:
    """Outputs, and gradients of the projections too, are those of ordinary padding; streamed as well."""
    mixer, x = made(mechanism, device).float(), tokens(device, 2, 9).float()
    mask = torch.ones(2, 9, dtype=torch.bool, device=device)
    mask[0, 6:] = False

    def answers(hidden: float) -> list[Tensor]:
        y = x.masked_fill(~mask[..., None], hidden)
        out = mixer(y, is_causal=mechanism.traits.modes[0], key_mask=mask)[mask]
        if mechanism.traits.memory:
            out = torch.cat([out, mixer.decode(y, key_mask=mask)[0][mask]])
        return [out, *torch.autograd.grad(out.square().sum(), list(mixer.parameters()), allow_unused=True)]

    for found, expected in zip(answers(value), answers(0.5), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_finite_padded_tokens_still_ask(device: torch.device) -> None:
    """A token that may not be seen may see: its own row is that of its query."""
    mixer, x = made("Softmax", device), tokens(device, 1, 5)
    mask = torch.tensor([[True, True, True, True, False]], device=device)
    moved = x.clone()
    moved[:, 4] *= -1e9
    changed = (mixer(moved, key_mask=mask) - mixer(x, key_mask=mask)).abs().amax(-1)[0] > 0
    assert changed.tolist() == [False, False, False, False, True]
