"""A pass backward computes in the precision of its pass forward, wherever ``backward()`` is called.

The law "backward inside autocast" holds every mechanism to it; here are whole models, and what torch leaves open.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fast_attention import Bound, Shape, catalogue, core
from fast_attention.engine import trace
from fast_attention.engine.precision import in_float32
from fast_attention.integrations import swap
from tests.cases import qkv
from tests.engine.test_tiles import needs_core

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
WRITTEN = ["ReLUAttention", "AFTLocal", "AFTConv"]
IN_CORE = ["FavorPlus", "FavorPlusPlus", "LinearAttention"]


def grads(out: Tensor, inputs: list[Tensor], *, inside: bool) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        return list(torch.autograd.grad(out, inputs, weights, retain_graph=True, allow_unused=True))


@pytest.mark.parametrize("mechanism", ["FavorPlus(num_features=16)", "ReLUAttention", "LearnedFeatures", "Sinkhorn"])
def test_a_swapped_model_trains_with_backward_inside_autocast(mechanism: str) -> None:
    torch.manual_seed(0)
    settings = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertModel(settings, add_pooling_layer=False)
    swap(model, mechanism)
    tokens = torch.randint(5, 99, (2, 75))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=tokens).last_hidden_state
    weights = [w for w in model.parameters() if w.requires_grad]
    for a, b in zip(grads(out, weights, inside=True), grads(out, weights, inside=False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Local2d", "BlockLocal2d"])
def test_references_differentiate_as_they_computed(name: str) -> None:
    """Without the core torch's fused kernel computes them, or where that does not serve, products that it records."""
    bound = Bound(catalogue.default(name), Shape(2, 16, 97))
    inputs = [x.requires_grad_() for x in qkv(97, batch=1, width=16, dtype=torch.float32)]
    with trace.implementation("reference"), torch.autocast("cpu", torch.bfloat16):
        out = bound(*inputs)
    for a, b in zip(grads(out, inputs, inside=True), grads(out, inputs, inside=False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*WRITTEN, *([] if core.unavailable() else IN_CORE)])
def test_written_passes_keep_float32_after_a_forward_pass_outside_of_autocast(name: str, dtype: torch.dtype) -> None:
    mechanism = catalogue.default(name)
    torch.manual_seed(0)
    bound = Bound(mechanism, Shape(2, 16, 150)).to(dtype)
    inputs = [x.requires_grad_() for x in qkv(150, batch=1, width=16, dtype=dtype)]  # more than short forms serve
    for is_causal in (False, True):
        out = bound(*inputs, is_causal=is_causal)
        for a, b in zip(grads(out, inputs, inside=True), grads(out, inputs, inside=False), strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["Sinkhorn", "Nystrom"])
def test_a_compiled_module_inside_autocast(mechanism: str) -> None:
    """In one graph; torch runs the compiled gradients in the autocast of the forward pass, so they are less exact."""
    torch.compiler.reset()
    bound = Bound(catalogue.default(mechanism), Shape(2, 16, 75))
    inputs = [x.requires_grad_() for x in qkv(75, batch=1, width=16, dtype=torch.float32)]
    fast = torch.compile(bound, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        pair = fast(*inputs), bound(*inputs)
    torch.testing.assert_close(*pair)
    for a, b in zip(*(grads(out, inputs, inside=False) for out in pair), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@needs_core
def test_second_derivatives_of_a_written_pass_inside_autocast() -> None:
    bound = Bound(catalogue.default("FavorPlus"), Shape(2, 16, 75))
    inputs = [x.requires_grad_() for x in qkv(75, batch=1, width=16, dtype=torch.float32)]
    found = []
    for inside in (True, False):
        out = bound(*inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        found.append((first, torch.autograd.grad(sum(g.square().sum() for g in first), inputs)))
    for mine, reference in zip(found[0], found[1], strict=True):
        for a, b in zip(mine, reference, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))


def test_the_callers_own_graph_keeps_its_precision() -> None:
    """What in_float32 says to its nodes stops at its arguments."""
    a, b = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    before = a @ b  # in float32; the caller asks for its pass backward under autocast
    with torch.autocast("cpu", torch.bfloat16):
        out = in_float32(lambda x: x @ x)(before)
        middle, *_ = torch.autograd.grad(out.sum(), before, retain_graph=True)
        whole = torch.autograd.grad(out.sum(), (a, b), retain_graph=True)
        apart = torch.autograd.grad(before, (a, b), middle)
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(middle, torch.ones(8, 8) @ before.mT + before.mT @ torch.ones(8, 8))
    for x, y in zip(whole, apart, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, x.bfloat16().float()), "the caller's product, in the caller's precision"
