"""The reproductions by name, and the table that ``fast-attention reproduce`` prints of them."""

from __future__ import annotations

from fast_attention.lab.inputs import InputError
from fast_attention.lab.reproducing.cab import CAB
from fast_attention.lab.reproducing.capacity import CAPACITY
from fast_attention.lab.reproducing.decoding import DECODING
from fast_attention.lab.reproducing.duplication import DUPLICATION
from fast_attention.lab.reproducing.leaks import LEAKING
from fast_attention.lab.reproducing.mixers import MIXING
from fast_attention.lab.reproducing.performer import PERFORMER
from fast_attention.lab.reproducing.recall import RECALL
from fast_attention.lab.reproducing.reproduction import Reproduction
from fast_attention.lab.reproducing.spectrum import SPECTRUM
from fast_attention.lab.tables import Table

ALL = (
    PERFORMER,
    CAPACITY,
    SPECTRUM,
    DUPLICATION,
    RECALL,
    MIXING,
    LEAKING,
    CAB,
    DECODING,
)
REPRODUCTIONS = {each.name: each for each in ALL}


def named(name: str) -> Reproduction:
    """The reproduction of a name.

    Raises:
        InputError: There is none.
    """
    if name not in REPRODUCTIONS:
        raise InputError(f"reproduce {name}: there is {', '.join(REPRODUCTIONS)}")
    return REPRODUCTIONS[name]


def table() -> Table:
    """All of them, with their papers and the time that they take."""
    rows = [[each.name, each.title, each.paper, f"{each.minutes:g}"] for each in REPRODUCTIONS.values()]
    return Table(["reproduction", "what is measured", "paper", "minutes"], rows, left=(1, 2))
