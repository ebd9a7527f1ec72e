"""Every mechanism keeps every law that its traits grant, and refuses by name what they deny."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fast_attention import Attention, Shape, Unsupported, catalogue, conformance
from tests.cases import CASES, DEFAULTS, DISTINCT, KINDS, SETTINGS, bind, qkv, some_keys, uncached

COSTLY = {"declared order", "threads"}
TRACED = {"torch.compile(fullgraph=True)", "torch.export, dynamic length"}
# What a setting changes where it takes the implementation of another: the laws of the future, padding, gradients,
# decoding and packed sequences, of batches, lengths, digits and large inputs.
OF_SETTINGS = {
    "the future never moves the past", "an enormous future leaves the past alone", "padding is inert",
    "padded = shorter", "padded in front = shorter", "the last queries = the last rows",
    "padding may hold anything", "nothing to see gives zeros", "gradients",
    "decode in any split = one pass", "packed sequences = one call for each", "any length", "finite at large inputs",
    "low precision", "batch and heads are independent",
}  # fmt: skip

# What a law needs to be claimed.
CLAIMED: dict[str, Callable[[Any], bool]] = {
    "the future never moves the past": lambda m: m.traits.causal,
    "the past is seen": lambda m: m.traits.causal,
    "an enormous future leaves the past alone": lambda m: m.traits.causal,
    "padding is inert": lambda m: m.traits.padding,
    "padded = shorter": lambda m: m.traits.padding and not m.traits.sees_padding,
    "padded in front = shorter": lambda m: (
        m.traits.padding and not m.traits.sees_padding and m.traits.positions != "grid"
    ),
    "the last queries = the last rows": lambda m: m.traits.causal and isinstance(m, Attention) and m.traits.cross,
    "padding may hold anything": lambda m: m.traits.padding,
    "nothing to see gives zeros": lambda m: m.traits.padding and isinstance(m, Attention),
    "decode in any split = one pass": lambda m: m.traits.memory is not None,
    "states combine": lambda m: m.traits.memory == "constant",
    "torch.compile(fullgraph=True)": lambda m: m.traits.compile,
    "torch.export, dynamic length": lambda m: m.traits.export,
}


OTHERS = [m for m in CASES if m not in DEFAULTS]
TRACED_SETTINGS = [
    *{
        (type(m), *m.traits.modes, m.traits.padding, m.traits.learned, m.traits.export): m for m in reversed(CASES)
    }.values()
]


def laws(mechanism: Any) -> Iterator[tuple[conformance.Law, list[bool]]]:
    """The laws that a mechanism has to keep, and the directions in which they are judged.

    All of a default, and of a setting whose traits promise something else; of other settings those of settings. Tracing
    takes its time: a default is compiled in one direction, unless test_left_padding.py compiles it, and exported in the
    one that test_export.py of the integrations leaves; settings are traced, in one direction, that have other
    directions, masks or weights.
    """
    modes, default = mechanism.traits.modes, mechanism in DEFAULTS
    for law in conformance.LAWS:
        if law.name not in OF_SETTINGS and mechanism not in DISTINCT:
            continue
        if not CLAIMED.get(law.name, lambda m: True)(mechanism):
            continue
        if law.name not in TRACED:
            yield law, modes
        elif default and law.name.startswith("torch.compile"):
            if mechanism.traits.positions != "absolute":
                yield law, modes[-1:]
        elif traced := modes[:-1] if default else modes[: mechanism in TRACED_SETTINGS]:
            yield law, traced


def judged(mechanism: Any, law: conformance.Law, modes: list[bool], device: torch.device) -> conformance.Finding:
    subject = dataclasses.replace(conformance.of(mechanism), causal=True in modes, bidirectional=False in modes)
    with uncached() if law.name.startswith("torch.export") else nullcontext():
        return law(subject, str(device))


@pytest.mark.parametrize(
    ("mechanism", "law", "modes"),
    [
        pytest.param(m, law, modes, id=f"{m!r}-{law.name}", marks=[pytest.mark.slow] * (law.name in COSTLY | TRACED))
        for m in DEFAULTS
        for law, modes in laws(m)
    ],
)
def test_law(mechanism: Any, law: conformance.Law, modes: list[bool], device: torch.device) -> None:
    finding = judged(mechanism, law, modes, device)
    assert finding.status == "kept", f"{mechanism!r}: {finding}"


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", OTHERS, ids=repr)
def test_laws_of_a_setting(mechanism: Any, device: torch.device) -> None:
    findings = [judged(mechanism, law, modes, device) for law, modes in laws(mechanism)]
    broken = [finding for finding in findings if finding.status != "kept"]
    assert not broken, broken


@pytest.mark.parametrize("name", catalogue.names())
def test_repr_is_the_inverse_of_parse(name: str) -> None:
    mechanism = catalogue.default(name)
    assert repr(mechanism) == f"{name}()"
    assert catalogue.parse(repr(mechanism)) == mechanism == catalogue.parse(name)
    assert hash(mechanism) == hash(catalogue.parse(name))


def test_settings_print_as_they_are_written() -> None:
    for mechanism in CASES:
        assert catalogue.parse(repr(mechanism)) == mechanism


@pytest.mark.parametrize("mechanism", DISTINCT, ids=repr)
def test_traits_say_what_the_weights_are(mechanism: Any) -> None:
    bound, traits = bind(mechanism), mechanism.traits
    assert traits.learned == bool(list(bound.parameters())), "traits.learned"
    if traits.learned:
        assert traits.approximates is None, "what must be trained approximates nothing"
    longer = {name: tuple(t.shape) for name, t in bind(mechanism, max_len=48).state_dict().items()}
    sizes = {name: tuple(t.shape) for name, t in bound.state_dict().items()}
    assert traits.needs_max_len == (longer != sizes), "needs_max_len"
    before = {name: t.clone() for name, t in bound.named_buffers()}
    learned = {name: t.clone() for name, t in bound.named_parameters()}
    torch.manual_seed(99)
    bound.redraw()
    drawn = any(not torch.equal(t, before[name]) for name, t in bound.named_buffers())
    assert traits.random == drawn, "traits.random"
    assert all(torch.equal(t, learned[name]) for name, t in bound.named_parameters()), "redraw leaves what is learned"


@pytest.mark.parametrize("mechanism", [m for m in DISTINCT if isinstance(m, Attention) and m.traits.matrix], ids=repr)
def test_matrix_is_read_by_attending_to_the_identity(mechanism: Any, device: torch.device) -> None:
    bound = bind(mechanism, device=device)
    for is_causal in mechanism.traits.modes:
        q, k, v = qkv(11, device=device)
        eye = torch.eye(11, dtype=v.dtype, device=device).expand(2, 2, 11, 11)
        matrix = bound(q, k, eye, is_causal=is_causal)
        torch.testing.assert_close(matrix @ v, bound(q, k, v, is_causal=is_causal), rtol=1e-8, atol=1e-8)
        if is_causal:
            assert matrix.triu(1).abs().max() < 1e-12


@pytest.mark.parametrize(
    "mechanism", [m for m in DISTINCT if isinstance(m, Attention) and not m.traits.matrix], ids=repr
)
def test_no_matrix_where_none_is_granted(mechanism: Any) -> None:
    """Denied truthfully: the channels of the output do not share one matrix."""
    bound, is_causal = bind(mechanism), mechanism.traits.modes[0]
    q, k, v = qkv(8)
    eye = torch.eye(8, dtype=v.dtype).expand(2, 2, 8, 8)
    matrix = bound(q, k, eye, is_causal=is_causal)
    assert (matrix @ v - bound(q, k, v, is_causal=is_causal)).abs().max() > 1e-3


@pytest.mark.parametrize("name", catalogue.names())
def test_bounded_mechanisms_ask_for_and_keep_their_limit(name: str) -> None:
    mechanism = catalogue.default(name)
    if not mechanism.traits.needs_max_len:
        return
    with pytest.raises(ValueError, match="max_len"):
        bind(mechanism, max_len=0)
    bound = bind(mechanism, max_len=16)
    inputs = qkv(17) if isinstance(mechanism, Attention) else (torch.randn(2, 17, 16, dtype=torch.float64),)
    with pytest.raises(ValueError, match="max_len=16 tokens and got 17"):
        bound(*inputs)


def test_the_gate_speaks_the_callers_words() -> None:
    softmax = catalogue.default("Softmax")
    q, k, v = qkv(5)
    with pytest.raises(ValueError, match=r"k has 5 tokens and v has 4"):
        softmax(q, k, v[:, :, :4])
    with pytest.raises(ValueError, match=r"q has width 8 and k has width 4"):
        softmax(q, k[..., :4], v)
    with pytest.raises(ValueError, match=r"leading sizes \(2, 2\) and k has \(2, 1\)"):
        softmax(q, k[:, :1], v)
    with pytest.raises(ValueError, match=r"q is torch.float64 and v is torch.float32"):
        softmax(q, k, v.float())
    with pytest.raises(ValueError, match="key_mask must be boolean"):
        softmax(q, k, v, key_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"key_mask has shape \(2, 4\); it must be \(2, 5\)"):
        softmax(q, k, v, key_mask=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"tokens, width"):
        softmax(q[0, 0], k[0, 0], v[0, 0])
    with pytest.raises(ValueError, match="heads and head_dim must be at least 1"):
        Shape(0, 8)


def test_leading_dimensions_are_free(device: torch.device) -> None:
    for mechanism in (m for m in DEFAULTS if isinstance(m, Attention)):
        bound = bind(mechanism, device=device)
        q, k, v = qkv(7, batch=6, device=device)
        is_causal = mechanism.traits.modes[0]
        out = bound(q, k, v, is_causal=is_causal)
        deep = bound(*(x.unflatten(0, (3, 2)) for x in (q, k, v)), is_causal=is_causal)
        said = f"{mechanism!r} at leading sizes (3, 2, heads)"
        torch.testing.assert_close(deep.flatten(0, 1), out, rtol=1e-9, atol=1e-9, msg=said)
        torch.testing.assert_close(bound(q[0], k[0], v[0], is_causal=is_causal), out[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mechanism", [m for m in DEFAULTS if isinstance(m, Attention)], ids=repr)
def test_other_heads_and_widths_than_declared_are_refused(mechanism: Any) -> None:
    """Whether a mechanism reads queries or not; tokens before heads get a hint."""
    bound, said = bind(mechanism), r"and this module was built for Shape\(heads=2, head_dim=8"
    for heads in (1, 4):
        with pytest.raises(ValueError, match=said):
            bound(*qkv(6, heads=heads))
    if mechanism.traits.inputs != "v":
        with pytest.raises(ValueError, match=said):
            bound(*qkv(6, width=4))
    with pytest.raises(ValueError, match=r"q has .*did you mean q.transpose\(1, 2\)\?"):
        bound(*(x.transpose(1, 2) for x in qkv(6)))


@pytest.mark.parametrize("mechanism", [m for m in DISTINCT if isinstance(m, Attention) and m.needs_weights], ids=repr)
@pytest.mark.parametrize(("declared", "length"), [(4, 8), (1, 8), (2, 64)])
def test_weights_for_other_heads_are_refused_or_serve_all_heads(mechanism: Any, declared: int, length: int) -> None:
    w, own = (mechanism.weights(Shape(heads, 8, 64)) for heads in (declared, 3))
    inputs = qkv(length, heads=3, dtype=torch.float32)
    calls = [lambda w: mechanism(*inputs, w, is_causal=mechanism.traits.modes[0])]
    calls += [lambda w: mechanism.decode(*inputs, w)] if mechanism.traits.memory else []
    calls += [lambda w: mechanism.summarise(*inputs[1:], w)] if mechanism.traits.memory == "constant" else []
    for call in calls:
        if mechanism.heads_of(w) is None:  # they have no head axis
            assert all(a is None or a.shape == b.shape for a, b in zip(w, own, strict=True))
            call(w)
        else:
            with pytest.raises(ValueError, match=f"for {declared} heads and q has 3"):
                call(w)


@pytest.mark.parametrize("mechanism", DEFAULTS, ids=repr)
def test_empty_inputs_give_empty_results_and_no_keys_zeros(mechanism: Any) -> None:
    """With gradients of zeros, as torch's own."""
    bound = bind(mechanism)
    for batch, length in ((2, 0), (0, 5), (0, 0)):
        shapes = [(batch, 2, length, 8)] * 3 if isinstance(mechanism, Attention) else [(batch, length, 16)]
        x = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        out = bound(*x, is_causal=mechanism.traits.modes[0])
        assert out.shape == x[0].shape
        assert out.dtype == torch.float64
        out.sum().backward()
        assert all(y.grad is not None and y.grad.shape == y.shape for y in x)
    if mechanism.traits.cross and isinstance(mechanism, Attention):
        q, (_, k, v) = qkv(5)[0], qkv(5)
        none = bound(q, k[:, :, :0], v[:, :, :0])
        assert torch.equal(none, torch.zeros_like(q))
        assert bound(q[:, :, :0], k, v).shape == (2, 2, 0, 8)


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_tensors_on_the_meta_device_give_shapes(mechanism: Any) -> None:
    """In all modes, with gradients and masks; a state would have to hold numbers."""
    bound, shapes = bind(mechanism).to("meta"), [(2, 2, 5, 8)] * 3 if isinstance(mechanism, Attention) else [(2, 5, 16)]
    x = [torch.empty(shape, device="meta", dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = torch.ones(2, 5, dtype=torch.bool, device="meta") if mechanism.traits.padding else None
    for is_causal in mechanism.traits.modes:
        out = bound(*x, is_causal=is_causal, key_mask=mask)
        assert out.is_meta
        assert out.shape == x[0].shape
        if isinstance(mechanism, Attention):
            assert all(y.shape == x[0].shape for y in torch.autograd.grad(out.sum(), x))
    if mechanism.traits.memory is not None:
        with pytest.raises(ValueError, match="meta device hold nothing"):
            bound.decode(*x)


CONSTANT = {name: [m for m in every if m.traits.memory == "constant"] for name, every in SETTINGS.items()}


@pytest.mark.parametrize("name", [name for name, every in CONSTANT.items() if every])
def test_states_combine_with_those_of_nothing(name: str, device: torch.device) -> None:
    """In any order, where all keys of the first, second or third are masked, and one of them is huge."""
    none = torch.zeros(2, 10, dtype=torch.bool, device=device)
    for mechanism, empty in itertools.product(CONSTANT[name], (0, 1, 2, None)):
        bound, (q, k, v) = bind(mechanism, max_len=40, device=device), qkv(35, device=device)
        k[:, :, 25] *= 20  # far from the units of the others
        masks = [none if i == empty else some_keys(2, 10, device) for i in range(3)]
        a, b, c = (
            mechanism.summarise(k[:, :, i : i + 10], v[:, :, i : i + 10], bound.w, key_mask=mask)
            for i, mask in zip((0, 10, 20), masks, strict=True)
        )
        left, right = (mechanism.combine(mechanism.combine(a, b), c), mechanism.combine(a, mechanism.combine(b, c)))
        for x, y in zip(left.content, right.content, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        mask = torch.cat([*masks, torch.ones(2, 5, dtype=torch.bool, device=device)], -1)
        after = bound.decode(*(x[:, :, 30:] for x in (q, k, v)), left)[0]
        whole = bound(q, k, v, is_causal=True, key_mask=mask)[:, :, 30:]
        torch.testing.assert_close(after, whole, rtol=1e-9, atol=1e-9, msg=lambda m, each=mechanism: f"{each!r}: {m}")
        with pytest.raises(ValueError, match="combine takes two states; got a tuple"):
            mechanism.combine(a, (1, 2))


def test_refusals_name_what_would_work() -> None:
    linformer, fnet = bind("Linformer"), bind("FNet")
    nearest = r"LearnedFeatures\(\), T2R\(\)"  # of linear cost, with weights to train, too
    with pytest.raises(Unsupported, match=rf"Linformer\(\) does not support is_causal=True.*would work: {nearest}"):
        linformer(*qkv(6), is_causal=True)
    with pytest.raises(Unsupported, match=r"FNet\(\) does not support a key_mask.*What would work: \w+"):
        fnet(torch.randn(2, 6, 16), key_mask=torch.ones(2, 6, dtype=torch.bool))


def test_what_combines_states_is_named_where_they_do_not() -> None:
    """A mechanism that keeps another kind of state cannot do it either, the refusing one first of all."""
    for name in ("Softmax", "Local", "BigBird"):
        with pytest.raises(Unsupported) as refused:
            catalogue.default(name).combine(None, None)
        advised = re.findall(r"(\w+)\(\)", str(refused.value).partition("What would work: ")[2])
        assert {catalogue.default(each).traits.memory for each in advised} == {"constant"}
