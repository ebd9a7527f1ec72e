"""What is read from files of users: random bytes, and files that are nearly right."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from hypothesis import strategies as st

from fast_attention.data import FastaError
from fast_attention.data.blast import read_blast
from fast_attention.data.fasta import parse_fasta
from fast_attention.lab import corpus
from fast_attention.lab.inputs import InputError
from fast_attention.tasks.bytes import ByteLM
from fast_attention.tasks.sequences import Sequences
from fast_attention.training.settings import from_toml
from tests.fuzz.kit import fuzz

FASTA = st.lists(st.sampled_from([b">", b">one\n", b"MKV\n", b"*", b"\n", b"\r\n", b"m4", b"\x00", b"\xff", b" "]))
TABLE = [
    "text",
    "label",
    "sequence",
    ",",
    "\t",
    '"',
    "\n",
    "a",
    "b",
    "\r",
    "\0",
    "é",
    "{",
    "}",
    ":",
    "[",
    "]",
    "1",
    " ",
]
JSON = ['{"text": "a", "label": 1}\n', '{"text": "b", "label": "x"}\n', "{", "null\n", "[1]\n", '{"text": {}}\n']


def refused(error: ValueError, words: str) -> None:
    """In one line that names the file."""
    assert words in str(error)
    assert "\n" not in str(error)


def packed(text: bytes, how: int) -> bytes:
    """As it is, as gzip, or as gzip that is cut off or damaged."""
    if how == 0:
        return text
    zipped = bytearray(gzip.compress(text))
    if how == 2:
        del zipped[len(zipped) // 2 :]
    if how == 3:
        zipped[len(zipped) // 2] ^= 4
    return bytes(zipped)


@fuzz("FASTA", examples=150, parts=FASTA | st.lists(st.binary()), how=st.integers(0, 3))
def test_fasta_is_read_or_refused_with_its_line(parts: list[bytes], how: int) -> None:
    try:
        found = list(parse_fasta(packed(b"".join(parts), how), name="x"))
    except FastaError as error:
        return refused(error, "x, line ")
    assert found
    assert all(protein.sequence.isalpha() and protein.sequence.isupper() for protein in found)


@fuzz("texts", examples=60, text=st.binary(max_size=200) | st.text(max_size=100).map(str.encode), how=st.integers(0, 3))
def test_texts_are_read_or_refused(text: bytes, how: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(packed(text, how))
        for options in ({"text": file.name}, {"fasta": file.name}):
            try:
                assert corpus.read(**options).documents[0][1].strip()
            except InputError as error:
                refused(error, file.name)


@fuzz(
    "tables of labelled sequences",
    examples=100,
    parts=st.lists(st.sampled_from(TABLE + JSON), max_size=30),
    header=st.sampled_from(["", "text,label\n", "text\tlabel\n", "text,text\n", "\ufefftext,label\n"]),
    suffix=st.sampled_from([".csv", ".tsv", ".jsonl"]),
)
def test_tables_are_read_or_refused(parts: list[str], header: str, suffix: str) -> None:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        Path(file.name).write_bytes((header + "".join(parts)).encode())
        task = Sequences(path=file.name, context=8)
        try:
            batch = task.batch("train", 0, 2)
            task.baselines()
            task.describe()
        except ValueError as error:
            return refused(error, file.name)
        assert batch.tokens.shape[0] == 2
        assert int(batch.targets.max()) < task.classes


@fuzz("bytes to model", examples=60, text=st.binary(max_size=100), share=st.floats(0.01, 0.99))
def test_bytes_are_read_or_refused(text: bytes, share: float) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(text)
        task = ByteLM(path=file.name, context=4, share=share)
        try:
            batch = task.batch("valid", 0, 2)
        except ValueError as error:
            return refused(error, file.name)
        assert batch.tokens.shape == (2, 4)


@fuzz("indices of databases", examples=60, text=st.binary(max_size=80), start=st.booleans())
def test_databases_are_read_or_refused(text: bytes, start: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "a.pin"
        index.write_bytes(b"\0\0\0\4\0\0\0\1" * start + text)
        index.with_suffix(".psq").write_bytes(b"\1\2\0" * 9)
        try:
            assert all(protein.sequence for protein in read_blast(index))
        except FastaError as error:
            refused(error, folder)


PIECES = ["[training]", "[model]", "\n", "steps = ", "width = ", "1", "-1", "nan", '"a"', "lr", "=", "1e999", "[[", "x"]


@fuzz("settings in TOML", examples=150, text=st.lists(st.sampled_from(PIECES), max_size=15).map("".join) | st.text())
def test_settings_are_read_or_refused(text: str) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(text.encode(errors="surrogatepass"))
        try:
            training, model = from_toml(file.name)
        except ValueError as error:
            return refused(error, file.name)
        assert isinstance(training, dict)
        assert isinstance(model, dict)
