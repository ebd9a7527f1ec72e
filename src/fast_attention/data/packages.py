"""Reads the proteins of an installed Debian package: its FASTA files and BLAST databases."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from fast_attention.data.blast import read_blast
from fast_attention.data.fasta import Protein, read_fasta

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")  # Debian policy 5.6.1
_FASTA = re.compile(r"\.(fa|faa|fas|fasta)(\.gz)?$", re.IGNORECASE)


def read_package(name: str) -> Iterator[Protein]:
    """Yield the records of all protein files of an installed Debian package.

    Raises:
        ValueError: The package is not installed, or has no proteins.
    """
    files = files_of(name)
    if not files:
        raise ValueError(f"the Debian package {name} is installed, but holds neither FASTA files nor BLAST databases")
    for path in files:
        yield from read_blast(path) if path.suffix == ".pin" else read_fasta(path)


def files_of(name: str) -> list[Path]:
    """The package's FASTA files and the indices (``.pin``) of its protein databases, in order of their names.

    Raises:
        ValueError: There is no such package on this machine.
    """
    message = f"{name} is neither a file here nor an installed Debian package"
    if not _NAME.fullmatch(name):
        raise ValueError(f"{message}; give the path of a FASTA file")
    query = shutil.which("dpkg-query")
    if query is None:
        raise ValueError(f"{message} (this is no Debian system); give the path of a FASTA file")
    result = subprocess.run([query, "--listfiles", name], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"{message}; apt-get install {name} fetches it where Debian has it")
    paths = map(Path, sorted(result.stdout.splitlines()))
    return [path for path in paths if (path.suffix == ".pin" or _FASTA.search(path.name)) and path.is_file()]
