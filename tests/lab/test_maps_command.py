"""``fast-attention maps``: heads before and after, their distances, and pictures that stand for themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention import swap
from fast_attention.lab import commands
from fast_attention.lab.maps.heads import blocks, coarse, distance, sampled
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from tests.lab.reading_pages import assert_one_file, pictures, values
from tests.lab.test_compare import CONFIGS, WORDS, saved

transformers = pytest.importorskip("transformers")


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "words.txt").write_text(WORDS)
    return str(tmp_path / "words.txt")


def made(out: Path) -> dict[str, Any]:
    return json.loads((out / "maps.json").read_text())


def test_maps_are_sums_over_blocks_that_cover_every_key() -> None:
    assert sampled(1, 4) == [0]
    assert sampled(10, 4) == [0, 3, 6, 9]
    assert sampled(5) == [0, 1, 2, 3, 4]
    assert blocks(10, 4) == [0, 2, 5, 7, 10]
    rows = torch.rand(2, 3, 150)
    found = coarse(rows)
    assert found.shape == (2, 3, 64)
    torch.testing.assert_close(found[..., 5], rows[..., 5 * 150 // 64 : 6 * 150 // 64].sum(-1).double())
    torch.testing.assert_close(found.sum(-1), rows.sum(-1).double())


def test_distance_is_total_variation() -> None:
    a, b = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]), torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    assert distance(a, b).tolist() == [0.5]
    assert distance(a, a).tolist() == [0.0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_exact_attention_in_place_of_itself_is_no_distance(kind: str, tmp_path: Path, text: str) -> None:
    place = saved(tmp_path / "model", CONFIGS[kind])
    options = ["--text", text, "--length", "40", "--out", str(tmp_path / "out")]
    assert commands.run(["maps", place, "--mechanism", "Softmax", *options]) == 0
    heads = made(tmp_path / "out")["heads"]
    assert len(heads) == 2 * 4
    assert max(head["distance"] for head in heads) < 1e-6


def test_a_window_is_seen_for_what_it_is(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its map is a band; its distance is the weight that exact attention lays outside, where queries are shared."""
    place = saved(tmp_path / "model", CONFIGS["bert"])
    options = ["--text", text, "--length", "40", "--rows", "0,20", "--layers", "0", "--out", str(tmp_path / "out")]
    assert commands.run(["maps", place, "--mechanism", "Local(window=4)", *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = made(tmp_path / "out")
    assert printed == found
    assert (found["meta"]["before"], found["meta"]["after"]) == ("Softmax()", "Local(window=4)")
    assert len(found["heads"]) == 4, "one layer"
    for head in found["heads"]:
        exact, window = (torch.tensor(head[name]) for name in ("original", "swapped"))
        assert exact.shape == window.shape == (40, 40)
        far = (torch.arange(40)[:, None] - torch.arange(40)).abs() > 4
        assert not window[far].any()
        outside = (exact * far).sum(-1).mean()
        assert head["own_distance"] == pytest.approx(float(outside), abs=2e-3)
        assert head["distance"] == pytest.approx(head["own_distance"], abs=1e-6), "the first layer reads the same"
        for name in ("original", "swapped"):
            torch.testing.assert_close(torch.tensor(head[f"{name}_curves"]), torch.tensor(head[name])[[0, 20]])
    page = (tmp_path / "out" / "maps.html").read_text()
    assert_one_file(page)
    overview, drawn = pictures(page)
    for head in found["heads"]:
        named = f"{head['layer']} head {head['head']}"
        for words, key in (
            ("in the swapped model", "distance"),
            ("on the original's queries and keys", "own_distance"),
        ):
            told = next(text for text in overview if text.startswith(f"{named}, {words}: "))
            assert float(told.split()[-1]) == pytest.approx(head[key], rel=1e-3, abs=1e-6)
        peak = max(head["original_curves"][1])
        assert any(text.startswith("query 20 before: ") and float(text.split()[3]) == pytest.approx(peak, rel=1e-3)
                   for text in drawn)  # fmt: skip
        assert any(value == pytest.approx(peak, rel=1e-3) for value in values(page)), "in the table too"
    for words in ("layer.0", "head 3", "Local(window=4)", "query 20", "maps.json"):
        assert words in page, words


def test_a_model_swapped_before_needs_no_mechanism(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(CONFIGS["gpt2"]).eval()
    swap(model, {"h.1.*": "LinearAttention"})
    model.save_pretrained(tmp_path / "swapped")
    read = ["--ids", ",".join(str(i * i % 50) for i in range(30)), "--out", str(tmp_path / "out")]
    assert commands.run(["maps", str(tmp_path / "swapped"), *read]) == 0
    found = made(tmp_path / "out")
    assert found["meta"]["after"] == "Softmax() + LinearAttention()"
    first, second = found["heads"][:4], found["heads"][4:]
    assert max(head["distance"] for head in first) < 1e-6 < min(head["distance"] for head in second)


def test_a_model_of_this_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig(256, "LinearAttention", width=16, layers=2, heads=2, max_len=64, reads="bytes", causal=True)
    torch.manual_seed(0)
    saving.save(Model(config), tmp_path / "own")
    read = ["--length", "30", "--out", str(tmp_path / "out")]
    assert commands.run(["maps", str(tmp_path / "own"), "--mechanism", "LinearAttention", *read]) == 0
    assert max(head["distance"] for head in made(tmp_path / "out")["heads"]) < 1e-6
    assert commands.run(["maps", str(tmp_path / "own"), "--mechanism", "Softmax", *read]) == 0
    found = made(tmp_path / "out")["heads"]
    assert len(found) == 4
    assert min(head["distance"] for head in found) > 1e-4
    assert commands.run(["maps", str(tmp_path / "own"), *read]) == 2
    assert "give --mechanism" in capsys.readouterr().err


BAD = {
    "rows beyond": (["--rows", "0,40"], "--rows 40: queries go from 0 to 39"),
    "rows as words": (["--rows", "first"], "--rows first: write numbers"),
    "layers beyond": (["--layers", "2"], "--layers 2: layers go from 0 to 1"),
    "ids beyond": (["--ids", "3,64"], "give token numbers from 0 to 63"),
    "no matrix": (["--mechanism", "AFTSimple"], "traits.matrix"),
    "mixer": (["--mechanism", "FNet"], "mixes whole tokens"),
    "no mechanism": ([], "give --mechanism"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, said = BAD[case]
    place = saved(tmp_path / "model", CONFIGS["bert"])
    given = given if "--mechanism" in given or case == "no mechanism" else ["--mechanism", "LinearAttention", *given]
    given = given if "--ids" in given else [*given, "--text", text]
    capsys.readouterr()
    assert commands.run(["maps", place, "--length", "40", "--out", str(tmp_path / "out"), *given]) == 2
    told = capsys.readouterr().err.strip()
    assert said in told
    assert "\n" not in told


def test_a_folder_without_a_tokenizer_wants_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.AutoModel.from_config(CONFIGS["bert"]).save_pretrained(tmp_path / "bare")
    arguments = ["maps", str(tmp_path / "bare"), "--mechanism", "LinearAttention", "--out", str(tmp_path / "out")]
    assert commands.run(arguments) == 2
    assert "or give --ids" in capsys.readouterr().err
    assert commands.run(["maps", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
