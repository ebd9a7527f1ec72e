"""Draws the pictures: what each mechanism attends to, and what the newest records say of time and learning."""

from __future__ import annotations

import functools
import math
from statistics import fmean
from typing import Any

import matplotlib
import measured
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fast_attention import Attention, Bound, Mixer, Shape, attention_rows, catalogue
from fast_attention.lab.drawing import COLOURS, GRID, INK, STYLE, attention_map, svg

# What a mechanism attends to, on the same seeded tokens for all

TOKENS, WIDTH = 64, 16
REPEATED = (range(8, 20), range(40, 52))  # the second says what the first said
DRAWN = (  # settings whose pattern fits into 64 tokens; all others are drawn with their defaults
    "Local(window=6)", "BlockLocal(block_size=8)", "Local2d(height=8, width=8, window=3)",
    "BlockLocal2d(height=8, width=8, block_size=4)", "BigBird(block_size=4, num_random_blocks=2)",
    "Selected(block_size=4, topk=4)", "LSH(bucket_size=8)", "Sinkhorn(block_size=8)", "SortCut(block_size=8)",
    "Linformer(rank=16)", "Nystrom(num_landmarks=8)", "AFTLocal(window=8)", "Hybrid(near=BlockLocal(block_size=4))",
    "ByLength(long=Local(window=6), above=24)", "Adapted(mechanism=Local(window=6))",
)  # fmt: skip


def value(name: str) -> Attention[Any, Any] | Mixer[Any, Any]:
    """The mechanism as it is drawn."""
    return catalogue.parse(next((each for each in DRAWN if each.startswith(f"{name}(")), name))


def tokens() -> tuple[Tensor, Tensor]:
    """Queries and keys (1, 1, 64, 16): slowly changing, so that neighbours are alike, and one passage said twice."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    for i in range(1, TOKENS):
        x[i] = 0.75 * x[i - 1] + (1 - 0.75**2) ** 0.5 * x[i]
    x[list(REPEATED[1])] = x[list(REPEATED[0])]
    q, k = (1.1 * x + 0.3 * torch.randn_like(x) for _ in range(2))
    return q[None, None], k[None, None]


def panels(name: str) -> tuple[list[tuple[str, Tensor]], str]:
    """The matrices of a mechanism's picture with their titles, and what is drawn in them."""
    mechanism, (q, k) = value(name), tokens()
    torch.manual_seed(0)
    bound: Any = Bound(mechanism, Shape(1, WIDTH, TOKENS))

    def weights(is_causal: bool) -> Tensor:
        if mechanism.traits.matrix and isinstance(mechanism, Attention):
            return attention_rows(mechanism, q, k, bound.w, queries=range(TOKENS), is_causal=is_causal)[0, 0]
        if isinstance(mechanism, Mixer):  # (tokens, width, tokens, width)
            jacobian: Any = torch.autograd.functional.jacobian(
                lambda x: bound(x[None], is_causal=is_causal)[0], q[0, 0]
            )
            size = jacobian.square().sum((1, 3)).sqrt()
            return size / size.sum(-1, keepdim=True).clamp_min(1e-30)
        v = torch.zeros_like(k).requires_grad_()
        out = bound(q, k, v, is_causal=is_causal)
        rows = [torch.autograd.grad(out[0, 0, i].sum(), v, retain_graph=True)[0][0, 0] for i in range(TOKENS)]
        return torch.stack(rows).mean(-1).detach()

    words = "the weight of each key for each query"
    words += "" if mechanism.traits.matrix else ", the mean over channels, each of which has weights of its own"
    words = "how far each output moves with each input" if isinstance(mechanism, Mixer) else words
    exact = attention_rows("Softmax", q, k, queries=range(TOKENS))[0, 0]
    beside = [("exact attention", exact)] if isinstance(mechanism, Attention) and name != "Softmax" else []
    return beside + [("causal" if mode else "not causal", weights(mode)) for mode in mechanism.traits.modes], words


@functools.cache
def pattern(name: str) -> tuple[str, str, str]:
    """The picture of a mechanism's pattern as SVG, its alternative text, and the words under it."""
    parts, words = panels(name)
    alt = f"{name}: {words}, {TOKENS} tokens; panels: {', '.join(title for title, _ in parts)}."
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(2.7 * len(parts), 2.95), layout="constrained", facecolor="white")
        for axes, (title, matrix) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            attention_map(axes, matrix, float(matrix.max()))
            axes.set_title(title, color=INK, fontweight="normal")
            axes.set_xlabel("keys" if "weight" in words else "inputs")
            axes.set_ylabel("queries" if "weight" in words else "outputs")
        picture = svg(figure, alt)
    passages = " and ".join(f"{each.start} to {each.stop - 1}" for each in REPEATED)
    caption = (
        f"`{value(name)!r}` on {TOKENS} seeded tokens that change slowly, {passages} being the same passage: {words}, "
        "brighter is more, on a square-root scale of each panel."
        + " Learned weights are as they are drawn at first, untrained."
        * value(name).traits.learned
    )
    return picture, alt, caption


# What the records say

Line = dict[float, float]
SHOWN = ("FavorPlus()", "BigBird()", "Linformer()", "Local()", "LinearAttention()", "AFTSimple()")


def times(bench: measured.Record) -> str:
    """Time of a forward pass against length, exact attention and a mechanism of each kind, as SVG."""
    lines: dict[str, Line] = {"exact attention": {}}
    for cell in bench.held["cells"]:
        if cell["forward_ratio"] and cell["mechanism"] in ("exact attention", *SHOWN):
            exact = lines["exact attention"].get(cell["length"], cell["forward_ms"])
            lines.setdefault(cell["mechanism"], {})[cell["length"]] = cell["forward_ratio"] * exact
    longest, meta, exact = max(lines["exact attention"]), bench.meta, [*lines["exact attention"].values()][-1]
    labels = {name: f"{name} {exact / line[longest]:.0f}x".removesuffix(" 1x") for name, line in lines.items()}
    told = "; ".join(f"{name} {line[longest]:,.0f}" for name, line in lines.items())
    title = f"milliseconds, forward, {meta['heads']} heads of {meta['head_dim']}, {meta['dtype']}, {bench.machine}"
    alt = f"Milliseconds of a forward pass against tokens. At {longest:,} tokens: {told}."
    return _curves(lines, labels, f"{title}; {bench.name[:10]}", "tokens", alt, apart=1.5)


def learned(*studies: measured.Record) -> str:
    """Bits per byte against minutes of training, all of the first study and ``WKV()`` of the second, as SVG."""
    lines, labels, meta = dict[str, Line](), dict[str, str](), studies[0].meta
    for study in studies:
        for name in measured.learned(study) if study is studies[0] else ("WKV()",):
            runs = [row for row in study.held["results"] if row["mechanism"] == name]
            curves = [{step: (seconds / 60, bits) for step, seconds, bits in row["curve"]} for row in runs]
            shared = sorted(set.intersection(*map(set, curves)))[1:]  # an untrained model is off the scale
            points = [[curve[step] for curve in curves] for step in shared] + [[c[max(c)] for c in curves]]
            lines[name] = {fmean(x for x, _ in each): fmean(y for _, y in each) for each in points}
            label = {measured.EXACT: "exact attention", measured.ALONE: "no mixing"}.get(name, name)
            end, steps = fmean(y for _, y in points[-1]), fmean(row["steps"] for row in runs)
            labels[name] = f"{label}: {end:.2f}, {steps:,.0f} steps"
    title = f"bits per byte of unseen text, lower is better; {meta['task']}, {meta['model']['layers']} layers of "
    title += f"{meta['model']['width']}, {studies[0].machine}; {', '.join(study.name[:10] for study in studies)}"
    alt = f"Bits per byte after {measured.budget(studies[0])}: {'; '.join(labels.values())}."
    return _curves(lines, labels, title, "minutes of training, the same for all", alt, apart=1.02)


def _curves(lines: dict[str, Line], labels: dict[str, str], title: str, across: str, alt: str, *, apart: float) -> str:
    """Lines with their labels at their ends, each a factor below the one before; of tokens on logarithmic scales."""
    colours, longest, above = iter(COLOURS), max(max(line) for line in lines.values()), math.inf
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained", facecolor="white")
        axes = figure.subplots()
        if across == "tokens":
            axes.loglog(base=2)
            axes.set_xticks(ticks := [*lines["exact attention"]], [f"{x:,}" for x in ticks])
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.minorticks_off()
        for name, line in sorted(lines.items(), key=lambda item: -[*item[1].values()][-1]):
            exact = name in ("exact attention", measured.EXACT)
            colour, above = INK if exact else next(colours), min([*line.values()][-1], above / apart)
            axes.plot([*line], [*line.values()], color=colour, linewidth=2.4 if exact else 1.6)
            beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
            axes.annotate(labels[name].replace(", far", ",\n  far"), (longest, above), color=colour, **beside)
        axes.margins(x=0.02)
        axes.grid(color=GRID, linewidth=0.5)
        axes.set_xlabel(across)
        axes.set_title(title, fontweight="normal")
        return svg(figure, alt)


PICTURES: dict[str, tuple[Any, ...]] = {  # a file in docs/ -> its drawing, and the kinds of its records
    "times.svg": (times, "bench"),
    "learned.svg": (learned, "study-byte-lm", "study-byte-lm-learned"),
}
