"""Measures the wall time of calls on any device: of one by itself, or of several in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

SHORTEST_SAMPLE = 0.002  # seconds: faster calls are repeated and averaged within one sample
MOST_REPEATS = 50


def seconds(run: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Wall time of one call, averaged over ``repeats``, the device's queue empty before and after."""
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait(device)
    return (time.perf_counter() - start) / repeats


def repeats_for(estimate: float) -> int:
    """The number of calls of ``estimate`` seconds that make a sample long enough to time."""
    return max(1, min(MOST_REPEATS, round(SHORTEST_SAMPLE / max(estimate, 1e-9))))


def in_turns(
    runs: Mapping[Any, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    patience: float = math.inf,
    repeats: int = 1,
) -> dict[Any, list[float]]:
    """Seconds of every run, one after the other in each round; after ``patience`` seconds no further round begins."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    for number in range(rounds):
        if number and time.perf_counter() - start > patience:
            break
        for name, run in runs.items():
            times[name].append(seconds(run, device, repeats))
    return times


def wait(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
