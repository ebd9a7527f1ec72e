"""What the maps leave behind: the numbers and the page."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fast_attention import files
from fast_attention.lab import pages
from fast_attention.lab.maps import drawings
from fast_attention.lab.maps.heads import Head
from fast_attention.lab.pages import Figure, Section, Words
from fast_attention.lab.records import plain, sealed

_MEANING = (
    "A head's distance is the mean, over evenly sampled queries, of half the sum of absolute differences of two rows "
    "of attention weights: 0 where they are equal, 1 where two distributions have nothing in common (more is possible "
    "where weights are negative or do not add up to one). On the right both attend with the original's queries and "
    "keys, so that only the mechanism differs; on the left the swapped model runs by itself, and each layer reads what "
    "the layers below made of it."
)
_READING = (
    "Rows are sampled queries, columns blocks of keys, brightness the weight on a block (square root; one scale for a "
    "head; negative weights shown as 0). Below, the chosen rows: solid before, dashed after."
)


def save(meta: dict[str, Any], layers: list[list[Head]], folder: Path) -> Path:
    """Write maps.html and maps.json into ``folder``, each whole or not at all; the page's path."""
    files.write(folder / "maps.json", as_json(meta, layers) + "\n")
    files.write(folder / "maps.html", html(meta, layers))
    return folder / "maps.html"


def as_json(meta: dict[str, Any], layers: list[list[Head]]) -> str:
    """The record ``{"meta": ..., "median_distance": ..., "heads": [...]}``, weights to four digits."""
    heads = [_rounded(plain(asdict(head))) for heads in layers for head in heads]
    return sealed("maps", {"meta": meta, "median_distance": median(layers), "heads": heads}, indent=None)


def median(layers: list[list[Head]]) -> float:
    """Of all heads' distances in the swapped model."""
    return statistics.median(head.distance for heads in layers for head in heads)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def html(meta: dict[str, Any], layers: list[list[Head]]) -> str:
    """The page."""
    facts = {
        "Model": meta["model"],
        "Read": meta["read"],
        "Before": meta["before"],
        "After": meta["after"],
        "Rows drawn": ", ".join(f"{place:,}" for place in meta["rows"]) or "none",
    }
    apart = [head for heads in layers for head in heads]
    nearest, farthest = (choose(apart, key=lambda head: head.distance) for choose in (min, max))
    lead = (
        f"The median head is {median(layers):.2f} apart; nearest {_named(nearest)}, farthest {_named(farthest)}. On "
        f"the same queries and keys the median is {statistics.median(head.own_distance for head in apart):.2f}."
    )
    overview = Figure(drawings.overview(layers), "The distance of every head.")
    sections = [
        pages.run(meta, facts),
        Section("How far apart", [Words(lead, "lead"), Words(_MEANING), overview]),
    ]
    for heads in layers:
        picture = drawings.layer(heads, meta["tokens"], meta["rows"], (meta["before"], meta["after"]))
        sections.append(Section(heads[0].layer, [Figure(picture, _READING)]))
    return pages.page("maps", [*sections, pages.again(meta, "maps.json")])


def _named(head: Head) -> str:
    return f"{head.layer} head {head.head} ({head.distance:.2f})"
