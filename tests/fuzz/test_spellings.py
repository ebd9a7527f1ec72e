"""Spellings of mechanisms and tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from experiments import tasks
from fast_attention import catalogue
from fast_attention.lab import inputs
from tests.fuzz.kit import fuzz

WORDS = """( ) = , window 64 -1 1e400 None ' \\ [ ] é () 1 ... 1j b'' f'{1}' ** * : := ; . @ lambda:0 Value Task
Mechanism ALiBi Relu Copy listops classify symbols longest x.csv"""
PIECES = [
    *catalogue.names(),
    *WORDS.split(),
    " ",
    "\0",
    "\n",
    "9" * 400,
    "9" * 5000,
    "(" * 300,
    "-" * 3000,
    "a." * 3000,
    "Adapted(" * 90,
]
HOSTILE = [
    "1",
    "()",
    "[]",
    "",
    "'a'",
    "...",
    "Value()",
    "Task()",
    "Softmax(scale=" + "9" * 400 + ")",
    "Local(window=64, window=8)",
]
PARSERS: dict[str, Callable[[str], Any]] = {
    "mechanism": catalogue.parse,
    "task": tasks.parse,
    "mechanisms of a command": lambda text: inputs.mechanisms([text]),
    "the mechanism of a command": inputs.mechanism,
}


@fuzz(
    "spellings of mechanisms and tasks",
    examples=300,
    parser=st.sampled_from(sorted(PARSERS)),
    text=st.sampled_from(HOSTILE) | st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(),
)
def test_parse_answers_or_refuses(parser: str, text: str) -> None:
    """Any text is a value, whose repr spells it again, or a ValueError of one line."""
    parse = PARSERS[parser]
    try:
        found = parse(text)
    except ValueError as error:
        refusal = str(error)
    else:
        for value in found if isinstance(found, list) else [found]:
            assert isinstance(value, tasks.Task if parser == "task" else catalogue.Mechanism)
            assert (tasks.parse if parser == "task" else catalogue.parse)(repr(value)) == value
        return
    assert refusal
    assert "\n" not in refusal.strip()
