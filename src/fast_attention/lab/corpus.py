"""Reads a text from the user's file as token numbers; without a file, Python's language reference."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import IO, Any

import torch
from torch import Tensor

from fast_attention.lab.inputs import InputError

LIMIT = 1 << 30  # bytes of a file, unpacked: a device has no end, and gzip may unpack to a thousand times its size
CHUNK = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """Named documents."""

    name: str
    documents: tuple[tuple[str, str], ...]

    @property
    def sha256(self) -> str:
        """The checksum of all documents, whatever they are called."""
        return hashlib.sha256("\0".join(text for _, text in self.documents).encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that a record tells about the corpus."""
        size = sum(len(text.encode()) for _, text in self.documents)
        return {"name": self.name, "documents": len(self.documents), "bytes": size, "sha256": self.sha256}

    def tokens(self, tokenizer: Any, length: int) -> tuple[Tensor, str]:
        """Up to ``length`` token numbers (1, n) of the first document, the tokenizer's own marks included; its name.

        Raises:
            InputError: There are none, or the tokenizer knows none.
        """
        name, text = self.documents[0]
        ids = self.numbers(tokenizer, text[: 16 * length + 64], name, truncation=True, max_length=length)
        if not ids:
            raise InputError(f"{self.name}: the tokenizer finds no token in {name}")
        return torch.tensor([ids]), f"the first {len(ids)} tokens of {name}"

    def numbers(self, tokenizer: Any, text: str, name: str, **options: Any) -> list[int]:
        """A document as tokens.

        Raises:
            InputError: All its tokens mean "unknown": every word would be the same.
        """
        ids, unknown = tokenizer(text, **options)["input_ids"], tokenizer.unk_token_id
        if unknown is not None and unknown in ids and {*ids} <= {unknown, *tokenizer.all_special_ids}:
            raise InputError(f"{self.name}: the tokenizer knows no word of {name}, so that all tokens are the same")
        return ids


def read(path: str | None = None, *, option: str = "--text") -> Corpus:
    """The text in a file, unpacked where its first two bytes say that it is gzip; without a path, Python's reference.

    Args:
        path: The file.
        option: What the user gave the path with, for messages.

    Raises:
        InputError: The file is missing, empty, damaged, too long or not UTF-8; the message names it.
    """
    if path is None:
        name, pages = "Python's language reference", (topics[title] for title in sorted(topics))
        return Corpus(f"{name} (PSF licence, installed)", ((name, "\n\n".join(pages)),))
    raw = b""
    try:
        with _opened(path) as file:
            raw = _all(file, path)
        if raw.startswith(b"\x1f\x8b"):
            raw = _all(gzip.GzipFile(fileobj=io.BytesIO(raw)), path)
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
    return Corpus(path, ((Path(path).name, text),))


def _opened(path: str) -> IO[bytes]:
    """A file, or a pipe that a shell gives (``<(command)``); no named pipe, to which nobody may ever write."""
    is_shells = os.path.realpath(path).startswith(("/dev/", "/proc/"))  # its other end is open already
    if not is_shells and stat.S_ISFIFO(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "a named pipe, on which one may wait for ever: give a file")
    return open(path, "rb")


def _all(file: IO[bytes] | Any, path: str) -> bytes:
    """All bytes of a file that holds no more than ``LIMIT``."""
    content = bytearray()
    while chunk := file.read(CHUNK):
        content += chunk
        if len(content) > LIMIT:
            raise InputError(f"{path}: more than {LIMIT:,} bytes, unpacked: give a part of it")
    return bytes(content)
