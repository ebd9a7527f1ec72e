"""The reproductions that read models, train them, or measure published packages."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fast_attention.data import text
from fast_attention.lab.inputs import InputError
from fast_attention.lab.reproducing import duplication, leaks, mixers, packages, page, recall, runs, spectrum
from fast_attention.lab.reproducing.reproduction import Budget, Reproduced, Reproduction
from fast_attention.lab.study.plan import matched, parameters
from fast_attention.tasks.recall import Duplicate
from fast_attention.tasks.task import IGNORED

RECORDS = Path(__file__).parents[2] / "records"
META: dict[str, Any] = {
    "status": "complete", "command": ["fast-attention", "reproduce"], "started": "", "minutes": 0.01, "seeds": 1,
    "fast_attention": "", "commit": None, "torch": "", "python": "", "platform": "", "device": "cpu", "hardware": "",
    "cores": 1, "threads": 1, "load_average": [0.0],
}  # fmt: skip


def ran(reproduction: Reproduction, seconds: float = 0.1) -> Reproduced:
    """A record of a tiny run, whose page can be drawn, and which a resumed run has nothing to add to."""
    record = Reproduced(dict(META), list(reproduction.run(Budget(seconds, 1))))
    record = Reproduced.from_json(record.to_json())
    assert not list(reproduction.run(Budget(0.0, 1, tuple(record.rows))))
    html = page.html(reproduction, record)
    assert "<svg" in html
    assert f"reproduce {reproduction.name}" in html
    return record


def kept(name: str) -> Reproduced:
    """The newest record of a reproduction."""
    return Reproduced.read(max(RECORDS.glob(f"*-reproduce-{name}.json")))


def cells(reproduction: Reproduction, record: Reproduced, number: int = 0) -> list[list[str]]:
    """The words of a table's cells."""
    return [[value.text for value in values] for values, _ in reproduction.tables(record)[number].values]


def test_a_spectrum_of_known_matrices() -> None:
    shares = spectrum.cumulative(torch.stack([torch.eye(8), torch.full((8, 8), 1 / 8)]))
    assert torch.allclose(shares[0], torch.arange(1, 9) / 8)
    assert torch.allclose(shares[1], torch.ones(8), atol=1e-5)
    assert spectrum.cumulative(torch.diag(torch.tensor([1.0, 3.0]))[None])[0].tolist() == [0.75, 1.0]


def test_nulls_keep_what_they_say() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 64, 8, dtype=torch.float64) * torch.tensor([0.5, 2.0])[:, None, None] for _ in range(2))
    own = spectrum.trained(q, k)
    assert torch.allclose(spectrum.permuted(q, k).sort(-1).values, own.sort(-1).values)
    for drawn in (spectrum.random_content(q, k), spectrum.random_scores(q, k)):
        assert torch.allclose(own.log().var(-1).mean(-1), drawn.log().var(-1).mean(-1))
    logs = [f(q, k).log() for f in (spectrum.random_content, spectrum.random_scores)]
    content, free = (torch.linalg.matrix_rank(x - x.mean(-1, keepdim=True)) for x in logs)
    assert content.max() <= 8 < free.min()


def test_the_spectrum_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(spectrum.DEFAULT_PACKAGE)
    monkeypatch.setattr(spectrum, "_passages", lambda: iter([("the Jargon File", "the first page", text()[:2000])]))
    monkeypatch.setattr(spectrum, "LENGTH", 32)
    monkeypatch.setattr(spectrum, "RANK", 8)
    monkeypatch.setattr(spectrum, "RANKS", (1, 8, 32))
    record = ran(spectrum.SPECTRUM, 0.0)
    assert len(record.rows) == 1
    assert all(curve["mean"][-1] == pytest.approx(1) for curve in record.rows[0]["curves"])


def test_one_bucket_is_full_attention() -> None:
    """The exact attention of shared queries and keys, in which a token does not see itself."""
    config = duplication.config_for(duplication.FULL)
    torch.manual_seed(0)
    mixer = duplication.Model(config).blocks[0].f.mixer
    x = torch.randn(1, duplication.TASK.length, config.width)
    with duplication.drawing_rotations(duplication.FULL):
        out = mixer(x, is_causal=True)
    q, v = (part.unflatten(-1, (config.heads, -1)).transpose(1, 2) for part in mixer.in_proj(x).chunk(2, -1))
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
    scores = (q @ F.normalize(q, dim=-1).mT).masked_fill(~visible, -math.inf)
    seen = torch.cat([v[..., :1, :], scores[..., 1:, :].softmax(-1) @ v], -2)  # the first token sees itself
    assert torch.allclose(out, mixer.out_proj(seen.transpose(1, 2).flatten(-2)), atol=1e-5)


def test_rotations_are_drawn_at_every_pass() -> None:
    model = duplication.Model(duplication.config_for(1)).eval()
    tokens = duplication.TASK.batch("valid", 0, 2).tokens
    with duplication.drawing_rotations(1):
        assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model(tokens), model(tokens))


def test_duplication_with_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplication, "TASK", Duplicate(words=7))
    monkeypatch.setattr(duplication, "SETTINGS", replace(duplication.SETTINGS, batch_size=4, evaluation_batches=1))
    record = ran(duplication.DUPLICATION)
    assert [row["trained"] for row in record.rows] == [*duplication.TRAINED]
    assert {row["steps"] for row in record.rows} == {runs.FEWEST}


def test_recall_with_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "SETTINGS", replace(recall.SETTINGS, batch_size=2, evaluation_batches=1))
    record = ran(recall.RECALL)
    assert len(record.rows) == sum(map(len, recall.FAMILIES.values()))


def test_state_is_counted_from_the_state() -> None:
    width, conv = recall.MODEL["width"], (recall.MODEL["conv"] - 1) * recall.MODEL["width"]
    for window in (2, 8):
        assert recall.state_size(f"Local(window={window})") == 2 * (2 * window * width + conv)
    heads, each = recall.MODEL["heads"], width // recall.MODEL["heads"]
    assert recall.state_size("LinearAttention()") == 2 * (heads * (each * (each + 1) + 1) + conv)


def test_mixers_with_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "SETTINGS", replace(mixers.SETTINGS, evaluation_batches=1))
    monkeypatch.setattr(mixers, "TOKENS", 96)
    monkeypatch.setattr(mixers, "LENGTHS", (32, 48))
    record = ran(mixers.MIXING)
    assert all(len(mixers.summaries(record, length)) == len(mixers.MIXERS) for length in (32, 48))
    assert len(mixers.claims(record)) == 6
    assert mixers.cell(record, mixers.SOFTMAX, 32).status == "measured"


def test_masked_bytes() -> None:
    task = mixers.MaskedBytes(context=32)
    batch = task.batch("train", 3, 256)
    hidden = batch.tokens == mixers.MASK
    assert torch.equal(hidden, batch.targets != IGNORED)
    assert batch.key_mask is None
    assert abs(hidden.float().mean() - mixers.SHARE) < 0.03
    assert torch.equal(batch.tokens, task.batch("train", 3, 256).tokens)


def test_mixers_have_equal_parameters() -> None:
    """All but those whose weights of positions outweigh the rest of a model, which keep one unit of feed-forward."""
    configs = {name: mixers.training(name, 512).config for name in mixers.MIXERS}
    large = {name for name, config in configs.items() if config.hidden == 1}
    assert large == {"GMLP()", "MLPMixer()", "RandomSynthesizer()"}
    sizes = [parameters(config) for name, config in configs.items() if name not in large]
    assert max(sizes) < 1.003 * min(sizes)


def test_batches_of_mixers_have_as_many_tokens_at_each_length() -> None:
    trainings = [mixers.training("FNet()", length) for length in mixers.LENGTHS]
    assert {each.settings.batch_size * each.task.length for each in trainings} == {mixers.TOKENS}


def test_steps_fill_the_time() -> None:
    trainings = [runs.Training(recall.TASK, matched(recall.TASK, "Softmax()", recall.MODEL), recall.SETTINGS)] * 2
    clock = iter(range(10**6))  # a step takes a second
    budget = Budget(1000.0, 1, clock=lambda: float(next(clock)))
    assert runs.equal_steps(budget, trainings, 10**6) == int(runs.KEPT * 1000 / 2)
    assert runs.equal_steps(budget, trainings, 50) == 50
    stopped = Budget(0.0, 1, ({"steps": 77},))
    assert runs.equal_steps(stopped, trainings, 50) == 77


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda package: None if package == "aft-pytorch" else "1")
    with pytest.raises(InputError, match=r"reproduce leaks needs aft-pytorch: make test-peers"):
        next(leaks.run(Budget(1.0, 0)))


def test_leaks_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of ours that is spoiled stands for a published one: its leak is found, named and drawn."""
    spoiled = packages.third_party(
        lambda: lambda x, mask=None: x.cumsum(-2) + x.amax((-2, -1), keepdim=True), inputs="x", causal=True, mask="mask"
    )
    subject = packages.Subject("performer-pytorch", "SelfAttention(causal=True)", lambda: spoiled)
    monkeypatch.setattr(packages, "installed", lambda package: "1.0")
    monkeypatch.setattr(leaks, "SUBJECTS", (subject,))
    record = ran(leaks.LEAKING)
    first, *others = leaks.claims(record)
    assert first.holds is False
    assert "1.0 breaks that" in first.ours
    assert {claim.holds for claim in others} == {None}


def test_tables_are_the_records() -> None:
    record = kept("duplication")
    for row, shown in zip(record.rows, cells(duplication.DUPLICATION, record), strict=True):
        assert shown[1:] == [f"{100 * each['mean']:.1f}" for each in row["read"]]
    record = kept("recall")
    for shown in cells(recall.RECALL, record):
        rows = record.of(mechanism=shown[0])
        assert shown[2:4] == [f"{rows[0]['state']:,}", f"{statistics.fmean(r['accuracy'] for r in rows):.3f}"]
    record = kept("spectrum")
    curves = [curve for row in record.rows for curve in row["curves"]]
    for kind, *shares, _ in cells(spectrum.SPECTRUM, record):
        means = zip(*(curve["mean"] for curve in curves if curve["kind"] == kind), strict=True)
        assert shares == [f"{statistics.fmean(values):.3f}" for values in means][: len(shares)]


def test_the_table_of_mixers_is_the_record() -> None:
    record = kept("mixers")
    for shown, name in zip(cells(mixers.MIXING, record), mixers.summaries(record, 512), strict=True):
        for column, length in ((1, 512), (5, 2048)):
            values = [row["result"]["value"] for row in record.of(mechanism=name, length=length) if "seed" in row]
            assert shown[column].startswith(f"{statistics.fmean(values):.3f}")
            assert len(values) == 3


def test_every_breach_is_in_the_table() -> None:
    record = kept("leaks")
    broken = [law for row in record.rows for law in row["laws"] if law["status"] == "broken"]
    assert len(cells(leaks.LEAKING, record)) == len(broken)
    assert {row["package"] for row in record.rows} == {*packages.MODULES}
    assert json.loads(max(RECORDS.glob("*-reproduce-leaks.json")).read_text())["meta"]["status"] == "complete"
