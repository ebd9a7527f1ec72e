"""Every kernel in every configuration compiles for GPUs that are not here, within their registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fast_attention.gpu import maps

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one block may have
SPILLED = {80: 256, 90: 64, 100: 80}  # bytes of a thread's stack: next to none but on sm_80
EXPONENTIAL = {("bf16", 64): 160, ("bf16", 128): 304, ("fp32", 64): 160, ("fp32", 128): 960}  # by dtype and width


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "bf16"), ("float32", "fp32")])
def test_registers_and_shared_memory_suffice(dtype: str, kind: str) -> None:
    """Programs as ``ahead.csv`` has them are not compiled again, but for one in 25; all others are."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, "-m", "tests.gpu.ahead", "--known", "--dtypes", dtype, "--targets", *map(str, SHARED)],
        capture_output=True, text=True, env=environment,
        cwd=Path(__file__).parent.parent.parent,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    kernels = {"sums.chunk_sums", "sums.running_sums", "sums.row_products", "reading.outputs", "steps.step"}
    kernels |= {f"gradients.{name}" for name in ("of_queries", "of_keys", "of_values")}
    kernels |= {f"pools.{name}" for name in ("chunk_pools", "outputs", "of_queries", "of_keys")}
    assert {row["kernel"] for row in rows} == kernels
    assert {row["MAP"] for row in rows if row["kernel"] == "gradients.of_keys"} == {maps.ELU, maps.EXPONENTIAL}
    assert {row["target"] for row in rows if row["dtype"] == kind} == {*SHARED}
    wrong = [row for row in rows if row["stack"] > allowed(row) or row["shared"] > SHARED[row["target"]]]
    assert not wrong, wrong


def allowed(row: dict[str, Any]) -> int:
    if row["MAP"] != maps.EXPONENTIAL and not row["SCALED"]:
        return SPILLED[row["target"]]
    return EXPONENTIAL[row["dtype"], row["BW"] or 128]  # running sums know no width
