"""Wall time of a call, the device's queue empty before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def seconds(run: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Wall time of one call, averaged over ``repeats``, the device's queue empty before and after."""
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    _synchronise(device)
    return (time.perf_counter() - start) / repeats


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
