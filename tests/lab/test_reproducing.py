"""Reproductions: what they measure is right, their pages say what their records hold, and they end and resume."""

from __future__ import annotations

import json
import math
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fast_attention import attention_maps, cli
from fast_attention.lab.reproducing import associations, cab, capacity, decoding, page, performer
from fast_attention.lab.reproducing.associations import Batch, Contender, Retrieval
from fast_attention.lab.reproducing.listing import REPRODUCTIONS
from fast_attention.lab.reproducing.reproduction import Budget, Claim, Reproduced, Reproduction

ROOT = Path(__file__).parent.parent.parent
PAGES = runpy.run_path(str(ROOT / "docs" / "reproduction_pages.py"))


MEASURED = ("performer", "capacity", "cab", "decoding")  # the others' runs: test_reproducing_trained.py


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reproduction at sizes that take seconds."""
    monkeypatch.setattr(performer, "LENGTH", 64)
    monkeypatch.setattr(performer, "SCALES", (0.5, 1.0))
    few = [replace(each, sizes=(20,)) for each in capacity.CONTENDERS if each.label in ("softmax", "DPFP-1", "AFT")]
    monkeypatch.setattr(capacity, "CONTENDERS", tuple(few))
    monkeypatch.setattr(associations, "EVERY", 5)
    monkeypatch.setattr(associations, "SEQUENCES", 2)
    monkeypatch.setattr(cab, "LENGTHS", (32, 64))
    monkeypatch.setattr(cab, "ROUNDS", 2)
    monkeypatch.setattr(decoding, "POSITIONS", (1, 4, 8))
    monkeypatch.setattr(decoding, "IMAGES", {8: ("tiny", 1.0)})
    monkeypatch.setattr(decoding, "LAYERS", 1)
    monkeypatch.setattr(decoding, "FAR", (4, 16))


def reproduce(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", *arguments])
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def record_of(name: str) -> Reproduced:
    path = PAGES["newest"](name)
    assert path is not None, f"records/ has no record of reproduce {name}: run it, and benchmarks/keep.py"
    return Reproduced.read(path)


@pytest.mark.parametrize("name", MEASURED)
def test_each_runs_from_end_to_end(name: str, tiny: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    seeds = ("--seeds", "2") if name == "performer" else ()
    code, out, _ = reproduce(capsys, name, "--minutes", "0.1", "--out", str(tmp_path), *seeds)
    assert code == 0
    record = Reproduced.read(tmp_path / Reproduced.data)
    assert record.meta["status"] == "complete"
    assert record.rows
    sentence = REPRODUCTIONS[name].sentence(record)
    assert " ".join(sentence.split()) in " ".join(out.split())
    html = (tmp_path / Reproduced.page).read_text()
    assert "<svg" in html
    for each in REPRODUCTIONS[name].why(record):
        assert each.split(",")[0].replace("'", "&#39;") in html
    again, _, refused = reproduce(capsys, name, "--out", str(tmp_path))
    assert again == 2, "results are not written over unasked"
    assert "--resume" in refused


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = reproduce(capsys)
    assert code == 0
    for each in REPRODUCTIONS.values():
        assert each.name in out
        assert each.paper in out
    code, _, refused = reproduce(capsys, "nothing")
    assert code == 2
    assert "performer" in refused


def test_a_stopped_run_resumes_without_repeating(
    tiny: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[int, float]] = []

    def errors(draw: int, scale: float) -> list[Any]:
        if len(measured) == 3:
            measured.clear()
            raise KeyboardInterrupt
        measured.append((draw, scale))
        return original(draw, scale)

    original = performer.errors
    monkeypatch.setattr(performer, "errors", errors)
    code, _, _ = reproduce(capsys, "performer", "--seeds", "3", "--out", str(tmp_path))
    assert code == 130
    assert Reproduced.read(tmp_path / Reproduced.data).meta["status"] == "interrupted"
    monkeypatch.setattr(performer, "errors", original)
    code, _, _ = reproduce(capsys, "performer", "--seeds", "3", "--out", str(tmp_path), "--resume")
    assert code == 0
    rows = Reproduced.read(tmp_path / Reproduced.data).rows
    cells = [(row["draw"], row["scale"]) for row in rows]
    assert len(cells) == len({*cells}) == 6
    code, _, refused = reproduce(capsys, "performer", "--seeds", "4", "--out", str(tmp_path), "--resume")
    assert code == 2, "another number of draws is another reproduction"
    assert "seeds" in refused


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_it_fits_half_an_hour_and_names_its_numbers(name: str) -> None:
    chosen = REPRODUCTIONS[name]
    assert 0 < chosen.minutes <= 30
    assert chosen.published
    assert re.search(r"arXiv \d{4}\.\d{5}", chosen.paper)


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_record_and_page_agree(name: str) -> None:
    """The page begins with the record's sentence and shows the published numbers; another record, another page."""
    chosen, record = REPRODUCTIONS[name], record_of(name)
    text = PAGES["page"](chosen, record, PAGES["newest"](name))
    title, sentence, *_ = text.split("\n\n")
    assert title == f"# {chosen.title}"
    assert sentence == chosen.sentence(record)
    numbers = {float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}
    for each in chosen.published:
        shown = each.value in text if isinstance(each.value, str) else each.value in numbers
        assert shown, f"{each.what}: {each.value} is not on the page"
    assert record.meta["started"][:10] in text
    fewer = Reproduced(record.meta, record.rows[: len(record.rows) // 2])
    assert PAGES["page"](chosen, fewer, PAGES["newest"](name)) != text


def test_the_overview_is_of_the_newest_records() -> None:
    assert not PAGES["stale"](), "run `python docs/reproduction_pages.py`: newer records"


def test_disagreement_comes_first() -> None:
    def claims(_: Reproduced) -> list[Claim]:
        return [Claim("a", "so it is", True), Claim("b", "twice that", False), Claim("c", "nothing", None)]

    chosen = replace(REPRODUCTIONS["performer"], claims=claims)
    sentence = chosen.sentence(Reproduced({}))
    assert sentence == (
        "Disagrees with the paper in 1 of 3 points. It says that b; here twice that. Agrees: a (so it is). "
        "Not measured: c."
    )
    right: Reproduction = replace(chosen, claims=lambda _: [Claim("a", "so it is", True)])
    assert right.sentence(Reproduced({})) == "Agrees with the paper in all 1 points: a (so it is)."


def test_a_budget_counts_what_is_left() -> None:
    now = [10.0]
    budget = Budget(5.0, 1, ({"draw": 0, "scale": 1.0},), clock=lambda: now[0])
    now[0] = 12.0
    assert budget.left == 3.0
    now[0] = 99.0
    assert budget.left == 0.0
    assert budget.has(draw=0, scale=1.0)
    assert not budget.has(draw=0, scale=0.5)


def test_the_errors_are_those_of_outputs(tiny: None) -> None:
    """Uniform weights err by the outputs' variance around the values' mean; more features err less at small scales."""
    rows = performer.errors(0, 0.35)
    torch.manual_seed(0)
    q, k = (0.35 * torch.randn(1, 1, 64, 16) for _ in range(2))
    v = torch.randn(1, 1, 64, 16)
    weights = (q @ k.mT / 4).softmax(-1)
    expected = (weights @ v - v.mean(-2, keepdim=True)).square().mean().item()
    assert rows[0]["mse"] == pytest.approx(expected, rel=1e-4)
    record = Reproduced({}, [{"draw": n, "scale": 0.35, "errors": performer.errors(n, 0.35)} for n in range(5)])
    points = performer.medians(record, 0.35, "positive, orthogonal")
    assert points[512] < 0.2 * points[16]
    assert performer.slope({2: 8.0, 4: 2.0, 8: 0.5}) == pytest.approx(-2.0)


KERNELISED = [each for each in capacity.CONTENDERS if Retrieval(each, 6).kernelised]


@pytest.mark.parametrize("contender", KERNELISED, ids=lambda each: each.label)
def test_weights_from_features_are_those_of_the_mechanism(contender: Contender) -> None:
    model = Retrieval(contender, 30)
    q, k = torch.randn(2, 1, 1, contender.width), 2 * torch.randn(2, 1, 30, contender.width)
    bound = model.bound
    rows = attention_maps.attention_rows(bound.mechanism, q, k, bound.w, queries=[0])
    own = associations.kernel_weights(bound.mechanism, bound.w, q, k)
    torch.testing.assert_close(own.detach(), rows, rtol=1e-3, atol=1e-5)


def test_looked_up_tokens_are_products_with_one_hot_values() -> None:
    model = Retrieval(Contender("softmax", "Softmax()"), 12)
    batch = Batch.drawn(12, torch.Generator().manual_seed(0))
    assert sorted(batch.keys[0].tolist()) == sorted(batch.values[0].tolist()) == [*range(12)]
    tokens = torch.cat([F.one_hot(batch.values, 12).float(), model.embedding[batch.keys]], -1)
    torch.testing.assert_close(model._tokens(model.key, batch), model.key(tokens))
    q = model.query(model.embedding[batch.keys[torch.arange(32), batch.asked]])
    expected = (model.key(tokens) @ q[..., None] / 8).softmax(1)[..., 0]
    predictions, targets = model(batch)
    torch.testing.assert_close(predictions, expected)
    assert targets.equal(batch.asked)


@pytest.mark.parametrize("label", ["AFT", "Manhattan"])
def test_mechanisms_of_channels_see_all_associations_and_the_query(label: str) -> None:
    contender = next(each for each in capacity.CONTENDERS if each.label == label)
    model = Retrieval(contender, 10)
    batch = Batch.drawn(10, torch.Generator().manual_seed(0))
    predictions, targets = model(batch)
    assert targets.equal(batch.values[torch.arange(32), batch.asked])
    other = batch._replace(asked=(batch.asked + 1) % 10)
    assert not model(other)[0].allclose(predictions)


def test_the_loss_is_half_the_squared_distance() -> None:
    predictions = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]])
    targets = torch.tensor([1, 0])
    expected = 0.5 * (predictions - F.one_hot(targets, 3)).square().sum(-1).mean()
    torch.testing.assert_close(associations.loss_of(predictions, targets), expected)


def test_training_learns_and_ends_by_the_papers_rules() -> None:
    row = associations.trained(Contender("softmax", "Softmax()"), 20, 0, 60.0)
    assert row["stopped"] == "learnt"
    assert row["loss"] <= associations.LEARNT
    assert row["recall"] == 1.0
    assert row["steps"] % associations.EVERY == 0
    assert row["state"] >= 20 * (64 + 20)
    assert associations.trained(Contender("AFT", "AFTSimple()", channels=True), 20, 0, 0.2)["stopped"] == "time"


def test_trainings_that_time_ended_bear_out_nothing() -> None:
    row = {"contender": "softmax", "associations": 400, "seed": 1, "loss": 0.4, "stopped": "time"}
    claim = capacity.claims(Reproduced({}, [row]))[0]
    assert claim.holds is None
    assert capacity.claims(Reproduced({}, [{**row, "stopped": "no progress"}]))[0].holds is False


def test_unfused_attention_is_exact_attention() -> None:
    q, k, v = torch.randn(3, 2, 3, 17, 8)
    torch.testing.assert_close(cab.unfused(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_the_efficiency_length_is_the_last_crossing() -> None:
    def record(*seconds: float) -> Reproduced:
        lengths = (256, 512, 1024, 2048)
        rows = [{"length": n, "competitor": cab.UNFUSED, "seconds": (n / 256) ** 2} for n in lengths]
        own = [{"length": n, "competitor": "x", "seconds": s} for n, s in zip(lengths, seconds, strict=True)]
        return Reproduced({}, rows + own)

    crossing = cab.efficiency_length(record(8.0, 8.0, 8.0, 8.0), "x", cab.UNFUSED)
    assert crossing == pytest.approx(256 * math.sqrt(8), rel=1e-9)
    for first in (0.5, 99.0):  # whatever came before
        assert cab.efficiency_length(record(first, 8.0, 8.0, 8.0), "x", cab.UNFUSED) == pytest.approx(crossing)
    assert cab.efficiency_length(record(0.5, 0.5, 0.5, 0.5), "x", cab.UNFUSED) == 256
    assert cab.efficiency_length(record(99.0, 99.0, 99.0, 99.0), "x", cab.UNFUSED) == math.inf
    assert cab.efficiency_length(record(1.0, 1.0, 1.0, 1.0), "x", cab.FUSED) is None


def test_the_time_of_an_image_is_the_sum_over_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"part": "model", "name": decoding.PLAIN, "position": n, "seconds": 1e-3 * n} for n in (1, 100, 784)]
    rows += [{"part": "model", "name": decoding.LINEAR, "position": n, "seconds": 1e-3} for n in (1, 100, 784)]
    record = Reproduced({}, rows)
    assert decoding.whole(record, decoding.PLAIN, 784) == pytest.approx(1e-3 * 784 * 785 / 2, rel=2e-3)
    assert decoding.gain(record, decoding.PLAIN, 784) == pytest.approx(785 / 2, rel=2e-3)
    assert decoding.whole(record, decoding.PLAIN, 3072) is None


def test_pages_are_self_contained() -> None:
    record = record_of("performer")
    html = page.html(REPRODUCTIONS["performer"], record)
    assert not re.search(r"<(link|img|script [^>]*src)", html)
    assert json.loads(record.to_json())["schema"].startswith("fast-attention reproduce")
