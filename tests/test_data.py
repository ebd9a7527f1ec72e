"""The shipped samples are what LICENSES.md says, and the reader names file and line of everything it refuses."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest

from fast_attention import data
from fast_attention.lab import corpus
from fast_attention.lab.inputs import InputError

FOLDER = Path(data.__file__).parent


@pytest.mark.parametrize("name", ["jargon.txt.gz", "uniprot.fasta.gz"])
def test_every_sample_has_its_source_licence_and_digest(name: str) -> None:
    said = (FOLDER / "LICENSES.md").read_text().split(f"## {name}")[1].split("\n## ")[0]
    raw = (FOLDER / name).read_bytes()
    assert hashlib.sha256(raw).hexdigest() in said
    assert hashlib.sha256(gzip.decompress(raw)).hexdigest() in said
    assert all(word in said for word in ("Source:", "Licence:", "How made:"))
    assert len(raw) < 400_000


def test_text_is_prose() -> None:
    text = data.text()
    assert len(text.encode()) == 399_800
    assert text.startswith("Chapter 1. Hacker Slang and Hacker Culture")


def test_proteins_are_real_and_cas9_is_the_first() -> None:
    proteins = data.proteins()
    assert len(proteins) == len({protein.sequence for protein in proteins}) == 421
    cas9 = proteins[0]
    assert cas9.name == "sp|Q99ZW2|CAS9_STRP1"
    assert len(cas9.sequence) == 1368
    assert cas9.sequence.startswith("MDKKYSIGLDIGTNSVGWAV")
    assert cas9.sequence.endswith("RIDLSQLGGD")
    assert set("".join(protein.sequence for protein in proteins)) == set("ACDEFGHIKLMNPQRSTVWY")
    assert sum(len(protein.sequence) > 1024 for protein in proteins) == 61


def test_plain_and_packed_files_read_alike(tmp_path: Path) -> None:
    content = b"\n>one first protein\r\nmkv\nLLA*\n\n>two\nGG\n"
    (tmp_path / "a.fasta").write_bytes(content)
    (tmp_path / "b.anything").write_bytes(gzip.compress(content))
    found = list(data.read_fasta(tmp_path / "a.fasta"))
    assert found == [("one first protein", "MKVLLA"), ("two", "GG")]
    assert found == list(data.read_fasta(tmp_path / "b.anything"))
    assert [protein.name for protein in found] == ["one", "two"]


PACKED = gzip.compress(b">one\n" + bytes(65 + i * i % 23 for i in range(20000)) + b"\n")
BROKEN = {
    "before": (b"\nMKV\n>one\nMKV\n", r"line 2: residues before the first header"),
    "empty": (b"", r"line 1: the file is empty"),
    "blank": (b"\n \n", r"line 1: the file is empty"),
    "letter": (b">one\nMKV\nMK3V\n", r"line 3: '3' in column 3 is not a residue"),
    "gap": (b">one\nMK-V\n", r"line 2: '-' in column 3"),
    "space": (b">one\nMK V\n", r"line 2: ' ' in column 3"),
    "binary": (b">one\n\x00\xff\n", r"line 2: .* in column 1"),
    "stop": (b">one\nMK*\nV\n", r"line 3: residues after a stop"),
    "inside": (b">one\nM*K\n", r"line 2: '\*' in column 2"),
    "header": (b">one\n>two\nMKV\n", r"line 1: the header '>one' has no residues"),
    "last": (b">one\nMKV\n>two\n", r"line 3: the header '>two' has no residues"),
    "truncated": (PACKED[: len(PACKED) // 2], r"line \d+: the gzip data end too early"),
    "damaged": (PACKED[:40] + b"\x00\x00\x00" + PACKED[43:], r"line \d+: the gzip data (are damaged|end too early)"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_name_and_line(case: str, tmp_path: Path) -> None:
    content, said = BROKEN[case]
    path = tmp_path / "broken.fasta"
    path.write_bytes(content)
    with pytest.raises(data.FastaError, match=rf"^{re.escape(str(path))}, {said}"):
        list(data.read_fasta(path))
    with pytest.raises(InputError, match=said):
        corpus.read(fasta=str(path))


def test_the_readers_of_the_lab(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve café", encoding="utf-8")
    assert corpus.read(str(tmp_path / "a.txt")).documents == (("a.txt", "naïve café"),)
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\n")
    with pytest.raises(InputError, match="line 2: not UTF-8"):
        corpus.read(str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"x" * 1000)[:-12])
    with pytest.raises(InputError, match="cut off"):
        corpus.read(str(tmp_path / "a.txt"))
    with pytest.raises(InputError, match="No such file"):
        corpus.read(fasta=str(tmp_path / "none"))
    with pytest.raises(InputError, match="not both"):
        corpus.read("a", "b")
    assert corpus.read(fasta="sample").passage(1300)[0] == "sp|Q99ZW2|CAS9_STRP1"
    assert len(corpus.read(fasta="sample").passage(10**6)[1]) == 2948
