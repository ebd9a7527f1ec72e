"""Measures one sequence over processes of this machine: ``python -m benchmarks.parallel``.

Bytes sent for a layer, the memory of a process at a million tokens, and how much of the ideal speed two processes give.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from experiments.arguments import Arguments
from experiments.models import Model, ModelConfig
from fast_attention import FavorPlus, LinearAttention, Shape
from fast_attention.lab.environment import environment
from fast_attention.parallel import attend, counted, parallelize

HEADS, WIDTH = 8, 64


def bytes_sent(rank: int, world: int, length: int) -> dict[str, float]:
    """Bytes that one process sends for a causal layer, and what W H D (D + 2) numbers would be."""
    q, k, v = (torch.randn(1, HEADS, length // world, WIDTH) for _ in range(3))
    with counted() as traffic:
        attend(LinearAttention(), q, k, v, group=dist.group.WORLD, is_causal=True)
    return {"bytes": traffic.bytes, "of bound": traffic.bytes / (world * HEADS * WIDTH * (WIDTH + 2) * 4)}


def peak(rank: int, world: int, length: int) -> dict[str, float]:
    """Seconds and the growth of a process's peak memory, forward and backward of causal FAVOR+ in 4 heads of 32."""
    torch.manual_seed(0)
    mechanism = FavorPlus(num_features=64)
    w = mechanism.weights(Shape(4, 32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    q, k, v = (torch.randn(1, 4, length // world, 32, requires_grad=True) for _ in range(3))
    if world == 1:
        out = mechanism(q, k, v, w, is_causal=True)
    else:
        out = attend(mechanism, q, k, v, w, group=dist.group.WORLD, is_causal=True)
    out.sum().backward()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"MiB": grown / 1024, "seconds": time.monotonic() - began}


def step(rank: int, world: int, length: int) -> dict[str, float]:
    """The median seconds of a training step of a decoder of 4 layers of linear attention."""
    torch.manual_seed(0)
    model = Model(ModelConfig(256, "LinearAttention()", layers=4, positions="none", causal=True))
    if world > 1:
        parallelize(model, dist.group.WORLD)
    tokens = torch.randint(256, (1, length // world))
    times = []
    for _ in range(4):
        if world > 1:
            dist.barrier()
        began = time.monotonic()
        model.zero_grad()
        model(tokens).logsumexp(-1).mean().backward()
        for parameter in model.parameters() if world > 1 else ():
            dist.all_reduce(parameter.grad)
        times.append(time.monotonic() - began)
    return {"seconds": statistics.median(times[1:])}


def _process(rank: int, world: int, threads: int, measure: Callable[..., Any], length: int, folder: str) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    Path(folder, str(rank)).write_text(json.dumps(measure(rank, world, length)))
    dist.barrier()
    dist.destroy_process_group()


def on(world: int, threads: int, measure: Callable[..., Any], length: int) -> dict[str, float]:
    """The largest of each number over the processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (world, threads, measure, length, folder), nprocs=world)  # type: ignore[attr-defined]
        results = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]
    return {name: max(each[name] for each in results) for name in results[0]}


def main() -> None:
    """Print the figures and write the record."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2**20, help="of the memory's figure")
    parser.add_argument("--step-tokens", type=int, default=2**16, help="of the training step")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/parallel.json"))
    given = parser.parse_args()
    record: dict[str, Any] = {"meta": {**environment(torch.device("cpu")), "status": "running"}}
    for length in (4096, 65536):
        record[f"sent, {length}"] = held = on(4, 1, bytes_sent, length)
        print(f"causal LinearAttention, 8 heads of 64, {length:,} tokens, 4 processes: {held['bytes']:,.0f} bytes sent "
              f"by each, {held['of bound']:.3f} of W H D (D + 2) numbers", flush=True)  # fmt: skip
    one, four = (on(world, 1, peak, given.tokens) for world in (1, 4))
    record["peak"] = {"one": one, "four": four, "tokens": given.tokens, "ratio": four["MiB"] / one["MiB"]}
    print(f"causal FavorPlus(num_features=64), 4 heads of 32, {given.tokens:,} tokens, forward and backward: "
          f"{one['MiB']:,.0f} MiB and {one['seconds']:.0f} s in one process, {four['MiB']:,.0f} MiB and "
          f"{four['seconds']:.0f} s in each of four: {four['MiB'] / one['MiB']:.2f} of it", flush=True)  # fmt: skip
    pairs = [[on(world, threads, step, given.step_tokens)["seconds"] for world, threads in ((1, 2), (2, 1))]
             for _ in range(given.pairs)]  # fmt: skip
    ratio = statistics.median(one / two for one, two in pairs)
    record["step"] = {"pairs": pairs, "ratio": ratio, "tokens": given.step_tokens}
    print(f"training step, 4 layers of 128, {given.step_tokens:,} tokens: one process of two threads "
          f"{statistics.median(one for one, _ in pairs):.2f} s, two of one thread "
          f"{statistics.median(two for _, two in pairs):.2f} s; median ratio {ratio:.2f}")  # fmt: skip
    record["meta"]["status"] = "complete"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"Record: {given.out}")


if __name__ == "__main__":
    main()
