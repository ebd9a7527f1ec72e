"""Tasks: batches have the bits that records were made with; users' files; what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from experiments import data, tasks
from experiments.tasks import IGNORED, Batch, Split

BATCHES: tuple[tuple[Split, int, int], ...] = (
    ("train", 0, 3), ("train", 5, 4), ("valid", 0, 3), ("valid", 7, 2), ("train", 1 << 32, 2)
)  # fmt: skip
DIGESTS = {  # as of 02d9f59, whose package held the tasks
    "copy": "2d6fd694 8afd450a 53e146ef 8ee4e8b7 6793414e",
    "Copy(words=15, seed=3)": "e6f5054e ab92efc5 fd2840eb 61e90f4b 06ae7993",
    "duplicate": "251309bb 1057e802 5dc762b7 12ddd6f4 e385cb99",
    "selective-copy": "76f70363 2b1eb36a c58fc01b cf1193a7 fecaa7db",
    "mqar": "941763f5 73eb1f98 5a9e00f5 25e3ea5d 55d6b913",
    "MQAR(vocab=32, context=16)": "0349a285 7fade1fb fbe2cd7e 8e30c6dc 9acf6b1f",
    "Lookup(vocab=32, context=16)": "55d6d02a 9dd421e7 5429f71d bc0a7960 a48d2511",
    "needle": "8962d678 f9267dab 496fe438 711c9e18 592e1ebe",
    "Needle(context=128, depth=0.5)": "8fec60ae 77839f45 e812a1fc c7658e89 ba3e37d1",
    "protein-mlm": "c63b397f 2ceefc5b a740196f 1f7057ef 6ab55f80",
    "ProteinMLM(context=64, split='random', seed=2)": "a48f5129 f4beefab 3e0dcb97 902686c8 857d0929",
    "ProteinMLM(fasta='own.fasta', share=0.3, context=50)": "6b99afa6 618439a8 d190539a dd4dbcce 57d6cd6d",
    "listops": "7cec8ab4 14309673 139324d9 3ce765aa ae98ac4d",
    "ListOps(shortest=16, longest=64)": "d687d7b6 1762ee65 2aa801f2 2de5963a b4d9d0b5",
    "pathfinder": "51d8ba9c d6e865df 0108449b 3e422b5a fcdc5bb4",
    "Pathfinder(size=24, dashes=6, distractors=2)": "f613b73d b9b9071d 375db953 8f3f4db3 66f7065d",
    "classify own.csv": "958891a6 95c3dfdd 266f685d a87fa16e 841d8ba8",
    "Sequences(path='own.jsonl', context=5)": "8acd941d a02e3ee5 57275674 77f8be91 b1fe8e31",
    "byte-lm own.txt": "3ec58baa 5d6d1466 49fdca58 99dfac34 991be9e6",
}
RESIDUES = str.maketrans("0123456789abcdef", "ACDEFGHIKLMNPQRS")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of a user's: a table with a repeated row and a sequence of two labels, texts, proteins."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{'ACGT'[i % 4] * (i % 7 + 1)}{i},{'yn'[i % 2]}\n" for i in range(60)]
    Path("own.csv").write_text("".join(["sequence,label\n", *rows, "AA,n\nAA,y\nB0,n\nB0,n\n"]))
    lines = [{"text": "ACGT"[i % 4] * (i % 7 + 1) + str(i), "class": i % 3} for i in range(60)]
    Path("own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("own.txt").write_bytes(bytes(range(256)) * 40)
    proteins = [hashlib.sha512(str(i).encode()).hexdigest().translate(RESIDUES)[: 40 + i] for i in range(40)]
    Path("own.fasta").write_text("".join(f">p{i}\n{protein}\n" for i, protein in enumerate(proteins)))
    return tmp_path


def digest(batch: Batch) -> str:
    sha = hashlib.sha256()
    for x in batch:
        if x is not None:
            sha.update(str((tuple(x.shape), x.dtype)).encode())
            sha.update(x.contiguous().numpy().tobytes())
    return sha.hexdigest()[:8]


@pytest.mark.parametrize("text", DIGESTS)
def test_batches_are_those_of_the_records(text: str, own: Path) -> None:
    task = tasks.parse(text)
    assert " ".join(digest(task.batch(*which)) for which in BATCHES) == DIGESTS[text]
    assert tasks.parse(repr(task)) == task
    batch = task.batch("valid", 1, 4)
    assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < task.vocab_size
    assert batch.tokens.shape[1] <= task.length
    limit = task.classes or task.vocab_size
    assert batch.targets[batch.targets != IGNORED].max() < limit


def test_baselines_are_those_of_the_records(own: Path) -> None:
    found = tasks.parse("MQAR(vocab=32, context=16)").baselines()
    assert list(found.values()) == pytest.approx([0.25, 0.3858975])  # records/2026-11-21-study-mqar.json
    value, operator = tasks.parse("ListOps(shortest=4, longest=16)").baselines().values()
    assert 0.1 < value < operator < 0.9
    counts, gzip, xz = tasks.parse("byte-lm own.txt").baselines().values()
    assert counts == pytest.approx(8.0)
    assert gzip < xz < counts or xz < gzip < counts
    counts, informed = tasks.parse("ProteinMLM(fasta='own.fasta', share=0.3, context=50)").baselines().values()
    assert 2.0 < informed < counts < 3.0  # of 16 letters, all alike
    commonest, naive = tasks.parse("classify own.csv").baselines().values()
    assert 0.3 < commonest <= naive <= 1.0


def test_bytes_of_the_standard_library_are_the_next_ones() -> None:
    task = tasks.parse("ByteLM(context=64)")
    batch = task.batch("valid", 0, 8)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert digest(task.batch("train", 3, 4)) == digest(task.batch("train", 3, 4)) != digest(task.batch("train", 4, 4))
    assert list(task.describe()) == ["training", "validation"]


def test_no_validation_protein_shares_a_stretch_with_a_training_one(own: Path) -> None:
    text = Path("own.fasta").read_text()
    Path("kin.fasta").write_text(text + text.replace(">p", ">q").replace("\nA", "\nC"))
    train, valid = tasks.protein_sides(tasks.ProteinMLM(fasta="kin.fasta", share=0.4))
    stretches = {bytes(x[i : i + 15].tolist()) for x in train for i in range(len(x) - 14)}
    assert not any(bytes(x[i : i + 15].tolist()) in stretches for x in valid for i in range(len(x) - 14))
    many = tasks.protein_sides(tasks.ProteinMLM(fasta="kin.fasta", share=0.4, split="random"))[1]
    assert len(valid) < len(many)


def test_texts_of_numbers_stay_texts_in_tables(own: Path) -> None:
    Path("numbers.tsv").write_text('text\tlabel\n"0\t1"\t01\n10\tNA\n20\t01\n30\tNA\n')
    rows = list(data.table("numbers.tsv"))
    assert rows[0] == {"text": "0\t1", "label": "01"}
    assert [row["label"] for row in rows] == ["01", "NA", "01", "NA"]
    assert tasks.parse("classify numbers.tsv").classes == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mqra", "Did you mean mqar"),
        ("MQAR(pears=2)", "no setting 'pears'"),
        ("MQAR(context=8)", "context must be at least 16"),
        ("__import__('os')", "no task"),
        ("copy file.txt", "takes no file"),
        ("classify", "name a file"),
        ("classify none.csv", "none.csv: No such file"),
        ("classify own.txt", "must end in .csv"),
        ("Sequences(path='own.csv', label='kind')", "no column is called kind; there are: sequence, label"),
        ("classify one.csv", "needs 2 labels"),
        ("classify twice.csv", "columns 1 and 3 are both called 'text': rename one"),
        ("classify case.csv", "Text and TEXT differ in case only"),
        ("classify gap.csv", "row 2: the sequence or its label is empty"),
        ("protein-mlm own.txt", "line 1: residues before the first header"),
        ("protein-mlm nopackage", "neither a file here nor an installed Debian package"),
        ("protein-mlm dna.fasta", "DNA, not proteins"),
        ("byte-lm none", "no such file or folder"),
        ("byte-lm one.csv", "needs more"),
        ("ByteLM(share=1.0)", "share must lie between 0 and 1"),
    ],
)
def test_what_is_refused(text: str, words: str, own: Path) -> None:
    Path("one.csv").write_text("text,label\nab,1\ncd,1\n")
    Path("twice.csv").write_text("text,label,text\nab,1,cd\n")
    Path("case.csv").write_text("Text,label,TEXT\nab,1,cd\n")
    Path("gap.csv").write_text("text,label\nab,1\n,1\n")
    Path("dna.fasta").write_text(f">one\n{'ACGT' * 20}\n>two\n{'GATTACA' * 20}\n")
    with pytest.raises(ValueError, match=words):
        tasks.parse(text).batch("train", 0, 2)
    with pytest.raises(ValueError, match="choose one of"):
        tasks.parse("copy").batch("test", 0, 2)  # type: ignore[arg-type]
