"""The reproductions run at tiny sizes, resume, and their pages are of the newest records."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from experiments import data, pages
from experiments.reproductions import cab, capacity, common, decoding, duplication, leaks, mixers, performer, recall
from experiments.reproductions import spectrum as spectra
from experiments.reproductions.capacity import Batch, Contender, Retrieval
from experiments.reproductions.common import Budget, Claim, Reproduced
from experiments.reproductions.training import Training, equal_steps
from experiments.tasks import IGNORED, Duplicate
from fast_attention import attention_maps
from fast_attention.conformance import third_party
from fast_attention.lab.inputs import InputError

SCRIPTS = (performer, capacity, spectra, duplication, recall, mixers, leaks, cab, decoding)
FEW = [replace(each, sizes=(20,)) for each in capacity.CONTENDERS if each.label in ("softmax", "DPFP-1", "AFT")]
SPOILED = third_party(  # stands for a published layer
    lambda: lambda x, mask=None: x.cumsum(-2) + x.amax((-2, -1), keepdim=True), inputs="x", causal=True, mask="mask"
)
TINY: dict[Any, dict[str, Any]] = {
    performer: {"LENGTH": 64, "SCALES": (0.5, 1.0)},
    capacity: {"CONTENDERS": tuple(FEW), "EVERY": 5, "SEQUENCES": 2, "LEAST": 0.1},
    spectra: {
        "passages": lambda: iter([("the Jargon File", "the first page", data.text()[:2000])]), "LENGTH": 32,
        "RANK": 8, "RANKS": (1, 8, 32),
    },
    duplication: {
        "TASK": Duplicate(words=7), "TRAINED": (0, 2, 1),
        "SETTINGS": replace(duplication.SETTINGS, batch_size=2, evaluation_batches=1),
    },
    recall: {
        "FAMILIES": {name: each[:1] for name, each in recall.FAMILIES.items()},
        "SETTINGS": replace(recall.SETTINGS, batch_size=2, evaluation_batches=1),
    },
    mixers: {
        "MIXERS": (*mixers.CONTROLS, "FNet()"), "TOKENS": 32, "LENGTHS": (16, 32),
        "SETTINGS": replace(mixers.SETTINGS, evaluation_batches=1),
    },
    leaks: {
        "SUBJECTS": (("performer-pytorch", "SelfAttention(causal=True)", lambda: SPOILED),),
        "installed": lambda package: "1.0",
    },
    cab: {"LENGTHS": (32, 64), "ROUNDS": 2, "BATCH": 1},
    decoding: {"POSITIONS": (1, 4, 8), "IMAGES": {8: ("tiny", 1.0)}, "LAYERS": 1, "FAR": (4, 16)},
}  # fmt: skip


def ran(script: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Reproduced:
    """The record of a tiny run, from its file."""
    for name, value in TINY[script].items():
        monkeypatch.setattr(script, name, value)
    seeds = ("--seeds", "1") if script.REPRODUCTION.seeds else ()
    minutes = "0.2" if script is cab else "0.003"
    given = ["--minutes", minutes, "--threads", "1", "--out", str(folder), *seeds, *options]
    assert common.main(script.REPRODUCTION, given) == 0
    return Reproduced.read(folder / Reproduced.data)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.REPRODUCTION.name)
def test_each_runs_from_end_to_end_and_has_nothing_to_resume(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is spectra:
        pytest.importorskip(spectra.MODEL)
    chosen, record = script.REPRODUCTION, ran(script, tmp_path, monkeypatch)
    assert (record.meta["status"], record.meta["command"][2]) == (
        "complete",
        f"experiments.reproductions.{chosen.name}",
    )
    assert "<svg" in (tmp_path / f"{chosen.name}.svg").read_text()
    assert record.rows
    assert chosen.claims(record)
    newest = Reproduced.read(pages.newest(f"reproduce-{chosen.name}") or Path())
    assert {frozenset(row) for row in record.rows} <= {frozenset(row) for row in newest.rows}, "another shape"
    assert ran(script, tmp_path, monkeypatch, "--resume").rows == record.rows
    with pytest.raises(InputError, match="--resume"):
        ran(script, tmp_path, monkeypatch)


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = performer.errors

    def stopping(draw: int, scale: float) -> list[Any]:
        if scale == 1.0:
            raise KeyboardInterrupt
        return errors(draw, scale)

    monkeypatch.setattr(performer, "LENGTH", 64)
    monkeypatch.setattr(performer, "errors", stopping)
    given = ["--seeds", "1", "--out", str(tmp_path)]
    assert common.main(performer.REPRODUCTION, given) == 130
    assert len(Reproduced.read(tmp_path / Reproduced.data).rows) == 3
    monkeypatch.setattr(performer, "errors", errors)
    assert common.main(performer.REPRODUCTION, [*given, "--resume"]) == 0
    assert [row["scale"] for row in Reproduced.read(tmp_path / Reproduced.data).rows] == [*performer.SCALES]


def test_pages_are_of_the_newest_records_and_disagreement_comes_first() -> None:
    for path, text in pages.made().items():
        assert path.suffix == ".svg" or path.read_text(encoding="utf-8") == text, "run `python docs/build.py`"
    claims = [Claim("a", "so it is", True), Claim("b", "twice that", False), Claim("c", "nothing", None)]
    chosen = replace(performer.REPRODUCTION, claims=lambda _: claims)
    said = "Of 3 points the record disagrees with the paper in 1, and agrees in 1, and did not measure 1."
    assert chosen.sentence(Reproduced({})) == said
    record, path = newest("performer")
    rows = re.findall(r"^\| (\w) \| .* \| (.*) \|$", pages.page(chosen, record, path), re.M)
    assert rows == [("b", "disagrees"), ("a", "**agrees**"), ("c", "not measured")]
    for script in SCRIPTS:
        assert script.REPRODUCTION.minutes <= 30
        assert re.search(r"arXiv \d{4}\.\d{5}", script.REPRODUCTION.paper)


def newest(name: str) -> tuple[Reproduced, Path]:
    """The last record of a reproduction, in the repository of these tests, and its file."""
    *_, path = sorted((Path(__file__).parents[2] / "records").glob(f"*-reproduce-{name}*.json"))
    return Reproduced.read(path), path


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_names_the_mechanisms_that_its_record_measured(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them and no other: what a script trains today, or calls a mechanism today, is no result of then."""
    record, path = newest(script.REPRODUCTION.name)
    rows = record.rows
    measured = {row[key] for row in rows for key in ("mechanism", "competitor") if "(" in row.get(key, "")}
    monkeypatch.setattr(pages, "ROOT", path.parents[1])
    text = pages.page(script.REPRODUCTION, record, path)
    cells = [cell.strip() for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    named = {cell.strip("`") for cell in cells if re.fullmatch(r"`[A-Z]\w*\(.*\)`", cell)}
    controls = {"Softmax()", "Local(window=0)"}
    assert named - controls == measured - controls


def test_recall_of_both_is_beside_windows_of_the_same_state() -> None:
    """One of a state that a window does better with is a disagreement, and linear attention alone is neither."""
    record, _ = newest("recall")
    claim = recall.claims(record)[1]
    windows, both = (recall.points(record, family) for family in (recall.WINDOW, recall.BOTH))
    ahead = [size for size, value in both.items() if value > max(v for n, v in windows.items() if n <= size)]
    assert claim.ours.startswith(f"{len(ahead)} of {len(both)} do; ")
    assert claim.holds is (len(ahead) == len(both))
    for row in record.of(family=recall.LINEAR):
        row["accuracy"] = 0.5
    assert recall.claims(record)[1] == claim


def test_steps_fill_the_time() -> None:
    each = Training(recall.TASK, recall.matched(recall.TASK, "Softmax()", recall.MODEL), recall.SETTINGS)
    clock = iter(range(10**6))  # a step takes a second
    budget = Budget(1000.0, clock=lambda: float(next(clock)))
    assert equal_steps(budget, [each] * 2, 10**6) == 400
    assert equal_steps(Budget(0.0, rows=({"steps": 77},)), [each], 50) == 77


def test_errors_are_of_outputs() -> None:
    """Uniform weights err by the outputs' variance around the values' mean."""
    torch.manual_seed(0)
    q, k = (0.35 * torch.randn(1, 1, performer.LENGTH, 16) for _ in range(2))
    v = torch.randn(1, 1, performer.LENGTH, 16)
    expected = (F.scaled_dot_product_attention(q, k, v) - v.mean(-2, keepdim=True)).square().mean().item()
    assert performer.errors(0, 0.35)[0]["mse"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("label", ["elu + 1", "FAVOR+ 64, fixed"])
def test_weights_from_features_are_those_of_the_mechanism(label: str) -> None:
    model = Retrieval(next(each for each in capacity.CONTENDERS if each.label == label), 30)
    q, k, bound = torch.randn(2, 1, 1, 64), 2 * torch.randn(2, 1, 30, 64), model.bound
    rows = attention_maps.attention_rows(bound.mechanism, q, k, bound.w, queries=[0])
    own = capacity.kernel_weights(bound.mechanism, bound.w, q, k)
    torch.testing.assert_close(own.detach(), rows, rtol=1e-3, atol=1e-5)


def test_what_is_retrieved_and_its_loss() -> None:
    model, batch = Retrieval(Contender("softmax", "Softmax()"), 12), Batch.drawn(12, torch.Generator().manual_seed(0))
    tokens = torch.cat([F.one_hot(batch.values, 12).float(), model.embedding[batch.keys]], -1)
    q = model.query(model.embedding[batch.keys[torch.arange(32), batch.asked]])
    expected = (model.key(tokens) @ q[..., None] / 8).softmax(1)[..., 0]
    predictions, targets = model(batch)
    torch.testing.assert_close(predictions, expected)
    loss = 0.5 * (predictions - F.one_hot(batch.asked, 12)).square().sum(-1).mean()
    torch.testing.assert_close(capacity.loss_of(predictions, targets), loss)
    row = {"contender": "softmax", "associations": 400, "seed": 1, "loss": 0.4, "stopped": "time"}
    assert capacity.claims(Reproduced({}, [row]))[0].holds is None, "time ended it"
    assert capacity.claims(Reproduced({}, [{**row, "stopped": "no progress"}]))[0].holds is False


def test_the_efficiency_length_is_the_last_crossing() -> None:
    q, k, v = torch.randn(3, 2, 3, 17, 8)
    torch.testing.assert_close(cab.unfused(q, k, v), F.scaled_dot_product_attention(q, k, v))
    lengths = (256, 512, 1024, 2048)
    exact = [{"length": n, "competitor": cab.UNFUSED, "seconds": (n / 256) ** 2} for n in lengths]
    for seconds, expected in (((99, 8, 8, 8), 256 * math.sqrt(8)), ((0.5, 8, 8, 8), 256 * math.sqrt(8)),
                              ((0.5,) * 4, 256), ((99,) * 4, math.inf)):  # fmt: skip
        own = [{"length": n, "competitor": "x", "seconds": s} for n, s in zip(lengths, seconds, strict=True)]
        assert cab.efficiency_length(Reproduced({}, exact + own), "x", cab.UNFUSED) == pytest.approx(expected)


def test_the_time_of_an_image_is_the_sum_over_its_tokens() -> None:
    rows = [{"part": "model", "name": decoding.PLAIN, "position": n, "seconds": 1e-3 * n} for n in (1, 100, 784)]
    assert decoding.whole(Reproduced({}, rows), decoding.PLAIN, 784) == pytest.approx(1e-3 * 784 * 785 / 2, rel=2e-3)


def test_spectra_of_known_matrices_and_of_nulls() -> None:
    assert spectra.cumulative(torch.diag(torch.tensor([1.0, 3.0]))[None])[0].tolist() == [0.75, 1.0]
    q, k = (torch.randn(2, 64, 8, dtype=torch.float64) for _ in range(2))
    own = spectra.trained(q, k)
    assert torch.allclose(spectra.permuted(q, k).sort(-1).values, own.sort(-1).values)
    for drawn in (spectra.random_content(q, k), spectra.random_scores(q, k)):
        assert torch.allclose(own.log().var(-1).mean(-1), drawn.log().var(-1).mean(-1))


def test_one_bucket_is_full_attention() -> None:
    """The exact attention of shared queries and keys, in which a token does not see itself."""
    config = duplication.config(duplication.FULL)
    mixer: Any = duplication.Model(config).blocks[0].f.mixer
    x = torch.randn(1, duplication.TASK.length, config.width)
    with duplication.drawing_rotations(duplication.FULL):
        out = mixer(x, is_causal=True)
    q, v = (part.unflatten(-1, (config.heads, -1)).transpose(1, 2) for part in mixer.in_proj(x).chunk(2, -1))
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
    scores = (q @ F.normalize(q, dim=-1).mT).masked_fill(~visible, -math.inf)
    seen = torch.cat([v[..., :1, :], scores[..., 1:, :].softmax(-1) @ v], -2)  # the first token sees itself
    assert torch.allclose(out, mixer.out_proj(seen.transpose(1, 2).flatten(-2)), atol=1e-5)


def test_states_are_counted_and_bytes_masked() -> None:
    width, conv = recall.MODEL["width"], (recall.MODEL["conv"] - 1) * recall.MODEL["width"]
    config = recall.matched(recall.TASK, "Local(window=2)", recall.MODEL)
    assert recall.state_size(Training(recall.TASK, config, recall.SETTINGS)) == 2 * (2 * 2 * width + conv)
    batch = mixers.MaskedBytes(context=32).batch("train", 3, 256)
    hidden = batch.tokens == mixers.MASK
    assert torch.equal(hidden, batch.targets != IGNORED)
    assert abs(hidden.float().mean() - mixers.SHARE) < 0.03


def test_leaks_are_named_and_so_are_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"package": "performer-pytorch", "version": "1.0", "layer": "x", **leaks.judged(lambda: SPOILED)}
    first, *others = leaks.claims(Reproduced({}, [row]))
    assert first.holds is False
    assert "1.0 breaks that" in first.ours
    assert {claim.holds for claim in others} == {None}
    monkeypatch.setattr(leaks, "installed", lambda package: None if package == "aft-pytorch" else "1")
    with pytest.raises(InputError, match="needs aft-pytorch: run it by"):
        next(leaks.measure(Budget(1.0)))
