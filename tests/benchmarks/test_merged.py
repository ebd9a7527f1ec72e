"""Studies joined into one record: each run once, what they must share, what each of them holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.merged import merged
from experiments.study import ALONE, EXACT, Result, Study
from fast_attention.lab.refusals import InputError

META = {
    "status": "complete", "command": ["fast-attention", "study"], "started": "2026-11-27T23:31:29+0000", "commit": "ab",
    "task": "Copy()", "data": {}, "model": {"width": 16}, "metric": "accuracy", "equal": "minutes", "hardware": "here",
    "threads": 1, "torch": "2.13.0", "fast_attention": "0.1.0", "mechanisms": [EXACT, ALONE], "seeds": 1,
    "training": "TrainingSettings(steps=0, minutes=10.0, batch_size=2)",
}  # fmt: skip


def run(name: str, seed: int, value: float) -> Result:
    return Result(name, seed, "complete", value, value, 5, 0.01, 10, 20, 4)


def kept(folder: Path, name: str, results: list[Result], **meta: Any) -> Path:
    path = folder / name
    Study({**META, **meta}, results).save(path)
    return path


def test_each_run_stands_once(tmp_path: Path) -> None:
    one = kept(tmp_path, "one.json", [run(EXACT, 0, 0.1), run(EXACT, 1, 0.2)])
    clock = META["training"].replace("batch", "clock='processor', batch")  # type: ignore[attr-defined]
    two = kept(tmp_path, "two.json", [run(EXACT, 0, 0.9), run(ALONE, 0, 0.3)], training=clock, status="interrupted")
    joined = merged([one, two])
    assert [(r.mechanism, r.seed, r.value) for r in joined.results] == [
        (EXACT, 0, 0.1), (ALONE, 0, 0.3), (EXACT, 1, 0.2)
    ]  # fmt: skip
    assert (joined.meta["status"], joined.meta["mechanisms"], joined.meta["seeds"]) == ("complete", [EXACT, ALONE], 2)
    assert [(part["name"], part["training"]) for part in joined.meta["parts"]] == [
        ("one.json", META["training"]), ("two.json", clock)
    ]  # fmt: skip
    assert joined.meta["parts"][0]["runs"] == [f"{EXACT} seed 0", f"{EXACT} seed 1"]
    three = kept(tmp_path, "three.json", [*joined.results, run(ALONE, 1, 0.4)], parts=joined.meta["parts"])
    again = merged([three])
    assert again.meta["parts"][:2] == joined.meta["parts"]
    assert again.meta["parts"][2]["runs"] == [f"{ALONE} seed 1"], "what was trained since"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"data": {"training": "other texts"}}, "data differ"),
        ({"training": "TrainingSettings(steps=0, minutes=3.0, batch_size=2)"}, "training differ"),
        ({"hardware": "elsewhere", "threads": 2}, "hardware, threads differ"),
    ],
)
def test_other_studies_are_refused(other: dict[str, Any], words: str, tmp_path: Path) -> None:
    one, two = kept(tmp_path, "one.json", [run(EXACT, 0, 0.1)]), kept(tmp_path, "two.json", [], **other)
    with pytest.raises(InputError, match=f"two.json is another study than .*one.json: {words}"):
        merged([one, two])
