"""Small samples shipped with the package: English prose and proteins. Sources and licences are in its LICENSES.md."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from fast_attention.data.fasta import FastaError as FastaError
from fast_attention.data.fasta import Protein as Protein
from fast_attention.data.fasta import parse_fasta, read_fasta
from fast_attention.data.packages import read_package

__all__ = ["FastaError", "Protein", "models", "proteins", "read_fasta", "read_proteins", "text"]


def text() -> str:
    """The first 400 kB of the Jargon File 4.4.7 (public domain): English prose about the language of programmers."""
    return gzip.decompress(_bytes("jargon.txt.gz")).decode("utf-8")


def proteins() -> list[Protein]:
    """421 reviewed UniProt proteins of 56 to 2,948 residues (CC BY 4.0), Cas9 of *S. pyogenes* (Q99ZW2) first."""
    return list(parse_fasta(_bytes("uniprot.fasta.gz"), name="uniprot.fasta.gz"))


def read_proteins(source: str) -> Iterable[Protein]:
    """Read proteins: the shipped ones (``"sample"``), a FASTA file's, or those of an installed Debian package.

    Raises:
        FastaError: A file is damaged or holds something else; the message names the line.
        OSError: The file cannot be opened.
        ValueError: Neither a file nor an installed package, or a package without proteins.
    """
    if source == "sample":
        return proteins()
    path = Path(source)
    is_file = path.exists() or len(path.parts) != 1 or bool(path.suffix)
    return read_fasta(path) if is_file else read_package(source)


def models() -> dict[str, Path]:
    """The shipped models by name, each a folder for ``nn.saving.load`` with the record of its training."""
    return {path.parent.name: path.parent for path in sorted(Path(__file__).parent.glob("*/config.json"))}


def _bytes(name: str) -> bytes:
    return resources.files(__name__).joinpath(name).read_bytes()
