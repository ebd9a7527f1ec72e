"""Compares the kernels once on every device with plain operations; where they differ, the plain ones serve.

Compilers for new GPUs have made wrong code of right kernels. The verdict is kept for versions of torch, Triton and the
GPU's name, so that a process pays for it only where nobody has yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from fast_attention import files
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import FeatureMap
from fast_attention.gpu import maps, operations, plain

TOKENS = 300  # more than a chunk, and no multiple of a block
LARGEST = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # error, of the largest number
_verdicts: dict[str, str] = {}


def obstacle(q: Tensor, v: Tensor, phi: FeatureMap) -> str:
    """Why the kernels are not trusted for such heads here; empty where they are."""
    if symbolic() or not q.is_cuda or torch.cuda.is_current_stream_capturing():  # nothing may be run, or nothing can
        return ""
    known = maps.code(phi) if isinstance(phi, maps.Elementwise) else None
    return verdict(q.shape[-1], v.shape[-1], q.dtype, q.device, *(known or (maps.IDENTITY, 0.0)))


def verdict(width: int, values: int, dtype: torch.dtype, device: torch.device, code: int, offset: float) -> str:
    """What was found wrong, now or by an earlier process; empty for nothing."""
    key = " ".join(map(str, (_device(device), torch.__version__, _triton(), width, values, dtype, code)))
    if key not in _verdicts:
        _verdicts.update(_kept())
    if key not in _verdicts:
        with torch.inference_mode(False):
            _verdicts[key] = compared(width, values, dtype, device, code, offset)
        with contextlib.suppress(OSError):
            _path().parent.mkdir(parents=True, exist_ok=True)
            files.write(_path(), json.dumps(_kept() | {key: _verdicts[key]}, indent=1) + "\n")
        if _verdicts[key]:
            warnings.warn(
                f"fast-attention runs plain operations instead of Triton kernels: {_verdicts[key]}", stacklevel=2
            )
    return _verdicts[key]


def compared(width: int, values: int, dtype: torch.dtype, device: torch.device, code: int, offset: float) -> str:
    """What kernels make of a small case, and its gradients, that plain operations do not."""
    generator = torch.Generator(device=device).manual_seed(0)
    q, k, v, grad = (
        torch.rand(1, 2, TOKENS, size, generator=generator, device=device).to(dtype)
        for size in (width, width, values, values)
    )
    numbers = 1e-6, code, offset
    forms: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "causal": (
            lambda q, k, v: operations.chunk_scan(q, k, v, None, None, *numbers, True)[0],
            lambda q, k, v: plain.scan(q, k, v, None, None, *numbers)[0],
        ),
        "noncausal": (
            lambda q, k, v: operations.read_sums(q, operations.key_sums(k, v, None, *numbers[1:]), *numbers, True)[0],
            lambda q, k, v: plain.read_sums(q, plain.key_sums(k, v, None, *numbers[1:]), *numbers),
        ),
    }
    for name, pair in forms.items():
        results = []
        for form, kind in zip(pair, (dtype, torch.float64), strict=True):  # no TF32 of the caller's in float64
            with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                tensors = [x.to(kind).requires_grad_() for x in (q, k, v)]
                out = form(*tensors)
                results.append([out, *torch.autograd.grad(out, tensors, grad.to(kind))])
        for part, kernel, expected in zip(("output", "dq", "dk", "dv"), *results, strict=True):
            kernel, expected = kernel.detach().double(), expected.detach()
            error = float((kernel - expected).abs().max() / expected.abs().max())
            if not error <= LARGEST[dtype]:  # NaN too
                return f"{name} {part} of heads of {width} and {values} in {dtype} is off by {error:.2g}"
    return ""


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


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
