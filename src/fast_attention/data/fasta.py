"""Reads FASTA files, plain or gzipped; every error names the file and the line."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from fast_attention.data import reading

_RESIDUES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")


class FastaError(ValueError):
    """The file is not FASTA. The message names the file and the line."""


class Protein(NamedTuple):
    """One record: the header without ``>``, and the residues in capitals."""

    header: str
    sequence: str

    @property
    def name(self) -> str:
        """The first word of the header."""
        return self.header.split(maxsplit=1)[0] if self.header.strip() else "unnamed"


def read_fasta(path: str | os.PathLike[str]) -> Iterator[Protein]:
    """Yield the records of a FASTA file.

    Gzip is recognised by its first two bytes, not by the file's name. Small letters become capitals, a final ``*``
    (stop) is dropped, blank lines are skipped.

    Raises:
        FastaError: The file is empty, cut off, beyond ``reading.LIMIT``, or holds something else; the message names the
            line.
        OSError: The file cannot be opened.
    """
    with reading.opened(path) as file:
        yield from _records(file, str(path))


def parse_fasta(content: bytes, name: str = "FASTA") -> Iterator[Protein]:
    """Yield the records in ``content``, plain or gzipped; errors call the file ``name``."""
    yield from _records(io.BytesIO(content), name)


def _records(file: IO[bytes], name: str) -> Iterator[Protein]:
    header: str | None = None
    header_line = number = 0
    residues: list[str] = []
    for number, line in _lines(file, name):
        if line.startswith(b">"):
            if header is not None:
                yield _protein(header, residues, name, header_line)
            header, header_line, residues = line[1:].strip().decode("utf-8", "replace"), number, []
        elif header is None:
            raise FastaError(f"{name}, line {number}: residues before the first header (a line that starts with '>')")
        elif residues and residues[-1].endswith("*"):
            raise FastaError(f"{name}, line {number}: residues after a stop '*'")
        else:
            residues.append(_residues(line, name, number))
    if header is None:
        raise FastaError(f"{name}, line {max(number, 1)}: the file is empty; FASTA starts with a '>' line")
    yield _protein(header, residues, name, header_line)


def _protein(header: str, residues: list[str], name: str, line: int) -> Protein:
    sequence = "".join(residues).removesuffix("*")
    if not sequence:
        raise FastaError(f"{name}, line {line}: the header '>{header[:40]}' has no residues below it")
    return Protein(header, sequence)


def _residues(line: bytes, name: str, number: int) -> str:
    upper = line.upper()
    for column, byte in enumerate(upper.removesuffix(b"*"), 1):
        if byte not in _RESIDUES:
            raise FastaError(f"{name}, line {number}: {chr(byte)!r} in column {column} is not a residue letter")
    return upper.decode("ascii")


def _lines(file: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines without blank ones, unpacked where the file is gzip."""
    raw_file: Any = file
    buffered = raw_file if isinstance(raw_file, io.BufferedReader) else io.BufferedReader(raw_file)
    source: Any = gzip.GzipFile(fileobj=buffered) if buffered.peek(2)[:2] == reading.GZIP else buffered
    number, remaining = 0, reading.LIMIT.get()
    try:
        for read in iter(lambda: source.readline(remaining + 1), b""):
            remaining -= len(read)
            if remaining < 0:
                raise FastaError(reading.too_long(name))
            for line in read.splitlines():  # at a lone \r too
                number += 1
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield number, line.strip()
    except EOFError:
        raise FastaError(f"{name}, line {number + 1}: the gzip data end too early: the file is cut off") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FastaError(f"{name}, line {number + 1}: the gzip data are damaged ({error})") from None
