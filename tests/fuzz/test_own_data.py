"""The user's own tables and texts: every dialect is read, every mistake is one line."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fast_attention.tasks import ByteLM, Sequences, Tags, sequences, tags
from tests.fuzz.kit import fuzz

# No \r: Python's own writer leaves it without quotes, as if a line ended there.
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), min_size=1, max_size=12)


def one_line(error: ValueError, path: str) -> None:
    """What was wrong, in the caller's words: the file by name, in a single line."""
    assert str(error).startswith(path)
    assert "\n" not in str(error)


@fuzz(
    "tables in every dialect",
    examples=60,
    rows=st.lists(st.tuples(WORDS, st.sampled_from("ab")), min_size=4, max_size=12, unique_by=lambda row: row[0]),
    delimiter=st.sampled_from(",;|\t"),
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_a_table_of_any_dialect_is_read_as_it_was_written(
    rows: list[tuple[str, str]], delimiter: str, end: str, quoting: Any, mark: str
) -> None:
    """What Python's writer writes comes back; each class on both sides, each sequence once."""
    written = io.StringIO(newline="")
    writer = csv.writer(written, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerows([("no", "text", "label"), *((i, *row) for i, row in enumerate(rows))])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.csv")
        path.write_bytes((mark + written.getvalue()).encode())
        enough = all(sum(label == each for _, label in rows) > 1 for each in "ab")
        try:
            train, valid, names, counts = sequences.sides(Sequences(str(path)))
        except ValueError as error:
            one_line(error, str(path))
            assert not enough
            return
    assert enough
    assert counts == (0, 0, 0)
    found = {
        (bytes(row.tolist()).decode(), names[label])
        for side in (train, valid)
        for row, label in zip(side.rows, side.labels.tolist(), strict=True)
    }
    assert found == set(rows)


@fuzz(
    "files of any bytes for classify, tag and byte-lm",
    examples=150,
    content=st.binary(max_size=60)
    | st.text(max_size=60).map(str.encode)
    | st.lists(
        st.sampled_from(
            [
                b"text",
                b"label",
                b",",
                b"\n",
                b"\r",
                b'"',
                b">a",
                b"MKV",
                b"HHC",
                b"\t",
                b"{",
                b"}",
                b":",
                b"1",
                b"\xff",
                b";",
            ]
        ),
        max_size=25,
    ).map(b"".join),
    suffix=st.sampled_from([".csv", ".tsv", ".jsonl", ".fasta", ".txt"]),
)
def test_any_file_is_read_or_refused_in_one_line(content: bytes, suffix: str) -> None:
    """A ValueError that names the file, or batches whose tokens and targets the task says it has."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, f"x{suffix}"))
        Path(path).write_bytes(content)
        for task in (Sequences(path), Tags(path), ByteLM(path, context=4, share=0.4)):
            try:
                batch = task.batch("train", 0, 2)
                assert int(batch.tokens.max()) < task.vocab_size
                assert int(batch.targets.max()) < (task.classes or task.vocab_size)
                assert isinstance(task, ByteLM) or all(value >= 0 for value in task.baselines().values())
                assert task.describe()
            except ValueError as error:
                one_line(error, path)


@fuzz(
    "labels of tokens",
    examples=80,
    rows=st.lists(
        st.lists(
            st.tuples(st.text("abÄß字", min_size=1, max_size=3), st.sampled_from(["N", "V", "B-PER"])),
            min_size=2, max_size=6,
        ),
        min_size=2, max_size=6,
    ),
)  # fmt: skip
def test_every_word_keeps_its_label(rows: list[list[tuple[str, str]]]) -> None:
    """At its last byte, and nothing is asked for elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.tsv")
        lines = [f"{' '.join(word for word, _ in row)}\t{' '.join(tag for _, tag in row)}" for row in rows]
        path.write_text("\n".join(["words\ttags", *lines]), encoding="utf-8")
        wanted: dict[str, set[str]] = {}
        for line in lines:
            wanted.setdefault(line.split("\t")[0], set()).add(line.split("\t")[1])
        whole = {text: next(iter(tags)) for text, tags in wanted.items() if len(tags) == 1}
        try:
            train, valid, names, left = tags.sides(Tags(str(path)))
        except ValueError as error:
            one_line(error, str(path))
            assert len(whole) < 2 or len({tag for found in whole.values() for tag in found.split()}) < 2
            return
    assert left["sequences with several labellings"] == len(wanted) - len(whole)
    seen = {}
    for row in (*train, *valid):
        text = bytes(row.tokens.tolist())
        asked = [(i, names[n]) for i, n in enumerate(row.labels.tolist()) if n >= 0]
        assert all(i + 1 == len(text) or text[i + 1 : i + 2] == b" " for i, _ in asked)
        seen[text.decode()] = " ".join(tag for _, tag in asked)
    assert seen == whole
