"""The library's own launches of its kernels in every configuration, caught on tensors without memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fast_attention.gpu import gradients, launching, reading, steps, sums
from fast_attention.gpu.configurations import EXPONENTIAL, TABLE
from fast_attention.gpu.decays import Decays
from fast_attention.gpu.exponential import gradients as exponential_gradients
from fast_attention.gpu.exponential import launching as exponential_launching
from fast_attention.gpu.exponential import reading as exponential_reading
from fast_attention.gpu.exponential import steps as exponential_steps
from fast_attention.gpu.exponential import sums as exponential_sums
from fast_attention.gpu.exponential import values as exponential_values
from fast_attention.gpu.launching import Launch
from fast_attention.gpu.pooling import gradients as pool_gradients
from fast_attention.gpu.pooling import kernels as pool_kernels
from fast_attention.gpu.pooling import launching as pools

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


class Catcher:
    """Stands for a kernel and keeps its launches."""

    def __init__(self, module: ModuleType, name: str, kept: list[Caught]) -> None:
        self.kernel, self.module, self.name, self.kept = getattr(module, name), module.__name__, name, kept

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 1
        assert grid[0] > 0
        return self.launch

    def launch(self, *given: Any, **named: Any) -> None:
        options = {key: named.pop(key) for key in OPTIONS if key in named}
        given_all = dict(zip(self.kernel.arg_names, given, strict=False)) | named
        assert {*given_all} == {*self.kernel.arg_names}, self.name
        by_name = {name: given_all[name] for name in self.kernel.arg_names}
        constant = {p.name for p in self.kernel.params if p.is_constexpr}
        signature, hints = {}, {}
        for at, (name, value) in enumerate(by_name.items()):
            if name in constant:
                signature[name] = "constexpr"
            elif isinstance(value, Tensor):
                signature[name], hints[(at,)] = f"*{KINDS[value.dtype]}", [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        constants = {name: by_name[name] for name in by_name if name in constant}
        self.kept.append(Caught(self.module, self.name, signature, constants, hints, options))


KERNELS = [(sums, "chunk_sums"), (sums, "running_sums"), (sums, "row_products"), (reading, "outputs")]
KERNELS += [(gradients, name) for name in ("of_queries", "of_keys", "of_values")]
KERNELS += [(exponential_sums, "chunk_sums"), (exponential_sums, "running_sums"), (exponential_reading, "outputs")]
KERNELS += [
    (exponential_gradients, "of_queries"),
    (exponential_gradients, "of_keys"),
    (exponential_values, "of_values"),
]
KERNELS += [(pool_kernels, name) for name in ("chunk_pools", "running_pools", "outputs")]
KERNELS += [(pool_gradients, name) for name in ("of_queries", "running_sums", "of_keys")]
KERNELS += [(steps, "elementwise"), (exponential_steps, "exponential")]


@contextmanager
def catching() -> Iterator[list[Caught]]:
    """Launches inside are kept instead of made."""
    kept: list[Caught] = []
    real = [getattr(module, name) for module, name in KERNELS]
    for module, name in KERNELS:
        setattr(module, name, Catcher(module, name, kept))
    try:
        yield kept
    finally:
        for (module, name), kernel in zip(KERNELS, real, strict=True):
            setattr(module, name, kernel)


def elementwise(q: Tensor, mask: Tensor, *, is_causal: bool) -> None:
    """A forward and backward pass of the kernels of elementwise features."""
    run = Launch.of(q, q, 1, 0.0)
    states, last = run.sums(q, q, mask, None)
    before = states if is_causal else last
    out, factors, rest = run.outputs(q, q, q, mask, before, 1e-6, is_causal=is_causal, keep=True)
    weights = run.weights(out, rest, q, factors)
    behind, whole = run.sums(q, q, None, None, factors=factors, weights=weights, backwards=True)
    given = q, q, q, mask, q, factors, weights
    run.of_queries(*given, before, is_causal=is_causal)
    run.of_keys(*given, behind if is_causal else whole, is_causal=is_causal)
    launching.step(q[..., :1, :], q, q, mask, last, 1e-6, 1, 0.0)


def decayed(q: Tensor, mask: Tensor) -> None:
    """The same, causal, of sums that decay."""
    run = Launch.of(q, q, 1, 0.0)
    logs = torch.empty(q.shape[:-1], device="meta")
    run = replace(run, decays=Decays.of(logs, run.sizes.chunk))
    states, last = run.sums(q, q, mask, None)
    out, factors, rest = run.outputs(q, q, q, mask, states, 1e-6, is_causal=True, keep=True)
    weights = run.weights(out, rest, q, factors)
    behind, _ = run.sums(q, q, None, None, factors=factors, weights=weights, backwards=True)
    given = q, q, q, mask, q, factors, weights
    run.of_queries(*given, states, is_causal=True)
    run.of_keys(*given, behind, is_causal=True)
    launching.step(q[..., :1, :], q, q, mask, last, 1e-6, 1, 0.0, logs[..., 0])


def exponential(q: Tensor, mask: Tensor, *, is_causal: bool) -> None:
    """The same of exponential features: 256 of them, biased and trained."""
    rows = torch.empty(1, 256, q.shape[-1], device="meta")
    bias = torch.empty(1, 256, device="meta")
    run = exponential_launching.Launch.of(q, rows, rows, bias, trained=True)
    states, last = run.sums(q, q, mask, None)
    before = states if is_causal else last
    read = run.outputs(q, q, q, mask, before, is_causal=is_causal, keep=True)
    weights = run.denominators(read, q)
    behind, whole = run.sums(q, q, None, None, read=read, weights=weights)
    given = q, q, q, mask, q, read, weights
    run.of_queries(*given, before, is_causal=is_causal)
    run.of_keys(*given, behind if is_causal else whole, is_causal=is_causal)
    weights = exponential_launching.Weights(rows, rows, bias, trained=False)
    exponential_launching.step(q[..., :1, :], q, q, mask, last, weights)


def pooling(q: Tensor, mask: Tensor) -> None:
    """A forward and backward pass of the kernels of pools, causal and not."""
    run = pools.Launch(q)
    before, last = run.pools(q, q, mask, None)
    for is_causal in (True, False):
        out, rest, logs = run.outputs(q, q, q, mask, before, None, is_causal=is_causal, gated=True, keep=True)
        after = last if is_causal else None
        _, sums, _ = run.of_queries(q, out, rest, logs, q, after, gated=True)
        run.of_keys(q, q, mask, sums, (q, out, rest, logs, q) if is_causal else None, gated=True)


def launches(width: int, dtype: torch.dtype) -> Iterator[Caught]:
    """All launches of forward and backward passes, causal and not, for heads of this width."""
    q = torch.empty(1, 1, 1000, width, dtype=dtype, device="meta")
    mask = torch.empty(1, 1, 1000, dtype=torch.uint8, device="meta")
    with catching() as kept:
        for is_causal in (True, False):
            elementwise(q, mask, is_causal=is_causal)
            if width in {width for width, _ in EXPONENTIAL}:
                exponential(q, mask, is_causal=is_causal)
        if width in DECAYED:
            decayed(q, mask)
        if width == pools.CHANNELS:
            pooling(q, mask)
    yield from kept
