"""Records: every command's come back, older ones are read, and no changed letter goes unnoticed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks.bench import Benchmark, PeakMemory, Row, Step
from experiments.reproductions.common import Reproduced
from experiments.study import Result, Study
from fast_attention.lab import records
from fast_attention.lab.converted import Converted
from fast_attention.lab.inputs import InputError
from fast_attention.lab.records import Cell, Comparison, Error, Record

HELD = Path(__file__).parent.parent.parent / "records"
KINDS: dict[str, type[Record]] = {"study": Study, "bench": Benchmark, "convert": Converted, "reproduce": Reproduced}
CELL = Cell("Local()", 128, "measured", forward_ms=1.25, forward_ratio=0.5, rounds=7)
MADE = {
    "compare": Comparison({"lengths": [128]}, [CELL], [Error("Local()", 8, "Softmax", [[math.inf, 1.0]])]),
    "bench": Benchmark(
        {"seed": 1}, [CELL], [Row("a", "a", "core", False, "x", "y")], [{"gemm_gflops": 98.7}],
        [PeakMemory("a", 8, 1)], [Step("a", 1, 8, 0.5)], ["time 8 a"],
    ),
    "study": Study({"seeds": 2}, [Result("FNet()", 0, "complete", 0.5, 0.5, 3, 0.01, 9, 9, 4, [[3, 0.1, 0.5]])]),
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(HELD.glob("*.json")), ids=lambda path: path.name)
def test_older_records_are_read(path: Path) -> None:
    kind = next((kind for kind in KINDS if f"-{kind}" in path.name), None)
    if kind is None:
        assert records.opened(
            path.read_text(), re.sub(r"-\d+$", "", path.stem[len("2026-11-23-") :]).replace("-", " "), path.name
        )["meta"]
        return
    found = KINDS[kind].read(path)
    again = KINDS[kind].from_json(found.to_json())
    assert again == found
    assert json.loads(found.to_json())["schema"] == f"fast-attention {kind} {records.FORMAT}"


@pytest.mark.parametrize("kind", MADE)
def test_what_is_written_comes_back(kind: str, tmp_path: Path) -> None:
    MADE[kind].save(tmp_path / "record.json")
    assert type(MADE[kind]).read(tmp_path / "record.json") == MADE[kind]


@pytest.mark.parametrize("kind", MADE)
def test_every_changed_digit_and_letter_is_noticed(kind: str) -> None:
    """Also where what is left is JSON with all its fields."""
    text = MADE[kind].to_json()
    for at in (found.start() for found in re.finditer(r"[0-9a-z]", text)):
        other = "7" if text[at] == "8" else "8" if text[at].isdigit() else "q" if text[at] == "z" else "z"
        with pytest.raises(ValueError):
            type(MADE[kind]).from_json(text[:at] + other + text[at + 1 :])


def test_a_record_laid_out_otherwise_is_the_same() -> None:
    held = json.loads(MADE["study"].to_json())
    assert Study.from_json(json.dumps(dict(reversed(held.items())), separators=(",", ":"))) == MADE["study"]


def test_a_checksum_is_not_optional() -> None:
    held = json.loads(MADE["study"].to_json())
    del held["sha256"]
    with pytest.raises(ValueError, match="damaged"):
        Study.from_json(json.dumps(held))


def test_a_damaged_record_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    path.write_text(MADE["study"].to_json().replace('"value": 0.5', '"value": 0.6'))
    with pytest.raises(InputError, match=r"holds no study to resume \(the study is damaged: its SHA-256 is"):
        Study.resume(path, {"started": "now"})
