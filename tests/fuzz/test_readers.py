"""Texts that users name: random bytes, plain or packed, whole or damaged."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from hypothesis import strategies as st

from fast_attention.lab import texts
from fast_attention.lab.inputs import InputError
from tests.fuzz.kit import fuzz


def packed(text: bytes, how: int) -> bytes:
    """As it is, as gzip, or as gzip that is cut off or damaged."""
    if how == 0:
        return text
    zipped = bytearray(gzip.compress(text))
    if how == 2:
        del zipped[len(zipped) // 2 :]
    if how == 3:
        zipped[len(zipped) // 2] ^= 4
    return bytes(zipped)


@fuzz("texts", examples=60, text=st.binary(max_size=200) | st.text(max_size=100).map(str.encode), how=st.integers(0, 3))
def test_texts_are_read_or_refused(text: bytes, how: int) -> None:
    """In one line that names the file."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(packed(text, how))
        try:
            read, refusal = texts.read(file.name).documents[0][1], f"not refused: {file.name}"
        except InputError as error:
            read, refusal = "nothing", str(error)
    assert read.strip()
    assert file.name in refusal
    assert "\n" not in refusal
