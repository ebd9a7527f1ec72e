"""The comparison's parts: real tensors out of models, errors, fair times, the answer, and a report that is whole."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fast_attention import Bound, Mixer, Shape, catalogue, clock, extend
from fast_attention.lab import compare, loading, measure, pictures, report, texts, verdicts
from fast_attention.lab.capture import Gaussian, HuggingFace
from fast_attention.lab.compare import Scene, relative_rms
from fast_attention.lab.inputs import InputError
from fast_attention.lab.measure import Setting
from fast_attention.lab.records import EXACT, Cell, Comparison, Error
from fast_attention.lab.texts import Corpus
from tests.lab.reading_pages import assert_one_file, values
from tests.lab.small_models import WORDS, saved, transformers

KINDS = {
    "BertModel": {}, "GPT2Model": {}, "LlamaModel": {"num_key_value_heads": 2},
    "EsmModel": {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 2},
}  # fmt: skip


def model_of(folder: Path, kind: str, longest: int = 0, **changed: Any) -> HuggingFace:
    return HuggingFace(str(saved(folder, kind, **{**KINDS.get(kind, {}), **changed})), reading(), longest)


def reading(text: str = WORDS) -> Corpus:
    return Corpus("words", (("words", text),))


def eager_matrices(folder: Path, source: HuggingFace, length: int) -> Any:
    """What transformers' own attention says it attends with, and the positions extended where they must be."""
    eager = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    if length > 48:
        extend(eager, 80)
    ids = source.tokenizer(WORDS, truncation=True, max_length=length, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return eager(input_ids=ids, output_attentions=True).attentions


@pytest.mark.parametrize("kind", KINDS)
def test_captured_tensors_give_the_models_own_attention(kind: str, tmp_path: Path) -> None:
    """Scaling, causality and grouped keys: softmax of what was captured is what the model says it attends with."""
    source = model_of(tmp_path, kind)
    layers, read = source.layers(20)
    assert (source.heads, source.head_dim, source.context) == (4, 8, 48)
    assert source.is_causal == (kind in ("GPT2Model", "LlamaModel"))
    assert read == "the first 20 tokens of words"
    theirs = eager_matrices(tmp_path, source, 20)
    assert len(layers) == len(theirs) == 2
    for layer, matrix in zip(layers, theirs, strict=True):
        identity = torch.eye(20).expand(1, 4, 20, 20)
        ours = F.scaled_dot_product_attention(layer.q, layer.k, identity, is_causal=layer.is_causal)
        torch.testing.assert_close(ours, matrix, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["BertModel", "LlamaModel"])
def test_what_is_longer_than_its_positions_is_read_with_more_of_them(kind: str, tmp_path: Path) -> None:
    plain, source = model_of(tmp_path / "plain", kind), model_of(tmp_path / "long", kind, longest=80)
    assert (plain.context, source.context) == (48, 80)
    said = r"(learned|rotary) positions extended from 48 tokens \((copy|yarn)\), untrained"
    assert re.fullmatch(said, source.extension)
    for ours, theirs in zip(source.layers(48)[0], plain.layers(48)[0], strict=True):
        assert torch.equal(ours.q, theirs.q), "what its own positions reach is read as ever"
    layers, read = source.layers(80)
    assert read == f"the first 80 tokens of words, {source.extension}"
    ours = F.scaled_dot_product_attention(*layers[1][1:3], torch.eye(80).expand(1, 4, 80, 80), is_causal=layers[1][4])
    matrix = eager_matrices(tmp_path / "long", source, 80)[1]
    torch.testing.assert_close(ours, matrix, rtol=1e-4, atol=1e-5)


def test_models_that_add_to_their_scores_are_refused(tmp_path: Path) -> None:
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    with pytest.raises(InputError, match="attends with T5Buckets"):
        model_of(tmp_path / "t5", "T5Model", **t5)
    source = model_of(tmp_path / "mistral", "MistralModel", num_key_value_heads=4, sliding_window=16)
    assert len(source.layers(16)[0]) == 2
    with pytest.raises(InputError, match=r"attn_mask .*a window .*shorter --lengths"):
        source.layers(17)
    with pytest.raises(InputError, match="no attention"):
        model_of(tmp_path / "fnet", "FNetModel")
    with pytest.raises(InputError, match=r"holds no config\.json"):
        HuggingFace(str(tmp_path), reading())


def test_minilm_reads_the_default_text() -> None:
    try:
        place = loading.default_model()
    except InputError:
        pytest.skip("the demo extra is not installed")
    source = HuggingFace(place, texts.read())
    layers, _ = source.layers(64)
    assert (source.heads, source.head_dim, source.context, len(layers)) == (12, 32, 512, 6)
    assert 6 < layers[2].q.norm(dim=-1).mean() < 11  # trained weights: random ones give 0.1
    found = Scene(layers, setting(12, 32)).error(catalogue.parse("Local(window=64)"))
    assert max(max(row) for row in found.output) < 1e-4, "a window as wide as the text is exact"


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
    found = Scene(layers, setting(head_dim=16, device=device)).error(mechanism)
    torch.manual_seed(0)
    bound = Bound(mechanism, Shape(4, 16, 24)).to(device)
    q, k, v = (x.to(device) for x in layers[1][1:4])
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    by_hand = (bound(q, k, v).double() - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
    torch.testing.assert_close(torch.tensor(found.output[1]).double(), by_hand[0].cpu().double(), rtol=1e-4, atol=1e-6)
    medians = [sorted(row)[2] for row in found.output]
    assert medians[0] < medians[1] < medians[2], "larger logits are harder"
    for is_causal in (False, True):
        window = Scene(layers, setting(head_dim=16, is_causal=is_causal)).error(catalogue.parse("Local(window=24)"))
        assert max(max(row) for row in window.output) < 1e-5, "against attention of the same direction"
    assert Error("Favor()", 8, "Softmax", [[math.nan, 0.1, 0.2]]).summary() == (0.2, math.inf)
    assert not verdicts.measurable(catalogue.parse("Linformer()"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_pairs_that_are_read_are_counted(is_causal: bool) -> None:
    """Against matrices in which every weight above nothing counts."""
    scene = Scene(Gaussian(2, 16).layers(24)[0], setting(2, 16, is_causal=is_causal))
    near = sum(1 for i in range(24) for j in range(24) if abs(i - j) <= 3 and (j <= i or not is_causal))
    visible = 24 * 25 / 2 if is_causal else 24 * 24
    for name, expected in (("Local(window=3)", near / visible), ("FavorPlus()", 1.0), ("Softmax()", 1.0)):
        assert scene.visible_fraction(catalogue.parse(name)) == pytest.approx(expected), name
    assert scene.visible_fraction(catalogue.default("Manhattan")) is None, "it weighs no pairs"


def test_layers_of_different_shapes_stay_apart_and_in_order() -> None:
    layers = [Gaussian(2, 16, seed=1).layers(8)[0][0], *Gaussian(4, 8).layers(8)[0]]
    scene = Scene(layers, setting())
    assert [len(batch[0]) for batch in scene.batches] == [1, 3]
    assert [len(row) for row in scene.error(catalogue.parse("Local(window=2)")).output] == [2, 4, 4, 4]


def plan(*mechanisms: str, lengths: tuple[int, ...] = (16, 32), source: Any = None, **options: Any) -> compare.Plan:
    budget, source = options.pop("budget", 30.0), source or Gaussian(2, 16)
    sizes = setting(source.heads, source.head_dim, **options)
    return compare.Plan(source, [catalogue.parse(m) for m in mechanisms], list(lengths), sizes, budget)


def record_of(of: compare.Plan) -> Comparison:
    meta: dict[str, Any] = {
        "status": "running", "command": ["fast-attention", "compare"], "started": "now", "source": of.source.title,
        "heads": 2, "head_dim": 16, "lengths": of.lengths, "causal": of.setting.is_causal, "asked": 0.1, "budget": 30,
        "backward": of.setting.backward, "dtype": "float32", "seed": 0, "hardware": "h", "device": "cpu", "threads": 1,
        "cores": 1, "load_average": [0.0], "load_average_after": [0.0], "fast_attention": "0", "commit": None,
        "torch": "0", "python": "3", "platform": "p",
    }  # fmt: skip
    return Comparison(meta)


MIXER = next(name for name in catalogue.names() if isinstance(catalogue.default(name), Mixer))
FEW = ("LinearAttention()", f"{MIXER}()", "T2R()", "FavorPlus(num_features=64)", "Local(window=3)")


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
    for cell in complete.cells:
        assert cell.status == "measured", cell
        assert cell.rounds >= 1
        assert all((cell.forward_ms, cell.training_ms, cell.forward_ratio, cell.training_ratio))
        assert all((cell.forward_bytes, cell.training_bytes, cell.operations))
    exact = complete.cell(EXACT, 32)
    assert exact is not None
    assert exact.forward_ratio == exact.training_ratio == 1.0
    assert {(error.mechanism, error.length) for error in complete.errors} == {(n, m) for n in FEW[3:] for m in (16, 32)}
    errors = [complete.error(name) for name in complete.mechanisms]
    medians = [(error.summary() or (math.inf,))[0] for error in errors if error]
    assert [bool(error) for error in errors] == [True, True, False, False, False], "what may be the answer goes first"
    assert medians == sorted(medians), "the most accurate before others"
    assert complete.mechanisms[2] == "T2R()", "then what may be trained"


def test_json_is_strict_and_comes_back(complete: Comparison) -> None:
    held = json.loads(complete.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(held) == {"schema", "meta", "rows", "errors", "sha256"}
    back = Comparison.from_json(complete.to_json())
    assert back.cells == complete.cells
    assert back.errors == complete.errors


def test_the_page_says_the_answer_first_and_the_records_numbers(complete: Comparison, tmp_path: Path) -> None:
    complete.leave(tmp_path, report.html)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.json", "report.html"]
    html = (tmp_path / complete.page).read_text()
    assert_one_file(html)
    lead = [unescape(each) for each in re.findall("<p class=lead>(.*?)</p>", html)]
    assert lead == verdicts.answer(complete)
    assert html.index("<p class=lead>") < html.index("<h2>") < html.index('<svg role="img" aria-label="Error against')
    titles = ["Error against speed", "Error, speed and memory", "What was run", "How to reproduce"]
    assert re.findall("<h2>(.*?)</h2>", html) == titles
    for cell in complete.cells:
        assert {cell.forward_ms, cell.training_ms, cell.peak_bytes} <= {*values(html)}
    for name in FEW[3:]:
        assert f">{name}</text>" in html, "named in the picture"
    rows = re.findall("<tr.*?</tr>", html.split("</table>")[0])[1:]
    assert [re.findall("<th scope=row[^>]*>(.*?)<", row)[0] for row in rows] == report.order(complete)
    assert sum("train it" in row for row in rows) == 1


def test_a_page_that_is_not_drawn_leaves_its_record(complete: Comparison, tmp_path: Path) -> None:
    def stopped(record: Comparison) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        complete.leave(tmp_path, stopped)
    assert Comparison.read(tmp_path / "records.json").cells == complete.cells


@pytest.mark.parametrize("after", [0, 3, 25])
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
    of = plan("LinearAttention()", "FavorPlus()")
    record = record_of(of)
    with pytest.raises(KeyboardInterrupt):
        compare.compare(of, record)
    compare.finish(of, record, "interrupted")
    record.leave(tmp_path, report.html)
    held = json.loads((tmp_path / "records.json").read_text())
    assert held["meta"]["status"] == "interrupted"
    names = (EXACT, "LinearAttention()", "FavorPlus()")
    assert {(row["mechanism"], row["length"]) for row in held["rows"]} == {(n, m) for n in names for m in (16, 32)}
    statuses = {row["status"] for row in held["rows"]}
    assert "not reached" in statuses
    assert ("measured" in statuses) == (after == 25)
    assert "This comparison was interrupted" in (tmp_path / record.page).read_text()


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
    notes = {cell.mechanism: (cell.status, cell.note) for cell in record.cells}
    assert notes["Linformer()"][0] == "refused"
    assert "traits.causal" in notes["Linformer()"][1]
    assert notes["LinearAttention()"] == ("failed", "RuntimeError: a fault")
    assert len(report.missing(record)) == 2
    assert all(cell.training_ms is None for cell in record.cells)
    assert "traits.causal" in report.html(record)


def test_where_positions_cannot_be_extended_the_page_says_so(tmp_path: Path) -> None:
    """ESM's are refused: nothing longer is read, and no error stands beside a speed of another length."""
    source = model_of(tmp_path, "EsmModel", longest=64)
    assert source.context == 48
    assert source.extension.startswith("nothing longer was read: ")
    of = plan("Local(window=3)", lengths=(16, 64), source=source, backward=False)
    record = record_of(of)
    compare.compare(of, record)
    assert {error.length for error in record.errors} == {16, 48}
    assert record.length == 16, "the greatest at which both are known"
    assert source.extension.split(":")[1][:40] in report.html(record)
    first, *decision, answer, _, _ = verdicts.answer(record)
    assert first.startswith("Exact attention at 64 tokens is no reference: nothing longer was read: ")
    assert decision == [*verdicts.LONG]
    assert answer.endswith(" at 16 tokens.")


def test_beyond_a_models_positions_the_decision_comes_first() -> None:
    """Exact attention at extended positions is no reference: nothing is an answer there, however close to it."""
    record = made_up({128: 4.0, 256: 2.0, 512: 0.5, 1024: 0.1}, error=0.01)
    extension = "learned positions extended from 256 tokens (copy), untrained"
    record.meta |= {"context": 256, "extension": extension}
    first, *decision, answer, train, _ = verdicts.answer(record)
    assert first == f"Exact attention at 512 and 1,024 tokens is no reference: {extension}."
    assert decision == [*verdicts.LONG]
    assert answer.startswith("No, nothing is better than exact attention here")
    assert answer.endswith(", at 128 and 256 tokens.")
    assert train == "To be trained first: nothing that was timed is more than 10 % faster."
    record.meta["context"] = 64
    assert len(verdicts.answer(record)) == 1 + len(verdicts.LONG)
    for reads_all in (None, 1024):
        record.meta["context"] = reads_all
        assert verdicts.answer(record)[0].startswith("Yes, Local(), 10 times as fast at 1,024 tokens")


def test_the_time_goes_to_the_first_and_what_is_left_out_says_why() -> None:
    of = plan("FavorPlus()", "Favor()", "LinearAttention()", lengths=(16, 64))
    record = record_of(of)
    times = {"FavorPlus()": 100.0, "Favor()": 10.0}
    record.cells = [Cell(n, 16, "measured", forward_best_ms=t, training_best_ms=t) for n, t in times.items()]
    everybody = measure.against_exact(of.mechanisms)
    assert measure.predicted(record.cells, "FavorPlus()", 1.0, 64) == (pytest.approx(0.8), 0.0)
    group = measure.TimingGroup(of.setting, everybody, record, 64, 1.0, lambda what: None)
    reasons = [(group.left_out(each) or ("", ""))[1] for each in everybody[1:]]
    assert reasons == ["about 0.8 s a pass: those before it fill the 1 s for this length", "", ""]
    group.runners[EXACT], group.estimates[EXACT] = measure.exact(of.setting, of.setting.tensors(8)), [0.2, 0.1]
    assert "about 0.1 s a pass" in str(group.left_out(everybody[2])), "three rounds are promised to what was added"
    record.cells[1].training_bytes = 2**40
    assert "GiB, more than half of the free memory" in str(group.left_out(everybody[2]))
    late = measure.TimingGroup(of.setting, everybody, record, 32, 1.0, lambda what: None)
    late.started -= 10
    assert "those before it fill the 1 s" in str(late.left_out(everybody[3])), "though nothing is known of it"
    group = measure.TimingGroup(of.setting, everybody[:1], record_of(of), 16, 5.0, lambda what: None)
    group.run()
    assert [cell.status for cell in group.record.cells] == ["measured"]


def test_errors_beyond_the_budget_leave_it_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_shares", lambda lengths, until: [(length, -1.0) for length in lengths])
    of = plan("Local(window=3)", "FavorPlus()", lengths=(16,), backward=False)
    record = record_of(of)
    compare.compare(of, record)
    compare.finish(of, record, "complete")
    assert [error.note for error in record.errors] == ["over budget: the time for errors was spent"] * 2
    assert {cell.status for cell in record.cells[1:]} == {"over budget"}
    said = verdicts.answer(record)[0]
    assert said.startswith("Undecided whether anything is better than exact attention here")
    assert said.endswith("FavorPlus() may be, at 16 tokens, but not all of it was measured: give --budget 60.")
    assert len(report.missing(record)) == 4
    assert "error at 16 tokens: over budget" in report.html(record)


def test_rounds_are_interleaved_and_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    real = clock.seconds

    def watched(run: Any, *rest: Any) -> float:
        order.append(run)
        return real(run, *rest)

    of = plan("LinearAttention()", "FavorPlus()", lengths=(16,), backward=False)
    group = measure.TimingGroup(of.setting, measure.against_exact(of.mechanisms), record_of(of), 16, 30.0, print)
    with monkeypatch.context() as patch:
        patch.setattr(clock, "seconds", watched)
        group.run()
    rounds = [order[i : i + 3] for i in range(len(order) - 3 * measure.MOST_ROUNDS, len(order), 3)]
    assert len(rounds) == measure.MOST_ROUNDS
    assert all(len(set(each)) == 3 for each in rounds), "everyone once in every round"
    assert len({tuple(map(id, each)) for each in rounds}) == 3, "and not always in the same order"
    found, count = measure.timing([2.0, 30.0, 4.0], [1.0, 10.0, 4.0])
    assert (found.ms, found.ratio, found.best_ms, found.best_ratio, count) == (4000.0, 2.0, 2000.0, 2.0, 3)
    found, _ = measure.timing([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert (found.low, found.ratio, found.high) == (2.0, 3.0, 4.0)
    assert measure.timing([3.0], [1.0])[0].low == 3.0
    assert (clock.repeats_for(1.0), clock.repeats_for(1e-4)) == (1, 20)


def test_the_clock_waits_for_the_device(device: torch.device) -> None:
    x = torch.randn(256, 256, device=device)
    once = min(clock.seconds(lambda: x @ x, device) for _ in range(3))
    assert clock.seconds(lambda: [x @ x for _ in range(200)], device) > 10 * once


def made_up(ratios: dict[int, float], name: str = "Local()", *, error: float = 0.3) -> Comparison:
    """Times of a mechanism at some of four lengths, and its error at all of them."""
    lengths = (128, 256, 512, 1024)
    cells = [Cell(EXACT, n, "measured", forward_ms=1.0, forward_ratio=1.0) for n in lengths]
    record = Comparison({"lengths": [*lengths], "backward": False, "budget": 60}, cells)
    return added(record, name, ratios, error)


def added(record: Comparison, name: str, ratios: dict[int, float], error: float | None) -> Comparison:
    for n in record.meta["lengths"]:
        cell = Cell(name, n, "over budget", "late")
        if n in ratios:
            cell = Cell(name, n, "measured", forward_ms=ratios[n], forward_ratio=ratios[n])
        record.cells.append(cell)
        if error is not None:
            record.errors.append(Error(name, n, "Softmax", [[error, error, 2 * error]], visible_fraction=0.25))
    return record


def test_the_crossover_holds_at_every_greater_length() -> None:
    for ratios, won in (
        ({128: 4, 256: 2, 512: 0.5, 1024: 0.2}, 512),
        ({128: 0.9, 256: 2, 512: 0.5, 1024: 0.2}, 512),  # won once, lost again
        ({128: 0.9, 256: 0.8, 512: 0.5, 1024: 1.0}, None),
        ({128: 0.9, 256: 0.8}, None),  # not measured is not won
        ({128: 0.9, 256: 0.8, 512: 0.5, 1024: 0.9}, 128),
    ):
        assert verdicts.crossover(made_up(ratios), "Local()") == won
    assert verdicts.interpolated({128: 4, 256: 2, 512: 0.5, 1024: 0.2}, 512) == (pytest.approx(256 * 2**0.5), False)
    assert verdicts.wins(made_up({128: 4, 256: 2, 512: 2, 1024: 1.5}), "Local()") == "never up to 1,024"
    assert verdicts.wins(made_up({128: 4, 256: 0.5}), "Local()") == "not timed beyond 256"
    assert verdicts.wins(made_up({128: 4, 256: 2}), "Local()") == "not up to 256"


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
    assert report._speed(cell)[1] == "even"
    assert report._speed(cell).small == "0.91 to 1.4"
    cell.forward_low, cell.forward_high, cell.forward_ratio = None, None, 0.97
    assert verdicts.even(cell)


FASTER = {128: 4.0, 256: 2.0, 512: 0.5, 1024: 0.2}


def test_the_answer_is_what_is_exact_enough_and_faster() -> None:
    record = added(made_up(FASTER, error=0.05), "AFTSimple()", dict.fromkeys(FASTER, 0.01), None)
    first, second, third = verdicts.answer(record)
    assert first.startswith("Yes, Local(), 5 times as fast at 1,024 tokens, is better than exact attention here (more")
    assert first.endswith(
        "median error at most 10 %, untrained): its median error is 5 %, from 25 % of the visible pairs."
    )
    assert second == "To be trained first: nothing that was timed is more than 10 % faster."
    assert third == "At which length: Local() is faster from about 360 tokens on."


def test_another_function_is_no_answer_however_fast() -> None:
    fast = dict.fromkeys(FASTER, 0.01)
    record = added(made_up(FASTER), "AFTSimple()", fast, None)
    added(added(record, "LinearAttention()", fast, None), "AFTConv()", fast, None)
    first, second, _ = verdicts.answer(record)
    assert first.startswith("No, nothing is better than exact attention here")
    assert first.endswith(", at 128, 256, 512 and 1,024 tokens.")
    assert second == "To be trained first: Local(), 5 times as fast at 1,024 tokens (median error 30 % untrained)."
    added(record, "T2R()", FASTER, None)
    assert "; or T2R(), 5 times as fast at 1,024 tokens (its weights are random before)." in verdicts.answer(record)[1]
    record.cells = [cell for cell in record.cells if cell.mechanism != "Local()"]
    assert "nothing that was compared estimates exact attention" in verdicts.answer(record)[0]


def test_a_tenth_is_asked_for_in_time_and_a_bound_in_error() -> None:
    assert verdicts.answer(made_up(dict.fromkeys(FASTER, 0.92), error=0.01))[0].startswith("No, ")
    assert verdicts.answer(made_up(dict.fromkeys(FASTER, 0.88), error=0.01))[0].startswith("Yes, ")
    record = made_up(FASTER, error=0.3)
    record.meta["asked"] = 0.4
    assert verdicts.answer(record)[0].startswith("Yes, Local()")
    assert verdicts.answer(Comparison({})) == ["Undecided: nothing was timed."]


def test_what_was_not_timed_leaves_it_undecided_if_it_could_be_the_answer() -> None:
    record = made_up({128: 4.0, 256: 2.0}, error=0.05)
    record.meta["would_do"] = 120
    first, *rest = verdicts.answer(record)
    assert first.startswith("Undecided whether anything is better")
    assert first.endswith("Local() may be, at 512 and 1,024 tokens, but not all of it was measured: give --budget 120.")
    assert rest[1] == "At which length: none of 128, 256, 512 and 1,024 tokens."
    assert verdicts.answer(made_up({128: 4.0, 256: 2.0}, error=0.3))[0].startswith("No, "), "it is too inexact anyway"
    record.cells[-1].status = record.cells[-2].status = "refused"
    assert verdicts.answer(record)[0].startswith("No, "), "no time would help"


def test_no_number_has_an_exponent() -> None:
    """A hundred times as slow is that, and not 1.1e+02."""
    assert [verdicts.speed(ratio) for ratio in (110.3, 1 / 1234.0, 1.02, 1.0 / 1.3)] == [
        "110 times as slow", "1,200 times as fast", "about as fast", "1.3 times as fast",
    ]  # fmt: skip
    record = made_up({128: 1234.0, 256: 110, 512: 0.001, 1024: 0.0005}, error=1e-7)
    assert not re.search(r"\de[+-]?\d", " ".join(verdicts.answer(record)))


def test_error_against_speed_at_one_length() -> None:
    """Worth having is what nothing else beats in both; names lie neither on each other nor outside."""
    record = made_up({1024: 0.25}, error=0.3)
    for name, ratio, error in (("Favor()", 0.5, 0.05), ("BigBird()", 0.5, 0.2), ("LSH()", 0.26, 0.29)):
        added(record, name, {1024: ratio}, error)
    found = pictures.tradeoff(record, record.length)
    assert found is not None
    assert found.length == 1024
    assert [point.name for point in found.best] == [EXACT, "Favor()", "LSH()", "Local()"]
    picture = pictures.scatter(found, 0.1)
    assert picture.alt.endswith("Favor() 2x with 5 %; LSH() 3.8x with 29 %; Local() 4x with 30 %")
    placed = re.findall(r'x="([\d.]+)" y="([\d.]+)"[^>]*>([A-Z]\w+\(\))</text>', picture.svg)
    assert {name for *_, name in placed} == {point.name for point in found.points} - {EXACT}
    boxes = [(float(x), float(y), 4.5 * len(name)) for x, y, name in placed]
    for i, (x, y, wide) in enumerate(boxes):
        assert 0 < x < x + wide < 7.6 * 72
        assert all(abs(y - b) > 7 or x + wide < a or a + w < x for a, b, w in boxes[:i])
    assert ">allowed: 10 %</text>" in picture.svg
    far = pictures.Tradeoff([point for point in found.points if point.error > 0.28], 1024)
    assert ">allowed: 10 %, below this picture</text>" in pictures.scatter(far, 0.1).svg, "no half of it is empty"
    assert ">10 %</text>" not in pictures.scatter(far, 0.1).svg
    record.cells = [cell for cell in record.cells if cell.length != 1024]
    assert pictures.tradeoff(record, record.length) is None


def test_a_row_has_the_error_and_the_speed_of_one_length() -> None:
    record = made_up({128: 4.0, 256: 2.0, 512: 0.5, 1024: 0.2}, error=0.3)
    record.errors = [error for error in record.errors if error.length < 1024]
    for error in record.errors:
        error.output = [[error.length / 1000]]
    table, every = report.table(record), report.every(record)
    assert [head for head in table.heads if any(digit in head for digit in "125")] == [
        "error at 512", "speed at 512", "memory at 512",
    ]  # fmt: skip
    shown = {values[0].text: [value.text for value in values] for values, _ in table.rows}
    assert shown["Local()"][1:4] == ["51 %", "2x", "from 512"]
    rows = {(values[0].text, values[1].text): (values[2].text, values[3].text) for values, _ in every.rows}
    known = {length: rows["Local()", f"{length:,}"] for length in record.meta["lengths"]}
    assert known == {128: ("13 %", "0.25x"), 256: ("26 %", "0.5x"), 512: ("51 %", "2x"), 1024: ("-", "5x")}
    record.errors.clear()
    assert "speed at 1,024" in report.table(record).heads, "where no error is known, the greatest that was timed"
