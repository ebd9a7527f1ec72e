"""Where operations are recorded or transformed, the plain forms run: make_fx, fake tensors, torch.jit, derivatives of
derivatives. (The laws have torch.compile, torch.export and torch.func.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from fast_attention import Attention, MultiheadAttention, TokenMixer, Unsupported, catalogue
from fast_attention.engine.blocks import slices, split
from tests.cases import bind, qkv, some_keys

pytestmark = pytest.mark.slow  # tracing takes its time

DEFAULTS: list[Any] = [catalogue.default(name) for name in catalogue.names()]
FUSED = ["Softmax", "Linformer(rank=4)", "Local(window=4)", "Local(window=64)", "BigBird(block_size=4)", "SortCut"]
# torch deprecates torch.jit and uses it: derivatives forwards import its own scripted decompositions.
scripted = pytest.mark.filterwarnings("ignore:.torch.jit")


def given(mechanism: Any, length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    wide = (torch.randn(2, length, 16, dtype=dtype),)
    return qkv(length, dtype=dtype) if isinstance(mechanism, Attention) else wide


def modes(mechanism: Any) -> list[bool]:
    return mechanism.traits.modes


@pytest.mark.parametrize("mechanism", DEFAULTS, ids=repr)
def test_fake_tensors_go_through_with_their_gradients(mechanism: Any) -> None:
    bound, inputs = bind(mechanism, max_len=70), given(mechanism, 70)
    for is_causal in modes(mechanism):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(x).requires_grad_() for x in inputs]
            out = bound(*fakes, is_causal=is_causal)
            out.sum().backward()
        assert out.shape == inputs[0].shape
        assert all(x.grad is None or x.grad.shape == x.shape for x in fakes)


@pytest.mark.parametrize("mechanism", DEFAULTS, ids=repr)
def test_a_recorded_graph_serves_other_numbers(mechanism: Any) -> None:
    bound, inputs = bind(mechanism, max_len=37), given(mechanism, 37)
    others = tuple(3 * x.flip(-2) for x in inputs)
    is_causal = mechanism.traits.causal
    graph = make_fx(lambda *x: bound(*x, is_causal=is_causal))(*inputs)
    expected = bound(*others, is_causal=is_causal)
    torch.testing.assert_close(graph(*others), expected, rtol=1e-8, atol=1e-8)


WRITTEN = ["ReLUAttention", "Manhattan", "LinearAttention", "CosFormer", "Sinkhorn", "AFTConv", "WKV", "GMLP"]


class Fixed(torch.nn.Module):
    """A module with its mode, which ``torch.jit.trace`` takes no argument for."""

    def __init__(self, bound: torch.nn.Module, is_causal: bool) -> None:
        super().__init__()
        self.bound, self.is_causal = bound, is_causal

    def forward(self, *x: Tensor) -> Tensor:
        return self.bound(*x, is_causal=self.is_causal)


@scripted
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", WRITTEN)
def test_a_module_of_torch_jit_trace_serves_other_numbers(name: str) -> None:
    mechanism: Any = catalogue.default(name)
    bound, inputs = bind(mechanism, max_len=37), given(mechanism, 37)
    others = tuple(3 * x.flip(-2) for x in inputs)
    for is_causal in modes(mechanism):
        program = torch.jit.trace(Fixed(bound, is_causal), inputs, check_trace=False)
        expected = bound(*others, is_causal=is_causal)
        torch.testing.assert_close(program(*others), expected, rtol=1e-5, atol=1e-5)  # its numbers are in float32


@pytest.mark.parametrize("name", WRITTEN)
def test_a_batch_of_gradients(name: str) -> None:
    """As ``torch.autograd.functional.jacobian(vectorize=True)`` asks for, and ``vmap`` over ``torch.autograd.grad``."""
    mechanism: Any = catalogue.default(name)
    bound, leaves = bind(mechanism, max_len=70), [x.requires_grad_() for x in given(mechanism, 70)]
    for is_causal in modes(mechanism):
        out = bound(*leaves, is_causal=is_causal)
        batch = torch.randn(2, *out.shape, dtype=out.dtype)

        def gradients(grad_out: Tensor, out: Tensor = out, **options: bool) -> tuple[Tensor, ...]:
            every = torch.autograd.grad(out, leaves, grad_out, retain_graph=True, allow_unused=True, **options)
            return tuple(x for x in every if x is not None)

        one_by_one = tuple(torch.stack(pair) for pair in zip(*map(gradients, batch), strict=True))
        torch.testing.assert_close(gradients(batch, is_grads_batched=True), one_by_one)
        torch.testing.assert_close(torch.vmap(gradients)(batch), one_by_one)


SMALL = {"FavorPlus": 80, "LearnedFeatures": 100, "Hybrid": 230, "Local": 20, "AFTLocal": 15, "AFTFull": 15,
         "BigBird": 25, "LSH": 70, "WKV": 25, "AFTSimple": 25}  # fmt: skip


@pytest.mark.parametrize(("mechanism", "most"), SMALL.items())
def test_a_compiled_graph_is_small_and_its_gradients_right(mechanism: str, most: int) -> None:
    """Compilers take time for every operation; how many there are does not depend on the length."""
    bound, inputs = bind(mechanism, max_len=300), given(catalogue.default(mechanism), 300)
    counts = []

    def counted(graph: Any, example: Any) -> Any:
        counts.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    leaves = [x.requires_grad_() for x in inputs]
    expected = bound(*leaves, is_causal=True)
    gradients = torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True)
    torch.compiler.reset()
    compiled = torch.compile(bound, fullgraph=True, backend=aot_autograd(fw_compiler=counted))
    out = compiled(*leaves, is_causal=True)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs, is_causal=True), expected)
    assert max(counts) <= most


@pytest.mark.parametrize("mechanism", [each for each in DEFAULTS if each.traits.compile], ids=repr)
def test_one_compiled_graph_serves_all_lengths(mechanism: Any) -> None:
    """Compiled with its lengths open."""
    bound, is_causal = bind(mechanism, max_len=131), mechanism.traits.causal
    torch.compiler.reset()
    compiled = torch.compile(bound, fullgraph=True, backend="eager", dynamic=True)
    for length in (70, 131):
        leaves = [x.requires_grad_() for x in given(mechanism, length)]
        pair = [run(*leaves, is_causal=is_causal) for run in (compiled, bound)]
        found, expected = (
            torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True) for out in pair
        )
        torch.testing.assert_close(pair[0], pair[1])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
def test_gradients_of_compiled_slices(device: torch.device) -> None:
    """Through the compiler itself: until torch 2.14 its own gradient of ``unfold`` is wrong, or written elsewhere."""
    q = torch.randn(2, 7, 16, 8, device=device)

    def scores(x: Tensor) -> Tensor:
        return (q @ slices(x, block=16, keys_left=16, keys_right=0, number=7).mT).square().sum()

    x = torch.randn(2, 100, 8, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(scores(x), x)
    torch.compiler.reset()
    (found,) = torch.autograd.grad(torch.compile(scores, fullgraph=True)(x), x)
    torch.testing.assert_close(found, expected)


@scripted
@pytest.mark.parametrize(
    "model",
    [bind("FavorPlus"), TokenMixer(16, 2, "Local"), torch.nn.Sequential(MultiheadAttention(16, 2, mechanism="LSH"))],
    ids=["Bound", "TokenMixer", "in a model"],
)
def test_torch_jit_script_is_refused_with_what_would_work(model: Any) -> None:
    with pytest.raises(Unsupported, match=r"cannot be read by torch.jit.script.*torch.compile\(model\)"):
        torch.jit.script(model)


@scripted
@pytest.mark.parametrize("mechanism", DEFAULTS, ids=repr)
def test_dual_numbers(mechanism: Any) -> None:
    """Derivatives forwards without torch.func, where nothing says beforehand that they are wanted."""
    bound, inputs = bind(mechanism, max_len=70), given(mechanism, 70)
    for is_causal in modes(mechanism):
        with forward_ad.dual_level():
            out = bound(*(forward_ad.make_dual(x, x) for x in inputs), is_causal=is_causal)
            tangent = forward_ad.unpack_dual(out).tangent
        near, step = [], 1e-7  # short, as features of ReLU have an edge
        for sign in (1, -1):
            near.append(bound(*((1 + sign * step) * x for x in inputs), is_causal=is_causal))
        slope = (near[0] - near[1]) / (2 * step)
        assert tangent is not None
        torch.testing.assert_close(tangent, slope, rtol=1e-5, atol=1e-6 * float(slope.detach().abs().max()) + 1e-8)


@pytest.mark.parametrize("way", ["float64", "autocast", "torch.func"])
@pytest.mark.parametrize("mechanism", FUSED)
def test_second_derivatives_through_the_fused_kernel(mechanism: str, way: str) -> None:
    chosen: Any = catalogue.parse(mechanism)
    dtype = torch.float32 if way == "autocast" else torch.float64
    bound, one = bind(chosen, max_len=70, dtype=dtype), torch.ones((), dtype=dtype)
    x, mask = given(chosen, 70, dtype), some_keys(2, 70) if chosen.traits.padding else None

    def total(s: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            return bound(*(s * part for part in x), key_mask=mask).to(dtype).square().mean()

    def slope(s: Tensor) -> Tensor:
        s = s.clone().requires_grad_()
        return torch.autograd.grad(total(s), s)[0]

    if way == "torch.func":
        second = torch.func.grad(torch.func.grad(total))(one)
    else:
        factor = one.clone().requires_grad_()
        (first,) = torch.autograd.grad(total(factor), factor, create_graph=True)
        (second,) = torch.autograd.grad(first, factor)
    step = 1e-5 if dtype == torch.float64 else 0.05
    difference = (slope(one + step) - slope(one - step)) / (2 * step)
    low = {"rtol": 0.15, "atol": 0.01} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 1e-8}
    torch.testing.assert_close(second, difference, **low)


def test_a_block_of_a_length_left_open_has_a_size_that_is_a_number() -> None:
    """A quotient in its place is carried through every later size, and compiling takes minutes."""
    sizes: list[Any] = []

    def look(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        sizes.extend(node.meta["example_value"].shape[-2] for node in graph.graph.find_nodes(
            op="call_method", target="unflatten"))  # fmt: skip
        return graph

    torch.compile(lambda x: split(x, 16) + 1, dynamic=True, fullgraph=True, backend=look)(torch.randn(2, 37, 3))
    assert [type(size) for size in sizes] == [int]
