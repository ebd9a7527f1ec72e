"""The law of memory: what tensors hold decides, not how it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from fast_attention.conformance.finding import Finding, judged, law, moved, rounding
from fast_attention.conformance.under_test import AttentionUnderTest


@law("any memory layout")
def layouts(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Transposed, gapped and repeated inputs give what contiguous ones give, gradients included."""
    module, worst, at = subject.built(device=device), 0.0, ""
    drawn = subject.draw(subject.length, device=device)
    for is_causal in subject.modes:
        contiguous = _with_gradients(subject, module, drawn, is_causal)
        for name in LAYOUTS:
            for which in range(len(drawn) + 1):  # one input laid out so, or all
                laid = tuple(_laid(name, x) if which in (n, len(drawn)) else x for n, x in enumerate(drawn))
                wanted = contiguous
                if name == REPEATED:
                    wanted = _with_gradients(subject, module, tuple(x.contiguous() for x in laid), is_causal)
                after = _with_gradients(subject, module, laid, is_causal)
                size = max(moved(a, b) for a, b in zip(after, wanted, strict=True))
                if not size <= worst:
                    worst, at = size, f"{name}, is_causal={is_causal}"
    return judged(worst, rounding(subject.dtype), at or ", ".join(LAYOUTS))


REPEATED = "one sequence for all"
LAYOUTS = ("width before tokens", "tokens before heads", "between other numbers", REPEATED)


def _laid(layout: str, x: Tensor) -> Tensor:
    """A tensor (..., tokens, width) of the same numbers, or of the first sequence's, in another layout."""
    if layout == "width before tokens":
        return x.mT.contiguous().mT
    if layout == "tokens before heads":
        return x.transpose(0, -2).contiguous().transpose(0, -2)
    if layout == "between other numbers":
        memory = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"), dtype=x.dtype, device=x.device)
        memory[..., 1::2] = x
        return memory[..., 1::2]
    return x[:1].expand_as(x)


def _with_gradients(
    subject: AttentionUnderTest, module: object, inputs: tuple[Tensor, ...], is_causal: bool
) -> tuple[Tensor, ...]:
    """Outputs, and the gradients of the inputs, of a call with inputs that lie as these do."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = subject.call(module, tuple(leaves), is_causal, None)
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out).cos()
    return out, *torch.autograd.grad((out * direction).sum(), leaves, allow_unused=True, materialize_grads=True)
