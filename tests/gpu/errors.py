"""Errors of every kernel against plain operations in float64, part by part: ``python -m tests.gpu.errors``.

On a GPU, or in Triton's interpreter (``TRITON_INTERPRET=1``), for heads of 64 in 16 bits: what the self-check compares,
all of it and not only the first part that is wrong, and in which block of 32 tokens the largest error lies. ``--vary``
runs the kernels of exponential features with other products, warps and blocks too: where one of them is right, that is
what a wrong one differs by. ``REFUSED`` is what the self-check would not let run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fast_attention.gpu import configurations, maps, self_check
from fast_attention.gpu.configurations import EXPONENTIAL, Sizes
from fast_attention.gpu.launching import Launch
from fast_attention.gpu.self_check import LARGEST, Case
from fast_attention.mechanisms.aft import kernels as pools
from fast_attention.mechanisms.linear import kernels
from tests.gpu.conftest import INTERPRETED, tf32_cut_off

WIDTH, BLOCK = 64, 32
VARIED = [{"warps": 4}, {"block": 32}, {"block": 32, "warps": 4}, {"precision": "tf32x3"}, {"precision": "ieee"}]


def known() -> list[Case]:
    """Every kernel of its own kind; FlexAttention, which the interpreter has not, on a GPU alone."""
    made = [
        kernels.check_elementwise(maps.ELU),
        kernels.check_decayed(maps.ELU, normalized=True),
        kernels.check_exponential(256, WIDTH),
        pools.check(),
    ]
    return made if INTERPRETED else [*made, self_check.flex_attention(), self_check.flex_logs()]


def told(case: Case, dtype: torch.dtype, device: torch.device, masked: bool) -> Iterator[str]:
    """A line for every part of a case."""
    lines: list[str] = []

    def measured(name: str, parts: Iterable[str], found: Iterable[Tensor], right: Iterable[Tensor], *, of: str) -> str:
        for part, mine, wanted in zip(parts, found, right, strict=True):
            off = (mine.detach().double() - wanted.detach()).abs() / wanted.detach().abs().max()
            error = float(off.max())
            of_tokens = off.dim() == 4 and off.shape[-2] == self_check.TOKENS
            where = f"  block {int(off.amax((0, 1, 3)).argmax()) // BLOCK}" if of_tokens else ""
            refused = "" if error <= LARGEST[mine.dtype] else "  REFUSED"
            lines.append(f"  {name:28} {part:10} {error:9.2g}{where}{refused}")
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "_unlike", measured)
        case.compare(WIDTH, WIDTH, dtype, device, masked)
    return iter(lines)


@contextmanager
def varied(changes: dict[str, Any]) -> Iterator[None]:
    """Exponential features computed otherwise."""
    sizes, precision = {name: to for name, to in changes.items() if name != "precision"}, changes.get("precision")
    row = EXPONENTIAL[WIDTH, False]
    other = Sizes(row.forward._replace(**sizes), row.backward._replace(**sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(configurations.EXPONENTIAL, (WIDTH, False), other)
        if precision:
            patch.setattr(Launch, "precision", precision)
        yield


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vary", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--masked", action="store_true")
    asked = parser.parse_args(given)
    device = torch.device("cpu" if INTERPRETED else "cuda")
    with tf32_cut_off():
        for dtype in (getattr(torch, kind) for kind in asked.kinds):
            for case in known():
                print(f"{case.name} in {dtype}", *told(case, dtype, device, asked.masked), sep="\n", flush=True)
            for changes in VARIED if asked.vary else []:
                with varied(changes):
                    case = kernels.check_exponential(256, WIDTH)
                    print(
                        f"{case.name} in {dtype}, {changes}",
                        *told(case, dtype, device, asked.masked),
                        sep="\n",
                        flush=True,
                    )


if __name__ == "__main__":
    main(sys.argv[1:])
