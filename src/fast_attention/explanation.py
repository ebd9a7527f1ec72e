"""``explain``: runs a call and reports which implementation it took, in which chunks, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fast_attention import catalogue, checks
from fast_attention.engine import trace
from fast_attention.engine.trace import Step
from fast_attention.expressions import in_words
from fast_attention.mechanism import Attention, Mechanism, Shape
from fast_attention.nn.bound import Bound

_KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": "torch's flash kernel for the CPU",
    "_scaled_dot_product_flash_attention": "torch's flash kernel",
    "_scaled_dot_product_efficient_attention": "torch's memory-efficient kernel",
    "_scaled_dot_product_cudnn_attention": "cuDNN's fused kernel",
    "_scaled_dot_product_fused_attention_overrideable": "the device's own fused kernel",
    "_scaled_dot_product_attention_math": "torch's unfused attention, which holds all scores",
}


@dataclass(frozen=True)
class Explanation:
    """The implementations that a call took. Print it.

    Args:
        mechanism: The mechanism's expression, or the module's class.
        inputs: Shapes, dtype and device of its inputs.
        steps: Every choice of an implementation, in the order they were made.
        kernels: The fused attention kernels that torch chose, with how many times each was called.
        gpu: What would compute the mechanism on a GPU; empty for a module, which may hold several.
    """

    mechanism: str
    inputs: str
    steps: tuple[Step, ...]
    kernels: dict[str, int]
    gpu: str = ""

    def __str__(self) -> str:
        lines = [f"{self.mechanism} on {self.inputs}"]
        for step in self.steps:
            sizes = ", ".join(f"{name} {size:,}" for name, size in step.sizes.items())
            lines.append(f"  {step.path}" + (f" ({sizes})" if sizes else "") + (f": {step.why}" if step.why else ""))
        if not self.steps and not self.kernels:
            lines.append("  plain operations of torch: this mechanism has one path")
        lines += [f"  {name}, called {count:,} time{'s' * (count > 1)}" for name, count in self.kernels.items()]
        lines += [f"  on a GPU: {self.gpu}"] if self.gpu and " on cpu" in self.inputs else []
        return "\n".join(lines)


class _Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name := _KERNELS.get(func._overloadpacket.__name__):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def explain(subject: Mechanism[Any, Any] | nn.Module | str, *inputs: Tensor, **keywords: Any) -> Explanation:
    """Run a call (twice) and report which implementation it took, with which chunk sizes, and why.

    Args:
        subject: A mechanism, its name or repr (weights are then made for the inputs), a ``Bound``, or any module that
            holds mechanisms.
        *inputs: What the call takes: q, k, v (..., H, L, E) for an attention, x (..., N, E) for a mixer.
        **keywords: Further arguments of the call: ``is_causal``, ``key_mask``.

    Returns:
        The steps taken, in order, for these sizes on this machine.

    Raises:
        Unsupported, ValueError: As the call itself.
    """
    name, gpu = repr(subject) if isinstance(subject, Mechanism) else str(subject), ""
    if isinstance(subject, str | Mechanism):
        mechanism = catalogue.parse(subject)  # type: ignore[arg-type]
        name, gpu, subject = repr(mechanism), mechanism.traits.gpu, _bound(mechanism, inputs)
    elif isinstance(subject, Bound):
        name, gpu = repr(subject.mechanism), subject.mechanism.traits.gpu
    elif isinstance(subject, nn.Module):
        name = type(subject).__name__
    else:
        raise TypeError(f"subject is a mechanism, its name, a Bound or another module; got {in_words(subject)}")
    with trace.recorded() as steps, torch.no_grad():
        subject(*inputs, **keywords)
    with _Kernels() as kernels, torch.no_grad():
        subject(*inputs, **keywords)
    tensors = [x for x in inputs or keywords.values() if isinstance(x, Tensor)]
    return Explanation(name, _shapes(tensors), tuple(steps), dict(kernels.counts), gpu)


def _shapes(inputs: list[Tensor]) -> str:
    if not inputs:
        return "no tensors"
    threads = f", {torch.get_num_threads()} threads" if inputs[0].device.type == "cpu" else ""
    return f"{' '.join(str(tuple(x.shape)) for x in inputs)} {inputs[0].dtype} on {inputs[0].device}{threads}"


def _bound(mechanism: Any, inputs: tuple[Tensor, ...]) -> Bound:
    names = "qkv" if isinstance(mechanism, Attention) else "x"
    if len(inputs) != len(names):
        raise TypeError(f"{mechanism!r} takes {', '.join(names)}; got {len(inputs)} tensors")
    named = dict(zip(names, inputs, strict=True))
    checks.tensors(**named)
    checks.rows(named, same_width=False)
    first, longest = inputs[0], max(x.shape[-2] for x in inputs)
    shape = Shape(first.shape[-3] if isinstance(mechanism, Attention) else 1, first.shape[-1], longest)
    return Bound(mechanism, shape).to(first.device, first.dtype)
