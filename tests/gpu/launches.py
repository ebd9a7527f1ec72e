"""The library's own launches of its kernels in every configuration, caught on tensors without memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor

from fast_attention.engine.operation import Operation
from fast_attention.gpu import launching, pools
from fast_attention.gpu.configurations import EXPONENTIAL, TABLE
from fast_attention.mechanisms.aft import kernels as pools_of_aft
from fast_attention.mechanisms.linear import kernels

KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.float64: "fp64"}
DECAYED = (64, max(TABLE))  # widths for which sums that decay are compiled: they differ by a few instructions
OPTIONS = ("num_warps", "num_stages")


class Caught(NamedTuple):
    """A launch: the kernel by module and name, what it was given, and how."""

    module: str
    name: str
    signature: dict[str, str]
    constants: dict[str, Any]
    hints: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    @property
    def key(self) -> str:
        """Equal for launches of one and the same program."""
        return json.dumps([self.module, self.name, self.signature, self.constants, self.options])

    @property
    def kernel(self) -> Any:
        return getattr(__import__(self.module, fromlist=[self.name]), self.name)

    def digest(self, target: int) -> str:
        """Of all that the compiler reads, and of the compiler."""
        compiler = triton.__version__, os.environ.get("TRITON_PTXAS_PATH", "")
        read = (self.key, str(self.hints), self.kernel.cache_key, str(target), *compiler)
        return hashlib.sha256("\n".join(read).encode()).hexdigest()[:16]


@contextmanager
def catching() -> Iterator[list[Caught]]:
    """Launches inside are kept instead of made."""
    kept: list[Caught] = []

    def launch(kernel: Any, programs: int, *given: Any, **named: Any) -> None:
        assert programs > 0
        options = {key: named.pop(key) for key in OPTIONS if key in named}
        given_all = dict(zip(kernel.arg_names, given, strict=False)) | named
        assert {*given_all} == {*kernel.arg_names}, kernel.__name__
        by_name = {name: given_all[name] for name in kernel.arg_names}
        constant = {p.name for p in kernel.params if p.is_constexpr or by_name[p.name] is None}
        signature, hints = {}, {}
        for at, (name, value) in enumerate(by_name.items()):
            if name in constant:
                signature[name] = "constexpr"
            elif isinstance(value, Tensor):
                signature[name], hints[(at,)] = f"*{KINDS[value.dtype]}", [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        constants = {name: by_name[name] for name in by_name if name in constant}
        kept.append(Caught(kernel.__module__, kernel.__name__, signature, constants, hints, options))

    with pytest.MonkeyPatch.context() as patch:
        for module in (launching, pools):
            patch.setattr(module, "launch", launch)
        yield kept


def passes(operation: Operation, *tensors: Any, **settings: Any) -> Any:
    """The outputs of a forward pass, once its backward pass has been launched too."""
    fast = operation.cuda
    assert fast is not None
    assert fast.backward is not None
    outputs, saved = fast.forward(*tensors, keep=True, **settings)
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    fast.backward(tensors, several, saved, several, **settings)
    return outputs


def launches(width: int, dtype: torch.dtype) -> Iterator[Caught]:
    """All launches of forward and backward passes, causal and not, for heads of this width."""
    q = torch.empty(1, 1, 1000, width, dtype=dtype, device="meta")
    one, mask = q[..., :1, :], torch.empty(1, 1, 1000, dtype=torch.bool, device="meta")
    of_map: dict[str, Any] = {"code": 1, "offset": 0.0}
    with catching() as kept:
        decays = [None, torch.empty(q.shape[:-1], device="meta")]
        for log_decay in decays if width in DECAYED else decays[:1]:
            _, last = passes(kernels.chunk_scan, q, q, q, mask, None, log_decay, eps=1e-6, **of_map)
            logs = None if log_decay is None else log_decay[..., :1]
            kernels._step(one, one, one, mask[..., :1], last, logs, eps=1e-6, **of_map)
        passes(kernels.read_sums, q, passes(kernels.key_sums, q, q, mask, **of_map), eps=1e-6, **of_map)
        if width in {width for width, _ in EXPONENTIAL}:  # 256 features, biased and trained
            rows = torch.empty(1, 256, width, device="meta", requires_grad=True)
            given = rows, torch.empty(1, 256, device="meta")
            _, last = passes(kernels.feature_scan, q, q, q, mask, None, *given, rows, None)
            passes(kernels.feature_read, q, passes(kernels.feature_sums, q, q, mask, *given), *given)
            kernels._feature_step(one, one, one, mask[..., :1], last, *given, rows)
        if width == launching.CHANNELS:
            passes(pools_of_aft.pool_scan, q, q, q, mask, None, None)
            passes(pools_of_aft.pool_read, q, passes(pools_of_aft.pool_sums, q, q, mask))
    yield from kept
