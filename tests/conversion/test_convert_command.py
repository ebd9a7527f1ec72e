"""``fast-attention convert``: a folder becomes another, with a report; stopped and gone on with; bad input in words."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention import from_pretrained
from fast_attention.cli import main
from fast_attention.conversion import Conversion
from fast_attention.lab import corpus, texts
from fast_attention.lab.converting import command, costs
from fast_attention.lab.converting.reading import Reading
from fast_attention.lab.converting.record import Converted
from fast_attention.lab.inputs import InputError
from fast_attention.lab.numbers import exactly
from tests.lab.reading_pages import assert_one_file, pictures, values

transformers = pytest.importorskip("transformers")

SHORT = ["--length", "40", "--threads", "1", "--lengths", "32", "96", "--mechanism", "LearnedFeatures(num_features=4)"]


def bytes_of(words: int) -> str:
    return " ".join(f"word{(7 * i * i) % 101} is {i % 13}" for i in range(words))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder and a tiny decoder of bytes, with their tokenizers, and a text."""
    home = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(hidden_size=16, vocab_size=384, max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(home / "encoder")
    gpt2 = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=384, n_positions=64)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(home / "decoder")
    for name in ("encoder", "decoder"):
        transformers.ByT5Tokenizer().save_pretrained(home / name)
    (home / "text.txt").write_text(bytes_of(1500))
    (home / "other.txt").write_text(". ".join(reversed(bytes_of(1501).split(" is "))))
    return home


def reading_options(folders: Path) -> list[str]:
    return ["--text", str(folders / "text.txt"), "--judge", str(folders / "other.txt")]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", *arguments])
    out, err = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out, err


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_a_model_is_converted_and_reported(
    name: str, folders: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [
        str(folders / name),
        *SHORT,
        *reading_options(folders),
        "--out",
        str(tmp_path),
        "--budget",
        "1.5",
    ]
    code, out, err = run(capsys, *given, "--minutes", "0.03")
    assert code == 0, err
    for words in ("after the fine-tune", "loss if exact", "against the original", "Budget 1.5"):
        assert words in out
    held = Converted.read(tmp_path / "report.json")
    assert held.stages == ["original", "swapped", "transferred", "tuned"]
    assert {row["length"] for row in held.costs} == {32, 96}  # the models know 64 positions
    assert all(row["seconds"] > 0 and row["bytes"] > 0 for row in held.costs)
    html = (tmp_path / "report.html").read_text()
    assert_one_file(html)
    stages, layers, costs, curves = pictures(html)
    figure = next(iter(held.figures("original")))
    assert [float(text.split()[-1]) for text in stages] == [
        float(exactly(held.figures(when)[figure]).replace(",", "")) for when in held.stages
    ]
    for layer, error in held.conversion.errors["tuned"].items():
        assert f"{layer}, after the fine-tune: error {exactly(error)}" in layers
    row = held.costs[0]
    told = f"{exactly(1000 * row['seconds'])} milliseconds, whole model at {row['length']} tokens"
    assert f"{row['model']}: {told}" in costs
    assert 1000 * row["seconds"] in values(html)
    for stage, points in held.conversion.curves.items():
        _, seconds, loss = next((point for point in points if point[2] > 0), points[0])  # the axis is logarithmic
        assert f"{stage}: loss {exactly(loss)} at {exactly(seconds)} s" in curves
    assert not (tmp_path / "checkpoint").exists()
    _same_figures(held.figures("tuned"), folders, name, tmp_path)
    code, _, err = run(capsys, *given)
    assert code == 2
    assert "holds a conversion: add --resume" in err
    code, again, _ = run(capsys, *given, "--resume")
    assert (code, again) == (0, out)
    code, again, err = run(capsys, *given, "--resume", "--mechanism", "Local(window=3)")
    assert (code, again) == (2, "")
    assert "is of another conversion" in err


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_a_model_is_converted_to_read_further(
    name: str, folders: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [str(folders / name), *SHORT, *reading_options(folders), "--out", str(tmp_path)]
    code, _, err = run(capsys, *given, "--minutes", "0.02", "--positions", "100", "--length", "90")
    assert code == 0, err
    held = Converted.read(tmp_path / "report.json")
    assert held.meta["length"] == 90
    assert held.meta["positions"].startswith("learned positions, copy: from 64 to 100 tokens")
    assert "from 64 to 100 tokens" in (tmp_path / "report.html").read_text()
    converted = from_pretrained(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).model_max_length == 100
    with torch.no_grad():
        assert converted(torch.randint(3, 300, (1, 100)))[0].isfinite().all()


def _same_figures(told: dict[str, float], folders: Path, name: str, out: Path) -> None:
    """The report's last figures, from the folder that was written and the one that was read."""
    converted = from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    trained, judge = texts.read([str(folders / "text.txt")], str(folders / "other.txt"))
    reading = Reading(trained, tokenizer, 40, 1, 0, shortest=32, judge=judge)
    if name == "decoder":
        with torch.no_grad():
            logits = [converted(**b).logits[:, :-1] for b in reading.held_out]
        losses = [
            torch.nn.functional.cross_entropy(x[mask], b["input_ids"][:, 1:][mask], reduction="none")
            for x, b in zip(logits, reading.held_out, strict=True)
            for mask in (b["attention_mask"][:, 1:].bool(),)
        ]
        assert told["nats_per_token"] == pytest.approx(float(torch.cat(losses).mean()), abs=2e-3)
        text = (folders / "other.txt").read_text()
        share = len(tokenizer(text, add_special_tokens=False)["input_ids"]) / len(text.encode())
        assert told["bits_per_byte"] == pytest.approx(told["nats_per_token"] / math.log(2) * share, rel=1e-6)
        return
    original = transformers.AutoModel.from_pretrained(folders / name)
    cosines: list[float] = []
    for batch in reading.held_out:
        with torch.no_grad():
            mask = batch["attention_mask"][..., None]
            a, b = ((m(**batch).last_hidden_state * mask).sum(1) / mask.sum(1) for m in (original, converted))
        cosines += torch.nn.functional.cosine_similarity(a, b).tolist()
    assert told["sentence_cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
def test_ctrl_c_leaves_a_model_and_resume_goes_on(
    folders: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = [*reading_options(folders), "--minutes", "0.1"]
    given = [str(folders / "encoder"), *SHORT, *text, "--out", str(tmp_path)]
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from fast_attention.cli import main; main(sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code, "convert", *given], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:  # the first measurements are done: training is next
        if line.startswith("swapped, untrained"):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert Converted.read(tmp_path / "report.json").conversion.status == "interrupted"
    assert (tmp_path / "checkpoint").exists()
    from_pretrained(tmp_path)
    code, out, err = run(capsys, *given, "--resume")
    assert code == 0, err
    assert "resumes from" in err
    assert "after the fine-tune" in out
    assert Converted.read(tmp_path / "report.json").conversion.status == "complete"


def test_costs_that_ctrl_c_left_out_are_measured_by_resume(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def converted(*_: object) -> Conversion:
        (tmp_path / "checkpoint").touch()
        return Conversion("", "LearnedFeatures(num_features=4)", [], {}, status="complete")

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_carry_out", converted)
    monkeypatch.setattr(costs, "measure", stopped)
    given = [str(folders / "encoder"), *SHORT, *reading_options(folders), "--out", str(tmp_path)]
    code, _, err = run(capsys, *given)
    assert (code, "--resume measures time and memory" in err) == (130, True)
    assert (tmp_path / "checkpoint").exists()
    for wrong in (["--lengths", "0"], ["--keep-layers", "one"]):  # nothing is cleared away for what cannot begin
        assert run(capsys, *given, "--restart", *wrong)[0] == 2
        assert (tmp_path / "report.json").exists()
    monkeypatch.setattr(costs, "measure", lambda *_: [])
    assert run(capsys, *given, "--resume")[0] == 0
    assert not (tmp_path / "checkpoint").exists()
    assert "costs" not in Converted.read(tmp_path / "report.json").meta


BAD = {
    "no model": (["nowhere"], "nowhere"),
    "no tokenizer": (["bare"], "holds no tokenizer"),
    "unknown mechanism": (["encoder", "--mechanism", "FavorPlos"], "Did you mean FavorPlus"),
    "cannot": (["decoder", "--mechanism", "Linformer(rank=4)"], "traits.causal"),
    "layers": (["encoder", "--keep-layers", "one"], "write numbers counted from 0"),
    "no such layer": (["encoder", "--keep-layers", "7"], "layers go from 0 to 1"),
    "too long": (["encoder", "--length", "65"], "reads 64 tokens at most; --positions 65 lets it read more"),
    "positions": (["encoder", "--positions", "64"], "--positions 64: positions=64: the model reads 64 tokens already"),
    "too short a text": (["encoder", "--text", "short.txt", "--judge", "text.txt"], "too few for passages of 64"),
    "budget": (["encoder", "--budget", "0.9"], "--budget"),
    "judge trained on": (
        ["encoder", "--text", "text.txt", "--judge", "same.txt"],
        "--judge same.txt: the same text as",
    ),
    "text twice": (
        ["encoder", "--text", "text.txt", "--text", "same.txt"],
        "--text same.txt: the same text as text.txt",
    ),
    "empty judge": (["encoder", "--text", "text.txt", "--judge", "empty.txt"], "--judge empty.txt: the file is empty"),
    "short judge": (["encoder", "--text", "text.txt", "--judge", "short.txt"], "too few for two passages of 64"),
    "everything trained on": (
        ["encoder", "--text", "jargon", "--text", "python", "--text", "packages"],
        "every source of this machine",
    ),
    "proteins and a judge": (
        ["encoder", "--fasta", "sample", "--judge", "jargon"],
        "give --judge or --fasta, not both",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    case: str, folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folders)
    (folders / "short.txt").write_text("only a few words\n")
    (folders / "same.txt").write_text((folders / "text.txt").read_text())
    (folders / "empty.txt").write_text("\n")
    (folders / "bare").mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folders / "bare" / name).write_bytes((folders / "encoder" / name).read_bytes())
    (name, *options), words = BAD[case]
    usual = [] if "--mechanism" in options else ["--mechanism", "LearnedFeatures"]
    quick = ["--threads", "1", "--minutes", "0.01"]
    quick += [] if {"--text", "--fasta"} & {*options} else reading_options(folders)
    code, out, err = run(capsys, name, *usual, *options, *quick, "--out", str(tmp_path))
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("fast-attention: ")
    assert "Traceback" not in err


def test_passages_are_drawn_by_number_and_held_out_ones_never() -> None:
    text = "".join(chr(97 + i % 23) + chr(65 + i // 23 % 26) + chr(48 + i // 598 % 10) for i in range(2500))
    made = corpus.Corpus("text", "text", (("text", text),))
    tokenizer = transformers.ByT5Tokenizer()
    reading = Reading([made], tokenizer, 33, 3, 0)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    seen = set()
    for number in range(200):
        ids = reading.batch(number)["input_ids"]
        assert torch.equal(ids, reading.batch(number)["input_ids"])
        assert ids.shape == (3, 33)
        assert bool((ids[:, -1] == tokenizer.eos_token_id).all())
        seen |= {tuple(row[:-1].tolist()) for row in ids}
    last = max(i for i in range(len(whole)) if tuple(whole[i : i + 32]) in seen)
    assert 0.85 * len(whole) < last + 32 <= round(0.9 * len(whole))
    held = [row[:-1].tolist() for batch in (*reading.held_out, *reading.choosing) for row in batch["input_ids"]]
    places = [next(i for i in range(len(whole)) if whole[i : i + 32] == row) for row in held]
    assert min(places) >= round(0.9 * len(whole))
    assert len(set(places)) == len(places)
    assert not torch.equal(Reading([made], tokenizer, 33, 3, 1).batch(0)["input_ids"], reading.batch(0)["input_ids"])


def test_proteins_are_padded_and_keep_to_themselves() -> None:
    proteins = tuple((f"p{i}", "ACDEFGHIKL"[i % 10] * (5 + 3 * i)) for i in range(20))
    reading = Reading([corpus.Corpus("proteins", "some", proteins)], transformers.ByT5Tokenizer(), 30, 4, 0)
    for number in range(30):
        batch = reading.batch(number)
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            real = row[mask.bool()]
            assert len(set(real[:-1].tolist())) == 1  # one protein, of one letter
            assert bool((row[~mask.bool()] == reading.passages.padding).all())
    with pytest.raises(InputError, match="too few"):
        Reading([corpus.Corpus("proteins", "one", proteins[:1])], transformers.ByT5Tokenizer(), 30, 4, 0)


def test_passages_have_mixed_lengths_in_bounded_memory() -> None:
    made = corpus.Corpus("text", "text", (("text", bytes_of(4000)),))
    reading = Reading([made], transformers.ByT5Tokenizer(), 512, 2, 0, shortest=32)
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
    assert max(rows) == 16
    assert min(rows) == 2


def test_short_documents_are_joined() -> None:
    words = bytes_of(4000).split()
    pieces = tuple((f"{i}", " ".join(words[i : i + 20])) for i in range(0, len(words), 20))
    reading = Reading([corpus.Corpus("text", "pieces", pieces)], transformers.ByT5Tokenizer(), 512, 1, 0)
    assert reading.batch(0)["attention_mask"].shape == (1, 512)
    assert {row for batch in reading.held_out for row in batch["attention_mask"].sum(1).tolist()} == {512}


def test_another_text_judges_at_every_length_and_is_never_trained_on() -> None:
    seen = corpus.Corpus("text", "seen", (("seen", "abc, def. " * 9000),))
    other = corpus.Corpus("text", "other", (("other", "Uvw xyz. Zyx! " * 1400),))
    tokenizer = transformers.ByT5Tokenizer()
    reading = Reading([seen], tokenizer, 4096, 1, 0, shortest=32, judge=other)
    assert [*reading.groups] == ["short", "other text, 512", "other text, 2048", "trained text, 512"]
    for name, batches in reading.groups.items():
        read = {tokenizer.decode(row[row > 2]) for batch in batches for row in batch["input_ids"]}
        letters = {*"".join(read)}
        assert bool(letters & {*"uvwxyz"}) == (name != "trained text, 512")
        assert bool(letters & {*"abcdef"}) == (name == "trained text, 512")
    short = [row for batch in reading.groups["short"] for row in batch["attention_mask"].sum(1).tolist()]
    assert max(short) <= 128
    assert min(short) < 40
    assert len(reading.groups["short"][0]["input_ids"]) == 8
    first = tokenizer.decode(reading.groups["short"][0]["input_ids"][0], skip_special_tokens=True)
    assert first.startswith("Uvw xyz. Zyx! ")
    assert first.rstrip()[-1] in ".!"  # whole sentences
    for length in (512, 2048):
        shapes = {batch["input_ids"].shape for batch in reading.groups[f"other text, {length}"]}
        assert shapes == {(1, length)}
    for number in range(40):
        assert not {*tokenizer.decode(reading.batch(number)["input_ids"][0])} & {*"UvwxyzZ!"}


def test_steps_alone_bound_the_training(folders: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = [str(folders / "encoder"), *SHORT, *reading_options(folders), "--out", str(tmp_path), "--steps", "3"]
    code, _, err = run(capsys, *given)
    assert code == 0, err
    held = Converted.read(tmp_path / "report.json")
    assert "minutes=0.0, steps=3" in held.meta["settings"]
    assert all(curve[-1][0] == 3 for curve in held.conversion.curves.values())
    assert [facts["documents"] for facts in held.meta["texts"]] == [1]
    assert held.meta["judge"]["bytes"] == (folders / "other.txt").stat().st_size


def test_a_pass_that_would_take_long_is_not_begun(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.AutoModel.from_pretrained(folders / "encoder")
    layers = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    monkeypatch.setattr(costs, "LONGEST", 0.0)
    rows = costs.measure({"original": model}, layers, [8, 16, 32], 64, lambda words: None)
    assert [bool(row["note"]) for row in rows] == [False, True, True]
    assert rows[0]["attention_seconds"] < rows[0]["seconds"]


def test_the_record_is_json_without_nan(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        str(folders / "encoder"),
        *SHORT,
        "--fasta",
        "sample",
        "--minutes",
        "0.02",
        "--json",
        "--out",
        str(tmp_path),
    ]
    code, out, err = run(capsys, *given)
    assert code == 0, err
    held = json.loads(out)
    assert held == json.loads((tmp_path / "report.json").read_text())
    assert held["meta"]["text"].startswith("421 UniProt proteins")
