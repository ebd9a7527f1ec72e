"""``fast-attention convert``: a folder becomes another, with a report; stopped and resumed; bad input in words."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention import from_pretrained
from fast_attention.cli import main
from fast_attention.conversion import goals
from fast_attention.integrations import crossover
from fast_attention.lab import texts
from fast_attention.lab.converted import Converted
from fast_attention.lab.inputs import InputError
from fast_attention.lab.texts import Reading
from tests.lab.reading_pages import assert_one_file

transformers = pytest.importorskip("transformers")

FEATURES = "LearnedFeatures(num_features=4)"


def words(count: int) -> str:
    return " ".join(f"word{(7 * i * i) % 101} is {i % 13}" for i in range(count))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder and a tiny decoder of bytes, with their tokenizers, and texts."""
    home = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 16, "vocab_size": 384,
        "max_position_embeddings": 64,
    }  # fmt: skip
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(home / "encoder")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(home / "decoder")
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(home / "bare")
    for name in ("encoder", "decoder"):
        transformers.ByT5Tokenizer(model_max_length=64).save_pretrained(home / name)
    (home / "text.txt").write_text(words(1500))
    (home / "same.txt").write_text(words(1500))
    (home / "other.txt").write_text(". ".join(reversed(words(1501).split(" is "))))
    (home / "short.txt").write_text("only a few words\n")
    (home / "empty.txt").write_text("\n")
    return home


def given(home: Path, name: str, out: Path, *more: str, mechanism: str = FEATURES, length: int = 40) -> list[str]:
    texts = ["--text", str(home / "text.txt"), "--held-out", str(home / "other.txt")]
    sizes = ["--length", str(length), "--threads", "1", "--lengths", "32", "--lengths", "96"]
    return [str(home / name), "--mechanism", mechanism, *texts, *sizes, "--out", str(out), *more]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", *arguments])
    out, err = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out, err


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_a_model_is_converted_and_reported(
    name: str, home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The report's figures are those of the folder that was written."""
    chosen = ["--steps", "3", "--exact-up-to", "36", "--json"]
    options = given(home, name, tmp_path, *chosen)
    code, out, err = run(capsys, *options)
    assert code == 0, err
    assert json.loads(out) == json.loads((tmp_path / "report.json").read_text())
    held = Converted.read(tmp_path / "report.json")
    assert held.stages == ["original", "swapped", "transferred", "tuned"]
    assert held.conversion.mechanism == f"ByLength(long={FEATURES}, above=36)"
    assert "minutes=0.0, steps=3" in held.meta["settings"]
    assert held.conversion.steps == 6
    assert [facts["documents"] for facts in held.meta["texts"]] == [1]
    assert held.meta["held_out"]["bytes"] == (home / "other.txt").stat().st_size
    assert [(row["model"], row["length"]) for row in held.costs] == [("original", 32), ("converted", 32)]
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in held.costs)
    page = (tmp_path / "report.html").read_text()
    assert_one_file(page)
    for told in ("after the fine-tune", "against the original", "other text, 40", "short", "above=36"):
        assert told in page
    assert not (tmp_path / "checkpoint").exists()
    kind = transformers.AutoModelForCausalLM if name == "decoder" else transformers.AutoModel
    converted, original = from_pretrained(tmp_path), kind.from_pretrained(home / name).eval()
    held_out, tokenizer = texts.read(str(home / "other.txt")), transformers.AutoTokenizer.from_pretrained(tmp_path)
    reading = Reading([texts.read(str(home / "text.txt"))], held_out, tokenizer, 40, 1, 0)
    goal = goals.goal_of(converted, "original")
    prepared = {group: goal.prepare(original, batches) for group, batches in reading.groups.items()}
    found, figures = goals.measure(goal, converted, prepared)[0], held.figures(held.conversion.best)
    assert held.conversion.figures[held.conversion.best] == pytest.approx(found, abs=1e-5)
    if name == "decoder":
        ids = tokenizer(held_out.documents[0][1], add_special_tokens=False)["input_ids"]
        share = len(ids) / held_out.facts["bytes"]
        assert figures["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2) * share, rel=1e-4)
    with torch.no_grad():
        ids = torch.randint(3, 300, (2, 36))
        assert torch.equal(converted(ids)[0], original(ids)[0])
    assert (run(capsys, *options)[0], run(capsys, *options, "--resume")[:2]) == (2, (0, out))
    code, again, err = run(capsys, *given(home, name, tmp_path, *chosen, "--resume", mechanism="Local(window=3)"))
    assert (code, again) == (2, "")
    assert "is of another conversion: mechanism was" in err
    assert run(capsys, *options, "--restart", "--keep-layers", "one")[0] == 2
    assert (tmp_path / "report.json").exists(), "nothing is cleared away for what cannot begin"


def test_a_model_is_converted_to_read_further(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(crossover, "crossover", lambda *_, **__: 80)
    more = ["--steps", "1", "--positions", "100", "--teacher", "chunks"]
    code, out, err = run(capsys, *given(home, "encoder", tmp_path, *more, length=90))
    assert code == 0, err
    assert "steps" in out
    held = Converted.read(tmp_path / "report.json")
    assert held.meta["positions"].startswith("learned positions, copy: from 64 to 100 tokens")
    assert held.meta["teacher"] == "Chunks(tokens=64, before=0)"
    assert held.conversion.mechanism == f"ByLength(long={FEATURES}, above=64)", "within a chunk of the teacher"
    assert {row["length"] for row in held.costs} == {32, 96}
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).model_max_length == 100
    with torch.no_grad():
        assert from_pretrained(tmp_path)(torch.randint(3, 300, (1, 100)))[0].isfinite().all()


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_ctrl_c_leaves_a_model_and_resume_goes_on(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = given(home, "encoder", tmp_path, "--exact-up-to", "none", "--minutes", "0.05")
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from fast_attention.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "convert", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:  # the first measurements are done: training is next
        if line.startswith("swapped, untrained"):
            break
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert Converted.read(tmp_path / "report.json").conversion.status == "interrupted"
    assert "is partial" in (tmp_path / "report.html").read_text()
    from_pretrained(tmp_path)
    code, _, err = run(capsys, *options, "--resume")
    assert code == 0, err
    assert "resumes from" in err
    assert Converted.read(tmp_path / "report.json").conversion.status == "complete"


BAD = {
    "no model": (["nowhere"], "nowhere"),
    "no tokenizer": (["bare"], "holds no tokenizer"),
    "unknown mechanism": (["encoder", "--mechanism", "FavorPlos"], "Did you mean FavorPlus"),
    "cannot": (["decoder", "--mechanism", "Linformer(rank=4)"], "traits.causal"),
    "layers": (["encoder", "--keep-layers", "one"], "write numbers counted from 0"),
    "no such layer": (["encoder", "--keep-layers", "7"], "layers go from 0 to 1"),
    "too long": (["encoder", "--length", "65"], "reads 64 tokens at most; --positions 65 lets it read more"),
    "positions": (["encoder", "--positions", "64"], "--positions 64: positions=64: the model reads 64 tokens already"),
    "exact": (["encoder", "--exact-up-to", "often"], "write a number of tokens, at least 1, or auto"),
    "teacher": (["encoder", "--teacher", "paper"], "choose original or chunks"),
    "train": (["encoder", "--train", "all"], "train='all'"),
    "too short a text": (["encoder", "--text", "short.txt", "--held-out", "text.txt"], "too few for passages of 64"),
    "held out and trained on": (["encoder", "--text", "text.txt", "--held-out", "same.txt"], "which is trained on"),
    "text twice": (["encoder", "--text", "text.txt", "--text", "same.txt"], "same.txt: the same text as text.txt"),
    "empty": (["encoder", "--text", "text.txt", "--held-out", "empty.txt"], "--held-out empty.txt: the file is empty"),
    "short": (["encoder", "--text", "text.txt", "--held-out", "short.txt"], "too few for two passages of 64"),
    "own folder": (["encoder", "--out", "encoder"], "is the folder of the model itself"),
    "no such text": (["encoder", "--text", "jargon"], "--text jargon: No such file or directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    case: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(home)
    (name, *options), said = BAD[case]
    usual = {"--mechanism": "LearnedFeatures", "--out": str(tmp_path), "--steps": "1", "--threads": "1"}
    usual |= {} if "--text" in options else {"--text": "text.txt", "--held-out": "other.txt"}
    more = [word for option, value in usual.items() if option not in options for word in (option, value)]
    code, out, err = run(capsys, name, *options, *more)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("fast-attention: ")
    assert "Traceback" not in err


def test_texts_of_this_machine_teach_and_judge(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without options: the docstrings of Python's library, judged by the documentation of installed packages."""
    for name, text in (("python", "text.txt"), ("packages", "other.txt")):
        made = texts.Corpus(name, ((name, (home / text).read_text()),))
        monkeypatch.setattr(texts, name, lambda made=made: made)
    options = ["--mechanism", FEATURES, "--steps", "1", "--exact-up-to", "none", "--out", str(tmp_path)]
    assert run(capsys, str(home / "encoder"), *options)[0] == 0
    meta = Converted.read(tmp_path / "report.json").meta
    assert ([each["name"] for each in meta["texts"]], meta["held_out"]["name"]) == (["python"], "packages")


def test_passages_are_drawn_by_number_and_held_out_ones_never() -> None:
    text = "".join(chr(97 + i % 23) + chr(65 + i // 23 % 26) + chr(48 + i // 598 % 10) for i in range(2500))
    made, tokenizer = texts.Corpus("text", (("text", text),)), transformers.ByT5Tokenizer()
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    reading, other = (Reading([made], made, tokenizer, 30, 3, seed) for seed in (0, 1))
    places = {tuple(whole[i : i + 29]): i for i in range(len(whole) - 28)}

    def at(batches: list[Any]) -> list[int]:
        return [places[tuple(row[:-1].tolist())] for batch in batches for row in batch["input_ids"]]

    trained, held = at([*map(reading.batch, range(200))]), at(reading.groups["trained text, 30"])
    assert trained == at([*map(reading.batch, range(200))]) != at([*map(other.batch, range(200))])
    assert 0.85 * len(whole) < max(trained) + 29 <= round(0.9 * len(whole)) <= min(held)
    assert len({*held}) == len(held)
    with pytest.raises(InputError, match="too few"):
        Reading([made], made, tokenizer, 9000, 3, 0)


def test_passages_have_mixed_lengths_in_bounded_memory() -> None:
    pieces = tuple((f"{i}", words(4000)[100 * i : 100 * i + 100]) for i in range(500))  # short documents are joined
    made = texts.Corpus("text", pieces)
    reading = Reading([made], made, transformers.ByT5Tokenizer(), 512, 2, 0)
    longest, rows, lengths = [], set(), []
    for number in range(300):
        mask = reading.batch(number)["attention_mask"]
        assert mask.numel() <= 2 * 512  # tokens of a batch, padding included
        assert bool((mask.diff(dim=1) <= 0).all())
        longest.append(mask.shape[1])
        rows.add(mask.shape[0])
        lengths += mask.sum(1).tolist()
    assert min(lengths) >= 32
    assert max(lengths) <= 512
    octaves = torch.histc(torch.tensor(longest).log2(), 4, 5.0, 9.0) / 300
    assert octaves.tolist() == pytest.approx([0.25] * 4, abs=0.08)  # log-uniform
    assert (min(rows), max(rows)) == (2, 16)


def test_another_text_judges_at_every_length_and_is_never_trained_on() -> None:
    seen = texts.Corpus("seen", (("seen", "abc, def. " * 9000),))
    other = texts.Corpus("other", (("other", "Uvw xyz. Zyx! " * 1400),))
    tokenizer = transformers.ByT5Tokenizer()
    reading = Reading([seen], other, tokenizer, 4096, 1, 0)
    assert [*reading.groups] == ["short", "other text, 512", "other text, 2048", "trained text, 512"]
    for name, batches in reading.groups.items():
        letters = {*"".join(tokenizer.decode(row[row > 2]) for batch in batches for row in batch["input_ids"])}
        assert bool(letters & {*"uvwxyz"}) == (name != "trained text, 512")
        assert bool(letters & {*"abcdef"}) == (name == "trained text, 512")
    short = [row for batch in reading.groups["short"] for row in batch["attention_mask"].sum(1).tolist()]
    assert (max(short) <= 128, min(short) < 40, len(reading.groups["short"][0]["input_ids"])) == (True, True, 8)
    for length in (512, 2048):
        assert {batch["input_ids"].shape for batch in reading.groups[f"other text, {length}"]} == {(1, length)}
    for number in range(40):
        assert not {*tokenizer.decode(reading.batch(number)["input_ids"][0])} & {*"UvwxyzZ!"}
