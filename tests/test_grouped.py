"""Fewer heads of keys and values than of queries: what repeated heads give, and no copies where none are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention import Bound, MultiheadAttention, Shape, attention, swap
from fast_attention.engine import heads
from tests.cases import ATTENTIONS, bind, qkv

UNORDERED = [m for m in ATTENTIONS if m.unordered]


def grouped(length: int, keys: int, groups: int, device: Any, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv(length, keys, heads=4, batch=batch, device=device)
    return q, k[:, :groups], v[:, :groups]


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
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


@pytest.mark.parametrize("mechanism", ATTENTIONS, ids=repr)
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
    causal = mechanism.traits.order >= 2
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


def test_the_kernel_is_that_of_repeated_heads() -> None:
    """Four axes, or torch's fused kernel would not serve: no scores are held."""
    from fast_attention import explain

    q, k, v = (x.float().requires_grad_() for x in grouped(64, 64, 2, "cpu"))
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
