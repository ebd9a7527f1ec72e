"""``MultiheadAttention`` is torch's module: options, masks, results, gradients, checkpoints, transformer layers."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fast_attention import Attention, MultiheadAttention, Softmax, Unsupported
from tests.cases import DEFAULTS, KINDS

ATTENTIONS: list[Any] = [mechanism for mechanism in KINDS if isinstance(mechanism, Attention)]
BOTH: list[Any] = [mechanism for mechanism in ATTENTIONS if mechanism.traits.bidirectional]
INF = float("-inf")


def both(device: torch.device, **options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's module and ours from the same seed, in float64."""
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(8, 2, **options)
    torch.manual_seed(3)
    ours = MultiheadAttention(8, 2, **options)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=0, atol=0)
        if "bias" in name:  # zeros hide mistakes
            nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(device, torch.float64), ours.to(device, torch.float64)


def inputs(device: torch.device, length: int, keys: int, batch: int | None, first: bool, **widths: int) -> list[Tensor]:
    made = []
    for name, tokens in (("embed", length), ("kdim", keys), ("vdim", keys)):
        shape = (tokens,) if batch is None else (batch, tokens) if first else (tokens, batch)
        x = torch.randn(*shape, widths.get(name, 8), dtype=torch.float64, device=device)
        made.append(x.requires_grad_())
    return made


def attn_mask(kind: str, rows: int, length: int, keys: int, device: torch.device) -> Tensor | None:
    """torch's sense: True = ignore; key 0 is always seen."""
    if kind == "none":
        return None
    shape = (length, keys) if "2" in kind else (rows, length, keys)
    ignored = torch.rand(shape) < 0.4
    ignored[..., 0] = False
    if "bool" in kind:
        return ignored.to(device)
    return torch.randn(shape, dtype=torch.float64).masked_fill(ignored, INF).to(device)


def padding_mask(kind: str, batch: int | None, keys: int, device: torch.device) -> Tensor | None:
    if kind == "none":
        return None
    ignored = torch.rand((keys,) if batch is None else (batch, keys)) < 0.3
    ignored[..., 0] = False
    if kind == "bool":
        return ignored.to(device)
    bias = torch.randn(ignored.shape, dtype=torch.float64) if kind == "bias" else torch.zeros(ignored.shape).double()
    return bias.masked_fill(ignored, INF).to(device)


def same_as_torch(theirs: nn.Module, ours: nn.Module, x: list[Tensor], **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched")
        expected, their_weights = theirs(*x, **options)
    got, our_weights = ours(*x, **options)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert (our_weights is None) == (their_weights is None)
    if our_weights is not None:
        torch.testing.assert_close(our_weights, their_weights, rtol=1e-10, atol=1e-12)
    probe = torch.randn_like(expected)
    leaves = [(*x, *module.parameters()) for module in (ours, theirs)]
    pairs = zip(
        torch.autograd.grad((got * probe).sum(), leaves[0]),
        torch.autograd.grad((expected * probe).sum(), leaves[1]),
        strict=True,
    )
    for mine, reference in pairs:
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("more", ["", "bias_kv", "zero", "both"])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}], ids=["packed", "kdim_vdim"])
@pytest.mark.parametrize("masks", ["none", "bool2", "float2", "bool3", "float3"])
def test_softmax_equals_torch_on_every_option(masks: str, widths: dict[str, int], more: str, device: Any) -> None:
    extra = {"add_bias_kv": more in ("bias_kv", "both"), "add_zero_attn": more in ("zero", "both")}
    for bias, first, batch in itertools.product((True, False), (True, False), (3, None)):
        theirs, ours = both(device, bias=bias, batch_first=first, **extra, **widths)
        for padding, (length, keys) in itertools.product(("none", "bool", "float", "bias"), ((4, 4), (3, 6))):
            x = inputs(device, length, keys, batch, first, **widths)
            options: dict[str, Any] = {
                "key_padding_mask": padding_mask(padding, batch, keys, device),
                "attn_mask": attn_mask(masks, 2 * (batch or 1), length, keys, device),
            }
            same_as_torch(theirs, ours, x, **options, need_weights=False)
            same_as_torch(theirs, ours, x, **options, average_attn_weights=padding != "bool")


def test_self_attention_and_shared_keys_equal_torch(device: torch.device) -> None:
    theirs, ours = both(device, batch_first=True)
    x, y = (torch.randn(2, n, 8, dtype=torch.float64, device=device) for n in (5, 3))
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))
    torch.testing.assert_close(ours(x, y, y), theirs(x, y, y))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("more", [False, True])
def test_the_causal_mask_of_torch(more: bool, dtype: torch.dtype, device: torch.device) -> None:
    theirs, ours = both(device, batch_first=True, add_zero_attn=more)
    x = torch.randn(2, 6, 8, dtype=torch.float64, device=device)
    mask = nn.Transformer.generate_square_subsequent_mask(6, device=device).to(torch.float64)
    mask = mask == INF if dtype == torch.bool else mask.to(dtype)
    lone = mask if dtype != torch.float32 else mask.double()  # torch wants its float masks in the inputs' dtype
    for hint, need_weights in itertools.product((False, True), (False, True)):
        if more and hint and not need_weights:
            continue  # torch drops the mask it was given and lines up its own with one key too many
        got = ours(x, x, x, attn_mask=mask, is_causal=hint, need_weights=need_weights)
        torch.testing.assert_close(got, theirs(x, x, x, attn_mask=lone, is_causal=hint, need_weights=need_weights))
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], theirs(x, x, x, attn_mask=lone)[0])


def test_the_mask_decides_where_a_hint_is_wrong(device: torch.device) -> None:
    theirs, ours = both(device, batch_first=True)
    x, y = (torch.randn(2, n, 8, dtype=torch.float64, device=device) for n in (5, 8))
    window = attn_mask("bool2", 0, 5, 5, device)
    torch.testing.assert_close(ours(x, x, x, attn_mask=window, is_causal=True)[0], theirs(x, x, x, attn_mask=window)[0])
    top_left = torch.ones(5, 8, dtype=torch.bool, device=device).triu(1)
    bottom_right = torch.ones(5, 8, dtype=torch.bool, device=device).triu(4)
    for mask in (top_left, bottom_right):
        torch.testing.assert_close(ours(x, y, y, attn_mask=mask, is_causal=True)[0], theirs(x, y, y, attn_mask=mask)[0])
    torch.testing.assert_close(ours(x, y, y, is_causal=True)[0], theirs(x, y, y, attn_mask=bottom_right)[0])


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
def test_a_causal_mask_is_an_order_to_every_causal_mechanism(mechanism: Any, device: torch.device) -> None:
    ours = made(mechanism, device)
    x = torch.randn(2, 7, 16, dtype=torch.float64, device=device)
    mask = torch.ones(7, 7, dtype=torch.bool, device=device).triu(1)
    soft = torch.zeros(7, 7, dtype=torch.float64, device=device).masked_fill(mask, INF)
    options: Any = {"need_weights": False}
    if not mechanism.traits.causal and not mechanism.traits.mask:
        with pytest.raises(Unsupported, match="causal"):
            ours(x, x, x, attn_mask=mask, is_causal=True, **options)
        return
    masks = (mask, soft, mask.expand(4, 7, 7))
    with_mask = [ours(x, x, x, attn_mask=m, is_causal=hint, **options)[0] for m in masks for hint in (True, False)]
    for out in with_mask[1:]:
        torch.testing.assert_close(out, with_mask[0], rtol=1e-10, atol=1e-10)
    if mechanism.traits.causal:
        torch.testing.assert_close(with_mask[0], ours(x, x, x, is_causal=True, **options)[0], rtol=0, atol=0)
    future = x.clone()
    future[:, 4:] = 6 * torch.randn_like(future[:, 4:])
    later = ours(future, future, future, attn_mask=mask, is_causal=True, **options)[0]
    torch.testing.assert_close(later[:, :4], with_mask[0][:, :4], rtol=1e-9, atol=1e-10)


def made(mechanism: Any, device: torch.device, width: int = 16, heads: int = 2, **options: Any) -> MultiheadAttention:
    torch.manual_seed(5)
    module = MultiheadAttention(width, heads, mechanism=mechanism, max_len=32, batch_first=True, **options)
    return module.to(device, torch.float64)


@pytest.mark.parametrize("mechanism", BOTH, ids=repr)
def test_masks_go_to_those_who_can_take_them(mechanism: Any, device: torch.device) -> None:
    ours = made(mechanism, device).eval()
    x = torch.randn(2, 6, 16, dtype=torch.float64, device=device)
    for kind in ("bool2", "float2", "bool3", "float3"):
        mask = attn_mask(kind, 4, 6, 6, device)
        if mechanism.traits.mask:
            out = ours(x, x, x, attn_mask=mask, need_weights=False)[0]
            assert out.isfinite().all()
            assert (out - ours(x, x, x, need_weights=False)[0]).abs().max() > 1e-6
        else:
            with pytest.raises(Unsupported, match=f"{type(mechanism).__name__}.*attn_mask.*traits.mask"):
                ours(x, x, x, attn_mask=mask, need_weights=False)
    if mechanism.traits.padding and not mechanism.traits.mask:
        with pytest.raises(Unsupported, match=r"key_padding_mask.*traits.mask"):
            ours(x, x, x, padding_mask("bias", 2, 6, device), need_weights=False)


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
def test_padding_is_ignored_or_refused(mechanism: Any, device: torch.device) -> None:
    ours = made(mechanism, device)
    x = torch.randn(2, 7, 16, dtype=torch.float64, device=device)
    ignored = torch.zeros(2, 7, dtype=torch.bool, device=device)
    ignored[1, 4:] = True
    if not mechanism.traits.padding:
        with pytest.raises(Unsupported, match="padding"):
            ours(x, x, x, ignored, need_weights=False)
        return
    options: Any = {"need_weights": False, "is_causal": mechanism.traits.modes[0]}
    out = ours(x, x, x, ignored, **options)[0]
    other = x.clone()
    other[1, 4:] = 50.0
    soft = torch.zeros(2, 7, device=device).masked_fill(ignored, INF)
    again = ours(other, other, other, soft, **options)[0]
    torch.testing.assert_close(again[0], out[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again[1, :4], out[1, :4], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
def test_weights_are_the_matrix_of_the_outputs(mechanism: Any, device: torch.device) -> None:
    ours = made(mechanism, device)
    x = torch.randn(2, 7, 16, dtype=torch.float64, device=device)
    order: Any = {"is_causal": mechanism.traits.modes[0]}
    plain, nothing = ours(x, x, x, need_weights=False, **order)
    assert nothing is None
    if not mechanism.traits.matrix:
        with pytest.raises(Unsupported, match=r"need_weights=False.*traits.matrix"):
            ours(x, x, x, **order)
        return
    out, weights = ours(x, x, x, average_attn_weights=False, **order)
    torch.testing.assert_close(out, plain, rtol=1e-9, atol=1e-9)
    assert weights.shape == (2, 2, 7, 7)
    v = nn.functional.linear(x, ours.in_proj_weight[32:], ours.in_proj_bias[32:]).view(2, 7, 2, 8).transpose(1, 2)
    torch.testing.assert_close(ours.out_proj((weights @ v).transpose(1, 2).flatten(2)), out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours(x, x, x, **order)[1], weights.mean(1))
    one, row = ours(x[0], x[0], x[0], **order)
    torch.testing.assert_close(one, out[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(row, weights[0].mean(0), rtol=1e-9, atol=1e-9)


def test_a_query_that_sees_nothing_gets_zeros(device: torch.device) -> None:
    _, ours = both(device, batch_first=True)
    x = torch.randn(2, 4, 8, dtype=torch.float64, device=device, requires_grad=True)
    ignored = torch.tensor([[False] * 4, [True] * 4], device=device)
    for mask in (ignored, torch.zeros(2, 4, device=device).masked_fill(ignored, INF)):
        out, weights = ours(x, x, x, mask)
        torch.testing.assert_close(out[1], ours.out_proj.bias.expand(4, 8))
        assert not weights[1].any()
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(4, dtype=torch.float64, device=device))
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        assert gradient.isfinite().all()
    row = torch.zeros(4, 4, dtype=torch.bool, device=device)
    row[2] = True
    out, weights = ours(x, x, x, attn_mask=row)
    torch.testing.assert_close(out[:, 2], ours.out_proj.bias.expand(2, 8))
    assert not weights[:, 2].any()


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
def test_attention_dropout_in_training_only(mechanism: Any, device: torch.device) -> None:
    if not mechanism.traits.mask:
        with pytest.raises(Unsupported, match=rf"{type(mechanism).__name__}.*dropout=0\.5.*traits.mask"):
            made(mechanism, device, dropout=0.5)
        ours = made(mechanism, device)
        ours.dropout = 0.5  # somebody's own way round: it is refused where it would act
        x = torch.randn(2, 6, 16, dtype=torch.float64, device=device)
        with pytest.raises(Unsupported, match=r"dropout.*traits.mask"):
            ours(x, x, x, need_weights=False, is_causal=mechanism.traits.modes[0])
        return
    ours = made(mechanism, device, dropout=0.5)
    x = torch.randn(2, 6, 16, dtype=torch.float64, device=device)
    torch.manual_seed(1)
    first, weights = ours(x, x, x, average_attn_weights=False)
    torch.manual_seed(2)
    assert (ours(x, x, x)[0] - first).abs().max() > 1e-6
    calm = ours.eval()(x, x, x, average_attn_weights=False)[1]
    kept = weights != 0
    torch.testing.assert_close(weights[kept], 2 * calm[kept])
    assert 0.2 < kept[calm != 0].double().mean() < 0.8
    v = nn.functional.linear(x, ours.in_proj_weight[32:], ours.in_proj_bias[32:]).view(2, 6, 2, 8).transpose(1, 2)
    torch.testing.assert_close(ours.out_proj((weights @ v).transpose(1, 2).flatten(2)), first)


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
def test_checkpoints_of_torch(mechanism: Any) -> None:
    for widths in ({}, {"kdim": 5, "vdim": 7}, {"add_bias_kv": True}, {"bias": False}):
        if "add_bias_kv" in widths and not mechanism.traits.cross:
            continue
        theirs = nn.MultiheadAttention(16, 2, **widths)
        ours = MultiheadAttention(16, 2, mechanism=mechanism, max_len=8, **widths)
        missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
        assert unexpected == []
        assert set(missing) == {f"attention.{name}" for name in ours.attention.state_dict()}
        again = MultiheadAttention(16, 2, mechanism=mechanism, max_len=8, **widths)
        again.load_state_dict(ours.state_dict())
        if not missing:
            theirs.load_state_dict(ours.state_dict())
        x = inputs(
            torch.device("cpu"), 3, 3, 2, False, embed=16, kdim=widths.get("kdim", 16), vdim=widths.get("vdim", 16)
        )
        x = [part.float() for part in x]
        options: Any = {"need_weights": False, "is_causal": mechanism.traits.modes[0]}
        torch.testing.assert_close(again(*x, **options)[0], ours(*x, **options)[0], rtol=0, atol=0)


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
def test_appended_keys(mechanism: Any, device: torch.device) -> None:
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        if not mechanism.traits.cross:
            with pytest.raises(Unsupported, match=r"add_bias_kv or add_zero_attn.*traits.cross"):
                made(mechanism, device, **options)
            continue
        ours = made(mechanism, device, **options)
        x = torch.randn(2, 6, 16, dtype=torch.float64, device=device)
        assert ours(x, x, x, need_weights=False)[0].isfinite().all()
        if mechanism.traits.matrix:
            assert ours(x, x, x)[1].shape == (2, 6, 7)
        if mechanism.traits.causal and not mechanism.traits.mask:
            with pytest.raises(Unsupported, match="attn_mask"):
                ours(x, x, x, is_causal=True, need_weights=False)


@pytest.mark.parametrize("mechanism", [m for m in DEFAULTS if not isinstance(m, Attention)], ids=repr)
def test_mixers_are_sent_to_token_mixer(mechanism: Any) -> None:
    with pytest.raises(Unsupported, match=f"{type(mechanism).__name__}.*TokenMixer"):
        MultiheadAttention(16, 2, mechanism=mechanism, max_len=8)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match=r"embed_dim=10.*num_heads=3"):
        MultiheadAttention(10, 3)
    with pytest.raises(ValueError, match=r"dropout.*0 to 1.*1\.5"):
        MultiheadAttention(8, 2, dropout=1.5)
    ours = MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"query has width 6.*8"):
        ours(x[..., :6], x, x)
    with pytest.raises(ValueError, match="all batched"):
        ours(x, x[0], x)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(3, 4\).*\(4, 4\)"):
        ours(x, x, x, attn_mask=torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"key_padding_mask has shape \(4,\).*\(2, 4\)"):
        ours(x, x, x, torch.zeros(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"boolean.*int64"):
        ours(x, x, x, torch.zeros(2, 4, dtype=torch.long))


# ----------------------------------------------------------------------------------------------- inside torch's layers


def layer(mechanism: Any, device: torch.device, **options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(4)
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **options)
    swapped = MultiheadAttention(16, 2, mechanism=mechanism, max_len=32, batch_first=True)
    swapped.load_state_dict(block.self_attn.state_dict(), strict=False)
    block.self_attn = swapped  # type: ignore[assignment]
    return block.to(device, torch.float64)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mechanism", BOTH, ids=repr)
def test_encoder_layer_in_training_and_evaluation(mechanism: Any, norm_first: bool, device: torch.device) -> None:
    """In evaluation torch's fused path would run softmax from our weights, and never call us."""
    block = layer(mechanism, device, norm_first=norm_first)
    x = torch.randn(2, 7, 16, dtype=torch.float64, device=device)
    calls: list[int] = []
    inner = block.self_attn.attention
    inner.register_forward_pre_hook(lambda *_: calls.append(1))
    trained = block.train()(x)
    with torch.no_grad():
        evaluated = block.eval()(x)
    assert len(calls) == 2
    torch.testing.assert_close(evaluated, trained.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mechanism", [m for m in DEFAULTS if not m.traits.bidirectional], ids=repr)
def test_an_encoder_layer_refuses_what_is_causal_only(mechanism: Any, device: torch.device) -> None:
    block, x = layer(mechanism, device), torch.randn(2, 7, 16, dtype=torch.float64, device=device)
    with pytest.raises(Unsupported, match=rf"{type(mechanism).__name__}.*traits\.bidirectional"):
        block(x)
    mask = nn.Transformer.generate_square_subsequent_mask(7, device, torch.float64)
    assert block(x, mask, is_causal=True).isfinite().all()


def test_no_hook_of_the_test_keeps_torch_from_the_fused_path(device: torch.device) -> None:
    """The layer above was called with a hook of the test's own: here without, by what comes out."""
    block = layer("Softmax(scale=3.0)", device).eval()
    x = torch.randn(2, 7, 16, dtype=torch.float64, device=device)
    with torch.no_grad():
        evaluated = block(x)
    torch.testing.assert_close(evaluated, block.train()(x).detach(), rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        assert (layer("Softmax()", device).eval()(x) - evaluated).abs().max() > 1e-3


def padded(device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 7, 16, dtype=torch.float64, device=device)
    ignored = torch.zeros(3, 7, dtype=torch.bool, device=device)
    ignored[1, 5:] = ignored[2, 2:] = True
    return x, ignored


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of torch's own TransformerEncoder
@pytest.mark.parametrize("swap", ["before", "after"])
@pytest.mark.parametrize("mechanism", BOTH, ids=repr)
def test_nested_encoder_with_padding(mechanism: Any, swap: str, device: torch.device) -> None:
    """``enable_nested_tensor`` left at its default: torch packs the padded batch before it calls the layers."""
    torch.manual_seed(4)
    plain = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer(mechanism, device) if swap == "before" else plain, 2)
    if swap == "after":
        encoder.layers = nn.ModuleList([layer(mechanism, device) for _ in range(2)])
    x, ignored = padded(device)
    if not mechanism.traits.padding:
        with pytest.raises(Unsupported, match="padding"), torch.no_grad():
            encoder.eval()(x, src_key_padding_mask=ignored)
        return
    trained = encoder.train()(x, src_key_padding_mask=ignored).detach()
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=ignored)
    torch.testing.assert_close(evaluated[~ignored], trained[~ignored], rtol=1e-9, atol=1e-9)
    other = x.masked_fill(ignored[..., None], 30.0)
    with torch.no_grad():
        torch.testing.assert_close(encoder(other, src_key_padding_mask=ignored), evaluated, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_softmax_in_torchs_layers_equals_torch(training: bool, norm_first: bool, device: torch.device) -> None:
    torch.manual_seed(4)
    options: Any = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")  # torch's word on norm_first
        theirs = nn.Transformer(16, 2, 2, 2, 32, **options).to(device, torch.float64).train(training)
    ours = copy.deepcopy(theirs)
    for block in (*ours.encoder.layers, *ours.decoder.layers):
        for name in ("self_attn", "multihead_attn"):
            if (old := getattr(block, name, None)) is not None:
                new = MultiheadAttention(16, 2, batch_first=True, device=device, dtype=torch.float64)
                new.load_state_dict(old.state_dict())
                setattr(block, name, new.train(training))
    x, ignored = padded(device)
    y = torch.randn(3, 5, 16, dtype=torch.float64, device=device)
    causal = nn.Transformer.generate_square_subsequent_mask(5, device=device, dtype=torch.float64)
    soft = torch.zeros(3, 7, dtype=torch.float64, device=device).masked_fill(ignored, INF)
    with torch.set_grad_enabled(training):
        for hint in (None, True):
            kinds: Any = {"tgt_mask": causal, "tgt_is_causal": hint, "src_key_padding_mask": soft}
            kinds["memory_key_padding_mask"] = soft
            torch.testing.assert_close(ours(x, y, **kinds), theirs(x, y, **kinds), rtol=1e-9, atol=1e-9)
        mask = nn.Transformer.generate_square_subsequent_mask(7, device=device, dtype=torch.float64)
        torch.testing.assert_close(ours.encoder(x, mask), theirs.encoder(x, mask), rtol=1e-9, atol=1e-9)


def test_nested_tensors_need_self_attention(device: torch.device) -> None:
    ours = made("Softmax", device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.nested.nested_tensor([torch.randn(n, 16, dtype=torch.float64, device=device) for n in (3, 5)])
    with pytest.raises(ValueError, match="nested"):
        ours(x, x.clone(), x)
    out, weights = ours(x, x, x)
    assert weights.shape == (2, 5, 5)
    for row, alone in zip(out.unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(row, ours(alone, alone, alone)[0])


# -------------------------------------------------------------------------------------------- dtypes, copies, compilers


def test_factory_and_low_precision(device: torch.device) -> None:
    half = MultiheadAttention(16, 2, batch_first=True, device=device, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    x = torch.randn(2, 6, 16, device=device)
    out, weights = half(*[x.bfloat16()] * 3)
    assert out.dtype == weights.dtype == torch.bfloat16
    with torch.autocast(device.type, torch.bfloat16):
        ours = MultiheadAttention(16, 2, batch_first=True, add_bias_kv=True, device=device)
        assert ours(x, x, x, torch.zeros(2, 6, device=device))[0].dtype == torch.bfloat16
    meta = MultiheadAttention(16, 2, device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_copies_and_pickles(device: torch.device) -> None:
    ours = made("Softmax", device)
    x = torch.randn(2, 6, 16, dtype=torch.float64, device=device)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(twin(x, x, x), ours(x, x, x), rtol=0, atol=0)
    assert "Softmax()" in repr(ours)


@pytest.mark.parametrize("mechanism", ["Softmax", "LinearAttention"])
def test_compile_a_layer_with_masks(mechanism: str, device: torch.device) -> None:
    torch._dynamo.reset()
    block = layer(mechanism, device)
    x, ignored = padded(device)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, src_key_padding_mask=ignored), block(x, src_key_padding_mask=ignored))
    causal = nn.Transformer.generate_square_subsequent_mask(7, device=device, dtype=torch.float64)
    torch.testing.assert_close(compiled(x, causal, is_causal=True), block(x, causal))


def test_compiled_a_hint_lines_up_only_where_it_can(device: torch.device) -> None:
    """torch reads its hint from the top left and we from the bottom right: one order at L = S, two elsewhere."""
    torch._dynamo.reset()
    ours, (x, y) = made("Softmax", device), (torch.randn(2, n, 16, device=device).double() for n in (4, 6))
    top_left = torch.ones(4, 6, dtype=torch.bool, device=device).triu(1)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    options: Any = {"attn_mask": top_left, "is_causal": True}
    torch.testing.assert_close(compiled(x, y, y, **options), ours(x, y, y, **options))


def test_compiled_a_bias_on_the_keys_fails_at_run_time(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("a device-side assertion ends the process's CUDA context")
    ours = made("Softmax", device)
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    hard = torch.tensor([[0.0, 0.0, 0.0, INF]] * 2, dtype=torch.float64)
    torch.testing.assert_close(compiled(x, x, x, hard), ours(x, x, x, hard))
    with pytest.raises(RuntimeError, match="0 and -inf only"):
        compiled(x, x, x, torch.ones(2, 4, dtype=torch.float64))


def test_export_with_a_dynamic_length(device: torch.device) -> None:
    ours = made(Softmax(), device).eval()
    x = torch.randn(2, 6, 16, dtype=torch.float64, device=device)
    length = torch.export.Dim("length", min=2, max=64)

    class Encode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = ours

        def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
            return self.attention(x, x, x, ignored)[0]

    ignored = torch.zeros(2, 6, dtype=torch.bool, device=device)
    exported = torch.export.export(Encode(), (x, ignored), dynamic_shapes=({1: length}, {1: length}))
    y = torch.randn(2, 11, 16, dtype=torch.float64, device=device)
    more = torch.rand(2, 11, device=device) < 0.4
    torch.testing.assert_close(exported.module()(y, more), ours(y, y, y, more)[0])


@pytest.mark.parametrize("value", [float("nan"), INF, 3e38])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("apart", ["self", "value", "cross"])
def test_padded_tokens_may_hold_anything(apart: str, kind: str, value: float, device: torch.device) -> None:
    """In self-attention, with values of their own and across: outputs and gradients are those of ordinary padding."""
    torch.manual_seed(1)
    ours = MultiheadAttention(8, 2, batch_first=apart != "value").to(device)
    tokens = torch.randn(2, 5, 8, device=device)
    ignored = torch.zeros(2, 5, dtype=torch.bool, device=device)
    ignored[0, 3:] = True

    def answers(hidden: float) -> list[Tensor]:
        x = tokens.masked_fill(ignored[..., None], hidden)
        query = tokens[:, :4] if apart == "cross" else x
        same = ignored[:, :4].logical_not() if apart != "cross" else torch.ones_like(ignored[:, :4])
        turned = query if ours.batch_first else query.transpose(0, 1)
        keys = turned if apart != "cross" else x
        values = keys if apart != "value" else x.clone().transpose(0, 1)
        mask = ignored if kind == "bool" else torch.zeros(2, 5, device=device).masked_fill(ignored, INF)
        out, _ = ours(turned, keys, values, key_padding_mask=mask, need_weights=False)
        seen = (out if ours.batch_first else out.transpose(0, 1))[:, :4][same]
        return [seen, *torch.autograd.grad(seen.square().sum(), [ours.in_proj_weight, ours.out_proj.weight])]  # type: ignore[list-item]

    for found, expected in zip(answers(value), answers(0.5), strict=True):
        torch.testing.assert_close(found, expected)
