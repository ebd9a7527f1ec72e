"""Every mechanism through torch's compiler itself, beside eager: ``python -m tests.compiled [NAME ...]``.

For each, in a process and a cache of its own: how far outputs and gradients of a compiled ``TokenMixer`` are from the
eager ones, and the CPU seconds of the first compilation, the C++ compiler's with them. ``make test-compiled``; too long
for ``make test``, whose laws trace without generating code.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor

LENGTH, WIDTH, HEADS = 300, 32, 2
MOST = 1e-4  # of a tensor's largest number


def numbers(mixer: torch.nn.Module, run: Callable[..., Tensor], x: Tensor, is_causal: bool) -> list[Tensor]:
    """The output and all gradients of its sum of squares."""
    leaves = [x, *mixer.parameters()]
    out = run(x, is_causal=is_causal)
    found = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)
    return [out.detach(), *found]


def one(name: str, is_causal: bool) -> int:
    """Compile one mechanism and print a line."""
    from fast_attention import TokenMixer, Unsupported, catalogue

    torch.manual_seed(0)
    mixer, x = TokenMixer(WIDTH, HEADS, catalogue.parse(name), max_len=LENGTH), torch.randn(2, LENGTH, WIDTH)
    x.requires_grad_()
    try:
        expected = numbers(mixer, mixer, x, is_causal)
    except Unsupported:
        return 0
    start = time.process_time()
    found = numbers(mixer, torch.compile(mixer, fullgraph=True), x, is_causal)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() - start + children.ru_utime + children.ru_stime
    scale = max(float(x.abs().max()) for x in expected)
    pairs = zip(expected, found, strict=True)
    error = max(float((a - b).abs().max()) / max(float(a.abs().max()), 1e-3 * scale) for a, b in pairs)
    print(f"{name:30} {'causal' if is_causal else '':7} error {error:.1e}  {seconds:5.1f} CPU seconds", flush=True)
    return int(not error <= MOST)


def main(names: list[str]) -> int:
    """Each in a process of its own; 1 where one is wrong or stops."""
    from fast_attention import catalogue

    wrong = []
    for name in names or catalogue.names():
        for mode in ("causal", "whole"):
            with tempfile.TemporaryDirectory() as cache:
                places = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
                command = [sys.executable, "-W", "ignore", "-m", "tests.compiled", "--one", name, mode]
                if subprocess.run(command, env=os.environ | places, check=False).returncode:
                    wrong.append(f"{name} ({mode})")
    print(f"wrong: {', '.join(wrong)}" if wrong else "compiled and eager agree")
    return int(bool(wrong))


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(one(given[1], given[2] == "causal") if given[:1] == ["--one"] else main(given))
