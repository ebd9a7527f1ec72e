"""What a user brings to ``classify``, ``tag`` and ``byte-lm``: tables, FASTA with labels, conflicts, mistakes."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fast_attention import tasks
from fast_attention.lab import commands
from fast_attention.tasks import ByteLM, Needle, ProteinMLM, Sequences, Tags, sequences, tags
from fast_attention.tasks import bytes as bytes_task
from fast_attention.tasks.task import IGNORED

SMALL = ["--width", "16", "--heads", "2", "--layers", "1", "--steps", "4", "--batch-size", "4"]


def kept(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# ------------------------------------------------------------------------------------------------------------ conflicts


def test_sequences_with_two_labels_are_left_out_counted_and_said(tmp_path: Path) -> None:
    lines = [f"text number {i},{'ab'[i % 2]}" for i in range(20)]
    lines += ["torn,a", "torn,b", "torn,a", "text number 3,b", "text number 3, b "]
    task = Sequences(kept(tmp_path / "x.csv", "text,label\n" + "\n".join(lines)))
    train, valid, names, counts = sequences.sides(task)
    assert names == ("a", "b")
    assert counts == (2, 1, 0)
    seen = {bytes(row.tolist()) for side in (train, valid) for row in side.rows}
    assert len(seen) == len(train.rows) + len(valid.rows) == 20
    assert b"torn" not in seen
    assert task.describe()["sequences with several labels left out"] == "1"
    assert task.remarks() == ["1 sequences have more than one label and are left out"]


def test_sequences_are_compared_before_they_are_cut(tmp_path: Path) -> None:
    """Alike as far as is read: no conflict of the file's, and no reason to stop; those of one label count once."""
    lines = [f"{'x' * 8}{i},{'ab'[i % 2]}" for i in range(10)] + [f"{i},{'ab'[i % 2]}" for i in range(10)]
    path = kept(tmp_path / "x.csv", "text,label\n" + "\n".join(lines))
    task = Sequences(path, context=8)
    train, valid, _, counts = sequences.sides(task)
    assert counts == (8, 0, 2)
    assert len(train.rows) + len(valid.rows) == 12
    assert "2 sequences of different labels are alike in the first 8 bytes" in task.remarks()[0]
    assert sequences.sides(Sequences(path, context=9)).counts == (0, 0, 0)
    assert Sequences(path).remarks() == []


def test_bytes_are_counted_some_sequences_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{'xy'[i % 3 == 0] * (i % 5)} number {i},{'ab'[i % 2]}" for i in range(60)]
    task = Sequences(kept(tmp_path / "x.csv", "text,label\n" + "\n".join(lines)), share=0.5)
    at_once = task.baselines()
    monkeypatch.setattr(sequences, "COUNTED", 7)
    assert task.baselines() == at_once


def test_lengths_are_taken_once(tmp_path: Path) -> None:
    """A batch of a long file does not go through all its sequences."""
    path = kept(tmp_path / "x.csv", "text,label\n" + "\n".join(f"ab {i},{'xy'[i % 2]} z" for i in range(20)))
    for kind, module in ((Sequences, sequences), (Tags, tags)):
        task = kind(path)
        assert len(task.batch("train", 0, 2).tokens) == 2
        known = module._lengths.cache_info().misses
        task.batch("train", 1, 2)
        assert module._lengths.cache_info().misses == known


@pytest.mark.parametrize("size", [4, 8, 32])
@pytest.mark.parametrize("count", [10, 14, 30, 60, 64])
def test_few_sequences_are_weighed_alike(size: int, count: int, tmp_path: Path) -> None:
    """Of a validation side smaller than two batches each is read as often as any other, to one, in any number."""
    lines = [f"sequence number {i},{'xy'[i % 2]}" for i in range(count)]
    task = Sequences(kept(tmp_path / "x.csv", "text,label\n" + "\n".join(lines)), share=0.5)
    rows = [tuple(row.tolist()) for i in range(8) for row in task.batch("valid", i, size).tokens]
    times = Counter(tuple(x for x in row if x) for row in rows)
    held_out = len(sequences.sides(task).valid.labels)
    if held_out < 2 * size:
        assert len(times) == held_out
        assert max(times.values()) - min(times.values()) <= 1
    assert [task.batch("valid", i, size).targets.tolist() for i in range(8)] == [
        task.batch("valid", i, size).targets.tolist() for i in range(8)
    ]


def test_validation_passages_of_bytes_differ(tmp_path: Path) -> None:
    """Where the side is twice a passage long, they once all began at its first byte."""
    text = bytes(range(256)) * 10
    task = ByteLM(kept(tmp_path / "x.bin", text[:2560]), context=64, share=0.05)
    held_out = len(bytes_task.sides(task)[1])
    assert held_out == 2 * task.context
    tokens = torch.cat([task.batch("valid", i, 8).tokens for i in range(8)])
    assert len({*map(tuple, tokens.tolist())}) == held_out - task.context


def test_gzip_is_unpacked(tmp_path: Path) -> None:
    content = "\n".join(f"sequence number {i}" for i in range(90)).encode()
    plain = ByteLM(kept(tmp_path / "x.txt", content), context=16)
    packed = ByteLM(kept(tmp_path / "x.txt.gz", gzip.compress(content)), context=16)
    assert packed.describe() == plain.describe()
    torn = ByteLM(kept(tmp_path / "torn.txt.gz", gzip.compress(content)[:-9]), context=16)
    with pytest.raises(ValueError, match=r"torn\.txt\.gz: the gzip data are damaged or cut off"):
        torn.describe()


def test_what_is_left_out_is_said_at_the_terminal_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"text number {i},{'ab'[i % 2]}" for i in range(20)] + ["torn,a", "torn,b"]
    path = kept(tmp_path / "x.csv", "text,label\n" + "\n".join(lines))
    assert commands.run(["train", "classify", path, *SMALL, "--out", str(tmp_path / "run")]) == 0
    assert "classify: 1 sequences have more than one label and are left out\n" in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["data"]["sequences with several labels left out"] == "1"
    assert record["task"] == f"Sequences(path={path!r})"


# --------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("delimiter", "suffix"), [(",", "csv"), (";", "csv"), ("\t", "csv"), ("|", "csv"), ("\t", "tsv")]
)
def test_tables_of_all_dialects_say_the_same(delimiter: str, suffix: str, end: str, tmp_path: Path) -> None:
    rows = [["id", " Text ", "LABEL"], *([str(i), f'say "{i}", {i}; or\t{i}|', "ab"[i % 2]] for i in range(8))]
    lines = [delimiter.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    task = Sequences(kept(tmp_path / f"x.{suffix}", "\ufeff" + end.join([*lines[:3], "", *lines[3:], ""])))
    found = [bytes(row.tolist()).decode() for side in sequences.sides(task)[:2] for row in side.rows]
    assert sorted(found) == sorted(row[1] for row in rows[1:])


def test_a_long_value_is_read_whole(tmp_path: Path) -> None:
    long = "ACGT" * 50_000
    path = kept(tmp_path / "x.csv", f"seq,class\n{long}a,1\n{long}b,1\n{long}c,2\n{long}d,2\n")
    assert max(map(len, sequences.sides(Sequences(path, context=300_000)).train.rows)) == 200_001


# ----------------------------------------------------------------------------------------------------------------- tags


def spelt(task: Tags) -> dict[str, str]:
    """Every sequence with its labels, '.' where none is asked for."""
    train, valid, names, _ = tags.sides(task)
    return {
        bytes(row.tokens.tolist()).decode(errors="replace"): "".join(
            "." if n == IGNORED else names[n] for n in row.labels.tolist()
        )
        for row in (*train, *valid)
    }


FASTA = {
    "three lines": ">a x\nMKTAY\nHHEEC\n\n>b\nWQRP\nCC-C\n",
    "wrapped": ">a x\nMKT\nAY\nHHE\nEC\n>b\nWQRP\nCC-C",
    "windows": ">a x\r\nmktay \r\nHHEEC\r\n>b\r\nWQRP\r\nCC-C\r\n",
}


@pytest.mark.parametrize("form", FASTA)
def test_fasta_with_structure(form: str, tmp_path: Path) -> None:
    task = Tags(kept(tmp_path / "x.fasta", FASTA[form]))
    assert spelt(task) == {"MKTAY": "HHEEC", "WQRP": "CC-C"}
    assert tags.sides(task).names == ("-", "C", "E", "H")


def test_tables_of_characters_and_of_words(tmp_path: Path) -> None:
    by_letter = Tags(kept(tmp_path / "a.csv", "pdb_id,seq,sst8,sst3\n1ABC,MKV,HTC,HCC\n2XYZ,WQ,EE,EE\n"))
    assert spelt(by_letter) == {"MKV": "HCC", "WQ": "EE"}
    assert spelt(Tags(by_letter.path, label="sst8")) == {"MKV": "HTC", "WQ": "EE"}
    by_word = Tags(kept(tmp_path / "b.tsv", "words\ttags\nDie Bär  schläft\tD N V\nJa\tI\n"))
    assert spelt(by_word) == {"Die Bär  schläft": "..D....N.........V", "Ja": ".I"}
    umlauts = Tags(kept(tmp_path / "c.jsonl", '{"text": "äb", "labels": "xy"}\n{"text": "c", "labels": "x"}\n'))
    assert spelt(umlauts) == {"äb": ".xy", "c": "x"}


def test_batches_ask_for_labels_as_tokens_of_their_own(tmp_path: Path) -> None:
    task = Tags(kept(tmp_path / "x.csv", "text,tags\nab cd,N V\nefg,N\nh,V\n"), share=0.3)
    assert task.vocab_size == 259
    tokens, targets, key_mask = task.batch("train", 0, 2)
    assert key_mask is not None
    for row, asked, seen in zip(tokens, targets, key_mask, strict=True):
        text = bytes(row[seen].tolist()).decode()
        wanted = {"ab cd": {1: 257, 4: 258}, "efg": {2: 257}, "h": {0: 258}}[text]
        assert {i: n for i, n in enumerate(asked.tolist()) if n != IGNORED} == wanted
        assert (row[~seen] == tags.PAD).all()


def test_labellings_that_disagree_are_left_out(tmp_path: Path) -> None:
    task = Tags(kept(tmp_path / "x.csv", "text,tags\nab,xy\nab,xx\ncd,xy\ncd,xy\nef,xx\n"))
    assert set(spelt(task)) == {"cd", "ef"}
    assert task.remarks() == ["1 sequences with several labellings are left out"]
    assert task.describe()["sequences with several labellings left out"] == "1"


def test_what_is_alike_as_far_as_it_is_read_stands_on_one_side(tmp_path: Path) -> None:
    """Labels that differ there are left out, those that differ beyond are not read."""
    lines = [f"ab{n}{tail},xyxy\n" for n in range(8) for tail in "cdef"] + ["rsta,xyxx\n", "rstb,xxxx\n"]
    task = Tags(kept(tmp_path / "x.csv", "".join(["text,tags\n", *lines])), context=3, share=0.5)
    train, valid, _, left = tags.sides(task)
    read = [[bytes(row.tokens.tolist()) for row in side] for side in (train, valid)]
    assert sorted([*read[0], *read[1]]) == [b"ab%d" % n for n in range(8)]
    assert left == {"sequences with several labellings": 1}
    with pytest.raises(ValueError, match="1 different sequences within context=2 bytes"):
        tags.sides(Tags(task.path, context=2))


def test_no_validation_protein_shares_a_stretch(tmp_path: Path) -> None:
    source = random.Random(5)
    letters = "ACDEFGHIKLMNPQRSTVWY"
    families = ["".join(source.choices(letters, k=60)) for _ in range(6)]
    copies = [family + "".join(source.choices(letters, k=10)) for family in families for _ in range(4)]
    lone = ["".join(source.choices(letters, k=70)) for _ in range(8)]
    task = Tags(kept(tmp_path / "x.fa", "".join(f">a\n{p}\n{'HC' * 35}\n" for p in [*copies, *lone])), share=0.4)
    train, valid, _, left = tags.sides(task)
    known = {bytes(row.tokens.tolist())[i : i + 15] for row in train for i in range(56)}
    assert valid
    assert not any(bytes(row.tokens.tolist())[i : i + 15] in known for row in valid for i in range(56))
    assert left["validation proteins that share stretches with training ones"] > 0
    assert "share stretches" in task.remarks()[0]


def test_baselines_of_tags_are_counts(tmp_path: Path) -> None:
    task = Tags(kept(tmp_path / "x.csv", "text,tags\n" + "".join(f"{'ab' * n},{'xy' * n}\n" for n in range(1, 12))))
    assert task.baselines() == {"commonest label": 0.5, "the byte's commonest label": 1.0}


def test_a_model_learns_labels_that_no_byte_alone_tells(tmp_path: Path) -> None:
    """A byte's label is the byte before it."""
    source, lines = random.Random(2), ["text,tags"]
    for _ in range(300):
        text = "".join(source.choices("pq", k=12))
        lines.append(f"{text},p{text[:-1]}")
    path = kept(tmp_path / "x.csv", "\n".join(lines))
    words = ["train", "tag", path, "--width", "32", "--layers", "1", "--steps", "120", "--batch-size", "16"]
    words += [
        "--lr",
        "0.005",
        "--mechanism",
        "Local(window=(1, 0))",
        "--positions",
        "none",
        "--out",
        str(tmp_path / "run"),
    ]
    assert commands.run(words) == 0
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["outcome"]["best"] > 0.95 > 0.7 > record["baselines"]["the byte's commonest label"]


TAG_MISTAKES: list[tuple[str, Any, str]] = [
    ("a.fasta", "", "the file is empty"),
    ("b.fasta", "MKV\nHHH\n", "does not start with a '>' line"),
    ("c.fasta", ">a\nMKV\n>b\nMK\nHH\n", "line 1: 1 lines below the header; half are residues"),
    ("d.fasta", ">a\n>b\nMK\nHH\n", "line 1: 0 lines below the header"),
    ("e.fasta", ">a\nMKV\nHH\n>b\nMK\nHH\n", "line 1: a sequence of 3 characters and 2 labels"),
    ("f.fasta", ">a\nM-V\nHHH\n>b\nMK\nHH\n", "line 1: '-' is not a residue letter"),
    ("g.fasta", ">a\nMK\nHH\n>b\nMV\nHH\n", "2 sequences and 1 different labels; 2 of each"),
    ("h.fasta", ">a\nMK\nHC\n", "1 sequences and 2 different labels"),
    ("i.csv", "text,tags\na b,x y\nc d,x\n", "line 3: a sequence of 2 words and 1 labels"),
    ("j.csv", "text,other\na,x\n", "no column is called labels or tags or structure"),
    ("k.csv", "text,tags\n,x\n", "line 2: the sequence is empty"),
    ("l.fasta", b">a\n\xff\nH\n", "not UTF-8 text"),
    ("m.fasta", b"\x1f\x8b\x08\x00\x00", "the gzip data are damaged or cut off"),
    ("n.csv", "", "the file has no sequences"),
    ("missing.fasta", None, "No such file"),
    ("", None, "Is a directory"),
]


@pytest.mark.parametrize(("name", "content", "said"), TAG_MISTAKES)
def test_mistakes_in_tagged_files_are_one_line(
    name: str, content: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        kept(path, content)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        Tags(str(path)).batch("train", 0, 2)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert commands.run(["train", "tag", str(path), *SMALL, "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --------------------------------------------------------------------------------------------------------- command line


def test_names_may_be_followed_by_a_file() -> None:
    assert tasks.parse("byte-lm my file.txt") == ByteLM("my file.txt")
    assert tasks.parse("protein-mlm x.fasta") == ProteinMLM("x.fasta")
    assert tasks.parse("needle x.txt") == Needle(path="x.txt")
    assert tasks.parse("tag x.fasta") == Tags("x.fasta")
    for text, said in (
        ("copy x.txt", "the task copy takes no file; those that do: protein-mlm, byte-lm, needle, classify, tag"),
        ("tag", "name a file, as in tag FILE.fasta"),
        ("classify ", "name a file, as in classify FILE.csv"),
        ("tagg x", "Did you mean tag"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            tasks.parse(text)


def test_a_text_is_trained_on_by_name_and_file(tmp_path: Path) -> None:
    path = kept(tmp_path / "my text.txt", "all work and no play " * 400)
    assert commands.run(["train", "byte-lm", path, *SMALL, "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["task"] == f"ByteLM(path={path!r})"


def test_tasks_are_listed_with_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["tasks"]) == 0
    said = capsys.readouterr().out
    for name in tasks.names():
        assert re.search(rf"^{name} ", said, re.M)
    assert "words=31" in said
    assert commands.run(["tasks", "copy"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Copy(symbols=10, words=31, seed=0)\n")
    assert "words:" in told
    assert commands.run(["tasks", "Copy(words=15)"]) == 0
    assert capsys.readouterr().out == told
    assert commands.run(["tasks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed] == tasks.names()
    for each in listed:
        assert tasks.kind(each["name"]).__name__ == each["class"]
        if not each["file needed"]:
            assert repr(tasks.parse(each["name"])) == f"{each['class']}()"
    assert commands.run(["tasks", "cpoy"]) == 2
    assert "Did you mean copy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["copy", "x.txt"], "copy takes no file"),
        (["classify"], "name a file, as in classify FILE.csv"),
        (["tag", "nowhere.fasta"], "nowhere.fasta: No such file"),
        (["byte-lm", "nowhere.txt"], "nowhere.txt: there is no such file"),
        (["Copy(words=3)", "x.txt"], "is not a task"),
    ],
)
def test_mistakes_at_the_command_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("train", "study"):
        assert commands.run([command, *words, "--out", str(tmp_path / "run")]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1


def test_padding_and_ignored_places_teach_nothing(tmp_path: Path) -> None:
    task = Tags(kept(tmp_path / "x.csv", "text,tags\na b,x y\nc,x\nd e f,y x y\n"), share=0.4)
    tokens, targets, key_mask = task.batch("train", 0, 2)
    assert key_mask is not None
    assert (targets[~key_mask] == IGNORED).all()
    assert int((targets != IGNORED).sum()) == sum(
        len(bytes(r[m].tolist()).split()) for r, m in zip(tokens, key_mask, strict=True)
    )
    assert torch.equal(tokens == tags.PAD, ~key_mask)
