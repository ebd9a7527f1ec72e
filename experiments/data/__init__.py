"""The samples of this folder, and readers of the files that users name: FASTA, tables and texts, by ``datasets``."""

from __future__ import annotations

import csv
import gzip
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import IterableDataset

HERE = Path(__file__).parent
SUFFIXES = {".csv": "csv", ".tsv": "csv", ".jsonl": "json"}  # of tables, and which loader of datasets reads them


def read(path: Path) -> bytes:
    """A file's bytes, unpacked if it is gzip.

    Raises:
        ValueError: It cannot be read, or its gzip data are damaged.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def text() -> str:
    """The first 400 kB of the Jargon File 4.4.7 (public domain): English prose about the language of programmers."""
    return read(HERE / "jargon.txt.gz").decode("utf-8")


def fasta(path: str) -> Iterator[dict[str, str]]:
    """Yield the records of a FASTA file, plain or gzipped: ``header`` without ``>``, and ``sequence`` in capitals.

    Raises:
        ValueError: The file cannot be read or is not FASTA; the message names the line.
    """
    header, residues, number = None, [], 0
    for number, line in enumerate(read(Path(path)).decode("utf-8", "replace").splitlines(), 1):
        if line.startswith(">") and header is not None and not residues:
            raise ValueError(f"{path}, line {number}: the header before has no residues below it")
        if line.startswith(">"):
            if header is not None:
                yield {"header": header, "sequence": "".join(residues)}
            header, residues = line[1:].strip(), []
        elif line.strip():
            residue = line.strip().upper().removesuffix("*")
            if header is None:
                raise ValueError(f"{path}, line {number}: residues before the first header (a line that starts with >)")
            if wrong := re.search(r"[^A-Z]", residue):
                raise ValueError(f"{path}, line {number}: {wrong.group()!r} is not a residue letter")
            residues.append(residue)
    if header is None or not residues:
        raise ValueError(f"{path}, line {number}: FASTA is a header, a line that starts with >, and residues below")
    yield {"header": header, "sequence": "".join(residues)}


def proteins(source: str = "sample") -> IterableDataset:
    """Proteins as rows with ``header`` and ``sequence``.

    Args:
        source: ``"sample"`` for 421 reviewed UniProt proteins of 56 to 2,948 residues (CC BY 4.0), Cas9 of
            *S. pyogenes* (Q99ZW2) first; a FASTA file; or the name of an installed Debian package with FASTA files.

    Raises:
        ValueError: Neither a file nor an installed package with FASTA files; or, while reading, as ``fasta``.
    """
    from datasets import IterableDataset

    path = HERE / "uniprot.fasta.gz" if source == "sample" else Path(source)
    files = [str(path)] if path.exists() or len(path.parts) != 1 or path.suffix else _of_package(source)
    return IterableDataset.from_generator(_all, gen_kwargs={"files": files})


def _all(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        yield from fasta(file)


def _of_package(name: str) -> list[str]:
    """The FASTA files of an installed Debian package, in order of their names."""
    query = shutil.which("dpkg-query")
    result = None
    if query is not None and re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name):
        result = subprocess.run([query, "--listfiles", name], capture_output=True, text=True, check=False)
    if result is None or result.returncode:
        raise ValueError(f"{name} is neither a file here nor an installed Debian package; name a FASTA file")
    paths = sorted(path for path in result.stdout.splitlines() if re.search(r"(?i)\.(fa|faa|fas|fasta)(\.gz)?$", path))
    if not paths:
        raise ValueError(f"the Debian package {name} is installed, but holds no FASTA files")
    return paths


def table(path: str) -> IterableDataset:
    """The rows of a ``.csv`` or ``.tsv`` file with a line of headers, all values texts, or of a ``.jsonl`` file.

    Raises:
        ValueError: It cannot be read or is no such table.
    """
    from datasets import Features, Value, load_dataset

    kind = SUFFIXES.get(Path(path.removesuffix(".gz")).suffix)
    if kind is None:
        raise ValueError(f"{path}: the name must end in {', '.join(SUFFIXES)}")
    options: dict[str, Any] = {}
    try:
        head = next((line for line in read(Path(path)).decode("utf-8-sig").splitlines() if line.strip()), "")
        if kind == "csv":
            delimiter = "\t" if ".tsv" in path else max(",;\t|", key=head.count)
            names = next(csv.reader([head], delimiter=delimiter), [])
            if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
                columns = [i for i, name in enumerate(names, 1) if name == twice]
                raise ValueError(f"columns {columns[0]} and {columns[1]} are both called {twice!r}: rename one")
            features = Features({name: Value("string") for name in names})
            options = {"sep": delimiter, "features": features, "keep_default_na": False}
        if not head:
            raise ValueError("the file has no rows")
        return load_dataset(kind, data_files=path, split="train", streaming=True, **options)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}".replace(f"{path}: {path}:", f"{path}:")) from error
