"""The Pathfinder task (Linsley et al. 2018, arXiv 1805.08315; Tay et al. 2020): are two discs on one dashed curve?"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from experiments.tasks import Batch, Split, Task, random_of
from fast_attention.value import at_least

STEP = 3  # pixels from one dash's end to the next: two of ink and one of gap
CLEAR = 2  # pixels without ink between one curve and another, at least
BORDER = 5  # pixels around the picture, so that no shift of a stamp leaves the grid
TRIES, SHORT_TRIES = 8, 30  # attempts to add a dash to both long curves; to draw a short one
EDGE = 1  # pixels of the picture's own edge that stay empty
START_DISTANCE = 7  # pixels between the beginnings of the two long curves
RADIUS, THICKNESS, CONTRAST = 1.5, 0.5, 0.75  # of discs; half of a dash's width; of dashes against discs
DIRECTIONS = tuple((x, y) for x in range(-4, 5) for y in range(-4, 5) if round(math.hypot(x, y)) == STEP)

Cell = tuple[int, int]


class Stamp(NamedTuple):
    """A dash or a disc around a cell: its bits on the grid, and the fraction of each pixel that it covers."""

    bits: int
    cover: dict[Cell, float]


@dataclass
class Curve:
    """A dashed curve: its dashes' end cells, directions and bits. ``settled`` has the bits of all but the last dash."""

    cells: list[Cell] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    settled: int = 0
    last: int = 0

    def copy(self) -> Curve:
        """A copy that can grow independently."""
        return Curve([*self.cells], [*self.turns], self.settled, self.last)

    @property
    def ink(self) -> int:
        """The bits of all dashes."""
        return self.settled | self.last

    @property
    def origin(self) -> Cell:
        """Where the first dash begins: a pixel before its end."""
        (x, y), (dx, dy) = self.cells[0], DIRECTIONS[self.turns[0]]
        size = math.hypot(dx, dy)
        return x - round(dx / size), y - round(dy / size)


class Picture(NamedTuple):
    """A picture as grey values 0 to 255, row by row, with its curves, discs and class."""

    grey: list[int]
    curves: list[Curve]  # the two long ones first
    discs: tuple[Cell, Cell]  # on the grid: ``BORDER`` more than in the picture
    joined: bool  # whether the discs end the same curve


@dataclass(frozen=True, repr=False)
class Pathfinder(Task):
    """Tell whether two discs are on the two ends of one long curve, or on ends of two.

    The pictures of both classes differ in nothing but the end of the second disc. The Long Range Arena's setting is
    ``Pathfinder(size=32, dashes=14, distractors=5)``.

    Args:
        size: Side of the picture, in pixels; it is read row by row.
        dashes: Dashes of each long curve; the short ones have a third of them.
        distractors: Number of short curves.
        seed: For the data.
    """

    size: int = 16
    dashes: int = 4
    distractors: int = 0
    seed: int = 0

    name = "pathfinder"
    vocab_size = 256
    length = property(lambda self: self.size**2)
    classes = 2

    def __post_init__(self) -> None:
        at_least(self, "size", self.size, 12)
        at_least(self, "dashes", self.dashes, 2)
        at_least(self, "distractors", self.distractors, 0)
        ink = STEP * (2 * self.dashes + self.distractors * (self.dashes // 3))
        if 5 * ink > self.size**2:
            raise ValueError(f"{self!r}: curves of {ink} pixels do not fit a picture of {self.size} x {self.size}")

    def make(self, split: Split, number: int, size: int) -> Batch:
        """Pictures as rows of grey values; class 1 where the discs end the same curve."""
        source = random_of(self, split, number)
        pictures = [self.draw(source) for _ in range(size)]
        return Batch(torch.tensor([p.grey for p in pictures]), torch.tensor([int(p.joined) for p in pictures]))

    def baselines(self) -> dict[str, float]:
        """Guessing: nothing but the curves tells the classes apart."""
        return {"chance": 0.5}

    def draw(self, source: random.Random) -> Picture:
        """A picture; attempts that do not fit are thrown away."""
        while True:
            pair = _pair(self, source)
            if pair is None:
                continue
            ends = [disc(self.size).bits << _at(self.size, cell) for c in pair for cell in (c.origin, c.cells[-1])]
            ink = pair[0].ink | pair[1].ink
            for bits in ends:
                ink |= bits
            curves = [*pair, *_short(self, source, ink)]
            if len(curves) < 2 + self.distractors:
                continue
            joined = source.random() < 0.5
            discs = (pair[0].origin, pair[0 if joined else 1].cells[-1])
            return Picture(_render(self.size, curves, discs), curves, discs, joined)


def _pair(task: Pathfinder, source: random.Random) -> tuple[Curve, Curve] | None:
    """Draw two long curves from near starts, dash by dash in turn; None if one got stuck or their discs would touch."""
    size = task.size
    first, second = Curve(), Curve()
    start = tuple(BORDER + EDGE + int(source.random() * (size - 2 * EDGE)) for _ in range(2))
    angle = 2 * math.pi * source.random()
    beside = (start[0] + round(START_DISTANCE * math.cos(angle)), start[1] + round(START_DISTANCE * math.sin(angle)))
    for _ in range(task.dashes):
        for _ in range(TRIES):
            a, b = first.copy(), second.copy()
            if _grow(a, (start[0], start[1]), b.ink, size, source) and _grow(b, beside, a.ink, size, source):
                first, second = a, b
                break
        else:
            return None
    with_discs = [first.ink, second.ink]
    for i, curve in enumerate((first, second)):
        for cell in (curve.origin, curve.cells[-1]):
            if not _inside(cell, size):
                return None
            with_discs[i] |= disc(size).bits << _at(size, cell)
    open_ends = _wide(disc(size).bits << _at(size, first.origin), size) & disc(size).bits << _at(size, first.cells[-1])
    if with_discs[0] & _wide(with_discs[1], size) or (with_discs[0] | with_discs[1]) & ~drawable(size) or open_ends:
        return None
    return first, second


def _short(task: Pathfinder, source: random.Random, ink: int) -> list[Curve]:
    """Draw the short curves, or as many as fit."""
    curves: list[Curve] = []
    for _ in range(task.distractors):
        for _ in range(SHORT_TRIES):
            curve = Curve()
            cell = tuple(BORDER + EDGE + int(source.random() * (task.size - 2 * EDGE)) for _ in range(2))
            start = (cell[0], cell[1])
            for _ in range(task.dashes // 3):
                if not _grow(curve, start, ink, task.size, source):
                    break
            else:
                curves.append(curve)
                ink |= curve.ink
                break
        else:
            break
    return curves


def _grow(curve: Curve, start: Cell, ink: int, size: int, source: random.Random) -> bool:
    """Add a random dash in free space: the less it turns, by the squared cosine, the likelier; False if none fits."""
    end = curve.cells[-1] if curve.cells else start
    if not _inside(end, size):
        return False
    blocked = _wide(ink | curve.settled, size) | curve.last
    options = [move for move in moves(size, end) if not move[2] & blocked]
    weights = [TURNS[curve.turns[-1]][turn] for _, turn, _ in options] if curve.turns else [1.0] * len(options)
    if sum(weights) <= 0.0:
        return False
    cell, turn, bits = source.choices(options, weights)[0]
    curve.cells.append(cell)
    curve.turns.append(turn)
    curve.settled |= curve.last
    curve.last = bits
    return True


@lru_cache(maxsize=1 << 14)
def moves(size: int, end: Cell) -> tuple[tuple[Cell, int, int], ...]:
    """The dashes from a cell that stay in the picture: where each ends, its direction and its bits."""
    dashes = []
    for turn, (dx, dy) in enumerate(DIRECTIONS):
        cell = (end[0] + dx, end[1] + dy)
        if _inside(cell, size):
            bits = dash(size, turn).bits << _at(size, cell)
            if not bits & ~drawable(size):
                dashes.append((cell, turn, bits))
    return tuple(dashes)


def _cosine(a: Cell, b: Cell) -> float:
    return (a[0] * b[0] + a[1] * b[1]) / (math.hypot(*a) * math.hypot(*b))


TURNS = [[max(0.0, _cosine(a, b)) ** 2 for b in DIRECTIONS] for a in DIRECTIONS]


def _inside(cell: Cell, size: int) -> bool:
    return all(BORDER + EDGE <= coordinate < BORDER + size - EDGE for coordinate in cell)


def _at(size: int, cell: Cell) -> int:
    """The shift that brings a stamp to a cell."""
    return (cell[1] - BORDER) * (size + 2 * BORDER) + cell[0] - BORDER


def _wide(bits: int, size: int) -> int:
    """Every pixel at most ``CLEAR`` from one of ``bits``, sideways, up, down or aslant."""
    for step in (1, size + 2 * BORDER):
        for _ in range(CLEAR):
            bits |= bits << step | bits >> step
    return bits


@lru_cache(maxsize=8)
def drawable(size: int) -> int:
    """The bits of the pixels that may have ink."""
    inner = range(BORDER + EDGE, BORDER + size - EDGE)
    return sum(1 << y * (size + 2 * BORDER) + x for x in inner for y in inner)


@lru_cache(maxsize=256)
def dash(size: int, turn: int) -> Stamp:
    """Two pixels of ink that end at the stamp's cell."""
    dx, dy = DIRECTIONS[turn]
    along = math.hypot(dx, dy)
    return _stamp(size, (-dx / along, -dy / along), THICKNESS)


@lru_cache(maxsize=8)
def disc(size: int) -> Stamp:
    """A disc around the stamp's cell."""
    return _stamp(size, (0.0, 0.0), RADIUS)


def _stamp(size: int, back: tuple[float, float], radius: float) -> Stamp:
    """The pixels within ``radius`` of the line from the cell to ``back``, sampled at four points of each pixel."""
    bits, cover = 0, {}
    for x in range(-3, 4):
        for y in range(-3, 4):
            hits = 0
            for px, py in ((x + i, y + j) for i in (-0.25, 0.25) for j in (-0.25, 0.25)):
                along = min(max(px * back[0] + py * back[1], 0.0), 1.0)
                hits += math.hypot(px - along * back[0], py - along * back[1]) <= radius
            if hits:
                cover[x, y] = hits / 4
                bits |= 1 << (y + BORDER) * (size + 2 * BORDER) + x + BORDER
    return Stamp(bits, cover)


def _render(size: int, curves: list[Curve], discs: tuple[Cell, Cell]) -> list[int]:
    """Render grey values: each pixel has the brightest of what covers it."""
    grey = [0] * size**2
    drawn = [(c, dash(size, t), CONTRAST) for curve in curves for c, t in zip(curve.cells, curve.turns, strict=True)]
    for (x, y), stamp, contrast in [*drawn, *((cell, disc(size), 1.0) for cell in discs)]:
        for (dx, dy), covered in stamp.cover.items():
            pixel = (y + dy - BORDER) * size + x + dx - BORDER
            grey[pixel] = max(grey[pixel], round(255 * contrast * covered))
    return grey
