"""Compares the kernels once on every device with plain operations; where they differ, the plain ones serve.

Compilers for new GPUs have made wrong code of right kernels. The verdict is kept for versions of torch, Triton and the
GPU's name, so that a process pays for it only where nobody has yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention import files
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import Elementwise
from fast_attention.gpu import decayed as decays
from fast_attention.gpu import maps, operations, plain
from fast_attention.gpu.exponential import kernels as exponentials
from fast_attention.gpu.exponential import plain as plain_exponentials
from fast_attention.gpu.forms import Forms
from fast_attention.gpu.pooling import operations as pooling
from fast_attention.gpu.pooling import plain as plain_pooling

TOKENS = 300  # more than a chunk, and no multiple of a block
LARGEST = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # error, of the largest number
_verdicts: dict[str, str] = {}


class Case(NamedTuple):
    """Kernels to be compared, by name, and how they and their plain forms are made for heads of two on a device."""

    name: str
    make: Callable[[torch.device], tuple[Forms, Forms]]


def elementwise(phi: Elementwise) -> Case:
    """The kernels of a map's number, those of features where it has none."""
    code, offset = maps.code(phi) or (maps.IDENTITY, 0.0)
    numbers = 1e-6, code, offset
    return Case(f"map {code}", lambda device: (operations.forms(*numbers, keep=True), plain.forms(*numbers)))


def decayed(phi: Elementwise, *, normalized: bool) -> Case:
    """The kernels of sums that decay."""
    code, offset = maps.code(phi) or (maps.IDENTITY, 0.0)

    def make(device: torch.device) -> tuple[Forms, Forms]:
        logs = torch.rand(1, 2, TOKENS, generator=torch.Generator(device).manual_seed(1), device=device) * -0.1
        return decays.forms(logs, 1e-6, code, offset, keep=True, normalized=normalized)

    return Case(f"decays {code} {normalized}", make)


def pools() -> Case:
    """The kernels of pools."""
    return Case("pools", lambda device: (pooling.forms(gated=True, keep=True), plain_pooling.forms(gated=True)))


def exponential(features: int, width: int) -> Case:
    """The kernels of so many exponentials, of heads so wide."""

    def make(device: torch.device) -> tuple[Forms, Forms]:
        rows = torch.randn(2, features, width, generator=torch.Generator(device).manual_seed(1), device=device)
        return exponentials.forms(rows, rows, None, keep=True, trained=False), plain_exponentials.forms(
            rows, rows, None
        )

    return Case(f"exponentials {features}", make)


def obstacle(case: Case, q: Tensor, v: Tensor, *, masked: bool) -> str:
    """Why the kernels are not trusted for such heads here; empty where they are."""
    if symbolic() or not q.is_cuda or torch.cuda.is_current_stream_capturing():  # nothing may be run, or nothing can
        return ""
    return verdict(case, q.shape[-1], v.shape[-1], q.dtype, q.device, masked=masked)


def verdict(case: Case, width: int, values: int, dtype: torch.dtype, device: torch.device, *, masked: bool) -> str:
    """What was found wrong, now or by an earlier process; empty for nothing."""
    mask = "masked" if masked else "unmasked"
    key = " ".join(map(str, (_device(device), torch.__version__, _triton(), width, values, dtype, case.name, mask)))
    if key not in _verdicts:
        _verdicts.update(_kept())
    if key not in _verdicts:
        with torch.inference_mode(False):
            _verdicts[key] = compared(case, width, values, dtype, device, masked=masked)
        with contextlib.suppress(OSError):
            _path().parent.mkdir(parents=True, exist_ok=True)
            files.write(_path(), json.dumps(_kept() | {key: _verdicts[key]}, indent=1) + "\n")
        if _verdicts[key]:
            warnings.warn(
                f"fast-attention runs plain operations instead of Triton kernels: {_verdicts[key]}", stacklevel=2
            )
    return _verdicts[key]


def compared(case: Case, width: int, values: int, dtype: torch.dtype, device: torch.device, *, masked: bool) -> str:
    """What kernels make of a small case, and its gradients, that plain operations do not."""
    generator = torch.Generator(device=device).manual_seed(0)
    q, k, v, grad = (
        torch.rand(1, 2, TOKENS, size, generator=generator, device=device).to(dtype)
        for size in (width, width, values, values)
    )
    mask = torch.rand(1, 2, TOKENS, generator=generator, device=device) > 0.2 if masked else None
    forms = case.make(device)
    for name in ("causal",) if forms[0].read is None else ("causal", "noncausal"):
        results = []
        for form, kind in zip(forms, (dtype, torch.float64), strict=True):  # no TF32 of the caller's in float64
            with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                x, y, z = (x.to(kind).requires_grad_() for x in (q, k, v))
                out = _result(form, x, y, z, mask, is_causal=name == "causal")
                results.append([out, *torch.autograd.grad(out, (x, y, z), grad.to(kind))])
        if why := _unlike(name, ("output", "dq", "dk", "dv"), *results, of=f"{width} and {values} in {dtype}"):
            return why
    right = forms[1].scan(k.double(), k.double(), v.double(), mask, None)[1]  # a state of many keys
    with torch.no_grad():
        decoded = _decoded(forms[0], q, k, v, mask, right.float())
        expected = _decoded(forms[1], q.double(), k.double(), v.double(), mask, right)
    return _unlike("decoded", ("output", "state"), decoded, expected, of=f"{width} and {values} in {dtype}")


def _unlike(name: str, parts: Iterable[str], kernels: Iterable[Tensor], rights: Iterable[Tensor], *, of: str) -> str:
    """The first part that kernels got wrong; empty for none."""
    for part, kernel, right in zip(parts, kernels, rights, strict=True):
        kernel, right, most = kernel.detach(), right.detach(), LARGEST[kernel.dtype]
        error = float((kernel.double() - right).abs().max() / right.abs().max())
        if not error <= most:  # NaN too
            return f"{name} {part} of heads of {of} is off by {error:.2g}"
    return ""


def _decoded(
    forms: Forms, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The first token, added to a state."""
    q, k, v = q[..., :1, :], k[..., :1, :], v[..., :1, :]
    return forms.step(q, k, v, None if mask is None else mask[..., :1], state)


def _result(forms: Forms, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    if is_causal:
        return forms.scan(q, k, v, mask, None)[0]
    assert forms.sums is not None
    assert forms.read is not None
    return forms.read(q, forms.sums(k, v, mask))


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


def _kept() -> dict[str, str]:
    """The verdicts of earlier processes."""
    try:
        held = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}
