"""Describes an attention under test, ours or a third party's: how it is called and what it claims."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fast_attention import catalogue
from fast_attention.conformance.finding import Breaches, Law, claims
from fast_attention.mechanism import Attention, Mechanism, Shape
from fast_attention.nn.bound import Bound
from fast_attention.nn.multihead import MultiheadAttention

Call = Callable[..., Tensor]
MASKS = ("key_mask", "mask", "input_mask", "key_padding_mask", "attention_mask")
THIRD_PARTY_ERRORS = (Exception, SystemExit)  # what a third party's code may raise
OF_TOKENS = nn.MultiheadAttention, MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder
CAUSAL = ("is_causal", "causal")


@dataclass(frozen=True)
class AttentionUnderTest:
    """An attention as the laws call it, with what it claims.

    Args:
        name: Its name in reports.
        make: ``make()`` gives a module or function, a fresh one each time.
        call: ``call(module, inputs, is_causal, key_mask)`` -> outputs. ``inputs`` are (q, k, v), each (B, H, L, E), or
            (x,), (B, L, E); ``key_mask`` is None or boolean (B, L), True = may be seen.
        inputs: ``"qkv"`` or ``"x"``.
        heads: Heads of q, k and v (1 for ``"x"``).
        width: Width per head, or of a token.
        length: A length it takes; the law of any length tries others.
        causal: It claims that the future never moves the past (when asked with ``is_causal=True``).
        bidirectional: It can be called without causality.
        padding: It claims to honour a key mask.
        shrinks: It claims that a padded input gives what the shorter input gives.
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
    dtype: torch.dtype = torch.float64
    mechanism: Mechanism[Any, Any] | None = None

    def built(self, *, seed: int = 0, dtype: torch.dtype | None = None, device: Any = "cpu") -> Any:
        """A fresh instance with seeded weights; torch's random state is left as it was."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = self.make()
        return module.to(device=device, dtype=dtype or self.dtype).eval() if isinstance(module, nn.Module) else module

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


@dataclass(frozen=True)
class Case:
    """An attention as most laws call it: built once, in one direction, with inputs of its usual length."""

    subject: AttentionUnderTest
    module: Any
    inputs: tuple[Tensor, ...]
    is_causal: bool
    device: str

    @property
    def length(self) -> int:
        """The tokens of ``inputs``."""
        return self.inputs[0].shape[-2]

    @property
    def promises(self) -> Any:
        """The traits of one of our mechanisms; None of a third party's."""
        return None if self.subject.mechanism is None else self.subject.mechanism.traits

    def call(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The outputs of some inputs."""
        return self.subject.call(self.module, inputs, self.is_causal, mask)

    def draw(self, length: int, **options: int) -> tuple[Tensor, ...]:
        """Inputs of another length."""
        return self.subject.draw(length, device=self.device, **options)


def law_of_calls(
    name: str, limit: float | None = None, *, causal: bool = False, dtype: torch.dtype | None = None
) -> Callable[[Callable[[Case], Breaches]], Law]:
    """Make a law of a function that gives the breaches of one case: it is asked in every direction, or causal only.

    ``dtype`` is what to call the attention in, where that is not its own.
    """

    def make(measured: Callable[[Case], Breaches]) -> Law:
        @functools.wraps(measured)
        def breaches(subject: AttentionUnderTest, device: str) -> Breaches:
            claims(subject.causal or not causal, "not causal")
            module = subject.built(dtype=dtype, device=device)
            inputs = tuple(x.to(dtype or x.dtype) for x in subject.draw(subject.length, device=device))
            for is_causal in [True] if causal else subject.modes:
                for size, at in measured(Case(subject, module, inputs, is_causal, device)):
                    yield size, ", ".join(filter(None, [at, f"{is_causal=}"]))

        return Law(name, breaches, limit)

    return make


def with_gradients(call: Callable[..., Tensor], inputs: Iterable[Tensor], module: Any = None) -> tuple[Tensor, ...]:
    """Outputs of ``call(*inputs)``, and the gradients of its inputs and of the weights of ``module`` in one direction.

    The call gets tensors that lie in memory as ``inputs`` do.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = call(*leaves)
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
        leaves += weights_of(module)
        grads = torch.autograd.grad((out * direction).sum(), leaves, allow_unused=True, materialize_grads=True)
    return out.detach(), *grads


def weights_of(module: Any) -> list[Tensor]:
    """The weights of a module that can be trained; none of a function."""
    return [w for w in module.parameters() if w.requires_grad] if isinstance(module, nn.Module) else []


def of(
    mechanism: Mechanism[Any, Any] | str, *, max_len: int = 128, width: int = 8, heads: int = 2
) -> AttentionUnderTest:
    """Describe one of our mechanisms, whose claims are its traits.

    Learned weights are moved off their initial values, which often are zeros that would hide a leak.
    """
    parsed = catalogue.parse(mechanism)
    traits, attends = parsed.traits, isinstance(parsed, Attention)

    def call(module: Any, inputs: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None) -> Tensor:
        return module(*inputs, is_causal=is_causal, key_mask=key_mask)

    def make() -> Bound:
        bound = Bound(parsed, Shape(heads, width, max_len))
        for parameter in bound.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
        return bound

    return AttentionUnderTest(
        name=repr(parsed),
        make=make,
        call=call,
        inputs="qkv" if attends else "x",
        heads=heads if attends else 1,
        width=width if attends else heads * width,
        causal=traits.causal,
        bidirectional=traits.bidirectional,
        padding=traits.padding,
        shrinks=not traits.sees_padding,
        mechanism=parsed,
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
    """Describe a third-party attention; what is not given is read from the signature of what ``make()`` returns.

    Args:
        make: Gives a module or function taking (q, k, v) or (x). An ``nn.MultiheadAttention``, torch's or ours, an
            ``nn.TransformerEncoderLayer`` and an ``nn.TransformerEncoder`` are called on tokens (x) of their width,
            with masks in their sense.
        name: Its name in reports.
        inputs: ``"qkv"`` or ``"x"``; by default by the number of required arguments.
        heads: Heads of q, k and v.
        width: Width per head, or of a token for ``"x"``.
        length: A length it takes.
        causal: Whether it claims causality; by default a ``causal`` attribute or an ``is_causal``/``causal`` argument.
        mask: Name of its key-mask argument; by default the first of ``MASKS`` that its signature has.
        mask_keeps: True where its mask's True means "may be seen".
        dtype: What to call it in.

    Raises:
        TypeError: ``make`` is the module itself, or no function.
        ValueError: It takes neither one tensor nor three.
    """
    module = _build(make, name)
    if isinstance(module, OF_TOKENS):
        width = _attention_of(module).embed_dim
        options: Any = {"width": width, "length": length, "causal": causal is not False, "dtype": dtype}
        return AttentionUnderTest(name or type(module).__name__, make, _of_tokens, "x", 1, padding=True, **options)
    forward = module.forward if isinstance(module, nn.Module) else module
    parameters = inspect.signature(forward).parameters
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = [p for p in parameters.values() if p.kind in kinds and p.default is p.empty]
    if inputs is None:
        if len(required) not in (1, 3):
            raise ValueError(
                f"{name or module!r} takes {len(required)} required arguments: describe it with a factory that returns "
                "fast_attention.conformance.AttentionUnderTest(...)"
            )
        inputs = "x" if len(required) == 1 else "qkv"
    flag = next((word for word in CAUSAL if word in parameters), None)
    claims_causal = bool(getattr(module, "causal", False)) if causal is None else causal
    mask = mask or next((word for word in MASKS if word in parameters), None)

    def call(module: Any, tensors: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None) -> Tensor:
        options: dict[str, Any] = {flag: is_causal} if flag else {}
        if mask and key_mask is not None:
            options[mask] = key_mask if mask_keeps else ~key_mask
        out = module(*tensors, **options)
        return out[0] if isinstance(out, tuple) else out

    return AttentionUnderTest(
        name=name or type(module).__name__,
        make=make,
        call=call,
        inputs=inputs,
        heads=heads if inputs == "qkv" else 1,
        width=width,
        length=length,
        causal=claims_causal or (flag is not None and causal is None),
        bidirectional=flag is not None or not claims_causal,
        padding=mask is not None,
        dtype=dtype,
    )


def _attention_of(module: Any) -> Any:
    """The attention of one of torch's encoders, its layers or what is one itself: width and order of axes."""
    layer = module.layers[0] if isinstance(module, nn.TransformerEncoder) else module
    return layer.self_attn if isinstance(layer, nn.TransformerEncoderLayer) else layer


def _of_tokens(module: Any, inputs: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None) -> Tensor:
    """Self-attention by torch's modules, whose masks say what is hidden."""
    (x,), length, first = inputs, inputs[0].shape[1], _attention_of(module).batch_first
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1) if is_causal else None
    hidden = None if key_mask is None else ~key_mask
    x = x if first else x.transpose(0, 1)
    if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        out = module(x, future, src_key_padding_mask=hidden, is_causal=is_causal)
    else:
        out = module(x, x, x, key_padding_mask=hidden, attn_mask=future, is_causal=is_causal, need_weights=False)[0]
    return out if first else out.transpose(0, 1)


def _build(make: Callable[[], Any], name: str | None) -> Any:
    if isinstance(make, nn.Module) or not callable(make):
        raise TypeError(f"make is a function that gives a new module, such as lambda: Mine(64); got {make!r}")
    with torch.random.fork_rng():
        module = make()
    if not callable(module):
        raise ValueError(f"{name or module!r} gives {type(module).__name__}, which is no module and no function")
    return module


def resolve(text: str) -> AttentionUnderTest:
    """An attention under test from a mechanism's expression or from ``some_package.module:factory``.

    The factory is called without arguments and gives an ``AttentionUnderTest``, a mechanism, or a module or function
    that ``third_party`` describes.

    Raises:
        ValueError: No such mechanism, module or factory.
    """
    module, colon, attribute = text.partition(":")
    if not colon:
        return of(text)
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except THIRD_PARTY_ERRORS as error:
        raise ValueError(f"{text!r}: {_message(error)}") from error
    if isinstance(factory, AttentionUnderTest):
        return factory
    if not (inspect.isclass(factory) or inspect.isfunction(inspect.unwrap(factory)) or isinstance(factory, partial)):
        raise ValueError(f"{text!r} is no factory: write a Python function or a class that gives an attention")
    try:
        built = factory()
        if isinstance(built, Mechanism):  # a user's class, which no expression names before its module is imported
            return of(built)
        return built if isinstance(built, AttentionUnderTest) else third_party(factory, name=text)
    except THIRD_PARTY_ERRORS as error:
        raise ValueError(f"{text!r} called without arguments gives no attention: {_message(error)}") from error


def _message(error: BaseException) -> str:
    """The message of an error that a third party's code raised, in one line."""
    message = " ".join(str(error).split())
    plain = isinstance(error, ImportError | AttributeError | ValueError)
    return message if plain else f"{type(error).__name__}: {message}"
