"""Runs the operations of the core under AddressSanitizer and UBSan (``make sanitize``): ``python -m tests.core.sanitized``.

The process builds the core with both into ``build/sanitized`` and starts this file again where the sanitizers are loaded
before everything else. Whatever they find ends the process with their report.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path

from fast_attention import core
from fast_attention.core import building

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "build" / "sanitized" / core.FILE.name
LENGTHS = (1, 5, 47, 49, 333)
HEADS = ((1, 1), (3, 7), (96, 64))  # how many, and their size
# Settings of the mechanisms that the core computes, small enough for several tiles at these lengths.
MECHANISMS = (
    "Local(window=8)",
    "Local(window=64)",
    "LinearAttention()",
    "FavorPlus(num_features=24)",
    "LSH(bucket_size=8)",
)


def build() -> int:
    """Build the core with sanitizers and run ``main`` in a process that has them."""
    try:
        if not building.up_to_date(FILE, building.ALL):
            building.build(FILE, building.ALL, sanitize=True)
        libraries = building.sanitizers()
    except building.NoCompiler as error:
        print(f"nothing was run under the sanitizers: {error}")
        return 0
    surroundings = {
        **os.environ,
        core.VARIABLE: str(FILE),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # Python itself keeps memory until the end
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "OMP_NUM_THREADS": "3",
    }
    return subprocess.run([sys.executable, "-m", "tests.core.sanitized", "run"], cwd=ROOT, env=surroundings).returncode


def main() -> int:
    """Call every mechanism that the core computes, with gradients, at awkward sizes and with each width."""
    import torch

    from fast_attention import attention
    from fast_attention.engine import dispatch

    torch.manual_seed(0)
    ctypes.CDLL(None)["__asan_init"]  # an AttributeError: the sanitizer is not there
    if reason := core.unavailable():
        print(f"the sanitized core does not serve: {reason}")
        return 1
    calls = 0
    widths = [width for width in building.ALL if width <= core.native_width()]
    for width, name, length, (heads, size), causal in itertools.product(
        widths, MECHANISMS, LENGTHS, HEADS, (False, True)
    ):
        torch.ops.fast_attention_core.use_width(width)
        q, k, v = torch.randn(3, 1, heads, length, size, requires_grad=True)
        with dispatch.recorded() as steps:
            attention(q, k, v, name, is_causal=causal).sum().backward()
        calls += any(step.path.startswith(dispatch.CORE) for step in steps)
    print(f"{calls} calls of the core under the sanitizers, vectors of {', '.join(map(str, widths))} numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main() if sys.argv[1:] == ["run"] else build())
