"""Operations as nodes of a compiler's graph: what a backward pass takes from the forward pass, and what not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fast_attention import catalogue
from fast_attention.engine import node
from fast_attention.engine.operation import Operation, like_queries
from tests.cases import bind

pytestmark = pytest.mark.slow  # tracing takes its time

calls: list[tuple[bool, ...]] = []  # whether each tensor of a run has a gradient to come


def _scaled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, factor: float) -> Tensor:
    calls.append((q.requires_grad, k.requires_grad, v.requires_grad))
    weights = (q @ k.mT * factor).softmax(-1)
    return (weights if mask is None else weights * mask) @ v


scaled = Operation(_scaled, empty=like_queries)


def given() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    calls.clear()
    node._graphs.clear()  # of other tests
    yield
    gc.collect()
    assert not node._graphs  # no graph outlives what may ask for it


def compiled(function: Any, backend: str) -> Any:
    return torch.compile(function, backend=backend, fullgraph=True)


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two such operations, between others that a compiler fuses and whose memory it uses again."""
    mask = torch.ones(7, 7, dtype=q.dtype).tril()
    x = scaled(q.sin(), k.cos(), v + 1.0, mask, factor=0.3).sin()
    return scaled(x * 2.0, x + 1.0, v, None, factor=0.2).exp()


def gradients(out: Tensor, leaves: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), leaves, **options)


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_backward_pass_runs_nothing_again(backend: str) -> None:
    leaves = given()
    expected = twice(*leaves)
    wanted = gradients(expected, leaves)
    out = compiled(twice, backend)(*leaves)
    forward = len(calls)
    found = gradients(out, leaves, retain_graph=True)
    assert len(calls) == forward
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, wanted)
    again = gradients(out, leaves)  # what was recorded is gone
    assert len(calls) == forward + 2
    torch.testing.assert_close(again, wanted)


def test_no_gradient_is_taken_that_nobody_asks_for() -> None:
    q, k, v = (x.detach() for x in given())
    out = compiled(twice, "aot_eager")(q, k, v.requires_grad_())
    assert all(seen == (False, False, True) or all(seen) for seen in calls[-2:])
    assert (False, False, True) in calls
    torch.testing.assert_close(gradients(out, [v]), gradients(twice(q, k, v), [v]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_nothing_owns_itself(backend: str) -> None:
    """Where the operation itself is in autograd's graph, its outputs lead back to it."""
    leaves = given()
    gradients(compiled(twice, backend)(*leaves), leaves)
    compiled(twice, backend)(*leaves)
    assert not node._graphs


def test_without_gradients_nothing_is_recorded() -> None:
    with torch.no_grad():
        out = compiled(twice, "aot_eager")(*given())
    assert not node._graphs
    assert not out.requires_grad


def test_what_nobody_asks_for_goes_with_its_output() -> None:
    out = compiled(twice, "aot_eager")(*given())
    assert node._graphs
    del out
    gc.collect()
    assert not node._graphs


def test_memory_that_the_compiler_has_used_again_is_not_read() -> None:
    """It passes the same numbers from another place, and may have overwritten the first."""
    x = torch.ones(3, requires_grad=True)
    number = node.keep(([x], [x.exp()]), [x])
    assert node.take(number, [x.detach().clone()], [True]) is None
    number = node.keep(([x], [x.exp()]), [x])
    ends = node.take(number, [x.detach()], [True])
    assert ends is not None
    assert node.take(number, [x.detach()], [True]) is None  # once
    output = weakref.ref(ends[1][0])
    del ends
    assert output() is None  # it does not live as long as its number
    constant = torch.ones(3)
    number = node.keep(([constant], [constant.exp()]), [constant])
    assert node.take(number, [constant], [True]) is None  # it does not lead there


def test_checkpoints_record_anew() -> None:
    leaves = given()
    wanted = gradients(twice(*leaves), leaves)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(twice, q, k, v, use_reentrant=False)

    torch.testing.assert_close(gradients(compiled(checkpointed, "aot_eager")(*leaves), leaves), wanted)


@pytest.mark.parametrize(
    ("text", "is_causal"),
    [("CosFormer()", False), ("CosFormer()", True), ("T2R()", False), ("T2R()", True), ("LinearAttention()", True),
     ("Nystrom(num_landmarks=4)", False), ("WKV()", True), ("ReLUAttention()", False), ("FNet(norm='ortho')", False)],
)  # fmt: skip
def test_a_mechanism_is_one_operation(text: str, is_causal: bool) -> None:
    """What the compiler is shown of it has no product but T2R's layer, and gives the same numbers and gradients."""
    shown: list[str] = []

    def look(module: torch.fx.GraphModule, examples: Any) -> Any:
        shown.extend(str(each.target) for each in module.graph.nodes)
        return module.forward

    torch.manual_seed(0)
    bound = bind(catalogue.parse(text))
    inputs = [torch.randn(2, 14, 16)] if "FNet" in text else [torch.randn(2, 2, 14, 8) for _ in range(3)]
    leaves, twins = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    ours = torch.compile(bound, backend=look, fullgraph=True)(*leaves, is_causal=is_causal)
    theirs = bound(*twins, is_causal=is_causal)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours, leaves), gradients(theirs, twins))
    assert len([target for target in shown if target.startswith("fast_attention.")]) == 1
    products = [target for target in shown if any(word in target for word in ("matmul", "bmm", "einsum", "fft_"))]
    assert len(products) == (2 if "T2R" in text else 0)  # its layer, of queries and of keys, is a compiler's to fuse
