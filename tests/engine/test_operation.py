"""One policy says whether a fast path may run: ``engine.operation.unsupported_reason``, which every family asks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fast_attention
from fast_attention import catalogue
from fast_attention.engine import operation, trace
from fast_attention.engine.operation import Fast, NotServed, Operation
from fast_attention.engine.tracing import symbolic
from tests.cases import bind, qkv

SOURCE = Path(fast_attention.__file__).parent
ROOMS = ("engine", "feature_maps", "mechanisms")
# Who else asks, in how many places, and why: what torch's own kernels and its autocast do on a device.
ASKED = {
    ("engine/tracing.py", "is_compiling"): 1,  # traced() and symbolic(), which all others ask
    ("engine/operation.py", "is_cpu"): 1,  # the policy
    ("engine/operation.py", "is_cuda"): 1,  # the policy of kernels for GPUs
    ("engine/operation.py", "device.type"): 1,  # as in precision.py
    ("engine/fused.py", "is_cpu"): 1,  # the flash kernel of a CPU is a function of its own in torch
    ("engine/numerics.py", "is_cpu"): 1,  # torch's exp2 is the faster one on a CPU
    ("mechanisms/dense/softmax.py", "is_cpu"): 1,  # torch's kernel for float16 is slower than both casts on a CPU
    ("engine/precision.py", "device.type"): 5,  # autocast is on or off for a kind of device
}


def questions(path: Path) -> list[str]:
    """What a file asks of torch and of a tensor's device."""
    asked = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            of = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if node.attr in ("is_compiling", "is_dynamo_compiling", "is_cpu", "is_cuda", "is_mps", "is_xpu"):
                asked.append(node.attr)
            elif node.attr == "type" and of == "device":
                asked.append("device.type")
        elif isinstance(node, ast.alias) and node.name == "is_compiling":
            asked.append(node.name)
    return asked


def test_no_family_asks_the_compiler_or_a_device_by_itself() -> None:
    counts: dict[tuple[str, str], int] = {}
    for path in (path for room in ROOMS for path in (SOURCE / room).rglob("*.py")):
        for question in questions(path):
            key = path.relative_to(SOURCE).as_posix(), question
            counts[key] = counts.get(key, 0) + 1
    assert counts == ASKED, "ask operation.unsupported_reason whether a fast path may run, tracing.symbolic about sizes"


def tensors(*shapes: tuple[int, ...], **options: Any) -> list[Tensor]:
    return [torch.zeros(shape, **options) for shape in shapes]


SAME = [(2, 3, 5, 4)] * 3


def test_ordinary_tensors_meet_no_obstacle() -> None:
    for even in (False, True):
        assert operation.unsupported_reason(*tensors(*SAME), even=even) == ""
        assert operation.unsupported_reason(*tensors((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 9)), even=even) == ""
    assert operation.unsupported_reason(nn.Parameter(torch.zeros(3)), torch.zeros(3, dtype=torch.float64)) == ""


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (tensors(*SAME, device="meta"), "not on a CPU"),
        (tensors((2, 3, 5, 4), (2, 3, 0, 4)), "no tokens"),
        (tensors((0, 3, 5, 4)), "no tokens"),
        ([FakeTensorMode().from_tensor(x) for x in tensors(*SAME)], "a tensor that overrides operations"),
    ],
    ids=["meta", "no keys", "no sequences", "fake outside of its mode"],
)
def test_what_no_fast_path_takes(given: list[Tensor], why: str) -> None:
    assert operation.unsupported_reason(*given) == operation.unsupported_reason(*given, even=True) == why


def test_what_only_even_paths_and_only_some_devices_mind() -> None:
    broadcast, mixed = tensors((2, 3, 5, 4), (1, 3, 5, 4)), [torch.zeros(5, 4), torch.zeros(5, 4, dtype=torch.float64)]
    for uneven, why in ((broadcast, "leading sizes that differ"), (mixed, "dtypes that differ")):
        assert operation.unsupported_reason(*uneven) == ""
        assert operation.unsupported_reason(*uneven, even=True) == why
    assert operation.unsupported_reason(*tensors((5, 4), device="meta"), anywhere=True) == ""
    assert operation.unsupported_reason(*tensors((0, 4), device="meta"), anywhere=True) == "no tokens"


def ways(ask: Callable[[Tensor], Tensor]) -> dict[str, Callable[[Tensor], Any]]:
    def dual(x: Tensor) -> None:
        with forward_ad.dual_level():
            ask(forward_ad.make_dual(x, x))

    def fake(x: Tensor) -> None:
        with FakeTensorMode() as mode:
            ask(mode.from_tensor(x))

    def exported(x: Tensor) -> None:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return ask(x)

        torch.export.export(Model(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)

    return {
        "vmap": torch.func.vmap(ask),
        "grad": torch.func.grad(lambda x: ask(x).sum()),
        "jvp": lambda x: torch.func.jvp(ask, (x,), (x,)),
        "dual numbers": dual,
        "fake tensors": fake,
        "make_fx": make_fx(ask),
        "compile": torch.compile(ask, backend="eager", fullgraph=True, dynamic=True),
        "export": exported,
    }


@pytest.mark.filterwarnings("ignore")  # of torch, about itself
@pytest.mark.parametrize("way", ways(torch.sin))
def test_whatever_traces_is_an_obstacle_and_compilers_alone_have_symbols(way: str) -> None:
    """The answers are constants of what is recorded; sizes are not asked, so that graphs serve other lengths."""
    answers = []

    def ask(x: Tensor) -> Tensor:
        answers.append((operation.unsupported_reason(x, even=True), symbolic()))
        return x.sin()

    torch.compiler.reset()
    ways(ask)[way](torch.ones(7, 3))
    assert set(answers) == {("traced", way in ("compile", "export"))}
    assert operation.unsupported_reason(torch.ones(7, 3)) == ""
    assert not symbolic()


@pytest.mark.parametrize("name", ["Local(window=8)", "BigBird(block_size=4)", "LSH(bucket_size=8)", "AFTLocal()"])
def test_one_operation_for_the_compiler_asks_where_it_runs(name: str) -> None:
    """Compiled, its body is still the fast path, on numbers."""
    bound, inputs = bind(catalogue.parse(name), max_len=200), qkv(200)
    compiled = torch.compile(bound, backend="eager", fullgraph=True)
    with trace.recorded() as eager:
        expected = bound(*inputs)
    compiled(*inputs)
    with trace.recorded() as steps:
        out = compiled(*inputs)
    assert steps == eager
    torch.testing.assert_close(out, expected)


FOR_CPUS = """LogAttention Manhattan LinearAttention Favor FavorPlus FavorPlusPlus LearnedFeatures Local BlockLocal
    Local2d BlockLocal2d BigBird LSH DenseSynthesizer RandomSynthesizer FactorizedDenseSynthesizer
    MixtureSynthesizer""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", FOR_CPUS)
def test_other_devices_take_plain_forms_and_say_why(name: str) -> None:
    """Past validation, which answers for tensors that hold nothing."""
    mechanism: Any = catalogue.default(name)
    bound, inputs = bind(mechanism, max_len=600).to("meta"), [x.to("meta") for x in qkv(600)]
    with trace.recorded() as steps:
        out = mechanism.attend(*inputs, bound.w, is_causal=False, key_mask=None)
    assert out.shape == inputs[2].shape
    assert [step.why for step in steps] == ["not on a CPU"]


@pytest.mark.parametrize("name", ["Softmax", "LinearAttention", "LogAttention", "Local", "LSH", "AFTFull", "AFTLocal"])
def test_fake_tensors_outside_of_their_mode(name: str) -> None:
    mechanism: Any = catalogue.default(name)
    bound, mode = bind(mechanism, max_len=300), FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x) for x in qkv(300)]
    with torch.no_grad():
        for is_causal in (False, True):
            assert bound(*fakes, is_causal=is_causal).shape == fakes[2].shape


AT_ANY_LENGTH = """ReLUAttention LogAttention Manhattan LinearAttention DecayedLinearAttention Favor FavorPlus
    FavorPlusPlus LearnedFeatures LSH Sinkhorn DenseSynthesizer RandomSynthesizer FactorizedRandomSynthesizer
    FactorizedDenseSynthesizer MixtureSynthesizer AFTFull AFTLocal AFTConv""".split()  # noqa: SIM905


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, about one of LSH's operations
@pytest.mark.parametrize("name", AT_ANY_LENGTH)
def test_transformed_calls_say_so(name: str) -> None:
    mechanism: Any = catalogue.default(name)
    bound, is_causal = bind(mechanism, max_len=40), mechanism.traits.causal
    inputs = [x.expand(2, *x.shape) for x in qkv(40)]
    with trace.recorded() as steps:
        torch.func.vmap(lambda *x: bound(*x, is_causal=is_causal))(*inputs)
    assert "traced" in [step.why for step in steps]


# frames of the operation itself, and those of them that call an implementation
PLUMBING = {str(SOURCE / "engine" / f"{name}.py") for name in ("operation", "precision", "trace", "tracing", "node")}
CALLERS = {"__call__", "forward", "wrapped"}
FEW_FRAMES = ["Local(window=8)", "LinearAttention()", "FavorPlus(num_features=16)", "AFTSimple()"]


@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("name", FEW_FRAMES)
def test_few_frames_stand_before_the_arithmetic(name: str, impl: Any, wants_gradient: bool) -> None:
    """At most three of ours between ``attend`` and the reference or the fast forward pass."""
    bound = bind(catalogue.parse(name), head_dim=16, max_len=80, dtype=torch.float32)
    inputs = [x.requires_grad_(wants_gradient) for x in qkv(80, width=16, dtype=torch.float32)]
    between: list[list[str]] = []

    def watched(frame: Any, event: str, argument: Any) -> None:
        if event != "call" or between or frame.f_code.co_filename in PLUMBING:
            return
        ours, each = [], frame.f_back
        while each is not None and each.f_code.co_name not in ("attend", "attend_masked"):
            ours += [each.f_code] if each.f_code.co_filename.startswith(str(SOURCE)) else []
            each = each.f_back
        if each is not None and ours and ours[0].co_filename in PLUMBING and ours[0].co_name in CALLERS:
            between.append([code.co_name for code in ours])

    bound(*inputs)  # what is cached by the first call is not looked for again
    with trace.implementation(impl):
        sys.setprofile(watched)
        try:
            bound(*inputs)
        finally:
            sys.setprofile(None)
    assert len(between) == 1
    assert "__call__" in between[0]
    assert len(between[0]) <= 3, between


def doubled(q: Tensor, k: Tensor, *, factor: float) -> Tensor:
    return q * 2 * factor + k


def fast_doubled(q: Tensor, k: Tensor, *, keep: bool, factor: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    if bool((q > 100).any()):
        raise NotServed("large numbers")
    return q * (2 * factor) + k, ()


def doubled_vjp(inputs: Any, outputs: Any, kept: Any, gradients: Any, *, factor: float) -> tuple[Tensor, Tensor]:
    return gradients[0] * (2 * factor), gradients[0]


TOY = Operation(
    doubled,
    cpu=Fast(
        fast_doubled, doubled_vjp, serves=lambda q, k, *, factor: "one token" if q.shape[-2] == 1 else "", even=2,
        path="in one go", why="it can", sizes=lambda q, k, **settings: {"tokens": q.shape[-2]},
    ),
    compute=torch.float32,
    path="plain",
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "path", "why"),
    [
        (tensors((3, 2), (3, 2)), "in one go", "it can"),
        (tensors((1, 2), (1, 2)), "plain", "one token"),
        (tensors((0, 2), (0, 2)), "plain", "no tokens"),
        (tensors((3, 2), (3, 2), device="meta"), "plain", "not on a CPU"),
        ([torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.float64)], "plain", "dtypes that differ"),
    ],
    ids=["fast", "one", "none", "meta", "mixed"],
)
def test_an_operation_says_what_it_takes_and_why(given: list[Tensor], path: str, why: str) -> None:
    with trace.recorded() as steps:
        TOY(*given, factor=1.5)
    assert steps == [trace.Step(path, why, {"tokens": 3} if path == "in one go" else {})]
    assert TOY.implementations == ("reference", "cpu")
    with trace.implementation("reference"), trace.recorded() as steps:
        TOY(*given, factor=1.5)
    assert [(step.path, step.why) for step in steps] == [("plain", operation.ASKED)]


def test_what_a_forward_pass_gives_up_the_reference_computes() -> None:
    q, k = torch.full((3, 2), 200.0, requires_grad=True), torch.zeros(3, 2)
    with trace.recorded() as steps:
        out = TOY(q, k, factor=1.5)
    assert steps == [trace.Step("plain", "large numbers", {})]
    assert torch.equal(out, doubled(q, k, factor=1.5))
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.full((3, 2), 3.0))


def test_sixteen_bits_are_widened_and_the_result_is_narrowed() -> None:
    q, k = (torch.randn(40, 8).bfloat16().requires_grad_() for _ in range(2))
    out = TOY(q, k, factor=1 / 3)
    assert torch.equal(out, (q.float() * (2 / 3) + k.float()).bfloat16())
    assert [x.dtype for x in torch.autograd.grad(out.sum(), (q, k))] == [torch.bfloat16] * 2
