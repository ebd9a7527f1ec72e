"""Measures float32's error over 4 processes beside one process's: ``python -m benchmarks.parallel_errors``.

Both against one process in float64, by the root of the mean square, at an odd length; outputs and gradients. What
cannot be spread is left out.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from experiments.arguments import Arguments
from fast_attention import Bound, Shape, catalogue
from fast_attention.mechanism import Attention, Unsupported
from fast_attention.parallel import Shards, attend, strategy

HEADS, WIDTH, WORLD, LENGTH = 4, 32, 4, 513


def _run(bound: Bound, inputs: list[torch.Tensor], is_causal: bool, group: Shards | None) -> list[torch.Tensor]:
    """Outputs and gradients."""
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    mechanism: Any = bound.mechanism
    if group is None:
        out = mechanism(q, k, v, bound.w, is_causal=is_causal)
    else:
        out = attend(mechanism, q, k, v, bound.w, group=group, is_causal=is_causal)
    return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v), materialize_grads=True, allow_unused=True)]


def cases(names: list[str]) -> list[tuple[str, bool]]:
    """The attentions, and whether causal, that can be spread over processes."""
    found = []
    for name in names:
        mechanism: Any = catalogue.parse(name)
        for is_causal in mechanism.traits.modes if isinstance(mechanism, Attention) else ():
            with suppress(Unsupported):
                strategy(mechanism, is_causal)
                found.append((name, is_causal))
    return found


def _process(rank: int, chosen: list[tuple[str, bool]], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=WORLD)
    lengths = tuple((LENGTH + WORLD - 1 - each) // WORLD for each in range(WORLD))
    group = Shards(dist.group.WORLD, rank, lengths, lengths)
    rows = {}
    for name, is_causal in chosen:
        torch.manual_seed(0)
        bound = Bound(name, Shape(HEADS, WIDTH, LENGTH))
        inputs = [torch.randn(1, HEADS, LENGTH, WIDTH) for _ in range(3)]
        one = [x.split(lengths, -2)[rank] for x in _run(bound, inputs, is_causal, None)]
        spread = _run(bound, [x.split(lengths, -2)[rank] for x in inputs], is_causal, group)
        bound.double()
        exact = [x.split(lengths, -2)[rank] for x in _run(bound, [x.double() for x in inputs], is_causal, None)]
        rows[f"{name}{', causal' * is_causal}"] = [
            [(x - y).square().sum().item() for x, y in zip(each, exact, strict=True)] for each in (one, spread)
        ]
    Path(folder, str(rank)).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print, for every attention, how many times one process's error that of four processes is."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--mechanisms", nargs="+", default=catalogue.names())
    chosen = cases(parser.parse_args().mechanisms)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (chosen, folder), nprocs=WORLD)  # type: ignore[attr-defined]
        every = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(WORLD)]
    worst = 0.0
    for name in every[0]:
        one, spread = (torch.tensor([rows[name][i] for rows in every]).sum(0).sqrt() for i in (0, 1))
        ratios = [b / a if a else 1.0 + b for a, b in zip(one.tolist(), spread.tolist(), strict=True)]
        worst = max(worst, *ratios)
        print(f"{name:40} outputs {ratios[0]:.2f}, gradients of q, k, v " + ", ".join(f"{r:.2f}" for r in ratios[1:]))
    print(f"worst: {worst:.2f}")


if __name__ == "__main__":
    main()
