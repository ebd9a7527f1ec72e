"""Counts what a call costs: arithmetic operations and the peak of the memory it allocates."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fast_attention import core

_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_VECTOR_PRODUCTS = ("mv", "dot")  # which torch's table leaves out
_SORTS = ("sort", "topk", "argsort")
_TRANSFORMS = ("_fft_c2c", "_fft_r2c", "_fft_c2r")


class _Counter(TorchDispatchMode):
    """Counts 2 per multiply-add of a matrix product, 1 per element written by anything else, n log n where it holds."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # imports Triton, where that is installed

        super().__init__()
        self.operations, self.registry = 0, flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in self.registry:
            self.operations += int(self.registry[packet](*args, **(kwargs or {}), out_val=out))
            return out
        name = packet.__name__
        if name.startswith(_CPU_ATTENTION):
            self.operations += _attention_operations(name, args)
            return out
        if name in _VECTOR_PRODUCTS:
            self.operations += 2 * args[0].numel()
            return out
        input_storages = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if not isinstance(t, Tensor) or (t.untyped_storage()._cdata in input_storages and not name.endswith("_")):
                continue
            factor = 1.0
            if name in _SORTS:
                factor = math.log2(max(t.shape[-1] if t.ndim else 1, 2))
            elif name in _TRANSFORMS:
                factor = 5 * math.log2(max(t.numel(), 2))
            self.operations += int(t.numel() * factor)
        return out


def _attention_operations(name: str, args: Any) -> int:
    """Two matrix products forward, five backward, which torch's table leaves out on the CPU."""
    q, k, v = args[1:4] if name.endswith("_backward") else args[:3]
    products = 5 * (q.shape[-1] + v.shape[-1]) if name.endswith("_backward") else 2 * (q.shape[-1] + v.shape[-1])
    return int(q.shape[:-1].numel() * k.shape[-2] * products)


class _Peak(TorchDispatchMode):
    """Tracks the size of all storages that operations allocate, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.alive: dict[int, Any] = {}

    def _freed(self, key: int, size: int) -> None:
        if self.alive.pop(key, None) is not None:
            self.current -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        input_storages = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, Tensor):
                continue
            storage = t.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in input_storages and key not in self.alive:
                self.alive[key] = weakref.finalize(storage, self._freed, key, size)
                self.current += size
        self.peak = max(self.peak, self.current)
        return out


def count_operations(function: Callable[[], Any]) -> int:
    """Arithmetic operations of ``function()``: 2 m n k per matrix product, else one per element written.

    Sorts count log2 n per element and Fourier transforms 5 log2 n; views are free. Fused attention kernels are counted
    by torch's own formulas. The compiled core is one operation to torch: the reference is counted in its place.
    """
    with core.switched_off(), _Counter() as counter:
        function()
    return counter.operations


def peak_bytes(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The most bytes that ``function()`` held at once beyond what was there before, its result included.

    On CUDA the allocator's own peak; elsewhere the storages of all tensors made by torch operations (the workspace
    inside one fused operation is not counted).
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = function()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with _Peak() as peak:
        function()
    return peak.peak


def counted(function: Callable[[], Any], device: torch.device | str = "cpu") -> tuple[int, int]:
    """Operations and peak bytes of ``function()``, which is called for each."""
    return count_operations(function), peak_bytes(function, device)


def exponent(small: float, large: float, ratio: float) -> float:
    """The power of n by which a cost grew from ``small`` to ``large`` when n grew by ``ratio``."""
    return math.log(max(large, 1) / max(small, 1)) / math.log(ratio)
