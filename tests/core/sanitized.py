"""Runs the core under AddressSanitizer and UBSan: ``python -m tests.core.sanitized`` (``make sanitize``).

The process builds the core with both into ``build/sanitized`` and starts this file again in a process that loads the
sanitizers first. Whatever they find ends it with their report. An operation that is registered and not called here is
an error too.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fast_attention import LSH, Selected, Shape, catalogue, core
from fast_attention.core import building
from fast_attention.engine import tiles as engine_tiles
from fast_attention.engine import trace
from fast_attention.engine.operation import Fast, Operation
from fast_attention.feature_maps.features import EluPlusOne
from fast_attention.mechanisms.linear import compiled
from fast_attention.mechanisms.linear.core_map import NUMBERS

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "build" / "sanitized" / core.FILE.name
ABOUT_ITSELF = {"stamp", "use_width"}  # operations that read no tensors
# Heads, groups of keys, length, numbers of a key and of a value.
SIZES = [
    (1, 1, 1, 1, 1), (2, 1, 5, 3, 7), (96, 96, 5, 16, 16), (1, 1, 47, 256, 1), (4, 2, 49, 17, 33), (3, 3, 333, 64, 64),
    (1, 1, 1500, 64, 64),
]  # fmt: skip
CALLS = [  # dtype, window, whether it is causal
    (torch.float32, 0, True), (torch.bfloat16, 3, False), (torch.float16, 64, True), (torch.float32, 90, False),
]  # fmt: skip
called: set[str] = set()


def build() -> int:
    """Build the core with sanitizers and run ``main`` in a process that has them."""
    try:
        if not building.up_to_date(FILE, building.ALL):
            building.build(FILE, building.ALL, sanitize=True)
        libraries = building.sanitizers()
    except building.NoCompiler as error:
        print(f"nothing was run under the sanitizers: {error}")
        return 0
    environment = {
        **os.environ,
        core.VARIABLE: str(FILE),
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps memory until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "3",
    }
    return subprocess.run([sys.executable, "-m", "tests.core.sanitized", "run"], cwd=ROOT, env=environment).returncode


def main() -> int:
    """Call every operation at awkward sizes, with the vectors of every width that this processor has."""
    ctypes.CDLL(None)["__asan_init"]  # an AttributeError: the sanitizer is not there
    if reason := core.unavailable():
        print(f"the sanitized core does not serve: {reason}")
        return 1
    torch.manual_seed(0)
    start, widths = time.monotonic(), [width for width in building.ALL if width <= core.native_width()]
    for width in widths:
        assert torch.ops.fast_attention_core.use_width(width) == width
        sizes = SIZES if width == widths[-1] else SIZES[:-1]  # the longest takes half of the time
        for size, (dtype, window, causal) in itertools.product(sizes, CALLS):
            tiles(*size, dtype, window, causal)
            features(*size, dtype, causal)
            hashes(*size, dtype, causal)
            chosen(*size, dtype)
            near_and_far(*size, dtype, causal)
    registered = {
        each.split("::")[1] for each in torch._C._dispatch_get_all_op_names() if "fast_attention_core::" in each
    }
    assert called == registered - ABOUT_ITSELF, f"not called: {registered - ABOUT_ITSELF - called}"
    took, names, vectors = time.monotonic() - start, ", ".join(sorted(called)), ", ".join(map(str, widths))
    print(f"{names}: nothing found in {took:.0f} s, with vectors of {vectors} numbers")
    return 0


def call(name: str, *arguments: Any) -> None:
    """Call an operation of the core."""
    called.add(name)
    getattr(torch.ops.fast_attention_core, name)(*arguments)


def poisoned(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An output: NaN where nothing is written."""
    return torch.full(sizes, float("nan"), dtype=dtype)


def tiles(
    heads: int, groups: int, length: int, width: int, values: int, dtype: torch.dtype, window: int, causal: bool
) -> None:
    """Windows, forward and backward, with padding, biases by offset, sinks and capped scores."""
    batch = 2
    q = torch.randn(batch, heads, length, width).to(dtype)
    k = torch.randn(batch, groups, length, width).to(dtype)
    v, grad_out = (
        torch.randn(batch, groups, length, values).to(dtype),
        torch.randn(batch, heads, length, values).to(dtype),
    )
    ahead = 0 if causal else window
    plan = engine_tiles.window(length, length, window, ahead)
    padding = torch.rand(batch, heads, length) < 0.7
    numbers, sinks = torch.randn(heads, window + ahead + 1), torch.randn(heads)
    vectors = torch.randn(*numbers.shape, width)
    for key_mask, bias, by_offset, sink, cap, dropout in (
        (None, None, None, None, 0.0, 0.0),
        (padding, numbers, None, sinks, 5.0, 0.3),
        (padding, numbers, vectors, None, 0.0, 0.0),
    ):
        out, logs = poisoned(batch, heads, length, values, dtype=dtype), poisoned(batch, heads, length, 2)
        terms = (key_mask, bias, by_offset, sink)
        given = (q, k, v, *terms, *plan, -window, width**-0.5, cap, dropout, 7, out, logs)
        call("tiles_forward", *given)
        assert out.isfinite().all()
        assert not logs.isnan().any()
        dq = poisoned(*q.shape, dtype=dtype)
        dk, dv = (
            torch.zeros(batch, groups, length, -(-numbers_of_one // 16) * 16) for numbers_of_one in (width, values)
        )
        slopes = [None if x is None else torch.zeros(batch, *x.shape) for x in (bias, by_offset)]
        call("tiles_backward", *given, grad_out, dq, dk, dv, *slopes)
        assert all(x.isfinite().all() for x in (dq, dk, dv))


def chosen(heads: int, _: int, length: int, width: int, values: int, dtype: torch.dtype) -> None:
    """Blocks that queries choose, forward and backward, with masks, sinks and no choices; more keys than queries."""
    for mechanism in (Selected(block_size=1, topk=1), Selected(block_size=13, topk=3, sinks=True)):
        weights = mechanism.weights(Shape(heads, width, length))
        q, k, v = (torch.randn(2, heads, length, n).to(dtype).requires_grad_() for n in (width, width, values))
        padding = torch.rand(2, length) < 0.7
        padding[0, -1] = True  # nothing is computed where every key is hidden
        for mask, first in itertools.product((None, padding), (0, length // 2)):
            past, (a, b, c) = ([x[..., part, :] for x in (q, k, v)] for part in (slice(first), slice(first, None)))
            state = mechanism.decode(past[0], past[1], past[2], weights)[1] if first else None
            some = None if mask is None else mask[:, first:]
            with trace.recorded() as steps:
                out = mechanism.decode(a, b, c, weights, state, key_mask=some)[0]
            assert any(step.path.startswith(trace.CORE) for step in steps), steps
            assert out.isfinite().all()
            assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().sum(), (q, k, v)))


def features(heads: int, _: int, length: int, width: int, values: int, dtype: torch.dtype, causal: bool) -> None:
    """Sums of features and of random ones, and sums that decay, forward and backward, with masks and states."""

    def passes(numbers: dict[str, Any]) -> Any:
        forward, backward = partial(compiled.forward, **numbers), partial(compiled.backward, **numbers)
        return Operation(forward, cpu=Fast(forward, backward))

    sums = passes({"number": NUMBERS[EluPlusOne], "offset": 0.0, "eps": 1e-6})
    exponentials, signed = (
        passes({"number": number, "offset": 0.0, "eps": 0.0})
        for number in (compiled.EXPONENTIAL, compiled.TRIGONOMETRIC)
    )
    called.update(("features_forward", "features_backward"))
    few = min(width, 33) + 4
    rows, bias = torch.randn(heads, few, width), torch.randn(heads, 1, few)
    for more, behind in ((0, False), (length // 2, False), (0, True)):
        if behind and not causal:
            continue
        sizes = (length, width), (length + more, width), (length + more, values)
        q, k, v = (torch.randn(2, heads, *size).to(dtype).requires_grad_() for size in sizes)
        mask = torch.rand(2, 1, length + more) < 0.7
        cases = [
            (sums, [None] * 3, width, None), (exponentials, [rows, rows.flip(1), bias], few, None),
            (signed, [rows / width, rows.flip(1) / width, None], 2 * few, None),  # denominators far from 0
        ]  # fmt: skip
        if causal and not more:
            cases += [(sums, [None] * 3, width, -torch.rand(2, heads, length, n)) for n in (1, width)]
        for run, weights, number, decay in cases:
            weights = [None if x is None else x.requires_grad_() for x in weights]
            state: list[Tensor | None] = [None] * 3
            if behind:
                state = [
                    torch.rand(2, heads, number, values),
                    torch.rand(2, heads, number),
                    torch.zeros(2, heads, number),
                ]
            decay = None if decay is None else decay.requires_grad_()
            out = run(q, k, v, mask, *weights, *state, decay, is_causal=causal, advances=behind)
            out = out[0] if behind else out
            assert out.isfinite().all()
            wanted = (q, k, v) if decay is None else (q, k, v, decay)
            assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().sum(), wanted))


def near_and_far(heads: int, _: int, length: int, width: int, values: int, dtype: torch.dtype, causal: bool) -> None:
    """Near blocks and sums of features for far ones, forward and backward, with sink tokens, biases and masks."""
    called.update(("hybrid_forward", "hybrid_backward"))
    for text in (
        "Hybrid(near=BlockLocal(block_size=1, before=0, after=0), far=LinearAttention(), first=0, last=0)",
        "Hybrid(near=BlockLocal(block_size=9, bias=T5Buckets(), sinks=True), far=LearnedFeatures(19), first=3)",
        "Hybrid(near=BlockLocal(before=0), far=FavorPlus(num_features=33))",
    ):
        mechanism: Any = catalogue.parse(text)
        weights = mechanism.weights(Shape(heads, width, length))
        for more in (0, length // 2, -(length // 3)):
            sizes = (length, width), (length + more, width), (length + more, values)
            q, k, v = (torch.randn(2, heads, *size).to(dtype).requires_grad_() for size in sizes)
            for mask in (None, torch.rand(2, length + more) < 0.7):
                out = mechanism(q, k, v, weights, is_causal=causal, key_mask=mask)
                assert out.isfinite().all()
                assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().sum(), (q, k, v)))


def hashes(heads: int, _: int, length: int, width: int, values: int, dtype: torch.dtype, causal: bool) -> None:
    """Attention among hashed tokens, forward and backward, with few and many rounds, small chunks and masks."""
    called.update(("lsh_hash", "lsh_forward", "lsh_backward"))
    for mechanism in (LSH(), LSH(num_hashes=3, bucket_size=7)):
        weights = mechanism.weights(Shape(heads, width, length))
        q, v = (torch.randn(2, heads, length, n).to(dtype).requires_grad_() for n in (width, values))
        for mask in (None, torch.rand(2, length) < 0.7):
            with trace.recorded() as steps:
                out = mechanism(q, q, v, weights, is_causal=causal, key_mask=mask)
            assert any(step.path.startswith(trace.CORE) for step in steps) or length == 1, steps
            assert out.isfinite().all()
            assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().sum(), (q, v), allow_unused=True))


if __name__ == "__main__":
    sys.exit(main() if sys.argv[1:] == ["run"] else build())
