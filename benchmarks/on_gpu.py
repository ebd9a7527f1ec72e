"""Kernels on one GPU: time against the floor of bytes and operations, beside the fastest exact attention, and decoding.

python -m benchmarks.on_gpu --out out/gpu-kernels.json
python -m benchmarks.on_gpu --device cpu --dtype float32 --lengths 256 1024 --tokens 2048     # what it prints, anywhere

Bandwidth and products per second are measured in the same run; a floor is the larger of the bytes that must be moved
over the one and the operations that must be done over the other. Times are medians; the backward pass is that of a
forward and backward call less the forward call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fast_attention import AFTSimple, Attention, BigBird, Bound, FavorPlus, LearnedFeatures, Local, catalogue, files
from fast_attention.lab.surroundings import begun
from fast_attention.traits import Shape

MECHANISMS = (
    "LinearAttention", "DecayedLinearAttention", "FavorPlus(num_features=256)", "LearnedFeatures(num_features=64)",
    "AFTSimple", "Local(window=256)", "BigBird",
)  # fmt: skip
LENGTHS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
EXACT_TO = 65_536  # tokens
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class Clock:
    """Seconds of a call, by the device's own events where it has any."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def seconds(self, call: Callable[[], Any]) -> float:
        """The median of some calls, after two that warm up."""
        for _ in range(2):
            call()
        return statistics.median(self._once(call) for _ in range(self.repeats))

    def _once(self, call: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def graphed(self, call: Callable[[], Any]) -> float | None:
        """The same as a CUDA graph; None where there are none, or the call cannot be one."""
        if self.device.type != "cuda":
            return None
        try:
            self.seconds(call)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
        except (RuntimeError, NotImplementedError):
            return None
        return self.seconds(graph.replay)


def ceilings(clock: Clock, dtype: torch.dtype) -> dict[str, float]:
    """Bytes and operations per second: a copy, and a product of matrices."""
    on = {"device": clock.device, "dtype": dtype}
    size, width = (2**28, 8192) if clock.device.type == "cuda" else (2**24, 1024)
    x, other, a = torch.randn(size, **on), torch.empty(size, **on), torch.randn(width, width, **on)
    copied, product = clock.seconds(lambda: other.copy_(x)), clock.seconds(lambda: a @ a)
    return {"bytes": 2 * x.nbytes / copied, "operations": 2 * width**3 / product}


def operations(name: str, D: int, *, is_causal: bool) -> int:
    """The least operations of a forward pass for each token and head of width D, products and elementwise ones."""
    mechanism: Any = catalogue.parse(name)
    match mechanism:
        case Local():
            return 4 * D * sum(mechanism.sides if not is_causal else mechanism.sides[:1])
        case BigBird():
            window = mechanism.window_blocks // 2 + 1 if is_causal else mechanism.window_blocks
            others = mechanism.num_random_blocks + mechanism.num_global_blocks
            return 4 * D * mechanism.block_size * (window + others)
        case AFTSimple():
            return 12 * D  # two exponentials, a gate, two sums
        case FavorPlus() | LearnedFeatures():
            count = mechanism.num_features
            return 4 * D * count + 4 * D * count * (2 if isinstance(mechanism, LearnedFeatures) else 1)
    return 4 * D * D


def floor(
    name: str, sizes: tuple[int, ...], dtype: torch.dtype, most: dict[str, float], *, is_causal: bool
) -> tuple[float, float]:
    """The least seconds of a forward and of a backward pass."""
    B, H, L, D = sizes
    tokens, bits = B * H * L, torch.finfo(dtype).bits
    products = operations(name, D, is_causal=is_causal)
    forward = max(tokens * 4 * D * bits / 8 / most["bytes"], tokens * products / most["operations"])
    backward = max(tokens * 8 * D * bits / 8 / most["bytes"], 2.5 * tokens * products / most["operations"])
    return forward, backward


def heads(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of about unit scale."""
    return [torch.randn(sizes, device=device, dtype=dtype).requires_grad_() for _ in range(3)]


def measured(call: Callable[..., Tensor], x: list[Tensor], clock: Clock) -> dict[str, Any]:
    """Seconds forward, forward as a graph, and backward; or what went wrong."""
    grad = torch.randn_like(x[2])

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*x)

    try:
        seconds = clock.seconds(forward)
        both = clock.seconds(lambda: torch.autograd.grad(call(*x), x, grad))
        return {"forward": seconds, "graph": clock.graphed(forward), "backward": max(both - seconds, 0.0)}
    except (RuntimeError, NotImplementedError) as error:  # memory, or a backend without these sizes
        return {"error": str(error).splitlines()[0][:200]}


def exact(x: list[Tensor], clock: Clock, *, is_causal: bool) -> dict[str, Any]:
    """The fastest of torch's exact kernels."""
    rows = []
    for backend in BACKENDS if clock.device.type == "cuda" else BACKENDS[1:2]:
        with sdpa_kernel(backend):
            row = measured(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal), x, clock)
        rows.append({"backend": backend.name, **row})
    right = [row for row in rows if "forward" in row]
    return min(right, key=lambda row: row["forward"] + row["backward"]) if right else rows[-1]


def decoding(name: str, asked: Any, clock: Clock, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds of one more token behind a state, plain and as a graph."""
    mechanism: Any = catalogue.parse(name)
    bound = Bound(mechanism, Shape(asked.heads, asked.width, 4096)).to(clock.device)
    x = [t.detach() for t in heads((1, asked.heads, 256, asked.width), clock.device, dtype)]
    with torch.no_grad():
        _, state = mechanism.advance(*x, bound.w, None, key_mask=None)
        one = [t[..., :1, :].contiguous() for t in x]

        def call() -> Any:
            return mechanism.advance(*one, bound.w, state, key_mask=None)

        return {"mechanism": name, "seconds": clock.seconds(call), "graph": clock.graphed(call)}


def rows_of(asked: Any, clock: Clock, dtype: torch.dtype, most: dict[str, float]) -> list[dict[str, Any]]:
    """Every mechanism and exact attention, causal and not, at every length, on a full chip and on one sequence."""
    rows = []
    for length in asked.lengths:
        for batch in sorted({1, max(1, asked.tokens // length)}):
            sizes = batch, asked.heads, length, asked.width
            x = heads(sizes, clock.device, dtype)
            for is_causal in (True, False):
                shared = {"batch": batch, "length": length, "causal": is_causal}
                if length <= EXACT_TO:
                    rows.append({"mechanism": "exact", **shared, **exact(x, clock, is_causal=is_causal)})
                    print(json.dumps(rows[-1]), flush=True)
                for name in asked.mechanisms:
                    mechanism: Any = catalogue.parse(name)
                    bound = Bound(mechanism, Shape(asked.heads, asked.width, length)).to(clock.device)
                    call = lambda q, k, v, b=bound, c=is_causal: b(q, k, v, is_causal=c)  # noqa: E731
                    row, least = measured(call, x, clock), floor(name, sizes, dtype, most, is_causal=is_causal)
                    for part, seconds in zip(("forward", "backward"), least, strict=True):
                        if row.get(part):
                            row[f"{part}_of_floor"] = seconds / row[part]
                    rows.append({"mechanism": name, **shared, **row})
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Print every row, and write the record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--mechanisms", nargs="+", default=MECHANISMS)
    options.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    options.add_argument("--tokens", type=int, default=131_072, help="of a batch that fills the chip")
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--out", type=Path, default=None)
    asked = options.parse_args()
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    clock, meta = Clock(device, asked.repeats), begun(device, dtype=asked.dtype, heads=asked.heads, width=asked.width)
    torch.manual_seed(0)
    most = ceilings(clock, dtype)
    print(f"{meta['hardware']}: {most['bytes'] / 1e9:,.0f} GB/s, {most['operations'] / 1e12:,.1f} TFLOP/s")
    rows = rows_of(asked, clock, dtype, most)
    streams = [n for n in asked.mechanisms if isinstance(m := catalogue.parse(n), Attention) and m.traits.memory]
    steps = [decoding(name, asked, clock, dtype) for name in streams]
    for step in steps:
        print(json.dumps(step), flush=True)
    record: dict[str, Any] = {
        "schema": "fast-attention kernels 1",
        "meta": {**meta, "status": "complete", "ceilings": most},
    }
    record["meta"]["command"] = ["python", "-m", "benchmarks.on_gpu", *sys.argv[1:]]
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        files.write(asked.out, json.dumps({**record, "results": rows, "decoding": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
