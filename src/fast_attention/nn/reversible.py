"""Reversible residual blocks (Gomez et al. 2017; Kitaev et al. 2020): depth that costs no activation memory.

The backward pass rebuilds each block's inputs from its outputs, so that a sequence of blocks keeps two tensors for
the backward pass, whatever its depth, and pays with one more evaluation of every function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.func import functional_call

from fast_attention.engine.precision import Precision
from fast_attention.engine.tracing import exporting


class Reversible(nn.Module):
    """``y1 = x1 + F(x2)``, ``y2 = x2 + G(y1)`` (arXiv 2001.04451, Eq. 8), which can be turned round.

    Args:
        f: A token mixer with its norm, called as ``f(x, is_causal=..., key_mask=...)`` (``TokenMixer`` is one).
        g: A position-wise layer with its norm, called as ``g(x)`` (``ChunkedFeedForward`` is one).

    Both return the shape they are given, draw random numbers from torch's global generators only, and keep no
    running statistics: a training pass calls each of them twice.
    """

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(
        self,
        x1: Float[Tensor, "*batch length embed"],
        x2: Float[Tensor, "*batch length embed"],
        *,
        is_causal: bool = False,
        key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
    ) -> tuple[Float[Tensor, "*batch length embed"], Float[Tensor, "*batch length embed"]]:
        """Both streams (..., L, E) through the block, with an ordinary graph."""
        y1 = x1 + self.f(x2, is_causal=is_causal, key_mask=key_mask)
        return y1, x2 + self.g(y1)

    def inverse(
        self,
        y1: Float[Tensor, "*batch length embed"],
        y2: Float[Tensor, "*batch length embed"],
        *,
        is_causal: bool = False,
        key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
    ) -> tuple[Float[Tensor, "*batch length embed"], Float[Tensor, "*batch length embed"]]:
        """``x2 = y2 - G(y1)``, ``x1 = y1 - F(x2)``: what ``forward`` was given, up to rounding and without dropout."""
        x2 = y2 - self.g(y1)
        return y1 - self.f(x2, is_causal=is_causal, key_mask=key_mask), x2


class ReversibleSequence(nn.Module):
    """Reversible blocks one after another; the streams start as two copies of the tokens and end as their mean.

    Gradients are those of the ordinary graph. Dropout, random numbers drawn in the blocks and autocast are replayed.
    Works under ``DistributedDataParallel``. Under ``torch.compile`` the training pass stays in eager code (a graph
    break); passes without gradients compile, and ``torch.export`` takes the ordinary graph.

    Args:
        blocks: The blocks, first to last.
    """

    def __init__(self, blocks: Iterable[Reversible]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self,
        x: Float[Tensor, "*batch length embed"],
        *,
        is_causal: bool = False,
        key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
    ) -> Float[Tensor, "*batch length embed"]:
        """Tokens (..., L, E) to tokens (..., L, E); both keywords go to every ``f``."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        recorded = torch.is_grad_enabled() and not exporting()
        if recorded and (x.requires_grad or parameters):
            # Disabled here, at the call: as a decorator it would import the compiler together with this package.
            rebuilt: Any = torch.compiler.disable(_rebuilt, reason="rebuilding needs the random numbers of eager code")
            y1, y2 = rebuilt(tuple(self.blocks), is_causal, key_mask, x, parameters)
        else:
            y1, y2 = x, x
            for block in self.blocks:
                y1, y2 = block(y1, y2, is_causal=is_causal, key_mask=key_mask)
        return (y1 + y2) / 2


def _rebuilt(
    blocks: tuple[Any, ...], is_causal: bool, key_mask: Tensor | None, x: Tensor, parameters: list[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    return _Rebuilding.apply(blocks, is_causal, key_mask, x, x, *parameters)  # type: ignore[return-value]


class _Rebuilding(torch.autograd.Function):
    """All blocks as one node. The parameters are among its inputs, so that their gradients travel autograd's ordinary
    way and whoever listens to them (``DistributedDataParallel``, hooks) hears them once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        blocks: tuple[Any, ...],
        is_causal: bool,
        key_mask: Tensor | None,
        x1: Tensor,
        x2: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.blocks, ctx.is_causal, ctx.parameters = blocks, is_causal, parameters
        ctx.precision, ctx.moments = Precision.now((x1,)), []
        with ctx.precision.again():
            for block in blocks:
                before_f = Moment.now(x1)
                x1 = x1 + block.f(x2, is_causal=is_causal, key_mask=key_mask)
                ctx.moments.append((before_f, Moment.now(x1)))
                x2 = x2 + block.g(x1)
        ctx.save_for_backward(x1, x2, key_mask, *parameters)
        return x1, x2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("reversible blocks give first derivatives only, hence no create_graph=True")
        d1, d2 = gradients
        y1, y2, key_mask, *_ = ctx.saved_tensors
        options, totals = {"is_causal": ctx.is_causal, "key_mask": key_mask}, dict[int, Tensor]()
        with ctx.precision.again():
            for block, (before_f, before_g) in zip(reversed(ctx.blocks), reversed(ctx.moments), strict=True):
                out, d = _pull(block.g, y1, {}, d2, before_g, totals)
                y2, d1 = y2 - out, d1 + d
                out, d = _pull(block.f, y2, options, d1, before_f, totals)
                y1, d2 = y1 - out, d2 + d
        return None, None, None, d1, d2, *(totals.get(id(parameter)) for parameter in ctx.parameters)


def _pull(
    function: nn.Module, x: Tensor, options: dict[str, Any], d: Tensor, moment: Moment, totals: dict[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """``function(x)`` as it was at ``moment``, the gradient of x, and those of the parameters added to ``totals``."""
    own = {name: parameter for name, parameter in function.named_parameters() if parameter.requires_grad}
    # Stand-ins, because hooks on a parameter would fire here and a second time behind this node.
    aliases = {name: parameter.detach().requires_grad_() for name, parameter in own.items()}
    x = x.detach().requires_grad_()
    with torch.enable_grad(), moment.again():
        out = functional_call(function, aliases, (x,), options)
    wanted = (x, *aliases.values())
    dx, *gradients = torch.autograd.grad(out, wanted, d.to(out.dtype), allow_unused=True)
    for parameter, gradient in zip(own.values(), gradients, strict=True):
        if gradient is not None:
            known = totals.get(id(parameter))
            totals[id(parameter)] = gradient if known is None else known + gradient
    return out.detach(), torch.zeros_like(x) if dx is None else dx


class Moment(NamedTuple):
    """The state of the random number generators at some moment."""

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def now(cls, x: Tensor) -> Moment:
        """The present, of the CPU's generator and of the device that holds ``x``."""
        there = None if x.device.type == "cpu" else torch.get_device_module(x.device).get_rng_state(x.device)
        return cls(x.device, torch.get_rng_state(), there)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Go back to that moment, and afterwards forward again."""
        module = torch.get_device_module(self.device)
        with torch.random.fork_rng([] if self.accelerator is None else [self.device], device_type=self.device.type):
            torch.set_rng_state(self.cpu)
            if self.accelerator is not None:
                module.set_rng_state(self.accelerator, self.device)
            yield
