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
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from fast_attention import __version__, files
from fast_attention.engine.tracing import symbolic
from fast_attention.gpu.cases import Case

_verdicts: dict[str, str] = {}


def obstacle(case: Case, q: Tensor, v: Tensor, *, masked: bool) -> str:
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
    """What was found wrong, now or by an earlier process; empty for nothing."""
    key = _key(case, width, values, dtype, device, masked=masked)
    if _earlier(key) is None:
        try:
            _verdicts[key] = compared(case, width, values, dtype, device, masked=masked)
            with contextlib.suppress(OSError):
                _path().parent.mkdir(parents=True, exist_ok=True)
                files.write(_path(), json.dumps(_kept() | {key: _verdicts[key]}, indent=1) + "\n")
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
    """What kernels make of a small case, and its gradients, that plain operations do not; in no caller's mode."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False):
            return case.compare(width, values, dtype, device, masked)
    finally:
        torch.set_default_dtype(default)


def _earlier(key: str) -> str | None:
    """What was found before, by this process or an earlier one; None where nothing was compared."""
    if key not in _verdicts:
        _verdicts.update(_kept())
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


def _kept() -> dict[str, str]:
    """The verdicts of earlier processes."""
    try:
        held = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}
