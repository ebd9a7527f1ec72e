"""Proteins that an installed Debian package brought: its FASTA files and its BLAST databases, found by its name."""

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
    """The records of all protein files of an installed Debian package, file by file.

    Raises:
        ValueError: There is no such package on this machine, or it brought no proteins.
    """
    found = files_of(name)
    if not found:
        raise ValueError(f"the Debian package {name} is installed, but holds neither FASTA files nor BLAST databases")
    for path in found:
        yield from read_blast(path) if path.suffix == ".pin" else read_fasta(path)


def files_of(name: str) -> list[Path]:
    """The package's FASTA files and the indices (``.pin``) of its protein databases, in order of their names.

    Raises:
        ValueError: There is no such package on this machine.
    """
    missing = f"{name} is neither a file here nor an installed Debian package"
    if not _NAME.fullmatch(name):
        raise ValueError(f"{missing}; give the path of a FASTA file")
    query = shutil.which("dpkg-query")
    if query is None:
        raise ValueError(f"{missing} (this is no Debian system); give the path of a FASTA file")
    listed = subprocess.run([query, "--listfiles", name], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise ValueError(f"{missing}; apt-get install {name} fetches it where Debian has it")
    paths = map(Path, sorted(listed.stdout.splitlines()))
    return [path for path in paths if (path.suffix == ".pin" or _FASTA.search(path.name)) and path.is_file()]
