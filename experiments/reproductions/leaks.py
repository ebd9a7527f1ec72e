"""Leaks of published packages: which laws of attention they break, by how much, in which version.

Records: records/*-reproduce-leaks.json. Again, in an environment that has the five packages (``make test-peers`` makes
``.venv-peers``): ``python -m experiments.reproductions.leaks --out out/leaks`` (half a minute; the same versions give
the same numbers).
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.reproductions import common
from experiments.reproductions.common import Budget, Claim, Reproduced, Reproduction, Row, Table
from fast_attention.conformance import AttentionUnderTest, Law, independence, robustness, third_party
from fast_attention.lab.pictures import COLOURS, GOOD
from fast_attention.lab.refusals import InputError
from fast_attention.lab.tables import digits

WIDTH, HEADS, LENGTH = 64, 4, 64
LAWS: tuple[Law, ...] = (
    independence.future, independence.past, independence.padding, independence.shorter, independence.batch,
    robustness.lengths, robustness.finite,
)  # fmt: skip
LEAKS = (LAWS[0].name, *(law.name for law in LAWS[2:5]))  # what moves an output and must not
MODULES = {
    "performer-pytorch": "performer_pytorch",
    "reformer-pytorch": "reformer_pytorch",
    "sinkhorn-transformer": "sinkhorn_transformer.sinkhorn_transformer",
    "aft-pytorch": "aft_pytorch",
    "nystrom-attention": "nystrom_attention",
}
PROMISES = {  # what a package promises: the package, whether of causal layers, and the law that holds it to that
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


# The layers


def _layer(package: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(MODULES[package]), name)


def performer(causal: bool) -> AttentionUnderTest:
    """performer-pytorch's ``SelfAttention``."""
    kind = _layer("performer-pytorch", "SelfAttention")
    make = lambda: kind(dim=WIDTH, heads=HEADS, dim_head=16, nb_features=32, causal=causal)  # noqa: E731
    return third_party(make, inputs="x", width=WIDTH, length=LENGTH, causal=causal, mask="mask")


def reformer(causal: bool) -> AttentionUnderTest:
    """reformer-pytorch's ``LSHSelfAttention``; its rotations, drawn at every call, are the same at each."""
    kind = _layer("reformer-pytorch", "LSHSelfAttention")
    make = lambda: kind(dim=WIDTH, heads=HEADS, bucket_size=8, n_hashes=4, causal=causal)  # noqa: E731
    described = third_party(make, inputs="x", width=WIDTH, length=LENGTH, causal=causal, mask="input_mask")

    def call(layer: Any, inputs: tuple[Tensor, ...], is_causal: bool, key_mask: Tensor | None) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return described.call(layer, inputs, is_causal, key_mask)

    return replace(described, call=call)


def sinkhorn(causal: bool) -> AttentionUnderTest:
    """sinkhorn-transformer's ``SinkhornSelfAttention``."""
    kind = _layer("sinkhorn-transformer", "SinkhornSelfAttention")
    make = lambda: kind(WIDTH, 16, LENGTH, heads=HEADS, causal=causal)  # noqa: E731
    return third_party(make, inputs="x", width=WIDTH, length=LENGTH, causal=causal, mask="input_mask")


def aft(name: str) -> AttentionUnderTest:
    """aft-pytorch's layers, which take neither a mask nor causality."""
    kind = _layer("aft-pytorch", name)
    return third_party(lambda: kind(max_seqlen=LENGTH, dim=WIDTH, hidden_dim=WIDTH), width=WIDTH, length=LENGTH)


def nystrom() -> AttentionUnderTest:
    """nystrom-attention's ``NystromAttention``."""
    kind = _layer("nystrom-attention", "NystromAttention")
    make = lambda: kind(dim=WIDTH, dim_head=16, heads=HEADS, num_landmarks=8)  # noqa: E731
    return third_party(make, inputs="x", width=WIDTH, length=LENGTH, mask="mask")


SUBJECTS: tuple[tuple[str, str, Callable[[], AttentionUnderTest]], ...] = (
    ("performer-pytorch", "SelfAttention(causal=True)", lambda: performer(True)),
    ("performer-pytorch", "SelfAttention()", lambda: performer(False)),
    ("reformer-pytorch", "LSHSelfAttention(causal=True)", lambda: reformer(True)),
    ("reformer-pytorch", "LSHSelfAttention()", lambda: reformer(False)),
    ("sinkhorn-transformer", "SinkhornSelfAttention(causal=True)", lambda: sinkhorn(True)),
    ("sinkhorn-transformer", "SinkhornSelfAttention()", lambda: sinkhorn(False)),
    ("aft-pytorch", "AFTFull()", lambda: aft("AFTFull")),
    ("aft-pytorch", "AFTSimple()", lambda: aft("AFTSimple")),
    ("aft-pytorch", "AFTLocal()", lambda: aft("AFTLocal")),
    ("nystrom-attention", "NystromAttention()", nystrom),
)


# Measuring


def installed(package: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def measure(budget: Budget) -> Iterator[Row]:
    """A row for each layer, with what each law found.

    Raises:
        InputError: A package is not installed; the message names all that are missing.
    """
    missing = [package for package in MODULES if installed(package) is None]
    if missing:
        raise InputError(f"needs {', '.join(missing)}: run it by .venv-peers/bin/python, which `make test-peers` makes")
    for package, layer, make in SUBJECTS:
        if not budget.has(package=package, layer=layer):
            budget.say(f"{package}: {layer}")
            yield {"package": package, "version": installed(package), "layer": layer, **judged(make)}


def judged(make: Callable[[], AttentionUnderTest]) -> Row:
    """Whether a layer is causal, and the finding of every law."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        under_test = make()
        findings = [law(under_test) for law in LAWS]
    laws = [{"law": f.law, "status": f.status, "size": f.size, "limit": f.limit, "detail": f.detail} for f in findings]
    return {"causal": under_test.causal, "laws": laws}


# What it says


def breaches(record: Reproduced) -> list[tuple[Row, Row]]:
    """The row of a layer and a law that it breaks."""
    return [(row, law) for row in record.rows for law in row["laws"] if law["status"] == "broken"]


def size(law: Row) -> str:
    """How large a breach is; a record has no infinities."""
    return "raises or not finite" if law["size"] is None else digits(law["size"])


def where(law: Row) -> str:
    """What a law changed, in the words of its code: tokens are replaced, by random ones of another size."""
    return law["detail"].replace("made", "replaced by ones")


def claims(record: Reproduced) -> list[Claim]:
    """What the packages promise."""
    return [_claim(record, words, *held) for words, held in PROMISES.items()]


def _claim(record: Reproduced, words: str, package: str, causal: bool, law: str) -> Claim:
    rows = record.of(package=package, causal=causal)
    judged = [each for row in rows for each in row["laws"] if each["law"] == law and each["status"] != "not claimed"]
    if not judged:
        return Claim(words, "it was not measured", None)
    worst = max(judged, key=lambda each: math.inf if each["size"] is None else each["size"])
    broken = worst["status"] == "broken"
    unit = f"{size(worst)} of the outputs' rms" if law in LEAKS else f"{size(worst)} rows or tensors are lost"
    at = f" ({where(worst)})" if broken and worst["detail"] else ""
    return Claim(words, f"{rows[0]['version']} {'breaks that' if broken else 'keeps it'}: {unit}{at}", not broken)


def draw(record: Reproduced) -> tuple[Figure, str]:
    """How far outputs move that must not, by layer: a group of bars for each law."""
    figure, (axes,) = common.figure(4.6)
    high = 0.8 / len(LEAKS)
    for number, name in enumerate(LEAKS):
        for at, row in enumerate(record.rows):
            law = next(each for each in row["laws"] if each["law"] == name)
            if law["status"] != "not claimed":
                value = 1e2 if law["size"] is None else max(law["size"], 1e-9)
                place, broken = at + (number - (len(LEAKS) - 1) / 2) * high, law["status"] == "broken"
                axes.barh(place, value, high, color=COLOURS[number] if broken else GOOD, alpha=1.0 if broken else 0.35)
        axes.barh(0, 0, color=COLOURS[number], label=name)
    axes.barh(0, 0, color=GOOD, alpha=0.35, label="kept")
    axes.axvline(1e-4, color=COLOURS[-1], linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yticks(range(len(record.rows)), [f"{row['package']}\n{row['layer']}" for row in record.rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("largest move of an output, relative to their rms; dotted: what rounding explains")
    axes.grid(axis="x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure, f"Size of {len(breaches(record))} breaches in {len(record.rows)} layers of {len(MODULES)} packages."


def tables(record: Reproduced) -> list[Table]:
    """Every breach, and a map of layers and laws."""
    rows = [
        [f"{row['package']} {row['version']}", row["layer"], law["law"], size(law), where(law)]
        for row, law in breaches(record)
    ]
    grid = [
        [
            f"{row['package']} {row['version']}: {row['layer']}",
            *(f"**{each['status']}**" if each["status"] == "kept" else each["status"] for each in row["laws"]),
        ]
        for row in record.rows
    ]
    heads = ["layer", "law", "size", "where"]
    return [
        *(
            Table(f"{package}: what is broken, and how far", heads, [row for own, *row in rows if own == package])
            for package in dict.fromkeys(row[0] for row in rows)
        ),
        Table("All laws", ["", *(law.name for law in LAWS)], grid),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    return [
        "performer-pytorch takes the maximum for its exponentials over all tokens, later and masked ones too. It "
        "zeroes masked keys in the values only.",
        "reformer-pytorch sorts the whole sequence by bucket and cuts it into chunks. A later token moves every border "
        "behind it. Masking later positions does not undo that.",
        "nystrom-attention scales its iterative inverse by a maximum over the whole batch.",
        "aft-pytorch exponentiates keys without taking a maximum away.",
        "Sizes are of an output's move over the outputs' rms. For lengths and large inputs they are counts.",
        "sinkhorn-transformer averages blocks, masked tokens included. Its causal layer keeps the law of the future.",
        "Inputs and weights are random. A leak there is a leak; its size in a trained model is another.",
        "A law replaces tokens that an output must not depend on. To each a random token is added, and the sum is "
        "multiplied by 6, -6, 60 or 10,000. The outputs before and after are compared. The laws and their limits are "
        "on the page [laws](../laws.md).",
    ]


REPRODUCTION = Reproduction(
    "leaks", "Leaks of published packages: future, padding, neighbours in a batch",
    "packages of arXiv 2009.14794, 2001.04451, 2002.11296, 2105.14103, 2102.03902", minutes=3, seeds=0,
    measure=measure, claims=claims, draw=draw, tables=tables, why=why, source="the packages",
)  # fmt: skip

if __name__ == "__main__":
    common.start(REPRODUCTION)
