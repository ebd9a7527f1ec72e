"""``benchmarks.whole_models`` and ``benchmarks.instead``: every figure that they ask for, and its sums."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import instead, whole_models
from fast_attention import swap
from fast_attention.lab import records

pytest.importorskip("transformers")


def run(module: Any, kind: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The record of a run, whose checksum is right."""
    module.main([*arguments, "--out", str(folder / "record.json")])
    held = records.opened((folder / "record.json").read_text(encoding="utf-8"), kind, "the record")
    assert held["meta"]["status"] == "complete"
    return held


def test_every_figure_is_measured_and_outputs_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = run(whole_models, "whole models", tmp_path, "--lengths", "16", "--pairs", "1")
    work = {(name, what) for name, case in whole_models.CASES.items() for what in case.asked}
    assert {(row["case"], row["what"]) for row in held["rows"]} == work
    assert {*held["reports"]} == {*whole_models.CASES}
    assert all(row["times"] > 0 and row.get("difference", 0) < 2e-5 for row in held["rows"])
    printed = capsys.readouterr().out
    assert all(name in printed for pair in work for name in pair)


def test_what_computes_something_else_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_models, "swap", lambda model: swap(model, "Local(window=4)"))
    arguments = ("--cases", "mistral", "--lengths", "32", "--pairs", "1")
    (row,) = run(whole_models, "whole models", tmp_path, *arguments)["rows"]
    assert row["difference"] > 0.01


def test_figures_are_derived_from_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pair is left out; ratios are taken pair by pair, the swapped model being first in every second one."""
    took = itertools.chain([9.0, 9.0], [1.0, 4.0], [6.0, 2.0], [2.0, 10.0])
    clock = itertools.accumulate(itertools.chain.from_iterable((0.0, next(took)) for _ in range(8)))
    monkeypatch.setattr(whole_models.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    sides = (lambda: [torch.tensor([2.0, -4.0])], lambda: [torch.tensor([2.0, -3.0])])
    found = whole_models.measured(sides, 4, 60.0)
    assert (found["seconds"], found["swapped_seconds"], found["pairs"]) == (6.0, 2.0, 3)
    assert (found["times"], found["least"], found["most"]) == (4.0, 3.0, 5.0)
    assert found["difference"] == 0.25


def test_every_way_reads_the_same_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--cases", "minilm", "--lengths", "24", "--longest", "20", "--rounds", "1")
    rows = run(instead, "instead", tmp_path, *arguments)["rows"]
    assert [row["texts"] for row in rows] == ["32 texts"] * 6 + ["24 tokens"] * 6
    for row in rows:
        assert row["tokens_per_second"] > 0, row
        whole = "int8" not in row["way"]
        assert row["cosine"] > (0.99999 if whole else 0.8), row
        assert row["difference"] < 2e-5 if whole else row["difference"] > 1e-3, row
    printed = capsys.readouterr().out
    assert all(row["way"] in printed for row in rows)


def test_scores_beyond_the_memory_are_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instead.measure, "memory_at_hand", lambda device: 2**30)
    given = instead.batched([torch.ones(8192, dtype=torch.long)])
    assert "21 GiB" in instead.too_large("ONNX Runtime, int8", given, 12)
    assert instead.too_large("torch, dynamic int8", given, 12) == ""
    assert instead.too_large("ONNX Runtime, int8", instead.batched([torch.ones(128, dtype=torch.long)]), 12) == ""
