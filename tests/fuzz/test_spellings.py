"""Mechanisms and their spellings."""

from __future__ import annotations

from hypothesis import strategies as st

from fast_attention import catalogue
from tests.fuzz.kit import fuzz

PIECES = [
    *catalogue.names(),
    "(",
    ")",
    "=",
    ",",
    "window",
    "64",
    "-1",
    "1e400",
    "None",
    "'",
    "\\",
    "lambda: 0",
    "[",
    "]",
    "\0",
    "é",
]


@fuzz(
    "spellings of mechanisms",
    examples=200,
    text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(),
)
def test_parse_answers_or_refuses(text: str) -> None:
    """Any text is a mechanism, whose repr spells it again, or a ValueError of one line."""
    try:
        found = catalogue.parse(text)
    except ValueError as error:
        refusal = str(error)
    else:
        assert catalogue.parse(repr(found)) == found
        return
    assert "\n" not in refusal.strip()
