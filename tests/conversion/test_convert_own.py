"""Converting runs of ``train``: each is judged by its own task, and what is written is opened like a run."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention.catalogue import parse as parsed
from fast_attention.lab import commands, loading
from fast_attention.lab.converting import costs, page
from fast_attention.lab.converting.record import Converted
from fast_attention.mechanism import Attention, Unsupported
from fast_attention.nn import saving
from fast_attention.nn.models import Model, ModelConfig
from fast_attention.nn.token_mixer import TokenMixer
from fast_attention.tasks import Batch, parse
from fast_attention.training import steps
from fast_attention.training.loop import train
from fast_attention.training.processes import Group
from fast_attention.training.settings import TrainingSettings
from tests.conversion.plain import convert, settings_of_all

ALONE = Group(0, 1, torch.device("cpu"))
TASK = parse("Copy(symbols=4, words=3)")
FEATURES = "LearnedFeatures(num_features=4)"
EVERYWHERE = ["--exact-up-to", "none", "--train", "model"]  # the mechanism at every length, all weights trained
STEPS = settings_of_all(minutes=0.0, steps=4, save_seconds=0.0)
SETTINGS = TrainingSettings(steps=250, batch_size=16, evaluate_every=250, evaluation_batches=2, save_every=0, lr=5e-3)
SIZES: dict[str, Any] = {"width": 16, "heads": 2, "layers": 2, "positions": "learned"}


def sequences(path: Path) -> str:
    """Labels that hang on a letter somewhere in the text."""
    source, rows = random.Random(0), ["text,label"]
    for i in range(160):
        letters = "".join(source.choice("abcde") for _ in range(source.randint(4, 9)))
        at, mark = source.randrange(len(letters)), "x" if i % 2 else "y"
        rows.append(f"{letters[:at]}{mark}{letters[at:]},{mark}")
    path.write_text("\n".join(rows) + "\n")
    return f"Sequences(path={str(path)!r}, context=24)"


def tags(path: Path) -> str:
    """A letter's label is the one of the marks before it."""
    source, rows = random.Random(0), ["sequence,labels"]
    for _ in range(120):
        letters = "".join(source.choice("abxy") for _ in range(source.randint(5, 10)))
        rows.append(f"{letters},{''.join('1' if 'x' in letters[: i + 1] else '0' for i in range(len(letters)))}")
    path.write_text("\n".join(rows) + "\n")
    return f"Tags(path={str(path)!r}, context=24)"


def text(path: Path) -> str:
    path.write_text("".join(f"{i % 7} and {i % 5}; " for i in range(900)))
    return f"ByteLM(path={str(path)!r}, context=24)"


RUNS: dict[str, Any] = {"copy": lambda path: repr(TASK), "classify": sequences, "byte-lm": text}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(home: Path) -> Any:
    """Runs of train by the name of their task, each trained when it is first asked for."""

    def run(name: str) -> Path:
        out = home / name
        if not out.exists():
            task = parse(RUNS[name](home / f"{name}.csv"))
            train(task, steps.config_for(task, **SIZES), SETTINGS, out)
        return out

    return run


def score(folder: Path, spelt: str) -> float:
    """Nats per target of a model on its run's validation batches."""
    return steps.evaluate(loading.load(folder), parse(spelt), SETTINGS, ALONE).loss


@pytest.mark.parametrize("name", ["classify", "byte-lm"])
def test_a_run_is_converted_and_opened_like_a_run(
    name: str, runs: Any, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = runs(name), tmp_path / "fast"
    words = [
        "--mechanism",
        FEATURES,
        "--minutes",
        "0.02",
        "--threads",
        "1",
        "--lr",
        "1e-3",
        "--share",
        "0.5",
        *EVERYWHERE,
    ]
    assert commands.run(["convert", str(run), *words, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "nats per target" in said
    assert ("bits per byte" in said) == (name == "byte-lm")
    held = Converted.read(out / "report.json")
    before, after = held.figures("swapped"), held.figures("tuned")
    assert after["nats_per_target"] < before["nats_per_target"]
    task = held.meta["task"]
    assert held.figures("original")["nats_per_target"] == pytest.approx(score(run, task), rel=1e-4)
    assert after["nats_per_target"] == pytest.approx(score(out, task), rel=1e-4)
    assert [row["length"] for row in held.costs] == 2 * [loading.load(out).config.max_len]
    assert all(row["seconds"] > 0 for row in held.costs)
    html = (out / "report.html").read_text()
    assert html.count("<svg") == 4
    assert "fast_attention.nn.saving.load" in html
    assert loading.load(out).config.mechanisms == 2 * [FEATURES]
    assert saving.load(run / "model").config.mechanisms == 2 * ["Softmax()"]
    assert commands.run(["check", str(out)]) == 0


def test_a_converted_run_is_converted_again(runs: Any, tmp_path: Path) -> None:
    """The report says which task it learnt; layers that are kept run what they ran."""
    quick = ["--minutes", "0.01", "--threads", "1", *EVERYWHERE]
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["convert", str(runs("copy")), "--mechanism", FEATURES, *quick, "--keep-layers", "1"]
    assert commands.run([*words, "--out", str(first)]) == 0
    words = ["convert", str(first), "--mechanism", "LinearAttention()", *quick, "--keep-layers", "0"]
    assert commands.run([*words, "--out", str(second)]) == 0
    assert loading.load(first).config.mechanisms == [FEATURES, "Softmax()"]
    assert loading.load(second).config.mechanisms == [FEATURES, "LinearAttention()"]
    held = Converted.read(second / "report.json")
    assert held.meta["task"] == repr(TASK)
    assert page.layers(held).rows[0].cells[1] == f"{FEATURES}: asked for"
    assert held.untouched == "as it was"
    assert Converted.read(first / "report.json").untouched == "exact"


def model(mechanism: Any = "Softmax()", **settings: Any) -> Model:
    torch.manual_seed(1)
    config = steps.config_for(TASK, mechanism=mechanism, **{**SIZES, **settings})
    made = Model(config)
    for mixer in (part for part in made.modules() if isinstance(part, TokenMixer)):
        if isinstance(mixer.mechanism, Attention):
            mixer.in_proj.weight.data *= 4  # attention that is far from uniform
    return made.eval()


def batch(number: int) -> Batch:
    return TASK.batch("train", number, 4)


HELD = [TASK.batch("valid", i, 4) for i in range(2)]


def test_a_label_for_every_token_is_judged_too(tmp_path: Path) -> None:
    task = parse(tags(tmp_path / "tags.csv"))
    ours = Model(steps.config_for(task, **SIZES)).eval()
    held = [task.batch("valid", i, 8) for i in range(2)]
    assert not all(bool(each.key_mask.all()) for each in held if each.key_mask is not None)
    settings = settings_of_all(minutes=0.0, steps=40, lr=1e-3)
    told = convert(ours, FEATURES, lambda i: task.batch("train", i, 8), held, settings=settings)
    assert told.figures["tuned"]["loss"] < told.figures["swapped"]["loss"]
    assert told.figures["tuned"]["accuracy"] > told.figures["swapped"]["accuracy"]


@pytest.mark.parametrize("settings", [{}, {"reversible": True, "positions": "rotary"}, {"positions": "sinusoidal"}])
def test_transfer_lowers_every_layers_error(settings: dict[str, Any]) -> None:
    ours = model(**settings)
    asked = settings_of_all(minutes=0.0, steps=60, share=1.0)
    told = convert(ours, "Local(window=(2, 0))", batch, HELD, settings=asked)
    before, after = told.errors["swapped"], told.errors["transferred"]
    assert len(told.converted) == 2
    assert all(after[name] < 0.95 * before[name] for name in told.layers), (before, after)
    assert set(told.runs.values()) == {"Softmax()"}


def test_what_the_figures_mean() -> None:
    ours, original = model(), model()
    told = convert(ours, FEATURES, batch, HELD, settings=settings_of_all(minutes=0.0, steps=30, lr=3e-3, distil=1.0))
    total, right, alike, count = 0.0, 0, 0, 0
    for each in HELD:
        with torch.no_grad():
            got, wanted = (m(each.tokens, each.key_mask) for m in (ours, original))
        for row in range(4):
            for place in range(each.tokens.shape[1]):
                target = int(each.targets[row, place])
                if target >= 0:
                    total -= float(got[row, place].log_softmax(-1)[target])
                    right += int(got[row, place].argmax()) == target
                    alike += int(got[row, place].argmax()) == int(wanted[row, place].argmax())
                    count += 1
    found = {"loss": total / count, "accuracy": right / count, "same_answer": alike / count}
    assert told.figures["tuned"] == pytest.approx(found, rel=1e-5)
    assert told.figures["original"]["same_answer"] == 1.0
    assert torch.equal(ours.embedding.weight, original.embedding.weight)
    assert ours.out.weight is ours.embedding.weight
    assert all(p.requires_grad and p.grad is None for p in ours.parameters())


def test_a_budget_puts_layers_back_and_a_killed_conversion_goes_on_to_the_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"settings": STEPS, "choosing": HELD[:1]}
    found = convert(model(), "Local(window=(1, 0))", batch, HELD, **settings)
    assert found.whole is not None
    least = min(found.put_back.values())
    settings["budget"] = 1.0 + (0.5 * (found.whole + least) / found.figures["original"]["loss"] - 1.0)
    if settings["budget"] < 1.0:
        settings["budget"] = 1.0
    whole = model()
    wanted = convert(whole, "Local(window=(1, 0))", batch, HELD, **settings)

    def kill(line: dict[str, Any]) -> None:
        if (line.get("stage"), line.get("step")) == ("fine-tune", 2):
            raise KeyError("killed")

    path = tmp_path / "checkpoint"
    with pytest.raises(KeyError):
        convert(model(), "Local(window=(1, 0))", batch, HELD, **settings, checkpoint=path, watch=kill)
    ours = model()
    told = convert(ours, "Local(window=(1, 0))", batch, HELD, **settings, checkpoint=path, resume=True)
    assert (told.figures, told.errors, told.chosen) == (wanted.figures, wanted.errors, wanted.chosen)
    assert all(torch.equal(x, whole.state_dict()[name]) for name, x in ours.state_dict().items())
    assert ours.config == whole.config


def test_layers_that_cannot_run_it_stay_and_say_why() -> None:
    mixed = model(mechanism=("Softmax()", "LinearAttention()", "RandomSynthesizer()"), layers=3)
    told = convert(mixed, "LinearAttention()", batch, HELD, settings=STEPS)
    assert told.converted == ["blocks.0.f.mixer"]
    assert "already" in told.kept["blocks.1.f.mixer"]
    assert mixed.config.mechanisms == ["LinearAttention()", "LinearAttention()", "RandomSynthesizer()"]
    assert told.runs["blocks.2.f.mixer"] == "RandomSynthesizer()"


REFUSED: dict[str, Any] = {
    "already": ("Softmax()", {}, "runs Softmax\\(\\) already: ask for another mechanism"),
    "tokens": ("FNet()", {"causal": False}, "mixes whole tokens and has no heads"),
    "past": ("Linformer(rank=2)", {}, r"traits\.causal"),
    "turned": ("MLPMixer()", {"positions": "rotary"}, "a causal model|has no heads"),
    "rotary": (
        "LearnedFeatures()",
        {"positions": "rotary"},
        r"traits\.rotary is False.* Or a model that was trained with positions='learned'",
    ),
    "projections": (
        "Softmax()",
        {"mechanism": "RandomSynthesizer()"},
        "reads q, k, and a layer of .* no such projection",
    ),
    "mixer": ("Softmax()", {"mechanism": "FNet()", "causal": False}, "mixes whole tokens and has no heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_layer_can_run_is_refused_and_the_model_is_as_it_was(case: str) -> None:
    mechanism, settings, words = REFUSED[case]
    if settings.get("causal") is False:
        torch.manual_seed(0)
        ours = Model(ModelConfig(9, mechanism=settings.get("mechanism", "Softmax()"), **SIZES))
    else:
        ours = model(**settings)
    config, before = ours.config, copy.deepcopy(ours.state_dict())
    with pytest.raises(Unsupported, match=words):
        convert(ours, mechanism, batch, HELD, settings=STEPS)
    assert ours.config == config
    assert all(torch.equal(x, before[name]) for name, x in ours.state_dict().items())


def test_a_layers_copy_reads_what_it_reads() -> None:
    """Fewer projections are those of the layer before; the same mechanism computes the same."""
    torch.manual_seed(0)
    mixer, x = TokenMixer(8, 2, "Softmax()", rotary=True), torch.randn(2, 5, 8)
    torch.testing.assert_close(mixer.with_mechanism(parsed("Softmax()"))(x), mixer(x))
    grouped = TokenMixer(8, 4, "Softmax()", num_kv_heads=2, bias=False)
    torch.testing.assert_close(grouped.with_mechanism(parsed("Softmax()"))(x), grouped(x))
    grouped = TokenMixer(8, 4, "Softmax()", num_kv_heads=2, max_len=5)
    fewer = grouped.with_mechanism(parsed("FactorizedDenseSynthesizer()"))
    assert fewer.mechanism.traits.reads == "qv"
    assert torch.equal(fewer.in_proj.weight, grouped.in_proj.weight[[*range(8), *range(12, 16)]])
    assert torch.equal(fewer.in_proj.bias, grouped.in_proj.bias[[*range(8), *range(12, 16)]])
    assert torch.equal(fewer.out_proj.weight, grouped.out_proj.weight)


BAD: dict[str, Any] = {
    "its own folder": ([], "run", "is the folder of the model itself"),
    "another file": (["--text", "x.txt"], "out", "which reads no bytes"),
    "proteins": (["--fasta", "sample"], "out", "which reads no residues"),
    "length": (["--length", "9"], "out", "sequences of a length of its own"),
    "layers": (["--keep-layers", "4"], "out", "layers go from 0 to 1"),
    "already": (["--mechanism", "Softmax"], "out", "already"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, out, words = BAD[case]
    run = runs("copy")
    usual = [] if "--mechanism" in options else ["--mechanism", FEATURES]
    folder = str(run if out == "run" else tmp_path)
    given = ["convert", str(run), *usual, *options, "--minutes", "0.01", "--threads", "1", "--out", folder]
    assert commands.run(given) == 2
    said, err = capsys.readouterr()
    assert (said, len(err.splitlines())) == ("", 1), err
    assert words in err


def test_a_model_of_which_nobody_says_what_it_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that reads bytes or residues has a task all the same; any other needs its run."""
    saving.save(model(), tmp_path / "numbers")
    given = ["--mechanism", "FavorPlus(num_features=8)", "--minutes", "0.01", "--threads", "1", "--batch-size", "2"]
    given += EVERYWHERE
    assert commands.run(["convert", str(tmp_path / "numbers"), *given, "--out", str(tmp_path / "a")]) == 2
    assert "give the folder of the run" in capsys.readouterr().err
    out = tmp_path / "b"
    assert (
        commands.run(["convert", "protein-mini", *given, "--length", "32", "--lengths", "32", "--out", str(out)]) == 0
    )
    held = Converted.read(out / "report.json")
    assert held.meta["task"] == "ProteinMLM(context=32)"
    assert held.figures("tuned")["nats_per_target"] < held.figures("swapped")["nats_per_target"]


def test_a_length_beyond_the_models_is_said(tmp_path: Path) -> None:
    rows = costs.measure({"original": model()}, ["blocks.0.f.mixer"], [4, 8, 16], None, lambda words: None)
    assert [row["note"] for row in rows] == ["", "it reads 7 tokens at most", "it reads 7 tokens at most"]
