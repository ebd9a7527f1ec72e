"""Shows attention maps as a page."""

from __future__ import annotations

import statistics

from fast_attention.lab import pages
from fast_attention.lab.maps import drawings
from fast_attention.lab.maps.heads import Head, Maps
from fast_attention.lab.pages import Figure, Section, Words

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


def html(record: Maps) -> str:
    """The page."""
    meta, layers = record.meta, record.layers
    facts = {
        "Model": meta["model"],
        "Read": meta["read"],
        "Before": meta["before"],
        "After": meta["after"],
        "Rows drawn": ", ".join(f"{query:,}" for query in meta["rows"]) or "none",
    }
    nearest, farthest = (choose(record.heads, key=lambda head: head.distance) for choose in (min, max))
    lead = (
        f"The median head is {record.median:.2f} apart; nearest {_named(nearest)}, farthest {_named(farthest)}. On "
        f"the same queries and keys the median is {statistics.median(head.own_distance for head in record.heads):.2f}."
    )
    overview = Figure(drawings.overview(layers), "The distance of every head.")
    sections = [
        pages.run(meta, facts),
        Section("How far apart", [Words(lead, "lead"), Words(_MEANING), overview]),
    ]
    for heads in layers:
        picture = drawings.layer(heads, meta["tokens"], meta["rows"], (meta["before"], meta["after"]))
        sections.append(Section(heads[0].layer, [Figure(picture, _READING)]))
    return pages.page("maps", [*sections, pages.again(meta, record.data)])


def _named(head: Head) -> str:
    return f"{head.layer} head {head.head} ({head.distance:.2f})"
