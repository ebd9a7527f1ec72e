"""Calls of ``attention`` beside torch's function, and of ``MultiheadAttention`` beside torch's module."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from fast_attention import MultiheadAttention, attention
from tests.fuzz.kit import fuzz


@st.composite
def calls(draw: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Queries, keys and values of any sizes, and arguments that torch takes too."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    groups, times = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length, keys, width, values = (draw(st.integers(1, top)) for top in (9, 9, 8, 8))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    size = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    q = torch.randn(*lead, groups * times, length, width, dtype=dtype) * size
    k = torch.randn(*lead, groups, keys, width, dtype=dtype) * size
    v = torch.randn(*lead, groups, keys, values, dtype=dtype)
    mask = None
    if draw(st.booleans()):
        sizes = (*lead, groups * times, length, keys)
        cut = draw(st.integers(0, len(sizes) - 2))
        sizes = tuple(n if draw(st.booleans()) else 1 for n in sizes[cut:])
        mask = torch.rand(sizes) > draw(st.sampled_from([0.0, 0.4, 1.0]))
        if draw(st.booleans()):
            mask = torch.randn(sizes, dtype=dtype).masked_fill(~mask, float("-inf"))
    scale = draw(st.none() | st.floats(-2, 2))
    is_causal = mask is None and length == keys and draw(st.booleans())
    return [q, k, v], {"attn_mask": mask, "scale": scale, "is_causal": is_causal, "enable_gqa": times > 1}


@fuzz("calls of attention() beside torch's function", examples=150, call=calls())
def test_attention_is_torchs_function(call: tuple[list[torch.Tensor], dict[str, Any]]) -> None:
    """Outputs and gradients."""
    tensors, options = call
    leaves = [x.requires_grad_() for x in tensors]
    ours = attention(*leaves, **options)
    if options.pop("is_causal"):  # with a scale below 0 torch's own order gives NaN
        options["attn_mask"] = torch.ones(leaves[0].shape[-2], leaves[0].shape[-2], dtype=torch.bool).tril()
    theirs = scaled_dot_product_attention(*leaves, **options)
    near: Any = {"rtol": 1e-9, "atol": 1e-10} if ours.dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    torch.testing.assert_close(ours, theirs, **near)
    probe = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad((out * probe).sum(), leaves) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=near["rtol"], atol=near["atol"] * (1 + float(b.detach().abs().max())))


@st.composite
def modules(draw: Any) -> tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]:
    """Options of torch's module, its inputs and its masks; key 0 is always seen."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    flip = st.booleans()
    heads, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    width = heads * head_dim
    options: dict[str, Any] = {name: draw(flip) for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    options |= {name: draw(st.integers(1, 5)) for name in ("kdim", "vdim") if draw(flip)}
    options |= {"embed_dim": width, "num_heads": heads, "dtype": torch.float64}
    length, keys, batch = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    batched = draw(flip)
    sizes = ((length, width), (keys, options.get("kdim", width)), (keys, options.get("vdim", width)))
    lead = (batch,) if batched else ()
    x = [torch.randn(*lead, *size, dtype=torch.float64) for size in sizes]
    if batched and not options["batch_first"]:
        x = [part.transpose(0, 1) for part in x]
    asked: dict[str, Any] = {"need_weights": draw(flip), "average_attn_weights": draw(flip)}
    rows = (batch if batched else 1) * heads
    kinds: dict[str, tuple[int, ...]] = {}
    if draw(flip):
        kinds["attn_mask"] = (rows, length, keys) if draw(flip) else (length, keys)
    if draw(flip):
        kinds["key_padding_mask"] = (*lead, keys)
    additive = draw(flip)
    for name, shape in kinds.items():
        ignored = torch.rand(shape) < 0.4
        ignored[..., 0] = False
        bias = torch.randn(shape, dtype=torch.float64).masked_fill(ignored, float("-inf"))
        asked[name] = bias if additive else ignored
    return options, x, asked


@fuzz("calls of MultiheadAttention beside torch's module", examples=100, case=modules())
def test_the_module_is_torchs_module(case: tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]) -> None:
    """Outputs, attention matrices and the gradients of every parameter, from one state_dict."""
    options, x, asked = case
    theirs, ours = torch.nn.MultiheadAttention(**options), MultiheadAttention(**options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    got, wanted = ours(*x, **asked), theirs(*x, **asked)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-9, atol=1e-10)
    assert (got[1] is None) == (wanted[1] is None)
    if wanted[1] is not None:
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-9, atol=1e-10)
    probe = torch.randn_like(got[0])
    slopes = [
        torch.autograd.grad((out[0] * probe).sum(), tuple(m.parameters())) for out, m in ((got, ours), (wanted, theirs))
    ]
    for (name, _), a, b in zip(ours.named_parameters(), *slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=lambda said, name=name: f"{name}: {said}")
