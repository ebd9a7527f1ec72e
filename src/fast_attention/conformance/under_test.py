"""Describes an attention under test, ours or a third party's: its calling convention, said once."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fast_attention import catalogue
from fast_attention.mechanism import Attention, Mechanism, Shape
from fast_attention.nn.bound import Bound

Call = Callable[..., Tensor]
MASKS = ("key_mask", "mask", "input_mask", "key_padding_mask", "attention_mask")
THIRD_PARTY_ERRORS = (Exception, SystemExit)  # what a third party's code may raise
CAUSAL = ("is_causal", "causal")


@dataclass(frozen=True)
class AttentionUnderTest:
    """What the laws need to know of an attention.

    Args:
        name: How the report calls it.
        make: ``make()`` gives a module or function; asked again, it gives a fresh one.
        call: ``call(made, inputs, is_causal, key_mask)`` -> outputs. ``inputs`` are (q, k, v), each (B, H, L, E), or
            (x,), (B, L, E); ``key_mask`` is None or boolean (B, L), True = may be seen.
        inputs: Which of the two.
        heads: Heads of q, k and v (1 for ``"x"``).
        width: Width per head, or of a token.
        length: A length it takes; the law of any length tries others.
        causal: It claims that the future never moves the past (when asked with ``is_causal=True``).
        bidirectional: It can be called without causality.
        padding: It claims to honour a key mask.
        shrinks: It claims that a padded input gives what the shorter input gives.
        order: The exponent of n it claims for time and memory, if it claims one.
        dtype: What to call it in.
        mechanism: Ours, if it is one of ours; more laws apply then.
    """

    name: str
    make: Callable[[], Any]
    call: Callable[[Any, tuple[Tensor, ...], bool, Tensor | None], Tensor]
    inputs: Literal["qkv", "x"] = "qkv"
    heads: int = 2
    width: int = 8
    length: int = 37
    causal: bool = False
    bidirectional: bool = True
    padding: bool = False
    shrinks: bool = True
    order: float | None = None
    dtype: torch.dtype = torch.float64
    mechanism: Mechanism[Any, Any] | None = None

    def built(self, *, seed: int = 0, dtype: torch.dtype | None = None, device: Any = "cpu") -> Any:
        """A fresh instance with seeded weights; torch's random state is left as it was."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = self.make()
        return made.to(device=device, dtype=dtype or self.dtype).eval() if isinstance(made, nn.Module) else made

    def draw(self, length: int, *, batch: int = 2, seed: int = 0, device: Any = "cpu") -> tuple[Tensor, ...]:
        """Gaussian inputs of a length."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, self.heads, length, self.width) if self.inputs == "qkv" else (batch, length, self.width)
        count = 3 if self.inputs == "qkv" else 1
        return tuple(
            torch.randn(shape, generator=generator, dtype=torch.float64).to(device, self.dtype) for _ in range(count)
        )

    @property
    def modes(self) -> list[bool]:
        """The values of ``is_causal`` it can be called with."""
        return [False] * self.bidirectional + [True] * self.causal


def of(mechanism: Mechanism[Any, Any] | str, *, max_len: int = 128, width: int = 8) -> AttentionUnderTest:
    """One of our mechanisms as a subject; its claims are its traits.

    Learned weights are moved off their initial values, which often are zeros that would hide a leak.
    """
    chosen = catalogue.parse(mechanism)
    traits, heads = chosen.traits, 2
    attends = isinstance(chosen, Attention)

    def call(made: Any, inputs: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None) -> Tensor:
        return made(*inputs, is_causal=is_causal, key_mask=key_mask)

    def make() -> Bound:
        bound = Bound(chosen, Shape(heads, width, max_len))
        for parameter in bound.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
        return bound

    return AttentionUnderTest(
        name=repr(chosen),
        make=make,
        call=call,
        inputs="qkv" if attends else "x",
        heads=heads if attends else 1,
        width=width if attends else heads * width,
        causal=traits.causal,
        padding=traits.padding,
        shrinks=not traits.spans,
        order=traits.order,
        mechanism=chosen,
    )


def third_party(
    make: Callable[[], Any],
    *,
    name: str | None = None,
    inputs: Literal["qkv", "x"] | None = None,
    heads: int = 2,
    width: int = 16,
    length: int = 64,
    causal: bool | None = None,
    mask: str | None = None,
    mask_keeps: bool = True,
    dtype: torch.dtype = torch.float32,
) -> AttentionUnderTest:
    """Anybody's attention as a subject; what is not said is read from the signature of what ``make()`` gives.

    Args:
        make: Gives a module or function taking (q, k, v) or (x).
        name: How the report calls it.
        inputs: ``"qkv"`` or ``"x"``; by default by the number of required arguments.
        heads: Heads of q, k and v.
        width: Width per head, or of a token for ``"x"``.
        length: A length it takes.
        causal: Whether it claims causality; by default a ``causal`` attribute or an ``is_causal``/``causal`` argument.
        mask: Name of its key-mask argument; by default the first of ``MASKS`` that its signature has.
        mask_keeps: True where its mask's True means "may be seen".
        dtype: What to call it in.

    Raises:
        ValueError: It takes neither one tensor nor three.
    """
    made = _made(make, name)
    forward = made.forward if isinstance(made, nn.Module) else made
    parameters = inspect.signature(forward).parameters
    required = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if inputs is None:
        if len(required) not in (1, 3):
            raise ValueError(
                f"{name or made!r} takes {len(required)} required arguments: describe it with a factory that returns "
                "fast_attention.conformance.AttentionUnderTest(...)"
            )
        inputs = "x" if len(required) == 1 else "qkv"
    flag = next((word for word in CAUSAL if word in parameters), None)
    claims = bool(getattr(made, "causal", False)) if causal is None else causal
    mask = mask or next((word for word in MASKS if word in parameters), None)

    def call(made: Any, tensors: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None) -> Tensor:
        options: dict[str, Any] = {flag: is_causal} if flag else {}
        if mask and key_mask is not None:
            options[mask] = key_mask if mask_keeps else ~key_mask
        out = made(*tensors, **options)
        return out[0] if isinstance(out, tuple) else out

    return AttentionUnderTest(
        name=name or type(made).__name__,
        make=make,
        call=call,
        inputs=inputs,
        heads=heads if inputs == "qkv" else 1,
        width=width,
        length=length,
        causal=claims or (flag is not None and causal is None),
        bidirectional=flag is not None or not claims,
        padding=mask is not None,
        dtype=dtype,
    )


def _made(make: Callable[[], Any], name: str | None) -> Any:
    with torch.random.fork_rng():
        made = make()
    if not callable(made):
        raise ValueError(f"{name or made!r} gives {type(made).__name__}, which is no module and no function")
    return made


def resolve(text: str, **options: Any) -> AttentionUnderTest:
    """An attention under test from a mechanism's expression or from ``some_package.module:factory``.

    The factory is called without arguments and gives an ``AttentionUnderTest``, or a module or function that
    ``third_party`` describes.

    Raises:
        ValueError: No such mechanism, module or factory.
    """
    module, colon, attribute = text.partition(":")
    if not colon:
        return of(text)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except THIRD_PARTY_ERRORS as error:
        raise ValueError(f"{text!r}: {_said(error)}") from error
    if isinstance(found, AttentionUnderTest):
        return found
    if not (inspect.isclass(found) or inspect.isfunction(inspect.unwrap(found)) or isinstance(found, partial)):
        raise ValueError(f"{text!r} is no factory: write a Python function or a class that gives an attention")
    try:
        made = found()
        return made if isinstance(made, AttentionUnderTest) else third_party(found, name=text, **options)
    except THIRD_PARTY_ERRORS as error:
        raise ValueError(f"{text!r} called without arguments gives no attention: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """The first line of what a third party's code raised."""
    said = " ".join(str(error).split())
    return said if isinstance(error, ImportError | AttributeError | ValueError) else f"{type(error).__name__}: {said}"
