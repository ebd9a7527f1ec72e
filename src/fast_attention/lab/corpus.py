"""Reads a text or proteins from the user's file as token numbers; without a file, Python's language reference."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import re
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import IO, Any, Literal

import torch
from torch import Tensor

from fast_attention.lab.inputs import InputError

LIMIT = 1 << 30  # bytes of a file, unpacked: a device has no end, and gzip may unpack to a thousand times its size
CHUNK = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Named documents of one kind."""

    kind: Literal["text", "proteins"]
    name: str
    documents: tuple[tuple[str, str], ...]

    @property
    def sha256(self) -> str:
        """The checksum of all documents, whatever they are called."""
        return hashlib.sha256("\0".join(text for _, text in self.documents).encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """What a record says of it."""
        size = sum(len(text.encode()) for _, text in self.documents)
        return {"name": self.name, "documents": len(self.documents), "bytes": size, "sha256": self.sha256}

    def passage(self, length: int) -> tuple[str, str]:
        """The first document of at least ``length`` characters, else the longest."""
        enough = (document for document in self.documents if len(document[1]) >= length)
        return next(enough, None) or max(self.documents, key=lambda document: len(document[1]))

    def tokens(self, tokenizer: Any, length: int) -> tuple[Tensor, str]:
        """Up to ``length`` token numbers (1, n), the tokenizer's own marks included, and where they come from.

        Raises:
            InputError: There are none, or the tokenizer knows none.
        """
        name, passage = self.passage(length)
        best = self.numbers(tokenizer, passage[: 16 * length + 64], name, truncation=True, max_length=length)
        if not best:
            raise InputError(f"{self.name}: the tokenizer finds no token in {name}")
        return torch.tensor([best]), f"the first {len(best)} tokens of {name}"

    def numbers(self, tokenizer: Any, text: str, name: str, **options: Any) -> list[int]:
        """A document as tokens; proteins with or without a space between residues, as the tokenizer knows better.

        Raises:
            InputError: All its tokens mean "unknown": every word would be the same.
        """
        layouts = [text] if self.kind == "text" else [text, " ".join(text)]
        read = [tokenizer(each, **options)["input_ids"] for each in layouts]
        unknown = tokenizer.unk_token_id
        best = max(read, key=lambda ids: sum(number != unknown for number in ids) / max(len(ids), 1))
        if unknown is not None and unknown in best and {*best} <= {unknown, *tokenizer.all_special_ids}:
            raise InputError(f"{self.name}: the tokenizer knows no word of {name}, so that all tokens are the same")
        return best


def read(text: str | None = None, fasta: str | None = None, *, option: str = "--text") -> Corpus:
    """The corpus of ``--text`` or ``--fasta``; Python's language reference without either.

    Args:
        text: A file of text.
        fasta: A file of proteins.
        option: What the user gave the text with, for messages.

    Raises:
        InputError: Both are given, or the file is missing, empty or damaged; the message names file and line.
    """
    if text and fasta:
        raise InputError("give --text or --fasta, not both")
    if fasta:
        return Corpus("proteins", fasta, tuple(_proteins(fasta)))
    if text is None:
        name, pages = "Python's language reference", (topics[title] for title in sorted(topics))
        return Corpus("text", f"{name} (PSF licence, installed)", ((name, "\n\n".join(pages)),))
    return Corpus("text", text, ((Path(text).name, _text(text, option)),))


def _proteins(path: str) -> list[tuple[str, str]]:
    """Name and residues of every record of a FASTA file."""
    records: list[tuple[str, list[str]]] = []
    for number, line in enumerate(_text(path, "--fasta").splitlines(), 1):
        residues = line.strip().upper().removesuffix("*")
        if line.startswith(">"):
            records.append(((line[1:].split() or ["unnamed"])[0], []))
        elif wrong := re.search("[^A-Z]", residues):
            what = f"{residues[wrong.start()]!r} in column {wrong.start() + 1} is not a residue letter"
            raise InputError(f"{path}, line {number}: {what}")
        elif residues and not records:
            raise InputError(f"{path}, line {number}: residues before the first header (a line that starts with '>')")
        elif residues:
            records[-1][1].append(residues)
    if none := [name for name, residues in records if not residues]:
        raise InputError(f"{path}: the header '>{none[0][:40]}' has no residues below it")
    return [(name, "".join(residues)) for name, residues in records]


def _text(path: str, option: str) -> str:
    """A file's text, unpacked where its first two bytes say that it is gzip."""
    raw = b""
    try:
        with _opened(path) as file:
            raw = _all(file, f"{option} {path}")
        if raw.startswith(b"\x1f\x8b"):
            raw = _all(gzip.GzipFile(fileobj=io.BytesIO(raw)), f"{option} {path}")
        text = raw.decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{option} {path}: the gzip data are cut off or damaged") from error
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(f"{option} {path}, line {line}: not UTF-8 text") from error
    if not text.strip():
        raise InputError(f"{option} {path}: the file is empty")
    return text


def _opened(path: str) -> IO[bytes]:
    """A file, or a pipe that a shell gives (``<(command)``); no named pipe, to which nobody may ever write."""
    is_shells = os.path.realpath(path).startswith(("/dev/", "/proc/"))  # its other end is open already
    if not is_shells and stat.S_ISFIFO(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "a named pipe, on which one may wait for ever: give a file")
    return open(path, "rb")


def _all(file: IO[bytes] | Any, what: str) -> bytes:
    """All bytes of a file that holds no more than ``LIMIT``."""
    content = bytearray()
    while chunk := file.read(CHUNK):
        content += chunk
        if len(content) > LIMIT:
            raise InputError(f"{what}: more than {LIMIT:,} bytes, unpacked: give a part of it")
    return bytes(content)
