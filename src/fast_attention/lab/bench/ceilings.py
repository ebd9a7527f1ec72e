"""Measures the machine's limits in the same process: matrix products, exponentials, copies, new tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fast_attention import clock

PATIENCE = 0.4  # seconds for each limit


def ceilings(device: torch.device, dtype: torch.dtype, patience: float = PATIENCE) -> dict[str, float]:
    """Measure the highest rates that the machine reaches now, in ``dtype``.

    Returns:
        ``gemm_gflops`` (2048 x 2048 x 2048), ``bmm_gflops`` (256 products of 128 x 64 x 128), ``exp_gelem_s`` (half a
        million numbers in place), ``copy_gb_s`` (64 MiB, read and written bytes together), ``fresh_gb_s`` (64 MiB
        allocated and written: where a CPU's system hands out such memory page by page, ``keep_memory`` not called, a
        tensor at a great length can cost more to get than to compute) and ``empty_us`` (an operation on one number:
        what a call costs).
    """
    a, b = (torch.randn(2048, 2048).to(device, dtype) for _ in range(2))
    c = torch.empty_like(a)
    small, other = (torch.randn(256, *size).to(device, dtype) for size in ((128, 64), (64, 128)))
    x = torch.rand(2**19, device=device).to(dtype)
    e = torch.empty_like(x)
    source = torch.ones(2**24, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)
    operations: dict[str, tuple[Callable[[], Any], float]] = {
        "gemm_gflops": (lambda: torch.mm(a, b, out=c), 2 * 2048**3 / 1e9),
        "bmm_gflops": (lambda: torch.bmm(small, other), 256 * 2 * 128 * 64 * 128 / 1e9),
        "exp_gelem_s": (lambda: torch.exp(x, out=e), x.numel() / 1e9),
        "copy_gb_s": (lambda: target.copy_(source), 2 * source.nbytes / 1e9),
        "fresh_gb_s": (lambda: torch.ones_like(source), source.nbytes / 1e9),
        "empty_us": (lambda: one.add_(0.0), 0.0),
    }
    with torch.no_grad():
        best = {name: least(run, device, patience) for name, (run, _) in operations.items()}
    rates = {name: operations[name][1] / seconds for name, seconds in best.items() if operations[name][1]}
    return {**rates, "empty_us": best["empty_us"] * 1e6}


def least(run: Callable[[], Any], device: torch.device, patience: float) -> float:
    """The shortest time of one call, of as many as ``patience`` seconds allow and three at least."""
    repeats = clock.repeats_for(clock.seconds(run, device))
    times, began = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < patience:
        times.append(clock.seconds(run, device, repeats))
    return min(times)
