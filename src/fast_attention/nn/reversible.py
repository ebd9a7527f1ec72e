"""Reversible residual blocks (Gomez et al. 2017; Kitaev et al. 2020), whose activation memory does not grow with depth.

The backward pass computes each block's inputs from its outputs: a sequence of blocks keeps two tensors for it,
whatever its depth, and every function is evaluated once more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.func import functional_call

from fast_attention.engine.precision import Precision
from fast_attention.engine.tracing import exporting, unrepeatable
from fast_attention.mechanism import Unsupported

Tokens = Float[Tensor, "*batch length embed"]
KeyMask = Bool[Tensor, "*#batch2 length"]


class Reversible(nn.Module):
    """An invertible residual block: ``y1 = x1 + F(x2)``, ``y2 = x2 + G(y1)`` (arXiv 2001.04451, Eq. 8).

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
        self, x1: Tokens, x2: Tokens, *, is_causal: bool = False, key_mask: KeyMask | None = None
    ) -> tuple[Tokens, Tokens]:
        """Both streams (..., L, E) through the block, with an ordinary graph."""
        y1 = x1 + self.f(x2, is_causal=is_causal, key_mask=key_mask)
        return y1, x2 + self.g(y1)

    def inverse(
        self, y1: Tokens, y2: Tokens, *, is_causal: bool = False, key_mask: KeyMask | None = None
    ) -> tuple[Tokens, Tokens]:
        """``x2 = y2 - G(y1)``, ``x1 = y1 - F(x2)``: what ``forward`` was given, up to rounding and without dropout."""
        x2 = y2 - self.g(y1)
        return y1 - self.f(x2, is_causal=is_causal, key_mask=key_mask), x2


class ReversibleSequence(nn.Module):
    """A sequence of reversible blocks; the two streams start as copies of the tokens and end as their mean.

    Gradients are those of the ordinary graph. Dropout, random numbers drawn in the blocks and autocast are replayed.
    Works under ``DistributedDataParallel``, and under FSDP2 where the sequence is sharded as one. Under
    ``torch.compile`` the training pass stays in eager code (a graph break); passes without gradients compile.

    The ordinary graph is built, with the memory that it takes, by ``torch.export``, under ``torch.func``, forward-mode
    derivatives and ``parametrize.cached()``, and where a block has hooks or FSDP2 shards it or a part of it by itself.

    Args:
        blocks: The blocks, first to last.

    Raises:
        TypeError: One of them is no ``Reversible``.
        Unsupported: In a training pass: F or G changes its buffers, as BatchNorm and ``spectral_norm`` do.
    """

    def __init__(self, blocks: Iterable[Reversible]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for i, block in enumerate(self.blocks):
            if not isinstance(block, Reversible):
                raise TypeError(f"blocks[{i}] is a {type(block).__name__}: give Reversible(f, g) blocks")

    def forward(self, x: Tokens, *, is_causal: bool = False, key_mask: KeyMask | None = None) -> Tokens:
        """Tokens (..., L, E) to tokens (..., L, E); both keywords go to every ``f``."""
        learned = [tensor for _, tensor in named_tensors(self) if tensor.requires_grad]
        needs_graph = torch.is_grad_enabled() and (x.requires_grad or learned)
        if needs_graph and not exporting() and not unrepeatable() and not any(map(_is_called_whole, self.blocks)):
            # Disabled here, at the call: as a decorator it would import the compiler together with this package.
            run: Any = torch.compiler.disable(_run, reason="rebuilding needs the random numbers of eager code")
            y1, y2 = run(self, is_causal, key_mask, x, learned)
        else:
            y1, y2 = x, x
            for block in self.blocks:
                y1, y2 = block(y1, y2, is_causal=is_causal, key_mask=key_mask)
        return (y1 + y2) / 2


def _is_called_whole(block: nn.Module) -> bool:
    """Whether a block must be called as a module: it has hooks, or FSDP2 gathers weights by hooks within it."""
    hooks = (block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks)
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(hooks) or any(isinstance(module, sharded) for module in block.modules())


def _run(
    sequence: ReversibleSequence, is_causal: bool, key_mask: Tensor | None, x: Tensor, learned: list[Tensor]
) -> tuple[Tensor, Tensor]:
    with unchanged(sequence):
        return _ReversibleFunction.apply(tuple(sequence.blocks), is_causal, key_mask, x, x, *learned)  # type: ignore[return-value]


class _ReversibleFunction(torch.autograd.Function):
    """All blocks as one node of autograd's graph. The parameters are among its inputs, so that hooks on their gradients
    (``DistributedDataParallel``'s too) run once.
    """

    @staticmethod
    def forward(
        ctx: Any, blocks: tuple[Any, ...], is_causal: bool, key_mask: Tensor | None, x1: Tensor, x2: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.blocks, ctx.is_causal, ctx.parameters = blocks, is_causal, parameters
        ctx.precision, ctx.random_states = Precision.current((x1,)), []
        # What functional_call has put into the modules is gone when the backward pass runs.
        ctx.weights = [(dict(named_tensors(block.f)), dict(named_tensors(block.g))) for block in blocks]
        with ctx.precision.restored():
            for block in blocks:
                before_f = RandomState.read(x1)
                x1 = x1 + block.f(x2, is_causal=is_causal, key_mask=key_mask)
                ctx.random_states.append((before_f, RandomState.read(x1)))
                x2 = x2 + block.g(x1)
        ctx.save_for_backward(x1, x2, key_mask, *parameters)
        return x1, x2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("reversible blocks give first derivatives only, hence no create_graph=True")
        d1, d2 = gradients  # with respect to the two streams, from outputs to inputs
        y1, y2, key_mask, *_ = ctx.saved_tensors
        options, totals = {"is_causal": ctx.is_causal, "key_mask": key_mask}, dict[int, Tensor]()
        with ctx.precision.restored():
            replays = zip(reversed(ctx.blocks), reversed(ctx.weights), reversed(ctx.random_states), strict=True)
            for block, (weights_f, weights_g), (before_f, before_g) in replays:
                out, dx = _vjp(block.g, weights_g, y1, {}, d2, before_g, totals)
                y2, d1 = y2 - out, d1 + dx
                out, dx = _vjp(block.f, weights_f, y2, options, d1, before_f, totals)
                y1, d2 = y1 - out, d2 + dx
        return None, None, None, d1, d2, *(totals.get(id(parameter)) for parameter in ctx.parameters)


def _vjp(
    function: nn.Module,
    weights: dict[str, Tensor],
    x: Tensor,
    options: dict[str, Any],
    grad_out: Tensor,
    state: RandomState,
    totals: dict[int, Tensor],
) -> tuple[Tensor, Tensor]:
    """``function(x)`` with the weights and random numbers of the forward pass, and the gradient of x; those of the
    weights are added to ``totals``."""
    parameters = {name: tensor for name, tensor in weights.items() if tensor.requires_grad}
    # Copies, because hooks on a parameter would run here and a second time after this node.
    aliases = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
    x = x.detach().requires_grad_()
    with torch.enable_grad(), state.restored():
        out = functional_call(function, weights | aliases, (x,), options)
    dx, *gradients = torch.autograd.grad(out, (x, *aliases.values()), grad_out.to(out.dtype), allow_unused=True)
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        if gradient is not None:
            total = totals.get(id(parameter))
            totals[id(parameter)] = gradient if total is None else total + gradient
    return out.detach(), torch.zeros_like(x) if dx is None else dx


class RandomState(NamedTuple):
    """The states of the random number generators of the CPU and of one device."""

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def read(cls, x: Tensor) -> RandomState:
        """The present states of the CPU's generator and of the one of the device that holds ``x``."""
        plain = x.device.type in ("cpu", "meta")
        state = None if plain else torch.get_device_module(x.device).get_rng_state(x.device)
        return cls(x.device, torch.get_rng_state(), state)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the generators to these states, and back to what they were at the end of the block."""
        devices, kind = ([], "cpu") if self.accelerator is None else ([self.device], self.device.type)
        with torch.random.fork_rng(devices, device_type=kind):
            torch.set_rng_state(self.cpu)
            if self.accelerator is not None:
                torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)
            yield


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers that a module has now, with their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Refuse a training pass that writes to the module's buffers: the backward pass would compute with others.

    Raises:
        Unsupported: One has been written to.
    """
    before = _versions(module)
    yield
    after = _versions(module)
    if name := next((name for name in before if after.get(name) != before[name]), None):
        raise Unsupported(
            f"{name} is changed by the training pass, and the backward pass computes again with what it has become. "
            "What would work: LayerNorm for BatchNorm, weight_norm for spectral_norm, or .eval() of the module that "
            "holds it"
        )


def _versions(module: nn.Module) -> dict[str, int]:
    """How often each buffer was written to."""
    return {name: buffer._version for name, buffer in module.named_buffers() if not buffer.is_inference()}
