"""An operation: one function of tensors with several implementations, of which every call takes the fastest it can.

A ``reference`` defines the function. Compilers trace it, function transforms and derivatives of higher order take it,
and so does every call that no faster implementation serves. The others, ``cpu`` and ``cuda``, are a forward and a
backward pass written by hand, for autograd through slices is quadratic: the gradient of every slice is a tensor of full
length. An ``Operation`` asks whether one serves before it starts, records the choice, widens 16-bit tokens, and gives
the result its gradient.

Under ``torch.compile`` it may be one node of the graph (``engine.node``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast_attention.engine import trace
from fast_attention.engine.node import Recorded, Stateless
from fast_attention.engine.precision import HALVES, Precision, in_float32
from fast_attention.engine.tracing import batched, exporting, intercepted, symbolic, traced, wrapped

Tensors = tuple[Tensor | None, ...]
HAS_TRITON = importlib.util.find_spec("triton") is not None  # it is not imported here
HALVES_AND_SINGLE = (*HALVES, torch.float32)
ASKED = "the reference was asked for"


class NotServed(ArithmeticError):
    """A forward pass saw in its numbers that the reference must run; the message is the reason."""


def always(*tensors: Any, **settings: Any) -> str:
    """Why an implementation does not serve: that is, never."""
    return ""


@dataclass(frozen=True, eq=False)
class Fast:
    """A faster implementation of an operation.

    Args:
        forward: ``(*tensors, keep, **settings) -> (outputs, saved)``: the reference's outputs, and what the backward
            pass needs beside inputs and outputs (normalisers, coarse states); ``()`` will do unless ``keep``.
        backward: ``(inputs, outputs, saved, gradients, **settings)`` -> one gradient or None per input tensor;
            gradients of outputs that nobody used are zeros. None: ``forward(*tensors, **settings) -> outputs`` is made
            of operations that autograd follows.
        serves: ``(*tensors, **settings)`` -> why it does not serve, empty where it does; asked where tensors are
            ordinary and on its device.
        even: How many of the first tensors must have one dtype and equal leading sizes (all but the last two).
        halves: Whether it takes 16-bit tokens as they are, in an operation that widens them.
        always: Whether it runs where the reference was asked for too, as a kernel of torch's own.
        path: What ``explain`` calls it, or a function of the call; nothing is recorded without a name.
        why: Why it is the one to run, or a function of the call that says it.
        sizes: The sizes that are recorded with it, or a function of the call.
        like: For kernels of a GPU: as ``forward``, but what it returns is uninitialised. A compiler asks for sizes.
        outputs: How many outputs there are, for a compiler.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Tensors] | None
    serves: Callable[..., str] = always
    even: int = 0
    halves: bool = False
    always: bool = False
    path: str | Callable[..., str] = ""
    why: str | Callable[..., str] = ""
    sizes: Callable[..., dict[str, int]] | None = None
    like: Callable[..., Any] | None = None
    outputs: int = 1


class Operation:
    """A function ``(*tensors, **settings) -> outputs`` with its implementations. A tensor may be None.

    Args:
        reference: The function in differentiable operations: one tensor, or a tuple.
        cpu: What serves tensors of a CPU.
        cuda: What serves those of a GPU.
        compute: ``torch.float32``: 16-bit tensors are widened, autocast is off inside, and the first output takes the
            dtype of the first tensor, as ``in_float32`` says; None: tensors come as they are.
        empty: As ``reference``, but what it returns is uninitialised; then a compiler for a CPU has one node. Settings
            are numbers and tuples of them there, all whole numbers or all not.
        path: What ``explain`` calls the reference, or a function of the call; nothing is recorded without a name.
        sizes: The sizes that are recorded with it, as a function of the call.
    """

    def __init__(
        self, reference: Callable[..., Any], *, cpu: Fast | None = None, cuda: Fast | None = None,
        compute: torch.dtype | None = None, empty: Callable[..., Any] | None = None,
        path: str | Callable[..., str] = "", sizes: Callable[..., dict[str, int]] | None = None,
    ) -> None:  # fmt: skip
        self.reference = in_float32(reference) if compute else reference
        self.cpu, self.cuda, self.compute, self.path, self.sizes = cpu, cuda, compute, path, sizes
        self._widened = in_float32(self.__call__)
        self._node: Any = None
        if empty is not None:
            self._node = Recorded(self, empty, _name(reference))
        elif cuda is not None and cuda.like is not None:
            self._node = Stateless(cuda.forward, cuda.backward, cuda.like, cuda.outputs, _name(reference))

    @property
    def implementations(self) -> tuple[str, ...]:
        """The kinds of implementation that there are."""
        faster = {"cpu": self.cpu, "cuda": self.cuda}
        return "reference", *(name for name, each in faster.items() if each is not None)

    def __call__(self, *tensors: Tensor | None, **settings: Any) -> Any:
        """The outputs, by the implementation that suits the call."""
        if symbolic():
            return self._compiled(tensors, settings)
        fast, why = self.chosen(tensors, settings)
        if fast is not None:
            if self.compute is not None and not fast.halves and _widens(tensors):
                return self._widened(*tensors, **settings)
            steps = trace.collected()
            before = 0 if steps is None else len(steps)
            if steps is not None:
                _record(fast.path, fast.why, fast.sizes, tensors, settings)
            try:
                if fast.backward is None:
                    return fast.forward(*tensors, **settings)
                if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
                    return _Function.apply(self, fast, settings, *tensors)
                return fast.forward(*tensors, keep=False, **settings)[0]
            except NotServed as error:
                why = str(error)
                if steps is not None:
                    del steps[before:]  # none of them gave the outputs
        if trace.asked():
            _record(self.path, why, self.sizes, tensors, settings)
        return self.reference(*tensors, **settings)

    def chosen(self, tensors: Sequence[Any], settings: dict[str, Any]) -> tuple[Fast | None, str]:
        """The faster implementation that serves an eager call, or None and why there is none."""
        first = tensors[0]
        if intercepted():
            return None, "traced"
        if (wanted := trace.wanted()) == "reference" and not (self.cpu is not None and self.cpu.always):
            return None, ASKED
        why, gpu = "not on a CPU", on_gpu(first)
        if self.cuda is not None and (gpu or wanted == "triton"):
            against = _against(self.cuda, tensors, settings) if gpu else "not on a GPU"
            if not against:
                return self.cuda, ""
            if self.cuda.like is None:
                trace.record("plain operations", against)
        if self.cpu is None or not has_cpu_path(first):
            return None, why
        why = _against(self.cpu, tensors, settings)
        return (None if why else self.cpu), why

    def _compiled(self, tensors: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """The outputs within a compiler's code: a node, kernels for a GPU, or the reference."""
        first, fast = tensors[0], self.cuda
        if not exporting():
            kernels = fast is not None and (fast.backward is None or fast.like is not None)
            if fast is not None and kernels and on_gpu(first) and not fast.serves(*tensors, **settings):
                return fast.forward(*tensors, **settings) if fast.like is None else self._node(tensors, settings)
            if isinstance(self._node, Recorded) and has_cpu_path(first):
                return self._node(tensors, settings)
        return self.reference(*tensors, **settings)


def _name(reference: Callable[..., Any]) -> str:
    return "_".join([*reference.__module__.split(".")[-2:], reference.__name__.lstrip("_")])


def _record(path: Any, why: Any, sizes: Any, tensors: Sequence[Any], settings: dict[str, Any]) -> None:
    path, why = (x if isinstance(x, str) else x(*tensors, **settings) for x in (path, why))
    if path:
        trace.record(path, why, **({} if sizes is None else sizes(*tensors, **settings)))


def _against(fast: Fast, tensors: Sequence[Any], settings: dict[str, Any]) -> str:
    """Why an implementation does not serve tensors of its device; empty where it does."""
    for x in tensors:
        if x is not None and type(x) is not Tensor and wrapped((x,)):
            return "a tensor that overrides operations"
    for x in tensors[:3]:  # tokens
        if x is not None and x.numel() == 0:
            return "no tokens"
    return (fast.even and _uneven(tensors[: fast.even])) or fast.serves(*tensors, **settings)


def _widens(tensors: Sequence[Any]) -> bool:
    for x in tensors:
        if x is not None and x.dtype in HALVES:
            return True
    return torch.is_autocast_enabled(tensors[0].device.type)


def unsupported_reason(*tensors: Tensor, even: bool = False, anywhere: bool = False) -> str:
    """Why nothing written by hand for a CPU may run on these tensors, which share a device; empty where it may.

    For code that is no operation, before what only it knows, a length say: while tracing, a size may be a symbol that
    must not be compared.

    Args:
        tensors: What is read; at least one.
        even: Whether tensors must have one dtype and equal leading sizes (all but the last two).
        anywhere: Whether every device is served.
    """
    if traced():
        return "traced"
    if trace.wanted() == "reference":
        return ASKED
    if not anywhere and not has_cpu_path(tensors[0]):
        return "not on a CPU"
    for x in tensors:
        if type(x) is not Tensor and wrapped((x,)):
            return "a tensor that overrides operations"
        if x.numel() == 0:
            return "no tokens"
    return _uneven(tensors) if even else ""


def _uneven(tensors: Sequence[Tensor]) -> str:
    shape, dtype = tensors[0].shape, tensors[0].dtype
    for x in tensors[1:]:
        if x.dtype != dtype:
            return "dtypes that differ"
        if (other := x.shape) != shape and other[:-2] != shape[:-2]:
            return "leading sizes that differ"
    return ""


def gpu_unsupported_reason(*tensors: Tensor, widest: int) -> str:
    """Why no Triton kernel may run on these tensors; empty where one may.

    Args:
        tensors: What the kernel reads; at least one.
        widest: The most numbers of a token that it takes.
    """
    first = tensors[0]
    if not on_gpu(first):
        return "not on a GPU"
    if not symbolic() and trace.wanted() == "reference":
        return ASKED
    if exporting() or (traced() and not symbolic()):
        return "traced"
    if any(x.dtype != first.dtype for x in tensors) or first.dtype not in HALVES_AND_SINGLE:
        return "dtypes that differ, or of more than 32 bits"
    if max(x.shape[-1] for x in tensors) > widest:
        return f"heads of more than {widest} numbers"
    if not symbolic() and (wrapped(tensors) or any(x.numel() == 0 for x in tensors)):
        return "a tensor that overrides operations, or no tokens"
    return "" if HAS_TRITON else "Triton is not installed"


def log_fallback(x: Tensor, why: str) -> None:
    """Record that a kernel did not run where one could have been hoped for: on a GPU, or asked for by name."""
    if not symbolic() and (on_gpu(x) or trace.wanted() == "triton"):
        trace.record("plain operations", why)


def has_cpu_path(x: Tensor) -> bool:
    """Whether what is written for CPUs can read ``x``."""
    return x.is_cpu


def on_gpu(x: Tensor) -> bool:
    """Whether kernels for GPUs can read ``x``."""
    return x.is_cuda


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operation: Operation, fast: Fast, settings: dict[str, Any], *tensors: Tensor | None
    ) -> Any:  # fmt: skip
        ctx.precision = Precision.current(tensors)
        outputs, saved = fast.forward(*tensors, keep=True, **settings)
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.operation, ctx.fast, ctx.settings, ctx.sizes = operation, fast, settings, (len(tensors), len(flat))
        ctx.save_for_backward(*tensors, *flat, *saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        count, number = ctx.sizes
        stored = ctx.saved_tensors
        inputs, outputs, saved = stored[:count], stored[count : count + number], stored[count + number :]
        with ctx.precision.restored():
            if torch.is_grad_enabled() or batched(gradients):
                with torch.enable_grad():
                    return None, None, None, *_differentiable(ctx.operation, ctx.settings, inputs, gradients)
            return None, None, None, *ctx.fast.backward(inputs, outputs, saved, gradients, **ctx.settings)


def _differentiable(
    operation: Operation, settings: dict[str, Any], inputs: Tensors, gradients: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, or are a batch of them."""
    views = [None if x is None else x.view_as(x) for x in inputs]  # one tensor may be passed twice
    wanted = [x for x in views if x is not None and x.requires_grad]
    outputs = operation.reference(*views, **settings)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    pairs = [(x, g) for x, g in zip(outputs, gradients, strict=True) if x.requires_grad]  # log scales need not
    outputs, gradients = zip(*pairs, strict=True)
    grad_in = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
    return [next(grad_in) if x is not None and x.requires_grad else None for x in views]


def like_queries(q: Tensor, k: Tensor, v: Tensor, *others: Any, **settings: Any) -> Tensor:
    """An uninitialised row of values for each query: what a compiler needs to know of most attentions."""
    return v.new_empty(*q.shape[:-1], v.shape[-1])
