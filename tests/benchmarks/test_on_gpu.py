"""The benchmark of kernels, run where there are none: every row, its floor, and the record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import floors, on_gpu


def test_rows_of_every_mechanism_beside_exact_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels.json"
    small = ["--device", "cpu", "--dtype", "float32", "--lengths", "64", "--tokens", "128", "--heads", "2"]
    monkeypatch.setattr(sys, "argv", ["on_gpu", *small, "--width", "8", "--repeats", "1", "--out", str(out)])
    monkeypatch.setattr(on_gpu, "ceilings", lambda *given: {"bytes": 1e9, "operations": 1e9})
    on_gpu.main()
    held = json.loads(out.read_text())
    assert held["meta"]["status"] == "complete"
    rows = held["results"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows) + len(held["decoding"])
    kinds = {(row["mechanism"], row["batch"], row["causal"]) for row in rows}
    names, sides = {"exact", *on_gpu.MECHANISMS}, (True, False)
    every = {(name, batch, causal) for name in names for batch in (1, 2) for causal in sides}
    assert kinds == {kind for kind in every if kind[0] != "FNet" or not kind[2]}  # which is not causal
    assert all(row["forward"] > 0 and "error" not in row for row in rows)
    assert {step["mechanism"] for step in held["decoding"]} == {*on_gpu.MECHANISMS} - {"BigBird", "AFTFull", "FNet"}
    assert held["meta"]["left_out"] == ""
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--minutes", "0"])
    on_gpu.main()
    held = json.loads(out.read_text())
    assert len(held["results"]) == 1
    assert held["meta"]["left_out"].startswith("0 minutes were over")


def test_operations_of_windows_blocks_and_pools() -> None:
    counted = [("Local(window=256)", 256, 512), ("BigBird", 7 * 64, 8 * 64), ("AFTSimple", 3, 3)]
    counted += [("LSH(num_hashes=2)", 2 * 96, 2 * 128), ("AFTLocal(window=8)", 11, 18), ("AFTConv", 9, 14)]
    counted += [("AFTFull", 1024, 2048), ("Sinkhorn", 96, 128), ("Favor(num_features=10)", 30, 30)]
    for name, causal, both in counted:
        for is_causal, keys in ((True, causal), (False, both)):
            assert floors.operations(name, 64, 2048, is_causal=is_causal) == 4 * 64 * keys


def test_floors_are_the_larger_of_bytes_and_operations() -> None:
    sizes, most = (1, 1, 1000, 8), {"bytes": 1e6, "operations": 1e12}
    moved = floors.floor("LinearAttention", sizes, torch.float32, most, is_causal=True)
    assert moved == pytest.approx((1000 * 4 * 8 * 4 / 1e6, 1000 * 8 * 8 * 4 / 1e6))
    moved = floors.floor("FNet", sizes, torch.float32, most, is_causal=False)
    assert moved == pytest.approx((1000 * 2 * 8 * 4 / 1e6, 1000 * 2 * 8 * 4 / 1e6))
    most = {"bytes": 1e12, "operations": 1e6}
    counted = floors.floor("FavorPlus(num_features=16)", sizes, torch.float32, most, is_causal=True)
    assert counted[0] == pytest.approx(1000 * (4 * 8 * 16 + 4 * 16 * 8) / 1e6)
    one, both = (floors.floor("Local(window=4)", sizes, torch.float32, most, is_causal=c)[0] for c in (True, False))
    assert both == 2 * one


def test_a_call_that_does_not_fit_is_a_row_that_says_so() -> None:
    def fails(*given: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory\nand more")

    x = on_gpu.heads((1, 1, 4, 4), torch.device("cpu"), torch.float32)
    assert on_gpu.measured(fails, x, on_gpu.Clock(torch.device("cpu"), 1)) == {"error": "out of memory"}
