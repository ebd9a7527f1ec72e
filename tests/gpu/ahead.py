"""Compiles every kernel in every configuration for GPUs that are not here: ``python -m tests.gpu.ahead --cores 1``.

Each line says registers, spilled bytes and shared memory of one program, from the assembler's own report.
``ahead.csv`` keeps what was told of every program, by a digest of its source, its configuration and the compiler:
``--known`` compiles those that have none there, or another one, and one in 25 of the others, which must be as it was;
``--write`` writes the file anew.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fast_attention.gpu.configurations import TABLE
from tests.gpu.launches import Caught, launches

TABLE_OF_PROGRAMS, SAMPLED = Path(__file__).with_suffix(".csv"), 25
TOLD = ("registers", "stack", "shared")


def compiled(caught: Caught, target: int) -> dict[str, int]:
    """What the assembler says of a kernel for compute capability ``target`` (90 for Hopper)."""
    kernel = caught.kernel
    constants = {(kernel.arg_names.index(name),): value for name, value in caught.constants.items()}
    source = ASTSource(fn=kernel, signature=caught.signature, constexprs=constants, attrs=caught.hints)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=caught.options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", told)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    return {"registers": registers, "stack": stack, "shared": made.metadata.shared}


def row(caught: Caught, target: int, told: dict[str, int]) -> dict[str, Any]:
    """What is said of one program, in a line."""
    kinds = [kind for kind in caught.signature.values() if kind.startswith("*")]
    sizes = "MAP", "SCALED", "CAUSAL", "PRECISION", "CHUNK", "BT", "BC", "BD", "BW", "BE"
    return {
        "kernel": f"{caught.module.rpartition('.')[2]}.{caught.name}", "target": target, "dtype": kinds[0][1:],
        **{key: caught.constants.get(key) for key in sizes}, **caught.options, **told,
    }  # fmt: skip


def known() -> dict[str, dict[str, int]]:
    """What was told of programs before, by their digests."""
    with TABLE_OF_PROGRAMS.open(newline="") as file:
        return {line["digest"]: {name: int(line[name]) for name in TOLD} for line in csv.DictReader(file)}


def told_of(work: list[tuple[Caught, int]], held: dict[str, dict[str, int]], cores: int) -> list[dict[str, Any]]:
    """A line of every program; ``held``: what need not be compiled, but for one in ``SAMPLED``."""
    digests = [caught.digest(target) for caught, target in work]
    new = [at for at, each in enumerate(digests) if each not in held or int(each, 16) % SAMPLED == 0]
    with ProcessPoolExecutor(cores) as pool:
        fresh = dict(zip(new, pool.map(compiled, *zip(*[work[at] for at in new], strict=True)), strict=True))
    for at, told in fresh.items():
        assert held.get(digests[at], told) == told, f"{work[at]}: {told}, before {held[digests[at]]}"
    return [row(*job, fresh.get(at) or held[digests[at]]) for at, job in enumerate(work)]


def written(work: list[tuple[Caught, int]], rows: list[dict[str, Any]]) -> None:
    columns = ("digest", "kernel", "target", "dtype", *TOLD)
    lines = [{**each, "digest": caught.digest(target)} for (caught, target), each in zip(work, rows, strict=True)]
    with TABLE_OF_PROGRAMS.open("w", newline="") as file:
        out = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        out.writerows(sorted(lines, key=lambda line: [str(line[name]) for name in ("kernel", "target", "digest")]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--widths", type=int, nargs="+", default=[*TABLE])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--known", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    caught = [x for dtype in asked.dtypes for width in asked.widths for x in launches(width, getattr(torch, dtype))]
    work = [(each, target) for each in {x.key: x for x in caught}.values() for target in asked.targets]
    rows = told_of(work, known() if asked.known else {}, asked.cores)
    for each in rows:
        print(json.dumps(each))
    if asked.write:
        written(work, rows)


if __name__ == "__main__":
    main()
