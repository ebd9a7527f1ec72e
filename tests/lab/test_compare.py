"""The comparison's parts: real tensors out of models, errors, fair times, verdicts, and a report that is whole."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fast_attention import Bound, Mixer, Shape, catalogue, clock, extend, files
from fast_attention.lab import (
    compare,
    corpus,
    loading,
    measure,
    numbers,
    pictures,
    report,
    timing,
    tradeoff,
    verdicts,
)
from fast_attention.lab.accuracy import Scene, measurable, one, relative_rms
from fast_attention.lab.capture import Gaussian, HuggingFace
from fast_attention.lab.comparison import Comparison, Error
from fast_attention.lab.corpus import Corpus
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import Setting
from fast_attention.lab.numbers import exactly
from fast_attention.lab.records import EXACT, Cell
from tests.lab.reading_pages import assert_one_file, values
from tests.lab.reading_pages import pictures as said_by

transformers = pytest.importorskip("transformers")
WORDS = " ".join(f"word{i * i % 37}" for i in range(400))
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "initializer_range": 0.4,
}
CONFIGS: dict[str, Any] = {
    "bert": transformers.BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=48),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=48),
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=48),
    "esm": transformers.EsmConfig(
        **SIZES, intermediate_size=64, max_position_embeddings=48, position_embedding_type="rotary",
        pad_token_id=1, mask_token_id=2,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def saved(folder: Path, config: Any, model: Any = None) -> str:
    """A randomly initialised model with a tokenizer of 38 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    (model or transformers.AutoModel).from_config(config).save_pretrained(folder)
    vocabulary = {"[UNK]": 0, **{f"word{i}": i + 1 for i in range(37)}, "M": 38, "K": 39, "V": 40}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(folder)
    return str(folder)


def reading(text: str = WORDS) -> Corpus:
    return Corpus("text", "words", (("words", text),))


@pytest.mark.parametrize("kind", CONFIGS)
def test_captured_tensors_give_the_models_own_attention(kind: str, tmp_path: Path) -> None:
    """Scaling, causality and grouped keys: softmax of what was captured is what the model says it attends with."""
    place = saved(tmp_path, CONFIGS[kind])
    source = HuggingFace(place, reading())
    layers, read = source.layers(20)
    assert (source.heads, source.head_dim, source.context) == (4, 8, 48)
    assert source.is_causal == (kind in ("gpt2", "llama"))
    assert read == "the first 20 tokens of words"
    eager = transformers.AutoModel.from_pretrained(place, attn_implementation="eager").eval()
    ids = source.tokenizer(WORDS, truncation=True, max_length=20, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        theirs = eager(input_ids=ids, output_attentions=True).attentions
    assert len(layers) == len(theirs) == 2
    for layer, matrix in zip(layers, theirs, strict=True):
        identity = torch.eye(20).expand(1, 4, 20, 20)
        ours = F.scaled_dot_product_attention(layer.q, layer.k, identity, is_causal=layer.is_causal)
        torch.testing.assert_close(ours, matrix, rtol=1e-4, atol=1e-5)


def test_models_that_add_to_their_scores_are_refused(tmp_path: Path) -> None:
    t5 = transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=64)
    with pytest.raises(InputError, match=r"position_bias|does not let its attention be replaced"):
        HuggingFace(saved(tmp_path / "t5", t5), reading())
    mistral = transformers.MistralConfig(
        **SIZES, intermediate_size=32, num_key_value_heads=4, sliding_window=16, max_position_embeddings=64
    )
    source = HuggingFace(saved(tmp_path / "mistral", mistral), reading())
    assert len(source.layers(16)[0]) == 2
    with pytest.raises(InputError, match="sees 16 tokens only"):
        source.layers(17)
    fnet = transformers.FNetConfig(
        hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=64, max_position_embeddings=48
    )
    with pytest.raises(InputError, match="does not let its attention be replaced"):
        HuggingFace(saved(tmp_path / "fnet", fnet), reading())


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no config\.json"):
        HuggingFace(str(tmp_path), reading())
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(InputError, match="cannot be loaded"):
        HuggingFace(str(tmp_path), reading())
    with pytest.raises(InputError, match="no such folder"):
        HuggingFace("nobody/nothing", reading())


def test_residues_are_spaced_where_the_tokenizer_needs_it(tmp_path: Path) -> None:
    source = HuggingFace(saved(tmp_path, CONFIGS["bert"]), Corpus("proteins", "p", (("one", "MKVMKV"),)))
    layers, read = source.layers(40)
    assert read == "the first 6 tokens of one"
    assert layers[0].q.shape == (1, 4, 6, 8)


def test_minilm_reads_the_shipped_text_and_proteins() -> None:
    try:
        place = loading.default_model()
    except InputError:
        pytest.skip("the demo extra is not installed")
    source = HuggingFace(place, corpus.read())
    layers, _ = source.layers(64)
    assert (source.heads, source.head_dim, source.context, len(layers)) == (12, 32, 512, 6)
    assert 6 < layers[2].q.norm(dim=-1).mean() < 11  # trained weights: random ones give 0.1
    found = Scene(layers, setting(12, 32)).error(catalogue.parse("Local(window=64)"), matrix=False)
    assert max(max(row) for row in found.output) < 1e-4, "a window as wide as the text is exact"
    source.corpus = corpus.read(fasta="sample")
    assert source.layers(64)[1] == "the first 64 tokens of sp|Q99ZW2|CAS9_STRP1"


def setting(heads: int = 4, head_dim: int = 64, **options: Any) -> Setting:
    chosen: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "is_causal": False}
    return Setting(heads, head_dim, **{**chosen, "backward": True, **options})


def test_error_is_relative_rms_head_by_head(device: torch.device) -> None:
    truth = torch.randn(1, 3, 5, 4)
    wrong = truth.clone()
    wrong[0, 1] *= 1.5
    torch.testing.assert_close(torch.tensor(relative_rms(wrong, truth)), torch.tensor([[0.0, 0.5, 0.0]]))
    layers, _ = Gaussian(4, 16).layers(24)
    mechanism = catalogue.parse("FavorPlus(num_features=64)")
    found = Scene(layers, setting(head_dim=16, device=device)).error(mechanism, matrix=True)
    torch.manual_seed(0)
    bound = Bound(mechanism, Shape(4, 16, 24)).to(device)
    q, k, v = (x.to(device) for x in layers[1][1:4])
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    by_hand = (bound(q, k, v).double() - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
    torch.testing.assert_close(torch.tensor(found.output[1]).double(), by_hand[0].cpu().double(), rtol=1e-4, atol=1e-6)
    assert found.matrix is not None
    assert [len(row) for row in found.matrix] == [4, 4, 4]
    medians = [sorted(row)[2] for row in found.output]
    assert medians[0] < medians[1] < medians[2], "larger logits are harder"
    exact_window = Scene(layers, setting(head_dim=16)).error(catalogue.parse("Local(window=24)"), matrix=True)
    assert max(max(row) for row in [*exact_window.output, *(exact_window.matrix or [])]) < 1e-5


def test_causal_error_is_against_causal_attention() -> None:
    layers, _ = Gaussian(2, 16).layers(24)
    found = Scene(layers, setting(2, 16, is_causal=True)).error(catalogue.parse("Local(window=24)"), matrix=True)
    assert max(max(row) for row in [*found.output, *(found.matrix or [])]) < 1e-5


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_pairs_that_are_read_are_counted(is_causal: bool) -> None:
    """Against matrices in which every weight above nothing counts."""
    scene = Scene(Gaussian(2, 16).layers(24)[0], setting(2, 16, is_causal=is_causal))
    near = sum(1 for i in range(24) for j in range(24) if abs(i - j) <= 3 and (j <= i or not is_causal))
    visible = 24 * 25 / 2 if is_causal else 24 * 24
    for name, expected in (("Local(window=3)", near / visible), ("FavorPlus()", 1.0), ("Softmax()", 1.0)):
        assert scene.visible_fraction(catalogue.parse(name)) == pytest.approx(expected), name
    assert scene.visible_fraction(catalogue.default("Manhattan")) is None, "it weighs no pairs"


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_what_is_longer_than_its_positions_is_read_with_more_of_them(kind: str, tmp_path: Path) -> None:
    place = saved(tmp_path, CONFIGS[kind])
    plain, source = HuggingFace(place, reading()), HuggingFace(place, reading(), longest=80)
    assert (plain.context, source.context) == (48, 80)
    assert re.fullmatch(
        r"(learned|rotary) positions extended from 48 tokens \((copy|yarn)\), untrained", source.extension
    )
    for length in (20, 48):
        assert source.layers(length)[1] == plain.layers(length)[1]
        for ours, theirs in zip(source.layers(length)[0], plain.layers(length)[0], strict=True):
            assert torch.equal(ours.q, theirs.q), "what its own positions reach is read as ever"
    layers, read = source.layers(80)
    assert layers[0].q.shape == (1, 4, 80, 8)
    assert read == f"the first 80 tokens of words, {source.extension}"
    model = transformers.AutoModel.from_pretrained(place).eval()
    extend(model, 80)
    ids = source.tokenizer(WORDS, truncation=True, max_length=80, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids)[0], source.extended(input_ids=ids)[0])


def test_where_positions_cannot_be_extended_the_page_says_so(tmp_path: Path) -> None:
    """ESM's are refused: nothing longer is read, and no error stands beside a speed of another length."""
    source = HuggingFace(saved(tmp_path, CONFIGS["esm"]), reading(), longest=64)
    assert source.context == 48
    assert source.extension.startswith("nothing longer was read: ")
    of = replace(plan("Local(window=3)", lengths=(16, 64)), source=source, setting=setting(4, 8, backward=False))
    record = record_of(of)
    compare.compare(of, record)
    assert {error.length for error in record.errors} == {16, 48}
    assert record.length == 16, "the greatest at which both are known"
    assert source.extension.split(":")[1][:40] in report.html(record)


def test_the_typical_head_is_neither_sharp_nor_flat() -> None:
    layers, _ = Gaussian(1, 32).layers(32)
    assert Scene(layers, setting(1, 32)).typical_head() == (1, 0)


def test_layers_of_different_shapes_stay_apart_and_in_order() -> None:
    layers = [Gaussian(2, 16, seed=1).layers(8)[0][0], *Gaussian(4, 8).layers(8)[0]]
    scene = Scene(layers, setting())
    assert [len(batch[0]) for batch in scene.batches] == [1, 3]
    found = scene.error(catalogue.parse("Local(window=2)"), matrix=True)
    assert [len(row) for row in found.output] == [2, 4, 4, 4]
    assert found.matrix is not None
    exact = (layers[2].q @ layers[2].k.mT / 8**0.5).softmax(-1)[0, 3]
    torch.testing.assert_close(one(scene.truths(matrix=True), 2, 3), exact)
    assert not measurable(catalogue.parse("Linformer()"))


def plan(*mechanisms: str, lengths: tuple[int, ...] = (16, 32), **options: Any) -> compare.Plan:
    source = Gaussian(2, 16)
    budget = options.pop("budget", 30.0)
    return compare.Plan(
        source, [catalogue.parse(m) for m in mechanisms], list(lengths), setting(2, 16, **options), budget
    )


def record_of(of: compare.Plan) -> Comparison:
    meta: dict[str, Any] = {
        "status": "running", "command": ["fast-attention", "compare"], "started": "now", "source": of.source.title,
        "heads": 2, "head_dim": 16, "lengths": of.lengths, "causal": of.setting.is_causal,
        "backward": of.setting.backward, "dtype": "float32", "seed": 0, "hardware": "h", "device": "cpu", "threads": 1,
        "cores": 1, "load_average": [0.0], "load_average_after": [0.0],
        "fast_attention": "0", "commit": None, "torch": "0", "python": "3",
        "platform": "p",
    }  # fmt: skip
    return Comparison(meta)


MIXER = next(name for name in catalogue.names() if isinstance(catalogue.default(name), Mixer))
TRAITS = {name: catalogue.default(name).traits for name in catalogue.names()}
LEARNED = next(name for name, traits in TRAITS.items() if traits.learned and traits.bidirectional)
FEW = ("FavorPlus(num_features=64)", "LinearAttention()", f"{MIXER}()", f"{LEARNED}()")


@pytest.fixture(scope="module")
def complete() -> Comparison:
    """One comparison of four kinds of mechanism."""
    torch.manual_seed(0)
    of = plan(*FEW)
    record, seen = record_of(of), []
    compare.compare(of, record, seen.append)
    compare.finish(of, record, "complete")
    assert 0 < len(seen) <= of.steps
    return record


def test_a_comparison_measures_everything(complete: Comparison) -> None:
    assert complete.mechanisms == list(FEW)
    for cell in complete.cells:
        assert cell.status == "measured", cell
        assert cell.rounds >= 1
        assert cell.forward_ms
        assert cell.training_ms
        assert cell.forward_ratio
        assert cell.training_ratio
        assert cell.forward_bytes
        assert cell.training_bytes
        assert cell.operations
    exact = complete.cell(EXACT, 32)
    assert exact is not None
    assert exact.forward_ratio == exact.training_ratio == 1.0
    assert exact.state_bytes == 2 * 2 * 32 * 16 * 4
    linear = [complete.cell("LinearAttention()", length) for length in (16, 32)]
    assert linear[0]
    assert linear[1]
    assert linear[0].state_bytes == linear[1].state_bytes, "constant state"
    assert [error.mechanism for error in complete.errors] == [FEW[0]] * 2, "an error for approximations only"
    assert [error.length for error in complete.errors] == [32, 16]
    assert complete.errors[0].matrix is not None
    assert complete.errors[1].matrix is None
    assert complete.matrices is not None
    assert list(complete.matrices.approximate) == [FEW[0]]


def test_json_is_strict_and_comes_back(complete: Comparison) -> None:
    held = json.loads(complete.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(held) == {"schema", "meta", "rows", "errors", "sha256"}
    back = Comparison.from_json(complete.to_json())
    assert back.cells == complete.cells
    assert back.errors == complete.errors
    odd = Comparison({}, [], [Error("Favor()", 8, "Softmax", [[math.inf, 1.0]])])
    assert Comparison.from_json(odd.to_json()).errors[0].output == [[math.inf, 1.0]]


def test_the_page_is_self_contained_and_says_it_all(complete: Comparison, tmp_path: Path) -> None:
    complete.leave(tmp_path, report.html)
    html = (tmp_path / complete.page).read_text()
    assert_one_file(html)
    titles = [
        "Verdict", "Error and speed", "Memory and work", "Time against", "Memory against", "Error of every head",
        "Attention matrices", "Each in a sentence", "What each cannot do", "What was run", "How to reproduce",
    ]  # fmt: skip
    places = [html.index(f"<h2>{title}") for title in titles]
    assert places == sorted(places), "the verdict leads"
    assert html.count('<svg role="img" aria-label="') == 6
    assert html.index('aria-label="Error against speed at 32 tokens. Pareto front: exact attention 1x') < places[1]
    assert all(name in html for name in FEW)
    assert "not an approximation: train it" in html
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.json", "report.html"]


def test_pictures_say_the_records_numbers_and_tables_hold_them(complete: Comparison) -> None:
    html = report.html(complete)
    _, forward, training, memory, heads, _ = said_by(html)
    for cell in (cell for cell in complete.cells if cell.forward_ms and cell.training_ms and cell.peak_bytes):
        at = f"at {cell.length:,} tokens"
        for told, value, unit in (
            (forward, cell.forward_ms, "milliseconds"),
            (training, cell.training_ms, "milliseconds"),
            (memory, (cell.peak_bytes or 0) / 2**20, "MiB"),
        ):
            assert f"{cell.mechanism}: {exactly(value or 0.0)} {unit} {at}" in told
        assert {cell.forward_ms, cell.training_ms, cell.peak_bytes} <= {*values(html)}
    error = complete.error(FEW[0])
    assert error is not None
    assert heads == [
        f"{FEW[0]}, {layer} head {number}: {exactly(100 * value)} %"
        for layer, row in zip(complete.meta["layers"], error.output, strict=True)
        for number, value in enumerate(row)
    ]
    assert {value for row in error.output for value in row} <= {*values(html)}


def test_numbers_without_an_error_for_what_must_be_trained(complete: Comparison) -> None:
    for name in FEW[1:]:
        assert complete.error(name) is None
        assert "%" not in verdicts.sentence(complete, catalogue.parse(name))
    assert "%" in verdicts.sentence(complete, catalogue.parse(FEW[0]))
    assert "train it" in verdicts.sentence(complete, catalogue.parse(FEW[3]))


@pytest.mark.parametrize("after", [0, 3, 40])
def test_ctrl_c_leaves_a_whole_partial_record(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before, in the warm-up and in the rounds."""
    calls, real = 0, clock.seconds

    def interrupted(*args: Any) -> float:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(clock, "seconds", interrupted)
    of = plan("LinearAttention()", "FavorPlus()", lengths=(16, 32))
    record = record_of(of)
    with pytest.raises(KeyboardInterrupt):
        compare.compare(of, record)
    compare.finish(of, record, "interrupted")
    record.leave(tmp_path, report.html)
    page = tmp_path / record.page
    held = json.loads((tmp_path / "records.json").read_text())
    assert held["meta"]["status"] == "interrupted"
    assert {(row["mechanism"], row["length"]) for row in held["rows"]} == {
        (name, length) for name in (EXACT, "LinearAttention()", "FavorPlus()") for length in (16, 32)
    }
    statuses = {row["status"] for row in held["rows"]}
    assert "not reached" in statuses
    assert ("measured" in statuses) == (after == 40)
    assert "This comparison was interrupted" in page.read_text()
    assert "</html>" in page.read_text()


def test_what_is_refused_or_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure.competitor

    def broken(mechanism: Any, *rest: Any) -> Any:
        if repr(mechanism) == "LinearAttention()":
            raise RuntimeError("a fault\nwith details")
        return real(mechanism, *rest)

    monkeypatch.setattr(measure, "competitor", broken)
    of = plan("Linformer()", "LinearAttention()", lengths=(16,), is_causal=True, backward=False)
    record = record_of(of)
    compare.compare(of, record)
    compare.finish(of, record, "complete")
    refused, failed = record.cell("Linformer()", 16), record.cell("LinearAttention()", 16)
    assert refused
    assert failed
    assert (refused.status, failed.status) == ("refused", "failed")
    assert "traits.causal" in refused.note
    assert failed.note == "RuntimeError: a fault"
    assert len(report.missing(record)) == 2
    assert all(cell.training_ms is None for cell in record.cells)
    assert "traits.causal" in report.html(record)


def test_a_slow_mechanism_is_over_budget_not_silent() -> None:
    of = plan("FavorPlus()", "Favor()", "LinearAttention()", lengths=(16, 64))
    record = record_of(of)
    times = {"FavorPlus()": 100.0, "Favor()": 10.0}
    record.cells = [Cell(n, 16, "measured", forward_best_ms=t, training_best_ms=t) for n, t in times.items()]
    everybody = measure.against_exact(of.mechanisms)
    group = timing.TimingGroup(of.setting, everybody, record, 64, 1.0, lambda what: None)
    assert timing.predicted(record.cells, "FavorPlus()", 1.0, 64) == (pytest.approx(0.8), 0.0)
    found = [(each.name, reason) for each, reason in group.admitted()]
    assert found[:3] == [(EXACT, ""), ("LinearAttention()", ""), ("Favor()", "")], "the unknown, then the quickest"
    assert found[3] == ("FavorPlus()", "about 0.8 s a pass: the quicker ones fill the 1 s for this length")
    record.cells[1].training_bytes = 2**40
    said = {each.name: reason for each, reason in group.admitted()}
    assert "GiB, more than half of the free memory" in said["Favor()"]
    group.run()
    assert [cell.status for cell in record.cells[2:]] == ["measured", "measured", "over budget", "over budget"]
    late = timing.TimingGroup(of.setting, everybody, record, 32, 1.0, lambda what: None)
    late.started -= 10
    cell = Cell("LinearAttention()", 32)
    late.add(replace(everybody[-1], make=lambda *sizes: pytest.fail("built though the time was spent")), cell)
    assert "spent before its turn" in cell.note


def test_rounds_are_interleaved_and_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    real = clock.seconds

    def watched(run: Any, *rest: Any) -> float:
        order.append(run)
        return real(run, *rest)

    of = plan("LinearAttention()", "FavorPlus()", lengths=(16,), backward=False)
    record = record_of(of)
    group = timing.TimingGroup(of.setting, measure.against_exact(of.mechanisms), record, 16, 30.0, lambda what: None)
    with monkeypatch.context() as patch:
        patch.setattr(clock, "seconds", watched)
        group.run()
    rounds = [order[i : i + 3] for i in range(len(order) - 3 * timing.MOST_ROUNDS, len(order), 3)]
    assert len(rounds) == timing.MOST_ROUNDS
    assert all(len(set(each)) == 3 for each in rounds), "everyone once in every round"
    assert len({tuple(map(id, each)) for each in rounds}) == 3, "and not always in the same order"
    found = timing.timing([2.0, 30.0, 4.0], [1.0, 10.0, 4.0])
    assert (found.median, found.ratio, found.best, found.best_ratio, found.rounds) == (4.0, 2.0, 2.0, 2.0, 3)
    assert clock.repeats_for(1.0) == 1
    assert clock.repeats_for(1e-4) == 20


def test_the_clock_waits_for_the_device(device: torch.device) -> None:
    x = torch.randn(256, 256, device=device)
    once = min(clock.seconds(lambda: x @ x, device) for _ in range(3))
    many = clock.seconds(lambda: [x @ x for _ in range(200)], device)
    assert many > 10 * once


def made_up(ratios: dict[int, float], *, exact: tuple[int, ...] = (128, 256, 512, 1024)) -> Comparison:
    cells = [Cell(EXACT, n, "measured", forward_ms=1.0, forward_ratio=1.0) for n in exact]
    cells += [Cell("Local()", n, "measured", forward_ms=r, forward_ratio=r) for n, r in ratios.items()]
    return Comparison({"lengths": list(exact)}, cells, [Error("Local()", 128, "Softmax", [[0.1, 0.2], [0.3, 0.4]])])


def test_the_crossover_holds_at_every_greater_length() -> None:
    assert verdicts.crossover(made_up({128: 4, 256: 2, 512: 0.5, 1024: 0.2}), "Local()") == 512
    assert verdicts.crossover(made_up({128: 0.9, 256: 2, 512: 0.5, 1024: 0.2}), "Local()") == 512, (
        "won once, lost again"
    )
    assert verdicts.crossover(made_up({128: 0.9, 256: 0.8, 512: 0.5, 1024: 1.0}), "Local()") is None
    assert verdicts.crossover(made_up({128: 0.9, 256: 0.8}), "Local()") is None, "not measured is not won"
    assert verdicts.crossover(made_up({128: 0.9, 256: 0.8, 512: 0.5, 1024: 0.9}), "Local()") == 128
    where = verdicts.crossing(made_up({128: 4, 256: 2, 512: 0.5, 1024: 0.2}), "Local()")
    assert where == pytest.approx(256 * 2**0.5)
    assert verdicts.wins(made_up({128: 4, 256: 2, 512: 2, 1024: 1.5}), "Local()") == "never up to 1,024"
    assert verdicts.wins(made_up({128: 4, 256: 0.5}), "Local()") == "not timed beyond 256"
    assert verdicts.wins(made_up({128: 4, 256: 2}), "Local()") == "not up to 256"


def test_verdicts_in_words() -> None:
    record = made_up({128: 4, 256: 2, 512: 0.5, 1024: 0.2})
    assert verdicts.sentence(record, catalogue.parse("Local()")) == (
        "Faster than exact attention from 512 tokens on (5 times as fast at 1,024); "
        "at 128 tokens output error 30 % in the median head and 40 % in the worst, 4 times as slow there."
    )
    at_the_end = Error("Local()", 1024, "Softmax", [[0.5, 0.6]], visible_fraction=0.25)
    record.errors += [at_the_end, Error("Favor()", 128, "Softmax", [[0.01]])]
    assert record.length == 1024
    assert record.error("Favor()") is None, "its error is of a length at which nothing else is compared"
    assert verdicts.sentence(record, catalogue.parse("Local()")).endswith(
        "at 1,024 tokens output error 60 % in the median head and 60 % in the worst, from 25 % of the visible pairs."
    )
    assert verdicts.headline(record)[-1] == (
        "At 1,024 tokens, of the approximations that are faster there, Local() is the most accurate: median "
        "error 60 %, from 25 % of the visible pairs, 5 times as fast."
    )
    record.errors.remove(at_the_end)
    assert verdicts.headline(record)[0].startswith("Below 512 tokens use exact attention")
    assert verdicts.headline(made_up({128: 4, 1024: 2})) == [
        "Use exact attention: nothing here was faster at 1,024 tokens."
    ]
    assert [verdicts.percent(x) for x in (0.0, 1e-7, 0.0123, 0.5, 47.69, math.inf)] == [
        "0 %", "below 0.001 %", "1.2 %", "50 %", "4,800 %", "not finite",
    ]  # fmt: skip


def test_no_number_has_an_exponent() -> None:
    """A hundred times as slow is that, and not 1.1e+02."""
    assert [verdicts.speed(ratio) for ratio in (110.3, 1 / 1234.0, 1.02, 1.0 / 1.3)] == [
        "110 times as slow", "1,200 times as fast", "about as fast", "1.3 times as fast",
    ]  # fmt: skip
    assert [numbers.factor(ratio) for ratio in (110.0, 0.5, 1 / 1234)] == ["0.0091x", "2x", "1,200x"]
    assert [numbers.bytes_of(size) for size in (1023, 1536, 1023 * 2**20)] == ["1,020 B", "1.5 KiB", "1,020 MiB"]
    assert [numbers.milliseconds(x) for x in (999.9, 12.3456, 5e6)] == ["1,000 ms", "12.3 ms", "5,000 s"]
    assert numbers.amount(999_900) == "1,000 k"
    record = made_up({128: 1234.0, 256: 110, 512: 0.001, 1024: 0.0005})
    said = " ".join([*verdicts.headline(record), verdicts.sentence(record, catalogue.parse("Local()"))])
    assert not re.search(r"\de[+-]?\d", said)


def test_within_noise_is_about_equal() -> None:
    """The middle half of the rounds on both sides of 1, or a median within 5 %, is no win and has no colour."""
    record = made_up({128: 4, 256: 0.9, 512: 0.8, 1024: 0.8})
    cell = record.cell("Local()", 1024)
    assert cell is not None
    assert not verdicts.even(cell)
    assert verdicts.crossover(record, "Local()") == 256
    cell.forward_low, cell.forward_high = 0.7, 1.1
    assert verdicts.even(cell)
    assert verdicts.crossover(record, "Local()") is None
    assert verdicts.headline(record)[0].startswith("Use exact attention")
    assert report._speed(cell).kind == "even"
    assert report._speed(cell).small == "0.91 to 1.4"
    cell.forward_low = cell.forward_high = None
    cell.forward_ratio = 0.97
    assert verdicts.even(cell)
    close = made_up({128: 4, 256: 0.99, 512: 0.5, 1024: 0.2})
    assert verdicts.crossing(close, "Local()") == pytest.approx(256, rel=0.01)


def test_the_spread_is_of_the_rounds() -> None:
    found = timing.timing([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert (found.low, found.ratio, found.high) == (2.0, 3.0, 4.0)
    found = timing.timing([3.0], [1.0])
    assert (found.low, found.ratio, found.high) == (3.0, 3.0, 3.0)


def test_the_fastest_stand_first() -> None:
    record = made_up({128: 4, 256: 2, 512: 0.5, 1024: 0.2})
    record.cells += [Cell("Favor()", n, "measured", forward_ms=9.0, forward_ratio=3.0) for n in (128, 1024)]
    record.cells += [Cell("LSH()", 128, "measured", forward_ms=0.1, forward_ratio=0.1), Cell("FNet()", 128)]
    assert verdicts.order(record) == ["Local()", EXACT, "Favor()", "LSH()", "FNet()"]


def test_memory_has_an_answer_in_words() -> None:
    record = made_up({1024: 0.2})
    exact, local = record.cell(EXACT, 1024), record.cell("Local()", 1024)
    assert exact
    assert local
    exact.forward_bytes, local.forward_bytes = 2**20, 3 * 2**20
    assert verdicts.headline(record)[-1] == (
        "Nothing clearly beats exact attention's memory: exact attention's fused kernel takes 1 MiB at 1,024 tokens "
        "(a forward pass), Local() 3 MiB."
    )
    local.forward_bytes = 2**19
    assert verdicts.headline(record)[-1].startswith("Less memory: 1 of 1, Local() the least with 512 KiB;")


def test_error_against_speed_at_one_length() -> None:
    """Worth having is what nothing else beats in both; an error of one length stands beside no speed of another."""
    record = made_up({128: 0.25, 1024: 0.1})
    for name, ratio, error in (("Favor()", 0.5, 0.05), ("BigBird()", 0.5, 0.2), ("LSH()", 2.0, 0.01)):
        record.cells.append(Cell(name, 128, "measured", forward_ms=ratio, forward_ratio=ratio))
        record.errors.append(Error(name, 128, "Softmax", [[error]]))
    found = tradeoff.tradeoff(record)
    assert found is not None
    assert found.where == "at 128 tokens"
    assert [point.name for point in found.best] == [EXACT, "Favor()", "Local()"]
    picture = pictures.scatter(found)
    assert "Favor() 2x with 5 %; Local() 4x with 30 %" in picture.alt
    assert all(f">{point.name}<" in picture.svg for point in found.points)
    record.cells = [cell for cell in record.cells if cell.length == 1024]
    assert tradeoff.tradeoff(record) is None
    assert tradeoff.tradeoff(made_up({})) is None


def test_an_error_that_is_not_finite_is_the_worst() -> None:
    assert Error("Favor()", 8, "Softmax", [[math.nan, 0.1, 0.2]]).summary() == (0.2, math.inf)


def test_every_default_mechanism_spells_itself() -> None:
    chosen = compare.default_mechanisms()
    assert len(chosen) == len(set(chosen)) > len(catalogue.names())
    assert [catalogue.parse(repr(mechanism)) for mechanism in chosen] == chosen


def test_pictures_stand_for_themselves() -> None:
    record = made_up({128: 4, 256: 2, 512: 0.5, 1024: 0.2})
    picture = pictures.growth(record, lambda cell: cell.forward_ms, "ms", 'a "quoted" <text>', "forward")
    assert 'aria-label="a &quot;quoted&quot; &lt;text&gt;"' in picture.svg
    assert ">362<" in picture.svg, "the crossover is written at its line"
    record.errors[0].output.append([0.35])
    heat = pictures.head_errors(record.errors, ["layer 0", "layer 1", "layer 2"])
    assert ">(1 heads)<" in heat.svg
    many = Comparison(record.meta, [Cell(f"Local(window={n})", 8, "measured", forward_ms=n) for n in range(1, 9)])
    drawn = pictures.growth(many, lambda cell: cell.forward_ms, "ms", "alt").svg
    assert all(f">window={n}<" in drawn for n in range(1, 9)), "no variant is left out"
    assert "Local() median 30 %, worst 40 %" in heat.alt


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "records.json"
    files.write(path, "old")

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="full"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in path.parent.iterdir()] == ["records.json"]
