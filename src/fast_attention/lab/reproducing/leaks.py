"""Leaks of published packages: which laws of attention they break, by how much, in which version.

The packages are in an environment of their own, that of ``make test-peers``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

from matplotlib.figure import Figure

from fast_attention.lab import hover
from fast_attention.lab.drawing import COLOURS, GOOD, figure_grid, labelled, picture
from fast_attention.lab.inputs import InputError
from fast_attention.lab.numbers import digits
from fast_attention.lab.reproducing import packages
from fast_attention.lab.reproducing.packages import LAWS, MODULES, SUBJECTS, Subject
from fast_attention.lab.reproducing.reproduction import Budget, Claim, Published, Reproduced, Reproduction, Row
from fast_attention.lab.tables import Table, Value

ENVIRONMENT = "make test-peers"
LEAKS = (LAWS[0].name, *(law.name for law in LAWS[2:5]))  # what moves an output and must not
CLAIMS = {  # what a package promises, and the subjects and laws that hold it to that
    "a causal performer-pytorch does not see the future": ("performer-pytorch", True, LAWS[0].name),
    "a causal reformer-pytorch does not see the future": ("reformer-pytorch", True, LAWS[0].name),
    "a causal sinkhorn-transformer does not see the future": ("sinkhorn-transformer", True, LAWS[0].name),
    "masked tokens move nothing in performer-pytorch": ("performer-pytorch", False, LAWS[2].name),
    "masked tokens move nothing in reformer-pytorch": ("reformer-pytorch", False, LAWS[2].name),
    "masked tokens move nothing in sinkhorn-transformer": ("sinkhorn-transformer", False, LAWS[2].name),
    "masked tokens move nothing in nystrom-attention": ("nystrom-attention", False, LAWS[2].name),
    "one sequence does not move another in nystrom-attention": ("nystrom-attention", False, LAWS[4].name),
    "aft-pytorch is finite": ("aft-pytorch", False, LAWS[6].name),
}


def run(budget: Budget) -> Iterator[Row]:
    """A row for each law of each layer.

    Raises:
        InputError: A package is not installed; the message names all that are missing.
    """
    missing = [package for package in MODULES if packages.installed(package) is None]
    if missing:
        raise InputError(
            f"reproduce leaks needs {', '.join(missing)}: {ENVIRONMENT} installs what it measures into .venv-peers, "
            "whose fast-attention has this command too"
        )
    for subject in SUBJECTS:
        if not budget.has(package=subject.package, layer=subject.name):
            budget.watch(f"{subject.package}: {subject.name}")
            yield _row(subject)


def _row(subject: Subject) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        under_test = subject.make()
        findings = [law(under_test) for law in LAWS]
    laws = [{"law": f.law, "status": f.status, "size": f.size, "limit": f.limit, "detail": f.detail} for f in findings]
    held = {"package": subject.package, "version": packages.installed(subject.package), "layer": subject.name}
    return {**held, "causal": under_test.causal, "laws": laws}


def breaches(record: Reproduced) -> list[tuple[Row, Row]]:
    """The row of a layer and a law that it breaks."""
    return [(row, law) for row in record.rows for law in row["laws"] if law["status"] == "broken"]


def size(law: Row) -> str:
    """How large a breach is; a record has no infinities."""
    return "raises or not finite" if law["size"] is None else digits(law["size"])


def claims(record: Reproduced) -> list[Claim]:
    """What the packages promise."""
    return [_claim(record, words, *held) for words, held in CLAIMS.items()]


def _claim(record: Reproduced, words: str, package: str, causal: bool, law: str) -> Claim:
    rows = [row for row in record.of(package=package) if row["causal"] == causal]
    judged = [each for row in rows for each in row["laws"] if each["law"] == law and each["status"] != "not claimed"]
    if not judged:
        return Claim(words, "it was not measured", None)
    worst = max(judged, key=lambda each: math.inf if each["size"] is None else each["size"])
    broken = worst["status"] == "broken"
    unit = f"{size(worst)} of the outputs' rms" if law in LEAKS else f"{size(worst)} rows or tensors are lost"
    where = f" ({worst['detail']})" if broken and worst["detail"] else ""
    ours = f"{rows[0]['version']} {'breaks that' if broken else 'keeps it'}: {unit}{where}"
    return Claim(words, ours, not broken)


@picture
def drawing(record: Reproduced) -> tuple[Figure, str]:
    """How far outputs move that must not, by layer: a group of bars for each law."""
    figure, (axes,) = figure_grid(4.6)
    labels = [f"{row['package']}\n{row['layer']}" for row in record.rows]
    high = 0.8 / len(LEAKS)
    for number, name in enumerate(LEAKS):
        for at, row in enumerate(record.rows):
            law = next(each for each in row["laws"] if each["law"] == name)
            if law["status"] != "not claimed":
                value = 1e2 if law["size"] is None else max(law["size"], 1e-9)
                height = at + (number - (len(LEAKS) - 1) / 2) * high
                colour = COLOURS[number] if law["status"] == "broken" else GOOD
                axes.barh(height, value, high, color=colour, alpha=1.0 if law["status"] == "broken" else 0.35)
                text = f"{row['package']} {row['layer']}: {name}, {size(law)}"
                hover.box(axes, 1e-9, height - high / 2, value, height + high / 2, text)
        axes.barh(0, 0, color=COLOURS[number], label=name)
    axes.barh(0, 0, color=GOOD, alpha=0.35, label="kept")
    axes.axvline(1e-4, color=COLOURS[-1], linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    labelled(axes, "largest move of an output, relative to their rms; dotted: what rounding explains", "", grid="x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure, f"Size of {len(breaches(record))} breaches in {len(record.rows)} layers of {len(MODULES)} packages."


def tables(record: Reproduced) -> list[Table]:
    """Every breach, and a map of layers and laws."""
    rows = [
        [f"{row['package']} {row['version']}", row["layer"], law["law"], size(law), Value(law["detail"], "words")]
        for row, law in breaches(record)
    ]
    kinds = {"kept": "fast", "broken": "broken", "not claimed": "pale"}
    grid = [
        [
            f"{row['package']} {row['version']}: {row['layer']}",
            *(Value(each["status"], kinds[each["status"]], title=each["detail"]) for each in row["laws"]),
        ]
        for row in record.rows
    ]
    heads = ["package", "layer", "law", "size", "where"]
    return [
        Table(heads, rows, left=(1, 2, 4), title="What is broken, and how far; for lengths and large inputs a count"),
        Table(["", *(law.name for law in LAWS)], grid, title="All laws"),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    return [
        "performer-pytorch takes the maximum for its exponentials over all tokens, later ones and masked ones too; "
        "masked keys are zeroed in the values only.",
        "reformer-pytorch sorts the whole sequence by bucket and cuts it into chunks: a later token moves every border "
        "behind it. Masking later positions does not undo that.",
        "nystrom-attention scales its iterative inverse by a maximum over the whole batch.",
        "aft-pytorch exponentiates keys without taking a maximum away.",
        "sinkhorn-transformer averages blocks, masked tokens included. Its causal layer keeps the law of the future.",
        "Sizes are of random inputs and weights, with tokens replaced by ones 6 and 60 times as large: a leak there is "
        "a leak, its size in a trained model is another. The laws and their limits are on the page of laws.",
    ]


LEAKING = Reproduction(
    name="leaks",
    title="Leaks of published packages: future, padding, neighbours in a batch",
    paper="packages of arXiv 2009.14794, 2001.04451, 2002.11296, 2105.14103, 2102.03902",
    minutes=3,
    seeds=0,
    published=tuple(Published(held[0], words, "promised") for words, held in CLAIMS.items()),
    run=run,
    claims=claims,
    drawing=drawing,
    tables=tables,
    why=why,
    source="the packages",
)
