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
    "copy": ["2d6fd6946cc4cadd", "8afd450a3e742eec", "53e146ef03a1bb52", "8ee4e8b73f193423", "6793414e9c2dd053"],
    "Copy(words=15, seed=3)": ["e6f5054edc892f84", "ab92efc57204beaf", "fd2840eb00bf7bfb", "61e90f4b3a821b63",
                               "06ae79939c118e64"],
    "duplicate": ["251309bb979c3276", "1057e802720baf37", "5dc762b7a30fcd24", "12ddd6f4d102aab5", "e385cb99f906fdd6"],
    "selective-copy": ["76f703637226f46b", "2b1eb36a1ef341a0", "c58fc01b2b15a803", "cf1193a70c47e345",
                       "fecaa7dbae15e784"],
    "mqar": ["941763f51891dc50", "73eb1f98a3fbffc8", "5a9e00f5e0d5b9c4", "25e3ea5dd3f309df", "55d6b9134aeb0e7f"],
    "MQAR(vocab=32, context=16)": ["0349a285510d83e9", "7fade1fbec81714c", "fbe2cd7e957feb46", "8e30c6dccd57eb47",
                                   "9acf6b1f97565a87"],
    "Lookup(vocab=32, context=16)": ["55d6d02acd5a4e05", "9dd421e71c13f96d", "5429f71d9d9b7391", "bc0a796022668722",
                                     "a48d2511b0662ea3"],
    "needle": ["8962d678f08d0cad", "f9267dab163dbe64", "496fe438c2f409f8", "711c9e185c9c169a", "592e1ebe1f9a2758"],
    "Needle(context=128, depth=0.5)": ["8fec60aeabd92527", "77839f45ee83cfd4", "e812a1fcb7cc819d", "c7658e8992c3b7e1",
                                       "ba3e37d13f337575"],
    "protein-mlm": ["c63b397fb81f421e", "2ceefc5beb3c2c63", "a740196f7e75d6f8", "1f7057ef86f47c3c", "6ab55f80858934c5"],
    "ProteinMLM(context=64, split='random', seed=2)": ["a48f5129d71969bf", "f4beefabaaf98db8", "3e0dcb97d21d14a2",
                                                       "902686c8545d16fa", "857d0929e66f4f0e"],
    "ProteinMLM(fasta='own.fasta', share=0.3, context=50)": ["6b99afa6305393ab", "618439a80134714a",
                                                             "d190539aca3a3494", "dd4dbcce75662431",
                                                             "57d6cd6d2eb92e8b"],
    "listops": ["7cec8ab4f0f7ec03", "14309673e1543310", "139324d939fd2ae5", "3ce765aab9b4874e", "ae98ac4d954f056f"],
    "ListOps(shortest=16, longest=64)": ["d687d7b65aad5c09", "1762ee65d77657b7", "2aa801f2d5c1bf70",
                                         "2de5963a08d4f37e", "b4d9d0b57ba08678"],
    "pathfinder": ["51d8ba9c3cac62d5", "d6e865df22470b30", "0108449bcfbd0b1b", "3e422b5ad8b9ee7a", "fcdc5bb480bbe10a"],
    "Pathfinder(size=24, dashes=6, distractors=2)": ["f613b73db6ca4f84", "b9b9071d3369372c", "375db9539d7620f1",
                                                     "8f3f4db32815c27c", "66f7065d2bb4a5b2"],
    "classify own.csv": ["958891a60ffa88bc", "95c3dfdda867b007", "266f685ddc69431c", "a87fa16e51e14f06",
                         "841d8ba8251c138b"],
    "Sequences(path='own.jsonl', context=5)": ["8acd941d429e02a3", "a02e3ee5671006ab", "5727567455a5503a",
                                               "77f8be9174888a39", "b1fe8e31b28777d2"],
    "byte-lm own.txt": ["3ec58baa86fe4b99", "5d6d1466f6aec1b2", "49fdca5831cc7bdc", "99dfac34a2fcf812",
                        "991be9e66ee1996b"],
}  # fmt: skip
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
    return sha.hexdigest()[:16]


@pytest.mark.parametrize("text", DIGESTS)
def test_batches_are_those_of_the_records(text: str, own: Path) -> None:
    task = tasks.parse(text)
    assert [digest(task.batch(*which)) for which in BATCHES] == DIGESTS[text]
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
    Path("gap.csv").write_text("text,label\nab,1\n,1\n")
    Path("dna.fasta").write_text(f">one\n{'ACGT' * 20}\n>two\n{'GATTACA' * 20}\n")
    with pytest.raises(ValueError, match=words):
        tasks.parse(text).batch("train", 0, 2)
    with pytest.raises(ValueError, match="choose one of"):
        tasks.parse("copy").batch("test", 0, 2)  # type: ignore[arg-type]
