"""Many short sequences give what each gives alone, and cost no more than one sequence of as many tokens.

Costs are counted in operations and bytes, not seconds.

A product of tokens with a head's weights shows whether these are copied for every sequence: torch spreads them over the
batch before it multiplies, and every operand counts with all the numbers that it is read with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fast_attention import Bound, Shape, catalogue, core
from fast_attention.mechanism import Attention
from tests.cases import ATTENTIONS, CASES, bind, qkv

HEADS, WIDTH, LONGEST = 2, 16, 256
CONSTANT = 1 << 16  # bytes that a call may read and write more, whatever it holds
FEW_MORE = 8  # operations that a call may have more
SETTINGS = {  # what each sequence has so many of, however short it is
    "MLPMixer": "MLPMixer(token_hidden=1)",  # hidden units
    "Linformer": "Linformer(rank=16)",  # scores, of which torch's kernel for a long one writes none
}
MORE = [
    'Adapted(FavorPlus(), adapts="qkv")', "AFTConv(kernel_size=5)", "AFTLocal(window=4, strict=True)",
    'DecayedLinearAttention(gate="channel")', 'DecayedLinearAttention(gate="token")', 'Favor(features="phase")',
    'FavorPlus(features="hyperbolic")', "FavorPlus(kernel=Relu())", "LinearAttention(feature_map=Exp())",
    'Linformer(rank=16, projection=LearnedProjection(sharing="headwise"))', "MLPMixer(token_hidden=None)",
    "MixtureSynthesizer((DenseSynthesizer(), FactorizedDenseSynthesizer()))", 'ReLUAttention(norm="length")',
    "Selected(block_size=4, topk=2)", "Sinkhorn(block_size=4)", "SortCut(block_size=2)", "GMLP(attention_dim=4)",
]  # fmt: skip
EXPRESSIONS = [*(SETTINGS.get(name, name) for name in catalogue.names()), *MORE]
DEARER = "MLPMixer(token_hidden=None)"  # unless causal: all 256 hidden units of every sequence


class Traffic(TorchDispatchMode):
    """Counts operations but views, the bytes that they read and write, and those of them that are weights alone."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.operations = self.bytes = self.of_weights = 0
        self.held = list(weights)  # alive, or another tensor would take the place of one of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs, outputs = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), out))
        storages = {_storage(x) for x in inputs}
        written = [x for x in outputs if func._schema.is_mutable or _storage(x) not in storages]
        if not written or "empty" in func._overloadpacket.__name__:
            return out
        size = sum(x.numel() * x.itemsize for x in (*inputs, *written))
        self.operations += 1
        self.bytes += size
        if inputs and storages <= {_storage(x) for x in self.held}:
            self.of_weights += size
            self.held += written
        return out


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _counted(function: Callable[[], Any], module: Bound) -> Traffic:
    with Traffic([*module.parameters(), *module.buffers()]) as traffic:
        function()
    return traffic


def _bound(expression: str) -> Bound:
    torch.manual_seed(0)
    return Bound(expression, Shape(HEADS, WIDTH, LONGEST))


def _call(module: Bound, sequences: int, tokens: int, *, is_causal: bool, backward: bool) -> Traffic:
    if isinstance(module.mechanism, Attention):
        inputs = [torch.randn(sequences, HEADS, tokens, WIDTH, requires_grad=backward) for _ in range(3)]
    else:
        inputs = [torch.randn(sequences, tokens, HEADS * WIDTH, requires_grad=backward)]

    def call() -> None:
        with torch.set_grad_enabled(backward):
            out = module(*inputs, is_causal=is_causal)
            if backward:
                torch.autograd.grad(out.sum(), [*inputs, *module.parameters()], allow_unused=True)

    call()  # plans of tiles are made once
    return _counted(call, module)


def _directions(expression: str) -> list[bool]:
    traits = catalogue.parse(expression).traits
    return [*([False] if traits.bidirectional else []), *([True] if traits.causal else [])]


CALLS = [
    pytest.param(expression, is_causal, id=f"{expression}-{'causal' if is_causal else 'all'}")
    for expression in EXPRESSIONS
    for is_causal in _directions(expression)
    if is_causal or expression != DEARER
]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("expression", "is_causal"), CALLS)
def test_short_sequences_cost_what_one_of_as_many_tokens_does(
    expression: str, is_causal: bool, backward: bool
) -> None:  # fmt: skip
    """At most twice the bytes, and as many operations for 64 sequences as for 16."""
    module, how = _bound(expression), {"is_causal": is_causal, "backward": backward}
    for tokens in (1, 2, 4):
        many, fewer = (_call(module, sequences, tokens, **how) for sequences in (64, 16))
        with core.switched_off():  # its memory is not counted
            one = _call(module, 1, 64 * tokens, **how)
        assert many.bytes <= 2 * one.bytes + CONSTANT, f"64 x {tokens}: {many.bytes} bytes, 1 x 64: {one.bytes}"
        assert many.operations <= fewer.operations + FEW_MORE, f"64 x {tokens} and 16 x {tokens} tokens"


@pytest.mark.parametrize("expression", [e for e in EXPRESSIONS if catalogue.parse(e).traits.memory is not None])
def test_a_step_of_many_sequences_makes_no_copies_of_weights(expression: str) -> None:
    """As many operations for 64 sequences as for 2, about 64 times the bytes of one, and hardly more of weights."""
    module = _bound(expression)

    @torch.no_grad()
    def step(sequences: int) -> Traffic:
        q, k, v = (torch.randn(sequences, HEADS, 20, WIDTH) for _ in range(3))
        _, state = module.decode(*(x[:, :, :18] for x in (q, k, v)))
        _, state = module.decode(*(x[:, :, 18:19] for x in (q, k, v)), state)
        return _counted(lambda: module.decode(*(x[:, :, 19:] for x in (q, k, v)), state), module)

    many, two, one = (step(sequences) for sequences in (64, 2, 1))
    assert many.operations <= two.operations + FEW_MORE
    assert many.bytes <= 1.1 * 64 * one.bytes + CONSTANT
    assert many.of_weights <= 2 * two.of_weights + many.bytes / 20


def test_a_copy_of_weights_for_every_sequence_is_counted() -> None:
    """What torch does of a product that broadcasts, beside one product of all tokens."""
    module, x = _bound("FavorPlus"), torch.randn(64, HEADS, 2, WIDTH)
    W = module.w.projection.mT
    broadcast = _counted(lambda: x @ W, module)
    together = _counted(lambda: torch.bmm(x.movedim(-3, 0).flatten(1, -2), W), module)
    assert broadcast.of_weights >= 64 * W.nbytes > together.of_weights == 0
    assert broadcast.bytes > 4 * together.bytes


def same_as_apart(module: Bound, is_causal: bool, inputs: list[Tensor], key_mask: Tensor | None) -> None:
    """Outputs and gradients of tokens are those of each sequence alone; those of weights add up."""
    together = _with_gradients(module, inputs, is_causal=is_causal, key_mask=key_mask)
    apart = [
        _with_gradients(
            module, [x[i : i + 1] for x in inputs], is_causal=is_causal,
            key_mask=None if key_mask is None else key_mask[i : i + 1],
        )
        for i in range(len(inputs[0]))
    ]  # fmt: skip
    tokens = 1 + len(inputs)
    for i, (whole, *parts) in enumerate(zip(together, *apart, strict=True)):
        _near(whole, torch.cat(parts) if i < tokens else torch.stack(parts).sum(0), together)


def same_streams_as_apart(module: Bound, inputs: list[Tensor], key_mask: Tensor | None) -> None:
    """Outputs of a stream, token by token, are those of each sequence alone."""

    @torch.no_grad()
    def streamed(rows: slice) -> Tensor:
        outs, state = [], None
        for t in range(inputs[0].shape[-2]):
            new = [x[rows, :, t : t + 1] for x in inputs]
            out, state = module.decode(*new, state, key_mask=None if key_mask is None else key_mask[rows, t : t + 1])
            outs.append(out)
        return torch.cat(outs, -2)

    together = streamed(slice(None))
    _near(together, torch.cat([streamed(slice(i, i + 1)) for i in range(len(together))]), [together])


def _with_gradients(module: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Outputs, and gradients of inputs and weights."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = module(*leaves, **options)
    wanted = [*leaves, *module.parameters()]
    return [out, *torch.autograd.grad(out.sin().sum(), wanted, allow_unused=True, materialize_grads=True)]


def _near(x: Tensor, y: Tensor, beside: list[Tensor]) -> None:
    """Equal to nine digits of the largest number, as quotients of small denominators have them."""
    largest = max(float(each.detach().abs().max()) for each in beside if each.numel())
    torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9 * (1.0 + largest))


@pytest.mark.parametrize("mechanism", CASES, ids=repr)
def test_a_batch_is_a_call_for_each(mechanism: Any) -> None:
    """Three sequences of five tokens, some of them padding."""
    module = bind(mechanism)
    inputs = list(qkv(5, batch=3)) if isinstance(mechanism, Attention) else [qkv(5, batch=3, width=16)[0][:, 0]]
    masks = [None, torch.arange(5) < torch.tensor([[5], [2], [3]])] if mechanism.traits.padding else [None]
    for is_causal, key_mask in itertools.product(mechanism.traits.modes, masks):
        same_as_apart(module, is_causal, inputs, key_mask)


@pytest.mark.parametrize("mechanism", [m for m in ATTENTIONS if m.traits.memory is not None], ids=repr)
def test_steps_of_a_batch_are_steps_for_each(mechanism: Any) -> None:
    """Three sequences of eighteen tokens, one by one."""
    same_streams_as_apart(bind(mechanism), list(qkv(18, batch=3)), None)
