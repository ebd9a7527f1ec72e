"""The shipped samples are what LICENSES.md says, and the reader names file and line of everything it refuses."""

from __future__ import annotations

import gzip
import hashlib
import re
import struct
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
    (tmp_path / "c.fasta").write_bytes(content.replace(b"\r", b"").replace(b"\n", b"\r"))  # old Macs'
    assert found == list(data.read_fasta(tmp_path / "c.fasta"))
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


def blast(folder: Path, sequences: list[str]) -> Path:
    """A BLAST protein database, format 4, of the sequences."""
    letters = "-ABCDEFGHIKLMNPQRSTVWXYZU*OJ"
    residues, starts = b"\0", []
    for sequence in sequences:
        starts.append(len(residues))
        residues += bytes(letters.index(letter) for letter in sequence) + b"\0"
    title, day, places = b"a title", b"Jan 1, 2014", [*starts, len(residues)]
    index = struct.pack(">3i", 4, 1, len(title)) + title + struct.pack(">i", len(day)) + day
    index += struct.pack(">i", len(sequences)) + struct.pack("<q", len(residues)) + struct.pack(">i", 9)
    index += struct.pack(f">{len(places)}i", *range(len(places))) + struct.pack(f">{len(places)}i", *places)
    (folder / "some.psq").write_bytes(residues)
    (folder / "some.pin").write_bytes(index)
    return folder / "some.pin"


def test_a_debian_package_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of a dpkg-query of our own: FASTA files and databases of proteins are read, the rest is not."""
    (tmp_path / "b.fasta").write_text(">one\nMKVLLA\n")
    (tmp_path / "b.txt").write_text("no proteins")
    index = blast(tmp_path, ["MKTAYU", "", "GG*"])
    query = tmp_path / "dpkg-query"
    listing = "\n".join(str(tmp_path / name) for name in ("some.pin", "some.psq", "b.fasta", "b.txt", "gone.fa", ""))
    query.write_text(f"#!/bin/sh\n[ $2 = bare ] && exit 0\n[ $2 = some-proteins ] && echo '{listing}' || exit 1\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [protein.sequence for protein in data.read_proteins("some-proteins")] == ["MKVLLA", "MKTAYU", "GG"]
    with pytest.raises(ValueError, match="bare is installed, but holds neither FASTA"):
        list(data.read_proteins("bare"))
    with pytest.raises(ValueError, match="apt-get install other-proteins fetches it"):
        list(data.read_proteins("other-proteins"))
    with pytest.raises(ValueError, match=r"Proteins! is neither a file here nor an installed"):
        list(data.read_proteins("Proteins!"))
    index.with_suffix(".psq").write_bytes(b"\0\1")
    with pytest.raises(data.FastaError, match=r"some\.psq: 2 bytes; its index ends at 13"):
        list(data.read_proteins("some-proteins"))
    index.write_bytes(b"text")
    with pytest.raises(data.FastaError, match=r"some\.pin: no index of a BLAST protein database"):
        list(data.read_proteins("some-proteins"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="no Debian system"):
        list(data.read_proteins("some-proteins"))


def test_a_file_goes_before_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some-proteins").write_text(">one\nMKV\n")
    monkeypatch.chdir(tmp_path)
    assert [protein.sequence for protein in data.read_proteins("some-proteins")] == ["MKV"]
    assert len(list(data.read_proteins("sample"))) == 421
    with pytest.raises(OSError, match="No such file"):
        list(data.read_proteins("other.fasta"))
