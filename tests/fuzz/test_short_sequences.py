"""Batches of short sequences, which are computed side by side, beside a call for each of them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fast_attention import Attention
from tests.cases import ATTENTIONS, CASES, bind
from tests.fuzz.kit import fuzz

STREAMING = [m for m in ATTENTIONS if m.traits.memory is not None]


@st.composite
def batches(draw: Any, mechanisms: list[Any]) -> tuple[Any, bool, list[Tensor], Tensor | None]:
    """A mechanism of random settings bound to random sizes, tokens of 2 to 6 sequences, and perhaps padding."""
    mechanism, heads = draw(st.sampled_from(mechanisms)), draw(st.integers(1, 3))
    width, length, batch = draw(st.sampled_from([4, 8])), draw(st.integers(1, 5)), draw(st.integers(2, 6))
    module = bind(mechanism, heads, width)
    torch.manual_seed(draw(st.integers(0, 2**31)))
    if isinstance(mechanism, Attention):
        inputs = [torch.randn(batch, heads, length, width, dtype=torch.float64) for _ in range(3)]
    else:
        inputs = [torch.randn(batch, length, heads * width, dtype=torch.float64)]
    is_causal = draw(st.sampled_from(mechanism.traits.modes))
    key_mask = None
    if mechanism.traits.padding and draw(st.booleans()):
        key_mask = torch.arange(length) < torch.randint(1, length + 1, (batch, 1))
    return module, is_causal, inputs, key_mask


def _with_gradients(module: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Outputs, and gradients of inputs and weights."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = module(*leaves, **options)
    wanted = [*leaves, *module.parameters()]
    return [out, *torch.autograd.grad(out.sin().sum(), wanted, allow_unused=True, materialize_grads=True)]


@fuzz("batches of short sequences", examples=150, batch=batches(CASES))
def test_a_batch_is_a_call_for_each(batch: tuple[Any, bool, list[Tensor], Tensor | None]) -> None:
    """Outputs, and gradients of tokens; those of weights add up."""
    module, is_causal, inputs, key_mask = batch
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


@fuzz("steps of batches of short sequences", examples=60, batch=batches(STREAMING))
def test_a_step_of_a_batch_is_a_step_for_each(batch: tuple[Any, bool, list[Tensor], Tensor | None]) -> None:
    """Outputs of a stream, token by token."""
    module, _, inputs, key_mask = batch

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


def _near(x: Tensor, y: Tensor, beside: list[Tensor]) -> None:
    """Equal to nine digits of the largest number, as quotients of small denominators have them."""
    largest = max(float(each.detach().abs().max()) for each in beside if each.numel())
    torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9 * (1.0 + largest))
