"""``benchmarks.cores``: its conditions and sums, its counts of parallel regions, and its busy processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cores
from fast_attention.lab import records
from fast_attention.lab.records import EXACT

COUNTS = sys.platform == "linux" and shutil.which("cc") is not None


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cores, "SAMPLE", 0.001)
    monkeypatch.setattr(cores, "keep_memory", lambda: True)
    own = torch.get_num_threads()
    yield
    torch.set_num_threads(own)


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The record of a run of one mechanism, whose checksum is right."""
    cores.main([*arguments, "--patience", "0", "--out", str(folder)], cores.CASES[:1])
    return records.opened((folder / "cores.json").read_text(encoding="utf-8"), "cores", "the record")


def test_every_condition_is_measured_and_regions_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = run(tmp_path, "--threads", "2", "1", "--length", "256")
    assert held["meta"]["status"] == "complete"
    assert [(row["threads"], row["busy"]) for row in held["rows"]] == [(1, 0), (2, 0), (2, 1), (2, 2)]
    assert all(row["seconds"] > 0 and row["exact_seconds"] > 0 for row in held["rows"])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("beside 2", "regions", "Local(window=64)", EXACT))
    if not COUNTS:
        assert "not counted" in held["meta"]["uncounted"]
        return
    assert {*held["regions"]} == {EXACT, f"{EXACT}, causal", *(case.name for case in cores.CASES)}
    assert held["regions"][EXACT] == 1, "its matrix products begin regions within its own, which are none"
    assert held["regions"]["FavorPlus(), causal"] >= 1


def test_a_run_without_a_compiler_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores.shutil, "which", lambda name: None)
    held = run(tmp_path, "--threads", "1", "--length", "16")
    assert held["regions"] == {}
    assert "Regions not counted: that takes Linux and a C compiler." in capsys.readouterr().out


def test_gains_and_slowdowns_are_of_exact_attentions_own() -> None:
    times = {(1, 0): (8.0, 40.0), (2, 0): (5.0, 20.0), (3, 0): (4.0, 16.0), (3, 1): (9.0, 1.0), (3, 2): (12.0, 32.0)}
    rows = [{"threads": t, "busy": b, "seconds": own, "exact_seconds": exact} for (t, b), (own, exact) in times.items()]
    found = cores.summary(rows)
    assert found.gain == pytest.approx((8 / 4) / (40 / 16))
    assert found.last == pytest.approx((5 / 4) / (20 / 16))
    assert found.slowdown == pytest.approx((12 / 4) / (32 / 16))
    assert cores.summary(rows[2:3]) == (None, None, None)


def test_busy_processes_end_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setattr(cores.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])

    def stopped() -> None:
        with cores.beside(2):
            assert [process.poll() for process in started] == [None, None]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert [process.poll() for process in started] == [-9, -9]


def test_threads_of_a_large_machine_are_doublings_and_the_last_two() -> None:
    assert cores.default_threads(1) == [1]
    assert cores.default_threads(4) == [1, 2, 3, 4]
    assert cores.default_threads(16) == [1, 2, 3, 4, 8, 15, 16]
