"""Kernels on one GPU: time against the floor of bytes and operations, beside the fastest exact attention, and decoding.

python -m benchmarks.on_gpu --out out/gpu-kernels.json
python -m benchmarks.on_gpu --device cpu --dtype float32 --lengths 256 1024 --tokens 2048     # what it prints, anywhere

Bandwidth and products per second are measured in the same run; a floor is the larger of the bytes that must be moved
over the one and the operations that must be done over the other. Times are medians; the backward pass is that of a
forward and backward call less the forward call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.floors import floor
from experiments.arguments import Arguments
from fast_attention import Attention, Bound, catalogue, files
from fast_attention.lab.environment import begun
from fast_attention.traits import Shape

MECHANISMS = (
    "LinearAttention", "DecayedLinearAttention", "FavorPlus(num_features=256)", "LearnedFeatures(num_features=64)",
    "AFTSimple", "Local(window=256)", "BigBird", "Favor", "AFTLocal(window=128)", "AFTConv", "LogAttention",
    "Manhattan", "LSH(num_hashes=4)", "Sinkhorn", "AFTFull", "FNet",
)  # fmt: skip
TO = {"AFTFull": 16_384}  # tokens, where weights of every pair are in memory
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


def heads(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values of about unit scale."""
    return [drawn(sizes, device, dtype, seed).requires_grad_() for seed in range(3)]


def drawn(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers of a generator of their own: a capture that failed leaves the device's own one unusable."""
    return torch.randn(sizes, generator=torch.Generator(device).manual_seed(seed), device=device, dtype=dtype)


def measured(call: Callable[..., Tensor], x: list[Tensor], clock: Clock) -> dict[str, Any]:
    """Seconds forward, forward as a graph, and backward; or what went wrong."""
    grad = drawn(tuple(x[2].shape), x[2].device, x[2].dtype, 3)

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*x)

    try:
        seconds = clock.seconds(forward)
        both = clock.seconds(lambda: torch.autograd.grad(call(*x), x, grad, allow_unused=True))
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


def called(name: str, sizes: tuple[int, ...], device: torch.device, *, is_causal: bool) -> Callable[..., Tensor] | None:
    """A mechanism's call on queries, keys and values; None where it has none that is causal, or not at this length.

    A mixer takes the queries of all heads as tokens.
    """
    mechanism: Any = catalogue.parse(name)
    _, number, length, width = sizes
    if length > TO.get(name, length) or (is_causal and not mechanism.traits.causal):
        return None
    if isinstance(mechanism, Attention):
        bound = Bound(mechanism, Shape(number, width, length)).to(device)
        return lambda q, k, v: bound(q, k, v, is_causal=is_causal)
    w = mechanism.weights(Shape(number, width, length))
    return lambda q, k, v: mechanism(q.transpose(1, 2).flatten(2), w).unflatten(-1, (number, width)).transpose(1, 2)


def rows_of(asked: Any, clock: Clock, dtype: torch.dtype, most: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Every mechanism and exact attention, causal and not, at every length, on a full chip and on one sequence."""
    for length, is_causal in itertools.product(asked.lengths, (True, False)):
        for batch in sorted({1, max(1, asked.tokens // length)}):
            sizes = batch, asked.heads, length, asked.width
            x, shared = heads(sizes, clock.device, dtype), {"batch": batch, "length": length, "causal": is_causal}
            if length <= EXACT_TO:
                yield {"mechanism": "exact", **shared, **exact(x, clock, is_causal=is_causal)}
            for name in asked.mechanisms:
                call = called(name, sizes, clock.device, is_causal=is_causal)
                if call is None:
                    continue
                row, least = measured(call, x, clock), floor(name, sizes, dtype, most, is_causal=is_causal)
                for part, seconds in zip(("forward", "backward"), least, strict=True):
                    if row.get(part):
                        row[f"{part}_of_floor"] = seconds / row[part]
                yield {"mechanism": name, **shared, **row}


def main() -> None:
    """Print every row, and write the record."""
    options = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--mechanisms", nargs="+", default=MECHANISMS)
    options.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    options.add_argument("--tokens", type=int, default=131_072, help="of a batch that fills the chip")
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--minutes", type=float, default=math.inf, help="then decoding alone is measured, and it ends")
    options.add_argument("--out", type=Path, default=None)
    asked = options.parse_args()
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    clock, meta = Clock(device, asked.repeats), begun(device, dtype=asked.dtype, heads=asked.heads, width=asked.width)
    torch.manual_seed(0)
    most = ceilings(clock, dtype)
    print(f"{meta['hardware']}: {most['bytes'] / 1e9:,.0f} GB/s, {most['operations'] / 1e12:,.1f} TFLOP/s")
    rows, end, left_out = [], time.monotonic() + 60 * asked.minutes, ""
    for row in rows_of(asked, clock, dtype, most):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if time.monotonic() > end:
            left_out = f"{asked.minutes:g} minutes were over: nothing was measured behind these rows"
            print(left_out, flush=True)
            break
    streams = [n for n in asked.mechanisms if isinstance(m := catalogue.parse(n), Attention) and m.traits.memory]
    steps = [decoding(name, asked, clock, dtype) for name in streams]
    for step in steps:
        print(json.dumps(step), flush=True)
    record: dict[str, Any] = {
        "schema": "fast-attention kernels 1",
        "meta": {**meta, "status": "complete", "ceilings": most, "left_out": left_out},
    }
    record["meta"]["command"] = ["python", "-m", "benchmarks.on_gpu", *sys.argv[1:]]
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        files.write(asked.out, json.dumps({**record, "results": rows, "decoding": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
