"""Reads texts, from a file or from what Python and packages say of themselves, and cuts them into chunks of tokens."""

from __future__ import annotations

import ast
import bisect
import errno
import gzip
import hashlib
import importlib.metadata
import io
import itertools
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import IO, Any

import torch
from torch import Tensor

from fast_attention.lab.inputs import InputError

FILE_BYTES = 1 << 30  # bytes of a file, unpacked: a device has no end, and gzip may unpack to a thousand times its size


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
        """Up to ``length`` token numbers (1, n) of the first document, the tokenizer's own marks included; its name."""
        name, text = self.documents[0]
        ids = self.numbers(tokenizer, text[: 16 * length + 64], name, truncation=True, max_length=length)
        if not ids:
            raise InputError(f"{self.name}: the tokenizer finds no token in {name}")
        return torch.tensor([ids]), f"the first {len(ids)} tokens of {name}"

    def numbers(self, tokenizer: Any, text: str, name: str, **options: Any) -> list[int]:
        """A document as tokens; refused where all mean "unknown": every word would be the same."""
        ids, unknown = tokenizer(text, **options)["input_ids"], tokenizer.unk_token_id
        if unknown is not None and unknown in ids and {*ids} <= {unknown, *tokenizer.all_special_ids}:
            raise InputError(f"{self.name}: the tokenizer knows no word of {name}, so that all tokens are the same")
        return ids


def read(path: str | None = None, *, option: str = "--text") -> Corpus:
    """The text in a file, unpacked where its first two bytes say that it is gzip; without a path, Python's reference.

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
    """All bytes of a file that holds no more than ``FILE_BYTES``."""
    content = file.read(FILE_BYTES + 1)
    if len(content) > FILE_BYTES:
        raise InputError(f"{path}: more than {FILE_BYTES:,} bytes, unpacked: give a part of it")
    return content


SOURCE_BYTES = 3 << 18  # bytes that are read of a source
DOCUMENT_CHARACTERS = 400  # characters of a document
LINE_WORDS = 4.0  # of a line on average: prose, neither a table of numbers nor a list
PROSE_FILES = (".md", ".rst", ".txt")
NO_DOCUMENTATION = ("licen", "copying", "notice", "author", "change", "release", "requirements", "test")


def python() -> Corpus:
    """The language reference that ``help`` prints, and the docstrings of the standard library."""
    documents = _limited(itertools.chain(sorted(topics.items()), _docstrings(Path(sysconfig.get_paths()["stdlib"]))))
    return Corpus("Python's topics and docstrings (PSF licence, installed)", documents)


def packages() -> Corpus:
    """Descriptions and documentation of the installed packages, in an order that mixes them."""
    return Corpus("documentation of installed packages (their own licences)", _limited(_installed()))


def _docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Every module's docstrings as one document."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.glob("**/*.py")}
    for name in sorted(paths, key=_rank):
        if "site-packages" in name or "test" in name:
            continue
        try:
            tree = ast.parse(paths[name].read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        kinds = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        yield name, "\n\n".join(text for node in kinds if (text := ast.get_docstring(node)))


def _installed() -> Iterator[tuple[str, str]]:
    """The description of every package, and the text files that it brings."""
    known = {str(each.metadata["Name"]).lower(): each for each in importlib.metadata.distributions()}
    for name in sorted(known, key=_rank):
        if name.replace("_", "-") == "fast-attention":
            continue
        package = known[name]
        yield name, str(package.metadata.json.get("description", ""))
        for file in sorted((file for file in package.files or () if file.suffix in PROSE_FILES), key=str):
            if any(word in str(file).lower() for word in NO_DOCUMENTATION):
                continue
            try:
                yield f"{name}: {file}", Path(str(package.locate_file(file))).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def _rank(name: str) -> bytes:
    """Where a name stands in an order that is the same everywhere, and not the alphabet's."""
    return hashlib.sha256(name.encode()).digest()


def _limited(documents: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Documents of prose until ``SOURCE_BYTES`` is reached, without paragraphs that stood before."""
    known: set[str] = set()
    chosen: list[tuple[str, str]] = []
    size = 0
    for name, text in documents:
        paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
        new = [each for each in dict.fromkeys(paragraphs) if each not in known]
        known |= {*new}
        document = "\n\n".join(new)
        lines = [line for line in document.splitlines() if line.strip()]
        if len(document) < DOCUMENT_CHARACTERS or len(document.split()) < LINE_WORDS * len(lines):
            continue
        chosen.append((name, document))
        size += len(document.encode())
        if size >= SOURCE_BYTES:
            break
    return tuple(chosen)


HELD_OUT = 0.1  # fraction of a source's tokens that are never trained on: the last ones
MOST_CHUNKS = 24  # of each group that is held out
TOKENS = 16_384  # at most, of each group that is held out, if that leaves LEAST chunks
LEAST = 3
SHORTEST_CHUNK = 32  # tokens of a chunk to train on, unless the longest are shorter
LENGTHS = (512, 2048, 8192)  # of the chunks of a text that is held out
SHORT, SHORT_ROWS = 128, 8  # tokens of the longest of the short ones; how many, of different lengths, share a batch
ROWS = 16  # chunks of a training batch, at most, unless more of the longest are asked for
STRIDE = 1_000_003  # between the batches of two seeds; torch takes 32 bits
Batch = dict[str, Tensor]
TokenIds = list[int]


class TextChunks:
    """Cuts texts into chunks with the tokenizer's own marks at both ends, ``prefix`` and ``suffix``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bare, marked = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
        at = next((i for i in range(len(marked)) if marked[i : i + len(bare)] == bare), 0)
        self.prefix, self.suffix = marked[:at], marked[at + len(bare) :]
        self.special_tokens = len(self.prefix) + len(self.suffix)
        self.padding = int(tokenizer.pad_token_id or 0)

    def document(self, corpus: Corpus) -> TokenIds:
        """The tokens of all documents of a corpus, joined."""
        text = "\n\n".join(text for _, text in corpus.documents)
        return corpus.numbers(self.tokenizer, text, "a document", add_special_tokens=False, verbose=False)

    def split(self, document: TokenIds, length: int) -> list[TokenIds]:
        """The chunks of a document, one after the other; a rest at the end only where nothing else is."""
        content = self.content(length)
        chunks = [document[i : i + content] for i in range(0, len(document) - content + 1, content)]
        return chunks or [document]

    def content(self, length: int) -> int:
        """How many tokens of a document a chunk of ``length`` holds; ``InputError`` if it holds none."""
        if length <= self.special_tokens:
            raise InputError(f"--length {length}: the tokenizer's own marks alone are as long")
        return length - self.special_tokens

    def batches(self, chunks: Sequence[TokenIds], size: int) -> list[Batch]:
        """Batches of so many chunks; the last may have fewer."""
        return [self.batch(chunks[i : i + size]) for i in range(0, len(chunks), size)]

    def batch(self, chunks: Sequence[TokenIds]) -> Batch:
        """Token numbers (chunks, longest) padded behind, and which of them are tokens."""
        rows = [torch.tensor([*self.prefix, *chunk, *self.suffix]) for chunk in chunks]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def spread(chunks: Sequence[TokenIds], count: int) -> list[TokenIds]:
    """At most so many chunks, evenly apart."""
    return [*chunks[:: max(len(chunks) // count, 1)][:count]]


class Reading:
    """Chunks to train on and to judge by, the tokenizer's own marks at both ends included.

    Args:
        corpora: What is trained on, but for the last tenth of each.
        held_out: A text of another source, of which nothing is trained on: bits per byte are its bytes.
        tokenizer: The model's.
        length: Tokens of a chunk, at most; those to train on have log-uniform lengths from ``SHORTEST_CHUNK`` on.
        size: Chunks of that length in a training batch; of shorter ones there are more, up to as many tokens.
        seed: Another one draws other batches.

    Attributes:
        groups: Held-out batches by what they are: ``"short"``, ``"other text, 512"`` and so on of ``held_out``,
            and ``"trained text, 512"`` of the ends of what is trained on.
    """

    def __init__(
        self, corpora: Sequence[Corpus], held_out: Corpus, tokenizer: Any, length: int, size: int, seed: int
    ) -> None:
        self.name = "; ".join(corpus.name for corpus in corpora)
        self.chunks, self.length, self.size, self.seed = TextChunks(tokenizer), length, size, seed
        content = self.chunks.content(length)
        self.shortest = min(max(SHORTEST_CHUNK, self.chunks.special_tokens + 1), length)
        read = [self.chunks.document(corpus) for corpus in corpora]
        sizes = [round((1 - HELD_OUT) * len(document)) for document in read]
        self.documents = [document[:size] for document, size in zip(read, sizes, strict=True)]
        self.ends = [*itertools.accumulate(sizes)]
        usual = min(length, LENGTHS[0])
        ends = [self.chunks.split(document[size:], usual) for document, size in zip(read, sizes, strict=True)]
        if self.ends[-1] < content or not ends[0][0]:
            raise InputError(
                f"{self.name} has {sum(map(len, read)):,} tokens, of which the last tenth is held out: too few for "
                f"passages of {length}; give a longer one, or a smaller --length"
            )
        document = self.chunks.document(held_out)
        self.tokens_per_byte = len(document) / held_out.facts["bytes"]
        self.groups = self._held_out_groups(held_out.name, document)
        last = spread([*itertools.chain(*ends)], MOST_CHUNKS)
        self.groups[f"trained text, {usual}"] = self.chunks.batches(last, size)

    @property
    def held_out(self) -> list[Batch]:
        """The batches of all groups."""
        return [*itertools.chain(*self.groups.values())]

    def batch(self, number: int) -> Batch:
        """Batch number i of the training chunks: they begin anywhere, as ``seed`` and i say."""
        generator = torch.Generator().manual_seed(self.seed * STRIDE + number)
        longest = self._length(generator, self.length)
        rows = max(self.size, min(self.size * self.length // longest, ROWS))
        lengths = [longest, *(self._length(generator, longest) for _ in range(rows - 1))]
        return self.chunks.batch([self._drawn(generator, self.chunks.content(each)) for each in lengths])

    def _length(self, generator: torch.Generator, longest: int) -> int:
        """A length between the shortest and ``longest``, every octave as likely as another."""
        if self.shortest >= longest:
            return longest
        fraction = float(torch.rand((), generator=generator))
        return round(self.shortest * (longest / self.shortest) ** fraction)

    def _drawn(self, generator: torch.Generator, content: int) -> TokenIds:
        at = int(torch.randint(self.ends[-1], (), generator=generator))
        which = bisect.bisect_right(self.ends, at)
        document = self.documents[which]
        start = min(at - (self.ends[which] - len(document)), max(len(document) - content, 0))
        return document[start : start + content]

    def _held_out_groups(self, name: str, document: TokenIds) -> dict[str, list[Batch]]:
        """Groups of a text that is not trained on: short chunks, and one group for every length."""
        lengths = [length for length in LENGTHS if length <= self.length] or [self.length]
        if len(document) < 2 * lengths[-1]:
            raise InputError(
                f"--held-out {name} has {len(document):,} tokens: too few for two passages of {lengths[-1]}; give a "
                "longer one, or a smaller --length"
            )
        short = spread(self.chunks.split(document, min(SHORT, self.length)), MOST_CHUNKS)
        parts = [each[: max(len(each) // (1 + i % 4), 1)] for i, each in enumerate(short)]
        groups = {"short": self.chunks.batches(parts, SHORT_ROWS)}
        for length in lengths:
            count = max(min(MOST_CHUNKS, TOKENS // length), LEAST)
            chunks = spread(self.chunks.split(document, length), count)
            groups[f"other text, {length}"] = self.chunks.batches(chunks, self.size)
        return groups
