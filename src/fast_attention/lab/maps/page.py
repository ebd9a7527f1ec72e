"""Shows attention maps as a page."""

from __future__ import annotations

import itertools
import statistics

from fast_attention.lab import pages
from fast_attention.lab.maps import drawings
from fast_attention.lab.maps.heads import Head, Maps
from fast_attention.lab.numbers import Number, count, exactly
from fast_attention.lab.pages import Figure, Folded, Section, Words
from fast_attention.lab.tables import Table

MOST = 96  # heads that are drawn, so that the page stays small

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
    every = Folded("Every head's distance and its rows' largest weights", _heads(record))
    sections = [Section("How far apart", [Words(lead, "lead"), Words(_MEANING), overview, every])]
    drawn = list(itertools.takewhile(lambda i: sum(map(len, layers[: i + 1])) <= MOST or not i, range(len(layers))))
    for heads in (layers[i] for i in drawn):
        picture = drawings.layer(heads, meta["tokens"], meta["rows"], (meta["before"], meta["after"]))
        sections.append(Section(heads[0].layer, [Figure(picture, _READING)]))
    if left := layers[len(drawn) :]:
        words = f"{len(left)} more layers, from {left[0][0].layer} on, are in the tables; --layers draws others."
        sections.append(Section("Layers that are not drawn", [Words(words)]))
    intro = [pages.where(meta, f"{meta['model']} reading {meta['read']}: {meta['before']} beside {meta['after']}")]
    return pages.page("maps", [*sections, pages.run(meta, facts), pages.again(meta, record.data)], intro)


def _heads(record: Maps) -> Table:
    """The numbers of the pictures: a row for each head."""
    rows, tokens = record.meta["rows"], record.meta["tokens"]
    columns = [f"query {query:,} {when}" for query in rows for when in ("before", "after")]
    heads = ["layer", "head", "distance", "on the same queries and keys", *columns]
    return Table(heads, (_row(head, tokens) for head in record.heads))


def _row(head: Head, tokens: int) -> list[str]:
    pairs = zip(head.original_curves, head.swapped_curves, strict=True)
    peaks = [Number(drawings.peak(curve, tokens), max(curve)) for pair in pairs for curve in pair]
    apart = [Number(exactly(value), value) for value in (head.distance, head.own_distance)]
    return [head.layer, count(head.head), *apart, *peaks]


def _named(head: Head) -> str:
    return f"{head.layer} head {head.head} ({head.distance:.2f})"
