"""Grouped heads and rotary positions in both modules, beside repetition and transformers' Llama."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as exact

from fast_attention import Attention, MultiheadAttention, Rotary, TokenMixer, Unsupported, decoding
from fast_attention.nn.positions import rotate_by
from tests.cases import DEFAULTS, KINDS

ATTENTIONS: list[Any] = [mechanism for mechanism in DEFAULTS if isinstance(mechanism, Attention)]
TURNED = [mechanism for mechanism in ATTENTIONS if mechanism.traits.rotary]
ROTARIES = [
    Rotary(),
    Rotary(rope_theta=500_000.0),
    Rotary(rope_type="linear", factor=4.0),
    Rotary(rope_type="dynamic", factor=4.0, original_max_position_embeddings=16),
    Rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    Rotary(rope_type="yarn", factor=8.0, original_max_position_embeddings=2048, rope_theta=1e6, beta_fast=16.0),
    Rotary(rope_type="yarn", factor=2.0, original_max_position_embeddings=64, attention_factor=1.5),
]
SCALED = [rotary for rotary in ROTARIES if rotary.rope_type != "dynamic"]


def tokens(device: Any, *shape: int) -> Tensor:
    return torch.randn(*shape, 16, dtype=torch.float64, device=device)


def seeded(kind: Any, *sizes: Any, device: Any = "cpu", **options: Any) -> Any:
    torch.manual_seed(5)
    return kind(*sizes, max_len=32, **options).to(device, torch.float64)


def whole(rows: Tensor, heads: int, groups: int) -> Tensor:
    """The projection of every head alone, out of that of the groups."""
    return rows.unflatten(0, (groups, -1)).repeat_interleave(heads // groups, 0).flatten(0, 1)


# -------------------------------------------------------------------------------------------------------- grouped heads


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mechanism", [m for m in KINDS if isinstance(m, Attention)], ids=repr)
def test_a_mixers_groups_are_repeated_heads(mechanism: Any, groups: int, device: torch.device) -> None:
    options = {"rotary": True} if mechanism.traits.rotary else {}
    ours = seeded(TokenMixer, 16, 4, mechanism, num_kv_heads=groups, device=device, **options)
    plain = seeded(TokenMixer, 16, 4, mechanism, device=device, **options)
    read = [part for part in "qkv" if part in mechanism.traits.inputs]
    sizes = [16 if part == "q" else 4 * groups for part in read]
    state = dict(ours.state_dict())
    for name in ("in_proj.weight", "in_proj.bias"):
        parts = zip(read, state[name].split(sizes), strict=True)
        state[name] = torch.cat([rows if part == "q" else whole(rows, 4, groups) for part, rows in parts])
    plain.load_state_dict(state)
    x = tokens(device, 2, 7)
    for is_causal in mechanism.traits.modes:
        torch.testing.assert_close(ours(x, is_causal=is_causal), plain(x, is_causal=is_causal), rtol=1e-9, atol=1e-10)
    if mechanism.traits.memory:
        state, outs = None, []
        for part in x.split((3, 1, 3), 1):
            out, state = ours.decode(part, state)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 1), plain(x, is_causal=True), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("mechanism", ["Softmax()", "LinearAttention()", "LSH()", "RandomSynthesizer()"])
def test_a_modules_groups_are_repeated_heads(mechanism: str, widths: dict[str, Any], device: torch.device) -> None:
    if mechanism == "LSH()":
        widths = {}  # no cross attention
    build: Any = {"mechanism": mechanism, "batch_first": True, "device": device, **widths}
    ours, plain = (seeded(MultiheadAttention, 16, 4, num_kv_heads=n, **build) for n in (2, None))
    state = dict(ours.state_dict())
    for name, x in state.items():
        if name in ("in_proj_weight", "in_proj_bias"):
            q, k, v = x.split((16, 8, 8))
            state[name] = torch.cat([q, whole(k, 4, 2), whole(v, 4, 2)])
        elif name in ("k_proj_weight", "v_proj_weight"):
            state[name] = whole(x, 4, 2)
        elif name in ("bias_k", "bias_v"):
            state[name] = whole(x.flatten(), 4, 2).view(1, 1, 16)
    plain.load_state_dict(state)
    x, k, v = (torch.randn(2, 6, n, dtype=torch.float64, device=device) for n in (16, ours.kdim, ours.vdim))
    asked: Any = {"need_weights": mechanism != "LSH()"}
    for got, wanted in zip(ours(x, k, v, **asked), plain(x, k, v, **asked), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


def test_groups_are_torchs_grouped_attention(device: torch.device) -> None:
    ours = seeded(MultiheadAttention, 16, 4, num_kv_heads=2, batch_first=True, device=device)
    x = tokens(device, 2, 6)
    q, k, v = torch.nn.functional.linear(x, ours.in_proj_weight, ours.in_proj_bias).split((16, 8, 8), -1)
    q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
    wanted = ours.out_proj(exact(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours(x, x, x, is_causal=True, need_weights=False)[0], wanted)


def test_default_settings_keep_their_names_and_sizes() -> None:
    for kind in (MultiheadAttention, TokenMixer):
        one, other = (seeded(kind, 16, 4, **options) for options in ({}, {"num_kv_heads": 4}))
        assert {n: x.shape for n, x in one.state_dict().items()} == {n: x.shape for n, x in other.state_dict().items()}
        assert {name.split(".")[0] for name in one.state_dict()} <= {
            "in_proj_weight", "in_proj_bias", "in_proj", "out_proj",
        }  # fmt: skip
    assert "num_kv_heads=2" in repr(MultiheadAttention(16, 4, num_kv_heads=2))


def test_groups_that_do_not_divide_are_named() -> None:
    for kind, n in itertools.product((MultiheadAttention, TokenMixer), (0, 3, 8, -1)):
        with pytest.raises(ValueError, match=f"num_kv_heads={n} must divide num_heads=4"):
            kind(16, 4, num_kv_heads=n)
    with pytest.raises(Unsupported, match=r"FNet\(\).*num_kv_heads"):
        TokenMixer(16, 4, "FNet", num_kv_heads=2)


# ----------------------------------------------------------------------------------------------------- rotary positions


def llamas(rotary: Rotary, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, H, L, E) as transformers' Llama turns them."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    names = ("rope_theta", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    settings = {name: getattr(rotary, name) for name in names} | {"attention_factor": rotary.attention_factor}
    if rotary.rope_type != "yarn":
        settings = {name: settings[name] for name in names[: 2 if rotary.rope_type == "default" else 3]}
    config = llama.LlamaConfig(
        hidden_size=q.shape[-1], num_attention_heads=1, rope_parameters=settings,
        max_position_embeddings=rotary.original_max_position_embeddings or 64,
    )  # fmt: skip
    cosine, sine = llama.LlamaRotaryEmbedding(config)(q, positions)
    return llama.apply_rotary_pos_emb(q, k, cosine, sine)


@pytest.mark.filterwarnings("ignore")  # transformers' own words on its settings
@pytest.mark.parametrize("rotary", ROTARIES, ids=repr)
@pytest.mark.parametrize("start", [0, 37])
def test_queries_and_keys_are_rotated_as_llama_rotates_them(rotary: Rotary, start: int) -> None:
    q, k = torch.randn(2, 3, 40, 16), torch.randn(2, 3, 40, 16)
    rows = [torch.arange(40) + start, torch.randint(0, 80, (40,))]
    positions = torch.stack(rows)
    sin_cos = rotary.sin_cos(positions, 16)
    for got, wanted in zip(
        (rotate_by(q, sin_cos), rotate_by(k, sin_cos)), llamas(rotary, q, k, positions), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=5e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_whole_layer_is_llamas_with_the_same_weights() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, attention_bias=False,
        rope_parameters={"rope_theta": 1000.0, "rope_type": "linear", "factor": 2.0}, _attn_implementation="sdpa",
    )  # fmt: skip
    theirs = llama.LlamaAttention(config, 0).double()
    rotary = Rotary(rope_theta=1000.0, rope_type="linear", factor=2.0)
    ours = TokenMixer(16, 4, num_kv_heads=2, rotary=rotary, bias=False).double()
    with torch.no_grad():
        ours.in_proj.weight.copy_(torch.cat([getattr(theirs, f"{part}_proj").weight for part in "qkv"]))
        ours.out_proj.weight.copy_(theirs.o_proj.weight)
    x, positions = tokens("cpu", 2, 9), torch.arange(9).expand(2, -1) + 5
    sin_cos = llama.LlamaRotaryEmbedding(config)(x, positions)
    wanted = theirs(x, sin_cos, attention_mask=None, is_causal=True)[0]
    torch.testing.assert_close(ours(x, is_causal=True, positions=positions), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rotary", [True, *SCALED], ids=repr)
@pytest.mark.parametrize("mechanism", ["Softmax()", "FavorPlus()", "Local(window=3)", "Hybrid()"])
def test_decoding_keeps_the_positions(mechanism: str, rotary: Any, device: torch.device) -> None:
    mixer = seeded(TokenMixer, 16, 2, mechanism, rotary=rotary, num_kv_heads=1, device=device)
    x = tokens(device, 3, 11)
    for positions in (
        None,
        torch.arange(11, device=device) + 4,
        torch.arange(11, device=device) + torch.tensor([[0], [3], [9]], device=device),
    ):
        wanted, state, outs, at = mixer(x, is_causal=True, positions=positions), None, [], 0
        for size in (4, 1, 1, 5):
            # Places are given for the first stretch only: the state goes on from there.
            first = None if positions is None or at else positions[..., :size]
            out, state = mixer.decode(x[:, at : at + size], state, positions=first)
            state = decoding.select(state, torch.arange(3, device=device))
            outs.append(out)
            at += size
        torch.testing.assert_close(torch.cat(outs, 1), wanted, rtol=1e-8, atol=1e-9)


def test_beams_take_their_positions_along(device: torch.device) -> None:
    mixer = seeded(TokenMixer, 16, 2, rotary=True, device=device)
    x, swap = tokens(device, 2, 6), torch.tensor([1, 0], device=device)
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]], device=device)
    _, state = mixer.decode(x[:, :4], positions=positions)
    straight, _ = mixer.decode(x[:, 4:], state)
    crossed, _ = mixer.decode(x[swap][:, 4:], decoding.select(state, swap))
    torch.testing.assert_close(crossed[swap], straight)


def test_a_dynamic_base_decodes_as_far_as_it_was_trained() -> None:
    rotary = Rotary(rope_type="dynamic", factor=2.0, original_max_position_embeddings=8)
    mixer = seeded(TokenMixer, 16, 2, rotary=rotary)
    x = tokens("cpu", 1, 9)
    out, state = mixer.decode(x[:, :8])
    torch.testing.assert_close(out, mixer(x[:, :8], is_causal=True))
    with pytest.raises(Unsupported, match=r"dynamic.*decode token 9.*beyond 8.*yarn"):
        mixer.decode(x[:, 8:], state)


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
def test_a_module_rotates_as_a_mixer_does_or_refuses(mechanism: Any, device: torch.device) -> None:
    if not mechanism.traits.rotary:
        for kind in (MultiheadAttention, TokenMixer):
            with pytest.raises(Unsupported, match=f"{type(mechanism).__name__}.*rotary"):
                kind(16, 2, mechanism=mechanism, max_len=32, rotary=True)
        return
    rotary = Rotary(rope_theta=100.0)
    mixer = seeded(TokenMixer, 16, 2, mechanism, rotary=rotary, device=device)
    module = seeded(MultiheadAttention, 16, 2, mechanism=mechanism, rotary=rotary, batch_first=True, device=device)
    module.attention.load_state_dict(mixer.attention.state_dict())
    module.out_proj.load_state_dict(mixer.out_proj.state_dict())
    read = [part for part in "qkv" if part in mechanism.traits.inputs]
    with torch.no_grad():
        for part, rows, bias in zip(read, mixer.in_proj.weight.split(16), mixer.in_proj.bias.split(16), strict=True):
            at = slice(16 * "qkv".index(part), 16 * "qkv".index(part) + 16)
            module.in_proj_weight[at], module.in_proj_bias[at] = rows, bias
    x = tokens(device, 2, 7)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [9, 9, 3, 0, 1, 70, 5]], device=device)
    for given in (None, positions, positions[1]):
        got = module(x, x, x, need_weights=False, positions=given)[0]
        torch.testing.assert_close(got, mixer(x, positions=given), rtol=1e-9, atol=1e-10)


def test_queries_stand_at_the_end_of_the_keys(device: torch.device) -> None:
    ours = seeded(MultiheadAttention, 16, 2, rotary=True, batch_first=True, device=device)
    x = tokens(device, 2, 7)
    wanted = ours(x, x, x, is_causal=True, need_weights=False)[0][:, 4:]
    torch.testing.assert_close(ours(x[:, 4:], x, x, is_causal=True, need_weights=False)[0], wanted)
    positions = torch.arange(7, device=device)
    given: Any = {"positions": positions[4:] + 50, "key_positions": (positions + 50).expand(2, -1)}
    torch.testing.assert_close(ours(x[:, 4:], x, x, is_causal=True, need_weights=False, **given)[0], wanted)
    assert (
        ours(x[:, 4:], x, x, is_causal=True, positions=positions[:3], key_positions=positions)[0] - wanted
    ).abs().max() > 1e-3
    one = ours(x[0], x[0], x[0], is_causal=True, need_weights=False, positions=positions)[0]
    torch.testing.assert_close(one[4:], wanted[0])


def test_rotary_compiles_and_exports(device: torch.device) -> None:
    for rotary in ROTARIES[3:4]:
        torch._dynamo.reset()
        mixer, x = seeded(TokenMixer, 16, 4, rotary=rotary, num_kv_heads=2, device=device).eval(), tokens(device, 2, 6)
        compiled = torch.compile(mixer, backend="eager", fullgraph=True, dynamic=True)
        torch.testing.assert_close(compiled(x, is_causal=True), mixer(x, is_causal=True))
        length = torch.export.Dim("length", min=2, max=64)
        exported = torch.export.export(mixer, (x,), dynamic_shapes={"x": {1: length}}).module()
        y = tokens(device, 2, 30)
        torch.testing.assert_close(exported(y), mixer(y))


def placed(positions: Tensor) -> Tensor:
    return TokenMixer(8, 2, rotary=True)(torch.randn(1, 3, 8), positions=positions)


MISTAKES: list[tuple[Any, str]] = [
    (lambda: Rotary(rope_type="ntk"), "rope_type must be one of 'default', 'linear', 'dynamic', 'yarn'"),
    (lambda: Rotary(rope_type="yarn", factor=2.0), "needs original_max_position_embeddings"),
    (lambda: Rotary(factor=2.0), "factor needs a rope_type"),
    (lambda: Rotary(rope_theta=0.0), r"rope_theta must be above 1"),
    (lambda: Rotary(rope_type="linear", factor=0.5), "factor must be at least 1"),
    (lambda: TokenMixer(6, 2, rotary=True), "the heads' width 3 is odd"),
    (lambda: MultiheadAttention(6, 2, rotary=True), "the heads' width 3 is odd"),
    (lambda: TokenMixer(8, 2, rotary="yes"), "rotary is True, False or a Rotary.*'yes'"),
    (lambda: MultiheadAttention(8, 2, rotary=True, add_zero_attn=True), "append keys that have no position"),
    (lambda: TokenMixer(8, 2)(torch.randn(1, 3, 8), positions=torch.arange(3)), "build it with rotary=True"),
    (lambda: TokenMixer(8, 2).decode(torch.randn(1, 3, 8), positions=torch.arange(3)), "build it with rotary=True"),
    (lambda: TokenMixer(8, 2, "FNet")(torch.randn(1, 3, 8), positions=torch.arange(3)), "build it with rotary=True"),
    (lambda: placed(torch.arange(4)), r"positions has shape \(4,\).*\(1, 3\)"),
    (lambda: placed(torch.zeros(2, 3).long()), r"positions has shape \(2, 3\).*\(1, 3\)"),
    (lambda: placed(torch.rand(3)), "whole numbers.*float32"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_mistakes_are_named(call: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


def test_one_sided_positions_are_refused() -> None:
    ours, x, y = MultiheadAttention(8, 2, rotary=True, batch_first=True), torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    with pytest.raises(ValueError, match="give both: positions of the 3 queries and key_positions of the 5 keys"):
        ours(x, y, y, positions=torch.arange(3))
    with pytest.raises(ValueError, match=r"key_positions has shape \(4,\)"):
        ours(x, y, y, positions=torch.arange(3), key_positions=torch.arange(4))
    with pytest.raises(ValueError, match="build it with rotary=True"):
        MultiheadAttention(8, 2, batch_first=True)(x, x, x, key_positions=torch.arange(3))
