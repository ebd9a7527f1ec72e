"""The user's own tables: ``.csv``, ``.tsv`` with a line of headers, or ``.jsonl``; every error names file and line."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fast_attention.tasks.bytes import read

SUFFIXES = (".csv", ".tsv", ".jsonl")
DELIMITERS = ",;\t|"  # of .csv: the one that the line of headers has most of
SHOWN = 20  # columns that an error lists


class Column(NamedTuple):
    """A column to look for: its role in the task, the user's name for it, the names to try without one."""

    role: str
    named: str
    usual: tuple[str, ...]


def records(owner: str, path: str, columns: tuple[Column, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield each record's location in the file and its values of the columns.

    Args:
        owner: The task's class, for errors.
        path: The file.
        columns: The columns, in the order of the values.

    Raises:
        ValueError: The file cannot be read, is no such table, or lacks a column or a value.
    """
    names: list[str] = []
    for location, record in _rows(Path(path)):
        if not names:
            names = [_find_column(owner, path, record, column) for column in columns]
        for name in names:
            if record.get(name) is None:
                raise ValueError(f"{location}: no value for {_short(name)!r}")
            if isinstance(record[name], dict | list):
                raise ValueError(f"{location}: {_short(name)!r} must be text, the words of a list in one string")
        yield location, [str(record[name]) for name in names]
    if not names:
        raise ValueError(f"{path}: the file has no sequences")


def text_of(path: Path) -> str:
    """A text file's content.

    Raises:
        ValueError: It cannot be read, or is not UTF-8.
    """
    try:
        return read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _find_column(owner: str, path: str, record: dict[str, Any], column: Column) -> str:
    lowered = {name.strip().lower(): name for name in record}
    names = [column.named] if column.named else list(column.usual)
    for name in names:
        if name in record or name in lowered:
            return name if name in record else lowered[name]
    listing = ", ".join(_short(name) for name in list(record)[:SHOWN]) + (", ..." if len(record) > SHOWN else "")
    message = f"no column is called {' or '.join(names)}; there are: {listing}"
    raise ValueError(f"{path}: {message}. Name it: {owner}(path=..., {column.role}=...)")


def _short(name: str) -> str:
    plain = " ".join(name.split())
    return plain if len(plain) <= 40 else f"{plain[:40]}..."


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    content = text_of(path)
    if path.suffix != ".jsonl":
        yield from _table(path, content)
        return
    for number, line in enumerate(io.StringIO(content, newline=None), 1):
        if line.strip():
            yield f"{path}, line {number}", _object(path, number, line)


def _table(path: Path, content: str) -> Iterator[tuple[str, dict[str, Any]]]:
    head = next((line for line in content.splitlines() if line.strip()), "")
    delimiter = "\t" if path.suffix == ".tsv" else max(DELIMITERS, key=head.count)
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    longest = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a chromosome is one value; the limit is the process's
    try:
        for row in reader:
            location = f"{path}, line {reader.line_num}"
            if not names:
                names = _headers(location, row)
            elif row:
                if any(row[len(names) :]):
                    message = f"{len(row)} values and {len(names)} columns: a value that contains {delimiter!r} needs"
                    raise ValueError(f'{location}: {message} quotes, "like this"')
                yield location, dict(zip(names, [*row, *[None] * (len(names) - len(row))], strict=False))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    finally:
        csv.field_size_limit(longest)


def _headers(location: str, row: list[str]) -> list[str]:
    for name in row:
        if name.strip() and row.count(name) > 1:
            raise ValueError(f"{location}: two columns are called {_short(name)!r}")
    return row


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        message = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ValueError(f"{path}, line {number}: not JSON ({message})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: not an object such as {{'sequence': ..., 'label': ...}}")
    return record
