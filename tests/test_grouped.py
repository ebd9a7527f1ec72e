"""Fewer heads of keys and values than of queries: what repeated heads give, and no copies where none are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Attention, Bound, MultiheadAttention, Shape, Softmax, TokenMixer, attention, swap
from fast_attention.engine import heads
from tests.cases import DEFAULTS, DISTINCT, KINDS, bind, qkv

KINDS_OF_HEADS = [m for m in KINDS if isinstance(m, Attention)]
UNORDERED = [m for m in DEFAULTS if isinstance(m, Attention) and m.unordered]


def grouped(length: int, keys: int, groups: int, device: Any, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv(length, keys, heads=4, batch=batch, device=device)
    return q, k[:, :groups], v[:, :groups]


@pytest.mark.parametrize("mechanism", KINDS_OF_HEADS, ids=repr)
def test_grouped_heads_are_repeated_heads(mechanism: Any, device: torch.device) -> None:
    """Outputs and gradients in every order, with masked keys, of one query and of many."""
    bound = bind(mechanism, heads=4, device=device)
    for groups, length, keys in ((2, 7, 7), (1, 1, 7), (2, 3, 7), (4, 7, 7)):
        if length != keys and not mechanism.traits.cross:
            continue
        inputs = [x.clone().requires_grad_() for x in grouped(length, keys, groups, device)]
        masks = [None, torch.rand(3, keys, device=device) > 0.3] if mechanism.traits.padding else [None]
        for is_causal in mechanism.traits.modes:
            for mask in masks:
                got = bound(*inputs, is_causal=is_causal, key_mask=mask, enable_gqa=True)
                q, k, v = inputs
                repeated = (x.repeat_interleave(4 // groups, 1) for x in (k, v))
                wanted = bound(q, *repeated, is_causal=is_causal, key_mask=mask)
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)
                direction = torch.randn_like(got)
                both = [torch.autograd.grad(x, inputs, direction, materialize_grads=True, allow_unused=True)
                        for x in (got, wanted)]  # fmt: skip
                for ours, theirs in zip(*both, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mechanism", [m for m in DISTINCT if isinstance(m, Attention)], ids=repr)
def test_unordered_means_that_queries_may_change_places(mechanism: Any) -> None:
    """Else queries of several heads could not be one sequence; nor do such mechanisms have weights of their heads."""
    bound, order = bind(mechanism), torch.tensor([3, 0, 4, 1, 2])
    q, k, v = qkv(5)
    is_causal = mechanism.traits.modes[0]
    turned, out = (bound(x, k, v, is_causal=is_causal) for x in (q[..., order, :], q))
    same = torch.allclose(turned, out[..., order, :])
    if mechanism.unordered:
        assert same
        assert mechanism.traits.cross
        assert not mechanism.needs_weights


@pytest.mark.parametrize("mechanism", UNORDERED, ids=repr)
def test_nothing_is_repeated_that_need_not_be(mechanism: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = grouped(6, 6, 2, "cpu")
    module = MultiheadAttention(16, 4, num_kv_heads=2, mechanism=mechanism).double()
    x = torch.randn(6, 3, 16, dtype=torch.float64)
    causal = mechanism.traits.complexity_exponent >= 2
    given: dict[str, Any] = {"need_weights": False, "is_causal": causal}
    wanted = (attention(q, k, v, mechanism, enable_gqa=True), module(x, x, x, **given)[0])

    def refuse(x: Tensor, times: int) -> Tensor:
        raise AssertionError(f"{tuple(x.shape)} repeated {times} times")

    monkeypatch.setattr(heads, "repeat", refuse)
    torch.testing.assert_close(attention(q, k, v, mechanism, enable_gqa=True), wanted[0])
    torch.testing.assert_close(module(x, x, x, **given)[0], wanted[1])
    attention(q, k, v, mechanism, enable_gqa=True, lengths=(2, 4), is_causal=causal)
    attention(q[:, :, :1], k, v, mechanism, enable_gqa=True, is_causal=True)
    with pytest.raises(AssertionError, match="repeated 2 times"):
        attention(q, k, v, "Local", enable_gqa=True)


@pytest.mark.slow
def test_keys_of_a_swapped_decoder_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact attention over a cache would copy it whole at every token."""
    pytest.importorskip("transformers")
    from tests.integrations.test_swap import build

    model = build("Llama")
    swap(model, "Softmax")
    ids = torch.randint(5, 99, (2, 9))
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    monkeypatch.setattr(heads, "repeat", lambda x, times: pytest.fail("repeated"))
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)


SPLITS = [[7], [1] * 7, [3, 1, 1, 2], [6, 1]]
DECODED = [m for m in KINDS_OF_HEADS if m.traits.memory is not None]


@torch.no_grad()
@pytest.mark.parametrize(
    "mechanism",
    [
        *DECODED,
        "ByLength(above=4)",
        "ByLength(long=BlockLocal(2), above=4)",
        "ByLength(short=Local(window=2), long=LinearAttention(), above=4)",
    ],
    ids=repr,
)
def test_grouped_heads_are_decoded_as_repeated_heads(mechanism: Any, device: torch.device) -> None:
    """In every split, with masked keys, and for caches that hold more tokens than ``above``."""
    bound = bind(mechanism, heads=4, device=device)
    for groups in (2, 1, 4):
        q, k, v = grouped(7, 7, groups, device)
        masks = [None, torch.rand(3, 7, device=device) > 0.3] if bound.mechanism.traits.padding else [None]
        for mask in masks:
            repeated = (x.repeat_interleave(4 // groups, 1) for x in (k, v))
            wanted = bound(q, *repeated, is_causal=True, key_mask=mask)
            for sizes in SPLITS:
                outs, state, start = [], None, 0
                for size in sizes:
                    new, start = slice(start, start + size), start + size
                    visible = None if mask is None else mask[:, new]
                    out, state = bound.decode(
                        *(x[:, :, new] for x in (q, k, v)), state, key_mask=visible, enable_gqa=True
                    )  # fmt: skip
                    outs.append(out)
                torch.testing.assert_close(torch.cat(outs, -2), wanted, rtol=1e-9, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["Softmax", "ByLength(long=BlockLocal(2), above=9)"])
def test_caches_hold_the_heads_that_there_are(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = TokenMixer(16, 4, num_kv_heads=2, mechanism=mechanism).double()
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    wanted = module(x, is_causal=True)
    monkeypatch.setattr(heads, "repeat", lambda x, times: pytest.fail("repeated"))
    first, state = module.decode(x[:, :5])
    outs = [first]
    for token in range(5, 9):
        out, state = module.decode(x[:, token : token + 1], state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), wanted)
    assert state.heads == 2
    held = state.content if mechanism == "Softmax" else state.content.short
    assert held.k.shape == held.v.shape == (3, 2, 9, 4)


def test_decoding_without_the_option_refuses_fewer_heads() -> None:
    q, k, v = grouped(3, 3, 2, "cpu")
    with pytest.raises(ValueError, match=r"they must be equal \(grouped keys and values"):
        Softmax().decode(q, k, v)
    with pytest.raises(ValueError, match="must divide those of q"):
        Softmax().decode(q[:, :3], k, v, enable_gqa=True)
    _, state = Softmax().decode(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="2 heads of widths"):
        Softmax().decode(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), state=state)


def test_gradients_of_decoded_grouped_heads() -> None:
    q, k, v = (x.requires_grad_() for x in grouped(6, 6, 2, "cpu"))
    repeated = [x.repeat_interleave(2, 1) for x in (k, v)]
    direction = torch.randn_like(q)
    outs, state = [], None
    for new in (slice(0, 3), slice(3, 4), slice(4, 6)):
        out, state = Softmax().decode(*(x[:, :, new] for x in (q, k, v)), state=state, enable_gqa=True)
        outs.append(out)
    ours = torch.autograd.grad(torch.cat(outs, -2), (q, k, v), direction)
    wanted = torch.autograd.grad(Softmax()(q, *repeated, is_causal=True), (q, k, v), direction)
    torch.testing.assert_close(ours, wanted)


def test_the_kernel_is_that_of_repeated_heads() -> None:
    """Four axes, or torch's fused kernel would not serve: no scores are held."""
    from fast_attention import explain

    q, k, v = (x.float().requires_grad_() for x in grouped(63, 63, 2, "cpu"))  # so few do not run in the core
    for is_causal in (False, True):
        one = explain("Softmax", q, q, q, is_causal=is_causal).kernels
        assert explain(Bound("Softmax", Shape(4, 8)), q, k, v, is_causal=is_causal, enable_gqa=True).kernels == one


def test_heads_of_bound_are_checked() -> None:
    bound, (q, k, v) = Bound("LinearAttention", Shape(4, 8)), grouped(6, 6, 3, "cpu")
    with pytest.raises(ValueError, match="q has 4 heads and k has shape"):
        bound(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match=r"k has \(heads, width\) \(2, 8\)"):
        bound(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match=r"q has \(heads, width\) \(2, 8\)"):
        bound(q[:, :2], k[:, :2], v[:, :2], enable_gqa=True)
    with pytest.raises(ValueError, match=r"q has leading sizes \(3,\) and k has \(2,\)"):
        bound(q, k[:2, :2], v[:2, :2], enable_gqa=True)
