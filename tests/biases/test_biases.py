"""Biases by positions: the papers' own numbers, fast passes against plain ones, masks, decoding, what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import (
    ALiBi,
    BigBird,
    BlockLocal,
    ByLength,
    Hybrid,
    LearnedFeatures,
    Local,
    Selected,
    Softmax,
    T5Buckets,
    TransformerXL,
    attention,
    catalogue,
    explain,
)
from fast_attention.biases.bias import alibi_slopes, t5_buckets
from fast_attention.counting import peak_bytes
from fast_attention.engine.trace import implementation
from fast_attention.mechanisms.dense import relative
from tests.cases import bind, qkv, some_keys
from tests.test_oracles import expected

BUCKETS = T5Buckets(num_buckets=8, max_distance=16)
BIASES = [ALiBi(), BUCKETS, TransformerXL(width=6)]


def test_slopes_are_those_of_bloom() -> None:
    modeling = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    for heads in (1, 2, 3, 5, 8, 12, 16, 20, 33):
        theirs = modeling.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), theirs, rtol=1e-6, atol=0.0)


def test_buckets_are_those_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = torch.arange(-3000, 3000)
    for number, most, both in ((32, 128, True), (32, 128, False), (8, 16, True), (9, 20, True), (5, 7, False)):
        settings: Any = {"num_buckets": number, "max_distance": most, "bidirectional": both}
        theirs = modeling.T5Attention._relative_position_bucket(offsets, **settings)
        assert torch.equal(t5_buckets(offsets, **settings), theirs), settings


def mechanisms(bias: Any) -> list[Any]:
    """Those whose passes differ at 150 tokens: bands, clipped bands, whole blocks, gathered ones, all keys."""
    return [
        Softmax(bias=bias), Local(window=20, bias=bias), Local(window=(3, 70), scale=0.5, bias=bias),
        Local(window=3, dilation=(1, 4), bias=bias), BlockLocal(block_size=7, before=2, after=0, bias=bias),
        BlockLocal(block_size=70, bias=bias), BigBird(block_size=8, bias=bias),
        BigBird(block_size=8, num_global_blocks=0, num_global_tokens=3, bias=bias),
    ]  # fmt: skip


CASES = [m for bias in BIASES for m in mechanisms(bias)]
CASES += [Hybrid(near=near, far=LearnedFeatures(num_features=5))
          for near in (BlockLocal(block_size=20, bias=ALiBi()), BlockLocal(block_size=16, bias=ALiBi()))]  # fmt: skip


def gradients(bound: Any, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    out = bound(*inputs, **options)
    torch.manual_seed(2)
    wanted = (*inputs, *bound.parameters())
    kept: Any = {"allow_unused": True, "materialize_grads": True}
    return out, *torch.autograd.grad(out, wanted, torch.randn_like(out), **kept)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mechanism", CASES, ids=repr)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_fast_passes_are_the_plain_form(mechanism: Any, is_causal: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Those of float32 by the core. With many heads and few, and cross lengths."""
    sizes = [(5, 3, 150, 150), (1, 2, 200, 200)] + [(2, 2, 70, 150), (2, 2, 150, 70)] * mechanism.traits.cross
    for batch, heads, length, keys in sizes:
        bound = bind(mechanism, heads=heads, dtype=dtype)
        for masked in (False, True):
            inputs = [x.to(dtype).requires_grad_() for x in qkv(length, keys, batch=batch, heads=heads)]
            options = {"is_causal": is_causal, "key_mask": some_keys(batch, keys) if masked else None}
            fast = gradients(bound, inputs, **options)
            with implementation("reference"):
                plain = gradients(bound, inputs, **options)
            for a, b in zip(fast, plain, strict=True):
                most = tolerance * max(1.0, float(b.detach().abs().max()))
                torch.testing.assert_close(a, b, rtol=0.0, atol=most, msg=lambda m, n=length: f"{n} tokens: {m}")


def of_blocks(size: int, **terms: Any) -> list[Any]:
    """Mechanisms whose passes read whole blocks, or windows as large, with a bias or sinks where they take them."""
    near = [
        BlockLocal(block_size=size, before=before, after=after, **terms) for before, after in ((1, 1), (0, 0), (2, 1))
    ]
    far: Any = LearnedFeatures(num_features=5)
    with_far = [] if isinstance(terms["bias"], TransformerXL) else near
    chosen: list[Any] = [Selected(block_size=size, topk=2)]
    chosen.append(Hybrid(near=Selected(block_size=size, topk=1), far=far))
    return [
        *near, *(Hybrid(near=each, far=far, first=1) for each in with_far), *chosen * (terms["bias"] is None),
        Local(window=size, **terms),
        ByLength(short=Softmax(**terms), long=near[0], above=2 * size),
    ]  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bias", [None, *BIASES], ids=repr)
def test_few_queries_at_the_borders_of_blocks(bias: Any, is_causal: bool) -> None:
    """As many keys as whole blocks hold, one more or one less: outputs and gradients, and some by their oracle."""
    size = 4
    for mechanism in of_blocks(size, bias=bias) + of_blocks(size, bias=bias, sinks=True)[:1]:
        if is_causal not in mechanism.traits.modes or not mechanism.traits.cross:
            continue
        bound = bind(mechanism)
        for length, keys in itertools.product((1, 2, size + 1), (5, 7, 8, 9, 13)):
            inputs = [x.requires_grad_() for x in qkv(length, keys)]
            fast = gradients(bound, inputs, is_causal=is_causal)
            with implementation("reference"):
                plain = gradients(bound, inputs, is_causal=is_causal)
            name = f"{mechanism!r}, {length} x {keys}"
            for a, b in zip(fast, plain, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
            with torch.no_grad():  # other passes than with gradients
                found = bound(*inputs, is_causal=is_causal)
                torch.testing.assert_close(found, plain[0], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
                if length <= 2:
                    one = expected(mechanism, [x[1] for x in inputs], bound.w, [1], is_causal, None)
                    torch.testing.assert_close(
                        found[1, 1:], one, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
                    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_bias_acts_beside_any_mask(is_causal: bool) -> None:
    q, k, v = qkv(12, 31)
    offsets = torch.arange(31) - torch.arange(12)[:, None] - 19
    falls = -torch.tensor(alibi_slopes(2), dtype=torch.float64)[:, None, None] * offsets.abs()
    for window, dilation in ((4, 1), (40, 1), (3, 4)):
        near = (offsets.abs() <= window * dilation) & (offsets % dilation == 0) & ((offsets <= 0) | (not is_causal))
        for mask in (torch.randn(12, 31, dtype=torch.float64), torch.randn(2, 1, 12, 31, dtype=torch.float64)):
            dense = (falls + mask).masked_fill(~near, float("-inf")).expand(2, 2, 12, 31)
            ours = Local(window=window, dilation=dilation, bias=ALiBi())(q, k, v, is_causal=is_causal, attn_mask=mask)
            torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, dense), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", BIASES, ids=repr)
def test_decoding_knows_how_far_cached_keys_are(bias: Any) -> None:
    near = [] if isinstance(bias, TransformerXL) else [Hybrid(near=BlockLocal(block_size=5, bias=bias)),
                                                       Hybrid(near=BlockLocal(block_size=4, bias=bias))]  # fmt: skip
    for mechanism in (
        Softmax(bias=bias), Local(window=4, dilation=3, bias=bias), BlockLocal(block_size=6, bias=bias),
        ByLength(short=Softmax(bias=bias), long=Local(window=4, bias=bias), above=9), *near,
    ):  # fmt: skip
        bound, (q, k, v) = bind(mechanism), qkv(40)
        state, outs = None, []
        with torch.no_grad():
            for start, end in ((0, 3), (3, 4), (4, 11), (11, 12), (12, 40)):
                out, state = bound.decode(*(x[:, :, start:end] for x in (q, k, v)), state)
                outs.append(out)
            whole = bound(q, k, v, is_causal=True)
        torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-8, atol=1e-8, msg=lambda m: f"{mechanism}: {m}")


def test_grouped_heads_and_packed_sequences_keep_their_distances() -> None:
    q, (_, k, v) = qkv(20, heads=4)[0], qkv(20)
    alibi = Softmax(bias=ALiBi())
    ours = attention(q, k, v, alibi, enable_gqa=True)
    torch.testing.assert_close(ours, alibi(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    packed = attention(q, q, q, alibi, lengths=(7, 13))
    parts = [alibi(x, x, x) for x in (q[:, :, :7], q[:, :, 7:])]
    torch.testing.assert_close(packed, torch.cat(parts, 2))


def test_traits_say_what_a_bias_changes() -> None:
    plain, fixed, learned, vectors = (Local(bias=bias).traits for bias in (None, *BIASES))
    assert (plain.approximates, fixed.approximates) == ("Softmax", None)
    assert [x.learned for x in (plain, fixed, learned, vectors)] == [False, False, True, True]
    assert [x.rotary for x in (plain, fixed, learned, vectors)] == [True, True, True, False]
    assert "2108.12409" in fixed.paper
    assert repr(Local(window=64, bias=ALiBi())) == "Local(window=64, bias=ALiBi())"
    assert catalogue.parse("Local(window=64, bias=T5Buckets(num_buckets=8))").bias == T5Buckets(num_buckets=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hybrid(near=BlockLocal(block_size=4, bias=TransformerXL()))", "near takes ALiBi"),
        ("Local(bias=ALiBi(slopes=()))", "one number for each head"),
        ("Local(bias=T5Buckets(num_buckets=3))", "num_buckets must be at least 4"),
        ("Local(bias=T5Buckets(max_distance=8))", "max_distance must be at least 9"),
        ("Local(bias=TransformerXL(width=0))", "width must be at least 1"),
        ("Local(bias=3)", "bias must be"),
    ],
)
def test_settings_out_of_range_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        catalogue.parse(text)


def test_slopes_for_other_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="slopes of 3 heads, and q has 2"):
        Local(bias=ALiBi(slopes=(1.0, 0.5, 0.25)))(*qkv(5))


@pytest.mark.parametrize("sizes", [(90, 90), (80, 100), (100, 80), (1, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", ["bias=ALiBi()", "bias=T5Buckets(num_buckets=8), sinks=True"])
def test_blocks_of_queries_read_offsets(
    bias: str, is_causal: bool, masked: bool, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients are those of all scores at once, also of rows before the first visible key."""
    bound = bind(f"Softmax({bias})")
    q, k, v = (x.requires_grad_() for x in qkv(*sizes))
    mask = torch.rand(2, sizes[1]) > 0.3 if masked else None
    if mask is not None:
        mask[0, :12], mask[1] = False, mask[1] & (sizes[0] > 1)
    wanted = bound(q, k, v, is_causal=is_causal, key_mask=mask)
    monkeypatch.setattr(relative, "SCORES", 1)
    monkeypatch.setattr(relative, "ROWS", 16)
    path = "softmax in blocks of queries" if sizes[0] > 16 else "all scores at once"
    assert path in str(explain(bound, q, k, v, is_causal=is_causal, key_mask=mask))
    out = bound(q, k, v, is_causal=is_causal, key_mask=mask)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-9)
    grad, leaves = torch.randn_like(out), [q, k, v, *bound.parameters()]
    first = [torch.autograd.grad(x, leaves, grad, create_graph=True) for x in (out, wanted)]
    for a, b in zip(*first, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-8)
    second = [torch.autograd.grad(sum(x.square().sum() for x in each), leaves) for each in first]
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-7)


def test_offsets_take_no_memory_of_every_pair() -> None:
    bound = bind("Softmax(bias=ALiBi())", dtype=torch.float32)
    peaks = []
    for length in (1024, 4096):
        q, k, v = qkv(length, batch=1, dtype=torch.float32)
        with torch.no_grad():
            peaks.append(peak_bytes(lambda q=q, k=k, v=v: bound(q, k, v, is_causal=True), "cpu"))
    assert peaks[1] < 5 * peaks[0]
