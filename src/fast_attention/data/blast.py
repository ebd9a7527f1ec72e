"""Reads BLAST protein databases of format 4: an index (``.pin``) and residues (``.psq``)."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from fast_attention.data import reading
from fast_attention.data.fasta import FastaError, Protein

_LETTERS = b"-ABCDEFGHIKLMNPQRSTVWXYZU*OJ"  # what a byte of the residues stands for (NCBIstdaa); 0 ends a sequence
_ASCII = bytes.maketrans(bytes(range(len(_LETTERS))), _LETTERS)


def read_blast(index: str | os.PathLike[str]) -> Iterator[Protein]:
    """Yield the proteins of a database, named by their numbers; headers are not read.

    Args:
        index: The ``.pin`` file; the ``.psq`` file is beside it.

    Raises:
        FastaError: The index is no format 4 of proteins, or the residues are shorter than it says.
        OSError: One of them cannot be opened.
    """
    path = Path(index)
    try:
        starts = _starts(reading.raw(path))
    except (struct.error, ValueError) as error:
        raise FastaError(f"{path}: no index of a BLAST protein database in format 4 ({error})") from None
    residues = reading.raw(path.with_suffix(".psq"))
    if starts[-1] > len(residues):
        raise FastaError(f"{path.with_suffix('.psq')}: {len(residues)} bytes; its index ends at {starts[-1]}")
    for number, (first, after) in enumerate(itertools.pairwise(starts), 1):
        sequence = residues[first : after - 1].translate(_ASCII).decode("ascii", "replace").strip("-*")
        if sequence:
            yield Protein(f"{path.stem}:{number}", sequence)


def _starts(content: bytes) -> tuple[int, ...]:
    """Where each sequence starts, and the end of the last."""
    version, kind, size = struct.unpack_from(">3i", content)
    if (version, kind) != (4, 1):
        raise ValueError(f"version {version}, kind {kind}; 4 and 1 are expected")
    offset = 12 + size
    (size,) = struct.unpack_from(">i", content, offset)
    offset += 4 + size
    (count,) = struct.unpack_from(">i", content, offset)
    offset += 4 + 8 + 4  # the number of sequences, of all residues, and of the longest's
    return struct.unpack_from(f">{count + 1}i", content, offset + 4 * (count + 1))
