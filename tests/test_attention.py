"""``attention(q, k, v, ...)`` takes the arguments of ``scaled_dot_product_attention``, or refuses them by name."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as exact

from fast_attention import Attention, Softmax, Unsupported, attention, catalogue
from fast_attention.catalogue import parse
from tests.cases import ATTENTIONS, bind, qkv

FIXED: list[Any] = [
    m for m in map(catalogue.default, catalogue.names()) if isinstance(m, Attention) and not m.traits.learned
]

OPEN = [m for m in ATTENTIONS if m.traits.mask]


def masks(length: int, keys: int, device: torch.device) -> list[Tensor | None]:
    """Every kind of mask that broadcasts to (2, 4, L, S); the first query of one sees nothing."""
    hidden = torch.rand(length, keys) > 0.4
    hidden[0] = False
    sizes = ((2, 4, length, keys), (4, length, keys), (2, 1, 1, keys), (1, 1, length, 1), (length, keys), (1, keys))
    made: list[Tensor | None] = [None, hidden.to(device)]
    for size in sizes:
        made += [(torch.rand(size) > 0.3).to(device), torch.randn(size, dtype=torch.float64).to(device)]
    return made


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3, -1.0])
def test_softmax_is_torchs_function(scale: float | None, heads: int, device: torch.device) -> None:
    for length, keys in ((5, 5), (3, 7)):
        q, _, _ = qkv(length, heads=4, device=device)
        _, k, v = qkv(length, keys, heads=heads, device=device)
        grouped: Any = {"scale": scale, "enable_gqa": heads < 4}
        for mask in masks(length, keys, device):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            got, wanted = (f(*leaves, attn_mask=mask, **grouped) for f in (attention, exact))
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
            pairs = zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (got, wanted)), strict=True)
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)
        if length == keys:
            order = torch.ones(keys, keys, dtype=torch.bool, device=device).tril()
            torch.testing.assert_close(
                attention(q, k, v, is_causal=True, **grouped), exact(q, k, v, attn_mask=order, **grouped)
            )


def test_names_and_defaults_are_torchs() -> None:
    theirs = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    ours = inspect.signature(attention).parameters
    assert {name: ours[name].default for name in theirs} == theirs


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e-256])
def test_causal_under_a_scale_that_is_not_positive(scale: float, device: torch.device) -> None:
    """torch's kernel on a CPU gives NaN there: it hides before it scales."""
    order = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    leaves = [x.requires_grad_() for x in qkv(6, device=device)]
    got, wanted = attention(*leaves, is_causal=True, scale=scale), exact(*leaves, attn_mask=order, scale=scale)
    torch.testing.assert_close(got, wanted)
    pairs = zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_dropout_is_torchs(device: torch.device) -> None:
    q, k, v = qkv(6, heads=4, device=device)
    drawn = []
    for call in (attention, exact):
        torch.manual_seed(1)
        drawn.append(call(q, k, v, dropout_p=0.5))
    torch.testing.assert_close(*drawn)
    assert (drawn[0] - attention(q, k, v)).abs().max() > 0.1
    assert not attention(q, k, v, dropout_p=1.0).any()


def test_a_mask_of_either_kind_and_the_order_hide_what_either_hides(device: torch.device) -> None:
    q, k, v = qkv(6, device=device)
    hidden = torch.rand(6, 6, device=device) > 0.5
    both = hidden & torch.ones_like(hidden).tril()
    torch.testing.assert_close(attention(q, k, v, attn_mask=hidden, is_causal=True), exact(q, k, v, attn_mask=both))
    seen = torch.tensor([[True] * 4 + [False] * 2] * 2, device=device)
    torch.testing.assert_close(
        attention(q, k, v, attn_mask=hidden, key_mask=seen), exact(q, k, v, attn_mask=hidden & seen[:, None, None])
    )


@pytest.mark.parametrize("mechanism", FIXED, ids=repr)
def test_every_mechanism_does_it_or_refuses_by_name(mechanism: Any, device: torch.device) -> None:
    q, k, v = qkv(8, heads=4, device=device)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("attn_mask", {"attn_mask": torch.ones(8, 8, dtype=torch.bool, device=device).tril(1)}),
        ("dropout", {"dropout_p": 0.5}),
    ]
    for word, options in asked:
        if mechanism.traits.mask:
            torch.manual_seed(1)
            assert (attention(q, k, v, mechanism, **options) - attention(q, k, v, mechanism)).abs().max() > 1e-3
        else:
            with pytest.raises(Unsupported, match=f"{type(mechanism).__name__}.*{word}"):
                attention(q, k, v, mechanism, **options)
    grouped = []
    for pair, gqa in (((k[:, :2], v[:, :2]), True), ((x[:, :2].repeat_interleave(2, 1) for x in (k, v)), False)):
        torch.manual_seed(1)
        grouped.append(attention(q, *pair, mechanism, enable_gqa=gqa))
    torch.testing.assert_close(*grouped)


@pytest.mark.parametrize("mechanism", FIXED, ids=repr)
def test_scale_is_the_factor_on_the_dot_products(mechanism: Any, device: torch.device) -> None:
    q, k, v = qkv(8, heads=4, device=device)
    has = "scale" in repr(type(mechanism).__dataclass_fields__)
    if not has and mechanism.traits.approximates is None:
        with pytest.raises(Unsupported, match=rf"{type(mechanism).__name__}.*scale=0\.2"):
            attention(q, k, v, mechanism, scale=0.2)
        return
    own = 1.0 if type(mechanism).__name__ == "LSH" else 8**-0.5
    found = []
    for queries, scale in ((q, 0.2), (q * (0.2 / own), None)):
        torch.manual_seed(1)
        found.append(attention(queries, k, v, mechanism, scale=scale))
    torch.testing.assert_close(*found)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"attn_mask": torch.ones(3, 6) > 0}, r"attn_mask has shape \(3, 6\).*\(2, 4, 6, 6\)"),
    ({"attn_mask": torch.ones(1, 1, 2, 4, 6, 6)}, r"attn_mask has shape \(1, 1, 2"),
    ({"attn_mask": torch.ones(6, 6).long()}, "boolean.*int64"),
    ({"dropout_p": 1.5}, "dropout.*from 0 to 1.*1.5"),
    ({"dropout_p": "a"}, "dropout.*'a'"),
    ({"scale": "a"}, "scale is a number.*'a'"),
    ({"scale": 0.1, "mechanism": "Softmax(scale=1.0)"}, r"Softmax\(scale=1.0\) brings a scale of its own.*scale=0.1"),
]


@pytest.mark.parametrize(("options", "said"), MISTAKES)
def test_mistakes_are_named(options: dict[str, Any], said: str) -> None:
    q, k, v = qkv(6, heads=4)
    with pytest.raises(ValueError, match=said):
        attention(q, k, v, **options)


def test_heads_that_do_not_divide_are_named() -> None:
    q, k, v = qkv(6, heads=4)
    for one, other, name in (
        (k[:, :3], v[:, :3], "k"),
        (k[:, :2], v[:, :3], "v"),
        (k[:, :0], v, "k"),
    ):
        with pytest.raises(ValueError, match=rf"q has 4 heads and {name} has shape"):
            attention(q, one, other, enable_gqa=True)
    with pytest.raises(ValueError, match=r"k must be \(..., heads, tokens, width\); got shape \(6, 8\)"):
        attention(q, k[0, 0], v, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        attention(q, k[:, :2], v[:, :2])


def test_compiled_and_under_autocast(device: torch.device) -> None:
    q, k, v = qkv(6, heads=4, device=device, dtype=torch.float32)
    options: Any = {"attn_mask": torch.rand(6, 6, device=device) > 0.3, "scale": 0.3, "enable_gqa": True}
    pair = (k[:, :2], v[:, :2])
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, *pair, Softmax(), **options), exact(q, *pair, **options))
    with torch.autocast(device.type, torch.bfloat16):
        got, wanted = attention(q, *pair, **options), exact(q, *pair, **options).float()
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mechanism", ["ReLUAttention", "Local", "BlockLocal"])
def test_a_mask_that_does_not_fit_is_refused_by_every_open_mechanism(mechanism: str) -> None:
    q, k, v = qkv(6)
    for shape, p in itertools.product([(5, 6), (3, 2, 6, 6)], [0.0, 0.1]):
        with pytest.raises(ValueError, match="attn_mask has shape"):
            parse(mechanism)(q, k, v, attn_mask=torch.ones(shape), dropout=p)


@pytest.mark.parametrize("mechanism", OPEN, ids=repr)
def test_an_additive_mask_may_have_more_digits(mechanism: Any) -> None:
    """numpy makes float64; a number below float32's least hides like minus infinity, a whole row of them too."""
    bound, (q, k, v) = bind(mechanism, dtype=torch.float32), qkv(6, dtype=torch.float32)
    mask = torch.randn(6, 6, dtype=torch.float64)
    mask[2] = torch.finfo(torch.float64).min
    got = bound(q, k, v, attn_mask=mask)
    torch.testing.assert_close(got, bound(q, k, v, attn_mask=mask.float()))
    assert got.dtype == torch.float32
    assert bool((got[..., 2, :] == 0.0).all())
