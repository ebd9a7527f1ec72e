"""Draws the pictures: what each mechanism attends to, and what the newest records say of time and learning."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

import matplotlib
import measured
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from fast_attention import Attention, Bound, Mixer, Shape, attention_rows, catalogue
from fast_attention.lab.drawing import COLOURS, GOOD, GRID, INK, PALE, STYLE, attention_map, svg

# What a mechanism attends to, on the same seeded tokens for all

TOKENS, WIDTH = 64, 16
REPEATED = (range(8, 20), range(40, 52))  # the second says what the first said
DRAWN = {  # settings whose pattern fits into 64 tokens; all others are drawn with their defaults
    "Local": "Local(window=6)",
    "BlockLocal": "BlockLocal(block_size=8)",
    "Local2d": "Local2d(height=8, width=8, window=3)",
    "BlockLocal2d": "BlockLocal2d(height=8, width=8, block_size=4)",
    "BigBird": "BigBird(block_size=4, num_random_blocks=2)",
    "Selected": "Selected(block_size=4, topk=4)",
    "LSH": "LSH(bucket_size=8)",
    "Sinkhorn": "Sinkhorn(block_size=8)",
    "SortCut": "SortCut(block_size=8)",
    "Linformer": "Linformer(rank=16)",
    "Nystrom": "Nystrom(num_landmarks=8)",
    "AFTLocal": "AFTLocal(window=8)",
    "Hybrid": "Hybrid(near=BlockLocal(block_size=4))",
    "ByLength": "ByLength(long=Local(window=6), above=24)",
    "Adapted": "Adapted(mechanism=Local(window=6))",
}


def value(name: str) -> Attention[Any, Any] | Mixer[Any, Any]:
    """The mechanism as it is drawn."""
    return catalogue.parse(DRAWN.get(name, name))


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
    modes = [("causal" if is_causal else "not causal", is_causal) for is_causal in mechanism.traits.modes]

    def moves(is_causal: bool) -> Tensor:
        jacobian: Any = torch.autograd.functional.jacobian(lambda x: bound(x, is_causal=is_causal)[0], q[0])
        size = jacobian[:, :, 0].square().sum((1, 3)).sqrt()
        return size / size.sum(-1, keepdim=True).clamp_min(1e-30)

    def rows(is_causal: bool) -> Tensor:
        if mechanism.traits.matrix:
            return attention_rows(mechanism, q, k, bound.w, queries=range(TOKENS), is_causal=is_causal)[0, 0]
        v = torch.zeros_like(k).requires_grad_()
        out = bound(q, k, v, is_causal=is_causal)
        each = [torch.autograd.grad(out[0, 0, i].sum(), v, retain_graph=True)[0][0, 0] for i in range(TOKENS)]
        return torch.stack(each).mean(-1).detach()

    if isinstance(mechanism, Mixer):
        return [(title, moves(mode)) for title, mode in modes], "how far each output moves with each input"
    words = "the weight of each key for each query"
    words += "" if mechanism.traits.matrix else ", the mean over channels, each of which has weights of its own"
    exact = [("exact attention", attention_rows("Softmax", q, k, queries=range(TOKENS))[0, 0])] * (name != "Softmax")
    return exact + [(title, rows(mode)) for title, mode in modes], words


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
        + " Learned weights are as they are drawn at first, untrained." * value(name).traits.learned
    )
    return picture, alt, caption


# What the records say

Line = dict[float, float]
SHOWN = ("FavorPlus()", "BigBird()", "Linformer()", "Local()", "LinearAttention()", "AFTSimple()")


def times(bench: measured.Record) -> str:
    """Time of a forward pass against length, exact attention and a mechanism of each kind, as SVG."""
    timed = [cell for cell in bench.held["cells"] if cell["forward_ratio"]]
    exact = {cell["length"]: cell["forward_ms"] for cell in timed if cell["mechanism"] == "exact attention"}
    lines: dict[str, Line] = {"exact attention": exact}
    for name in SHOWN:
        own = [cell for cell in timed if cell["mechanism"] == name]
        lines[name] = {cell["length"]: cell["forward_ratio"] * exact[cell["length"]] for cell in own}
    longest, meta = max(exact), bench.meta
    labels = {name: f"{name} {exact[longest] / line[longest]:.0f}x" for name, line in lines.items() if name in SHOWN}
    told = "; ".join(f"{name} {line[longest]:,.0f}" for name, line in lines.items())
    title = f"milliseconds, forward, {meta['heads']} heads of {meta['head_dim']}, {meta['dtype']}, {bench.machine}"
    alt = f"Milliseconds of a forward pass against tokens. At {longest:,} tokens: {told}."
    return _curves(lines, labels, f"{title}; {bench.date}", "tokens", alt, apart=1.5, logarithmic=True)


def learned(*studies: measured.Record) -> str:
    """Bits per byte against minutes of training, all of the first study and ``WKV()`` of the second, as SVG."""
    lines, labels = dict[str, Line](), dict[str, str]()
    for study in studies:
        for name in measured.learned(study) if study is studies[0] else ("WKV()",):
            results = [row for row in study.held["results"] if row["mechanism"] == name]
            curves = [{step: (seconds / 60, bits) for step, seconds, bits in row["curve"]} for row in results]
            shared = sorted(set.intersection(*map(set, curves)))[1:]  # an untrained model is off the scale
            points = [[curve[step] for curve in curves] for step in shared]
            points.append([(row["curve"][-1][1] / 60, row["curve"][-1][2]) for row in results])
            lines[name] = {fmean(x for x, _ in each): fmean(y for _, y in each) for each in points}
            label = {measured.EXACT: "exact attention", measured.ALONE: "no mixing"}.get(name, name)
            steps = round(fmean(row["steps"] for row in results))
            labels[name] = f"{label}: {points[-1] and [*lines[name].values()][-1]:.2f}, {steps:,} steps"
    lines = dict(sorted(lines.items(), key=lambda line: -[*line[1].values()][-1]))
    meta = studies[0].meta
    title = (
        f"bits per byte of unseen text, lower is better; {meta['task']}, {meta['model']['layers']} layers of "
        f"{meta['model']['width']}, {studies[0].machine}; {', '.join(study.date for study in studies)}"
    )
    alt = f"Bits per byte after {measured.budget(studies[0])}: {'; '.join(labels[name] for name in lines)}."
    return _curves(lines, labels, title, "minutes of training, the same for all", alt, apart=1.02)


def _curves(
    lines: dict[str, Line], labels: dict[str, str], title: str, across: str, alt: str, *, apart: float,
    logarithmic: bool = False,
) -> str:  # fmt: skip
    """Lines with their names at their ends, each a factor below the one before, exact attention in ink."""
    colours, longest = iter(COLOURS), max(max(line) for line in lines.values())
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained", facecolor="white")
        axes, above = figure.subplots(), math.inf
        if logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks([*next(iter(lines.values()))], [f"{x:,}" for x in next(iter(lines.values()))])
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.minorticks_off()
        for name, line in sorted(lines.items(), key=lambda item: -[*item[1].values()][-1]):
            exact = name in ("exact attention", measured.EXACT)
            colour = INK if exact else next(colours)
            axes.plot([*line], [*line.values()], color=colour, linewidth=2.4 if exact else 1.6)
            above = min([*line.values()][-1], above / apart)
            beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
            axes.annotate(labels.get(name, name).replace(", far", ",\n  far"), (longest, above), color=colour, **beside)
        axes.margins(x=0.02)
        axes.grid(color=GRID, linewidth=0.5)
        axes.set_xlabel(across)
        axes.set_title(title, fontweight="normal")
        return svg(figure, alt)


def by_length(bench: measured.Record) -> str:
    """A table of colours: how many times exact attention's speed each mechanism has at each length, as SVG."""
    rows = [row for row in measured.bench_speeds(bench) if not row.training and not row.is_causal]
    gains = {(row.expression, row.length): row.gain for row in rows}
    columns = sorted({row.length for row in rows})
    names = sorted({row.expression for row in rows}, key=lambda name: -gains.get((name, columns[-2]), 0.0))
    best = max(gains, key=lambda case: gains[case])
    alt = (
        f"Exact attention's time over that of {len(names)} mechanisms at {columns[0]:,} to {columns[-1]:,} tokens. "
        f"The largest gain is {gains[best]:.0f}x, of {best[0]} at {best[1]:,} tokens."
    )
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 0.27 * len(names) + 0.7), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for (name, length), gain in gains.items():
            x, y, strength = columns.index(length), names.index(name), min(abs(math.log2(gain)) / 5, 1.0)
            colour = {"color": GOOD if gain > 1 else PALE, "alpha": 0.12 + 0.7 * strength, "linewidth": 0}
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **colour))
            axes.text(x, y, measured.times(gain)[:-1], ha="center", va="center", color=INK)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xticks(range(len(columns)), [f"{length:,}" for length in columns])
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.spines[:].set_visible(False)
        return svg(figure, alt)


PICTURES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {  # file in docs/ -> its drawing, kinds of records
    "times.svg": (times, ("bench",)),
    "learned.svg": (learned, ("study-byte-lm", "study-byte-lm-learned")),
    "choose-lengths.svg": (by_length, ("bench",)),
}
