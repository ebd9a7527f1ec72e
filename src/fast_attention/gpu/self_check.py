"""Compares the kernels once on every device with plain operations; where they differ, the plain ones serve.

Compilers for new GPUs have made wrong code of right kernels. The verdict is kept for versions of this library, torch,
Triton and the GPU's name, so that a process pays for it only where nobody has yet; where nothing could be compared, for
want of a C compiler say, the next process tries again.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention import __version__, files
from fast_attention.engine import trace
from fast_attention.engine.tracing import symbolic
from fast_attention.gpu import flex
from fast_attention.gpu.calls import KernelSet

TOKENS = 300  # more than a chunk, and no multiple of a block
LARGEST = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # error, of the largest number
Make = Callable[[torch.device], KernelSet]
_verdicts: dict[str, str] = {}


class Case(NamedTuple):
    """Kernels to be compared, by name; ``compare(width, values, dtype, device, masked)`` says what is wrong."""

    name: str
    compare: Callable[[int, int, torch.dtype, torch.device, bool], str]

    @classmethod
    def of(cls, name: str, make: Make) -> Case:
        """A case of kernels, made for two heads on a device, and the references of their operations."""
        return cls(name, partial(_unlike_reference, make))


def unsupported_reason(case: Case, q: Tensor, v: Tensor, *, masked: bool) -> str:
    """Why the kernels are not trusted for such heads here; empty where they are.

    While a CUDA graph is captured nothing can be compared: what was found before counts.
    """
    if symbolic() or not q.is_cuda:
        return ""
    sizes = q.shape[-1], v.shape[-1], q.dtype, q.device
    if torch.cuda.is_current_stream_capturing():
        return _earlier(_key(case, *sizes, masked=masked)) or ""
    return verdict(case, *sizes, masked=masked)


def verdict(case: Case, width: int, values: int, dtype: torch.dtype, device: torch.device, *, masked: bool) -> str:
    """The fault that was found, now or by an earlier process; empty for none."""
    key = _key(case, width, values, dtype, device, masked=masked)
    if _earlier(key) is None:
        try:
            _verdicts[key] = compared(case, width, values, dtype, device, masked=masked)
            with contextlib.suppress(OSError):
                _path().parent.mkdir(parents=True, exist_ok=True)
                files.write(_path(), json.dumps(_saved() | {key: _verdicts[key]}, indent=1) + "\n")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers raise errors of many kinds; some are gone when the next process asks
            what = f"{case.name} for heads of {width} and {values} in {dtype}"
            _verdicts[key] = f"{what} failed: {f'{error}'.splitlines()[:1]}"
        if _verdicts[key]:
            warnings.warn(
                f"fast-attention runs plain operations instead of Triton kernels: {_verdicts[key]}", stacklevel=2
            )
    return _verdicts[key]


def compared(case: Case, width: int, values: int, dtype: torch.dtype, device: torch.device, *, masked: bool) -> str:
    """Compare kernels with plain operations on a small case, with its gradients, in no caller's mode."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False):
            return case.compare(width, values, dtype, device, masked)
    finally:
        torch.set_default_dtype(default)


def _earlier(key: str) -> str | None:
    """The finding of this process or an earlier one; None where nothing was compared."""
    if key not in _verdicts:
        _verdicts.update(_saved())
    return _verdicts.get(key)


def _key(case: Case, width: int, values: int, dtype: torch.dtype, device: torch.device, *, masked: bool) -> str:
    mask = "masked" if masked else "unmasked"
    versions = __version__, torch.__version__, _triton()
    return " ".join(map(str, (_device(device), *versions, width, values, dtype, case.name, mask)))


@cache
def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "unknown"


def _path() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "fast_attention" / "kernels.json"


def _saved() -> dict[str, str]:
    """The verdicts of earlier processes."""
    try:
        verdicts = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return verdicts if isinstance(verdicts, dict) else {}


def flex_attention() -> Case:
    """Softmax over intervals of keys by torch's FlexAttention."""
    return Case("FlexAttention", _unlike_softmax)


def flex_logs() -> Case:
    """FlexAttention with the logarithms of normalisers, through which gradients go too."""
    return Case("FlexAttention's logarithms", partial(_unlike_softmax, logged=True))


def _unlike_softmax(
    width: int, values: int, dtype: torch.dtype, device: torch.device, masked: bool, logged: bool = False
) -> str:
    # about zero: of positive numbers the gradients of weights nearly cancel, and what rounding leaves is 3 % of dq
    q, k, v, grad = (x - 0.5 for x in _heads(width, values, dtype, device))
    at = torch.arange(TOKENS, device=device)
    hidden = (at[None] < 80) if masked else torch.zeros_like(at[None], dtype=torch.bool)  # some queries see nothing
    pattern, results = flex.intervals(at - 40, at + 3, TOKENS), []
    visible = (at >= at[:, None] - 40) & (at <= at[:, None] + 3) & ~hidden
    nothing = ~visible.any(-1, keepdim=True)

    def right(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = (q @ k.mT * width**-0.5).masked_fill(~visible & ~nothing, float("-inf"))
        out, logs = scores.softmax(-1).masked_fill(nothing, 0.0) @ v, scores.logsumexp(-1)
        return out, logs.masked_fill(nothing[..., 0], 0.0)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mask = ~hidden if masked else None
        if not logged:
            return (out := flex.attend(q, k, v, pattern, mask, scale=None)), out[..., 0]
        out, logs = flex.attend_with_logs(q, k, v, pattern, mask, scale=None)
        return out, logs.masked_fill(nothing[..., 0], 0.0)

    for form, kind in ((kernel, dtype), (right, torch.float64)):
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            x = [t.to(kind).requires_grad_() for t in (q, k, v)]
            out, logs = form(*x)
            ends = (out, logs) if logged else (out,)
            starts = [grad.to(kind), grad[..., 0].to(logs.dtype)][: len(ends)]
            results.append([*ends, *torch.autograd.grad(ends, x, starts)])
    parts = ("output", *("logarithm" for _ in range(logged)), "dq", "dk", "dv")
    return _unlike("softmax's", parts, *results, of=f"{width} and {values} in {dtype}")


def _drawn(*sizes: int, device: torch.device, seed: int = 1) -> Tensor:
    return torch.rand(sizes, generator=torch.Generator(device).manual_seed(seed), device=device)


def _heads(width: int, values: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Queries, keys, values and a gradient of outputs for two heads."""
    generator, sizes = torch.Generator(device=device).manual_seed(0), (width, width, values, values)
    return tuple(torch.rand(1, 2, TOKENS, n, generator=generator, device=device).to(dtype) for n in sizes)


def _unlike_reference(
    make: Make, width: int, values: int, dtype: torch.dtype, device: torch.device, masked: bool
) -> str:
    q, k, v, grad = _heads(width, values, dtype, device)
    mask = _drawn(1, 2, TOKENS, device=device) > 0.2 if masked else None
    run, of = make(device), f"{width} and {values} in {dtype}"
    for name in ("causal",) if run.read is None else ("causal", "noncausal"):
        results = []
        for kind, context in ((dtype, contextlib.nullcontext()), (torch.float64, trace.implementation("reference"))):
            # in float64 no TF32 of the caller's
            with torch.enable_grad(), torch.autocast(device.type, enabled=False), context:
                x, y, z = (x.to(kind).requires_grad_() for x in (q, k, v))
                if name == "causal" or run.sums is None or run.read is None:
                    out = run.scan(x, y, z, mask, None)[0]
                else:
                    out = run.read(x, run.sums(y, z, mask))
                results.append([out, *torch.autograd.grad(out, (x, y, z), grad.to(kind))])
        if why := _unlike(name, ("output", "dq", "dk", "dv"), *results, of=of):
            return why
    one, one_mask = [x[..., :1, :] for x in (q, k, v)], None if mask is None else mask[..., :1]
    with torch.no_grad(), trace.implementation("reference"):
        state = run.scan(k.double(), k.double(), v.double(), mask, None)[1]  # of many keys
        x, y, z = (x.double() for x in one)
        expected = run.scan(x, y, z, one_mask, state)
    with torch.no_grad():
        x, y, z = one
        decoded = run.step(x, y, z, one_mask, state.float())
    return _unlike("decoded", ("output", "state"), decoded, expected, of=of)


def _unlike(name: str, parts: Iterable[str], kernels: Iterable[Tensor], rights: Iterable[Tensor], *, of: str) -> str:
    """The first part that kernels got wrong; empty for none."""
    for part, kernel, right in zip(parts, kernels, rights, strict=True):
        kernel, right, most = kernel.detach(), right.detach(), LARGEST[kernel.dtype]
        error = float((kernel.double() - right).abs().max() / right.abs().max())
        if not error <= most:  # NaN too
            return f"{name} {part} of heads of {of} is off by {error:.2g}"
    return ""
