"""What ``swap(model)`` gains without changing results: the words, and the commands that begin with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fast_attention.lab import command_line, compare, verdicts
from fast_attention.lab.capture import Gaussian, HuggingFace
from fast_attention.lab.texts import Corpus
from tests.lab.small_models import WORDS, saved

PADDING = "Same results, faster: swap(model) leaves the padding of batches out."


def row(length: int, before: float, difference: float = 1e-7) -> dict[str, Any]:
    return {"length": length, "before": before, "after": 1.0, "difference": difference}


@pytest.mark.parametrize(
    ("rows", "skips", "said"),
    [
        ([], True, [PADDING]),
        ([row(512, 1.02)], True, [PADDING]),
        (
            [row(512, 1.0), row(1024, 1.5, 2e-7), row(4096, 3.0, 4e-7)],
            False,
            [
                "Same results, faster: swap(model) makes the whole model 1.5 times as fast at 1,024 tokens; 3 times "
                "as fast at 4,096 tokens (outputs differ by 4e-07)."
            ],
        ),
        (
            [row(1024, 2.0)],
            True,
            [
                "Same results, faster: swap(model) makes the whole model 2 times as fast at 1,024 tokens (outputs "
                "differ by 1e-07).",
                PADDING.replace("leaves", "also leaves"),
            ],
        ),
        (
            [row(512, 1.02), row(256, 0.9)],
            False,
            ["swap(model) keeps the results, and gains nothing up to 512 tokens."],
        ),
    ],
)
def test_what_was_found_in_words(rows: list[dict[str, Any]], skips: bool, said: list[str]) -> None:
    assert verdicts.same_results({"gains": bool(rows) or skips, "skips_padding": skips, "rows": rows}) == said


def test_nothing_is_said_of_shapes_and_a_reason_is_given_where_nothing_is_gained() -> None:
    assert verdicts.same_results(None) == []
    assert compare.same_results(Gaussian(2, 8), [64], 10.0, lambda what: None) is None
    (said,) = verdicts.same_results({"gains": True, "skips_padding": False, "rows": []})
    assert said == "swap(model) keeps the results. What it gains was not timed at these lengths."
    (said,) = verdicts.same_results({"gains": False, "skips_padding": False, "rows": []})
    assert said.startswith("Nothing is faster with the same results")


def windows(folder: Path) -> Path:
    """A causal model that sees 16 tokens and has 400 positions."""
    sizes: dict[str, Any] = {"sliding_window": 16, "num_key_value_heads": 2, "max_position_embeddings": 400}
    return saved(folder, "MistralModel", **sizes)


def test_a_model_with_windows_is_timed_at_lengths_that_it_reads(tmp_path: Path) -> None:
    text = Corpus("words", (("words", WORDS),))
    source, watched = HuggingFace(str(windows(tmp_path)), text), list[str]()
    found = compare.same_results(source, [320, 64, 1000], 60.0, watched.append)
    assert found is not None
    assert watched == ["same results at 320 tokens"], "not beyond its positions, nor where it runs what it ran"
    (row,) = found["rows"]
    assert row["length"] == 320
    assert 0.0 < row["difference"] < 2e-5, "runs in tiles"
    assert all(row["before"] > 0 and row["after"] > 0 for row in found["rows"])
    assert (found["gains"], found["skips_padding"]) == (True, False)
    stopped = compare.same_results(source, [64, 320], 0.0, watched.append)
    assert stopped is not None
    assert stopped["rows"] == [], "no length begins when the time is over"


@pytest.mark.parametrize("command", ["advise", "compare"])
def test_commands_begin_with_what_keeps_the_results(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text(WORDS)
    place = str(saved(tmp_path / "model", "BertModel"))
    asked = {
        "advise": ["advise", place, "--length", "24", "--seconds", "20"],
        "compare": ["compare", "--model", place, "--lengths", "24", "--budget", "20"],
    }[command]
    asked += ["--text", "words.txt", "--threads", "1", "--mechanisms", "Local(window=64)"]
    capsys.readouterr()
    assert command_line.run(asked) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(PADDING)
    page, data = {
        "advise": ("out/advise/advice.html", "out/advise/advice.json"),
        "compare": ("report/report.html", "report/records.json"),
    }[command]
    assert PADDING in Path(page).read_text(encoding="utf-8")
    assert json.loads(Path(data).read_text(encoding="utf-8"))["meta"]["same_results"]["skips_padding"] is True


def test_of_a_model_with_windows_the_forms_that_keep_its_results_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mechanisms have no error there; what is known to be the same is still said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text(WORDS)
    place = str(windows(tmp_path / "model"))
    capsys.readouterr()
    asked = ["compare", "--model", place, "--lengths", "320", "--budget", "20", "--text", "words.txt"]
    assert command_line.run([*asked, "--threads", "1", "--mechanisms", "Local(window=64)"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(("Same results, faster: swap(model) makes", "swap(model) keeps the results"))
