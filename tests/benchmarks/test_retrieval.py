"""The retrieval benchmark: passages leave their documents, ranks are counted, manuals become text, every way reads."""

from __future__ import annotations

import argparse
import copy
import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import manuals, retrieval
from fast_attention import extend
from fast_attention.lab import loading
from fast_attention.lab.texts import TextChunks

transformers = pytest.importorskip("transformers")


def test_a_passage_leaves_its_document() -> None:
    documents = [[*range(1000 * i, 1000 * i + 700)] for i in range(30)]
    pairs = retrieval.pairs(documents, 0)
    assert pairs == retrieval.pairs(documents, 0)
    assert pairs != retrieval.pairs(documents, 1)
    for ids, pair in zip(documents, pairs, strict=True):
        assert len(pair.passage) == 200
        assert sorted([*pair.document, *pair.passage]) == ids
        assert pair.passage == [*range(pair.passage[0], pair.passage[0] + 200)]
    assert len({pair.passage[0] % 1000 for pair in pairs}) > 15


def test_ranks_are_counted_by_the_nearest_vector() -> None:
    axes = torch.eye(3)
    assert retrieval.ranks(axes, [axes[i : i + 1] for i in range(3)]) == (1.0, 1.0)
    turned = [axes[(i + 1) % 3][None] + 0.1 * axes[i] for i in range(3)]
    assert retrieval.ranks(axes, turned) == (0.0, pytest.approx(0.5))
    several = [torch.stack([axes[i], 5 * axes[(i + 1) % 3] + axes[i]]) for i in range(3)]
    assert retrieval.ranks(axes, several) == (1.0, 1.0)
    assert retrieval.ranks(axes, [torch.ones(1, 3)] * 3) == (0.0, pytest.approx(1 / 3))  # all alike: no answer


def test_manuals_are_plain_text_within_a_length(tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())

    put("usr/share/perl/5.36.0/pod/perlone.pod", "=head1 NAME\n\nB<one> and C<< two >>\n\n=over 4\n\n=item x\n\n=cut\n")
    put("usr/share/man/man2/read.2.gz", '.\\" a comment\n.TH read 2\n.SH NAME\n.B read\n\\- from a \\fIfile\\fP\n')
    put("usr/share/doc/git-doc/git-add.txt", "git add")
    put("usr/share/doc/git-doc/howto/long.txt", "word " * 200)
    tokenizer = transformers.ByT5Tokenizer()
    read = {each.name: each for each in manuals.manuals(tmp_path, tokenizer, 5, 100, 10)}
    assert {*read} == {"perlone", "read.2", "git-add"}
    assert read["perlone"].text.split() == ["NAME", "one", "and", "two", "x"]
    assert read["read.2"].text == "NAME\nread\n- from a file"
    assert read["read.2"].package == "manpages-dev"
    assert len(manuals.manuals(tmp_path, tokenizer, 5, 100, 2)) == 2
    with pytest.raises(SystemExit, match="unpack"):
        manuals.manuals(tmp_path / "empty", tokenizer, 5, 100, 2)


def test_every_way_reads_and_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(hidden_size=16, vocab_size=384, max_position_embeddings=512, **sizes)
    model = transformers.BertModel(config).eval()
    monkeypatch.setattr(loading, "default_model", lambda: "small")
    extend(converted := copy.deepcopy(model), 2048)
    monkeypatch.setattr(loading, "load", {"small": model, "out/x": converted}.get)
    mechanism = "Hybrid(near=BlockLocal(), far=LearnedFeatures(num_features=4))"
    asked = argparse.Namespace(exact=True, mechanisms=[mechanism], model=["out/x"], precision="float32")
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 300, (700 + 300 * i,), generator=draw).tolist() for i in range(3)]
    held = retrieval.pairs(ids, 0)
    vectors: dict[str, list[torch.Tensor]] = {}
    names: list[str] = []
    rows = []
    for way in retrieval.ways(asked, TextChunks(transformers.ByT5Tokenizer())):
        rows += retrieval.measure(way, held, names.append)
        for name, use in way.uses.items():
            vectors[name] = [use(way.document(pair.document)) for pair in held]
    assert [row["way"] for row in rows] == [*vectors]
    assert len(names) == 3 * 5  # chunks are made once for their mean and the best of them
    assert all(0 <= row["recall_at_1"] <= row["mrr"] <= 1 for row in rows)
    first = model(torch.tensor([[*held[0].document[:511], 1]])).last_hidden_state.mean(1)
    assert torch.allclose(vectors["original, cut to 512 tokens"][0], first, atol=1e-5)
    pieces = vectors["best of the 512-token chunks, a vector each"]
    assert [len(each) for each in pieces] == [1, 2, 3]
    assert torch.allclose(vectors[retrieval.MEAN][2], pieces[2].mean(0, keepdim=True))
    assert not torch.equal(vectors["extended, exact"][1], vectors[f"extended, untrained {mechanism}"][1])
    assert torch.equal(vectors["extended, exact"][1], vectors["converted: x"][1])
    assert retrieval.table(rows).rows


def test_a_record_is_resumed_by_the_same_run_only(tmp_path: Path) -> None:
    about = {
        "documents": 3,
        "tokens": {"all": 9},
        "seed": 0,
        "passage": 200,
        "precision": "float32",
        "status": "running",
    }
    retrieval._write(path := tmp_path / "record.json", about, [{"way": "cut"}])
    assert retrieval.resumed(path, {**about, "status": "complete"}) == [{"way": "cut"}]
    with pytest.raises(SystemExit, match=r"has tokens .* and this run"):
        retrieval.resumed(path, {**about, "tokens": {"all": 8}})
