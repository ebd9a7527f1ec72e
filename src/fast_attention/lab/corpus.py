"""Reads a text or proteins, from the user's file or the samples shipped with the package, as token numbers."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fast_attention import data
from fast_attention.data import reading
from fast_attention.lab.inputs import InputError

SAMPLE = "sample"


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
            InputError: It knows none of its words.
        """
        layouts = [text] if self.kind == "text" else [text, " ".join(text)]
        read = [tokenizer(each, **options)["input_ids"] for each in layouts]
        best = max(read, key=lambda ids: sum(number != tokenizer.unk_token_id for number in ids) / max(len(ids), 1))
        self._known(tokenizer, best, name)
        return best

    def _known(self, tokenizer: Any, ids: list[int], name: str) -> None:
        """Refuse tokens of a document that all mean "unknown": every word would be the same.

        Raises:
            InputError: They do.
        """
        unknown = tokenizer.unk_token_id
        if unknown is not None and unknown in ids and {*ids} <= {unknown, *tokenizer.all_special_ids}:
            raise InputError(f"{self.name}: the tokenizer knows no word of {name}, so that all tokens are the same")


def read(text: str | None = None, fasta: str | None = None, *, option: str = "--text") -> Corpus:
    """The corpus of ``--text`` or ``--fasta`` (``"sample"``: the shipped proteins); the shipped prose without either.

    Args:
        text: A file of text.
        fasta: A file of proteins.
        option: What the user gave the text with, for messages.

    Raises:
        InputError: Both are given, or the file is missing, empty or broken; the message names file and line.
    """
    if text and fasta:
        raise InputError("give --text or --fasta, not both")
    if fasta:
        return _proteins(fasta)
    if text is None:
        return Corpus("text", "the Jargon File 4.4.7 (public domain, shipped)", (("the Jargon File", data.text()),))
    return Corpus("text", text, ((Path(text).name, _text(Path(text), option)),))


def _proteins(path: str) -> Corpus:
    if path == SAMPLE and not Path(path).exists():
        proteins, name = data.proteins(), "421 UniProt proteins (CC BY 4.0, shipped)"
    else:
        try:
            proteins, name = list(data.read_fasta(path)), path
        except data.FastaError as error:
            raise InputError(str(error)) from error
        except OSError as error:
            raise InputError(f"--fasta {path}: {error.strerror or error}") from error
    return Corpus("proteins", name, tuple((protein.name, protein.sequence) for protein in proteins))


def _text(path: Path, option: str) -> str:
    raw = b""
    try:
        raw = reading.unpacked(path)
        text = raw.decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{option} {path}: the gzip data are cut off or damaged") from error
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror or error}") from error
    except reading.TooLong as error:
        raise InputError(f"{option} {error}") from error
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(f"{option} {path}, line {line}: not UTF-8 text") from error
    if not text.strip():
        raise InputError(f"{option} {path}: the file is empty")
    return text
