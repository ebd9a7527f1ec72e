"""Draws the pictures: what each mechanism attends to, and what the newest records say of time and learning."""

from __future__ import annotations

import functools
import math
from typing import Any

import matplotlib
import matplotlib.colors
import measured
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fast_attention import Attention, Bound, Mixer, Shape, attention_rows, catalogue
from fast_attention.lab.pictures import COLOURS, DARK, GRID, INK, STYLE, Picture, svg

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
            moves = functools.partial(bound, is_causal=is_causal)
            jacobian: Any = torch.autograd.functional.jacobian(lambda x: moves(x[None])[0], q[0, 0])
            size = jacobian.square().sum((1, 3)).sqrt()
            return size / size.sum(-1, keepdim=True).clamp_min(1e-30)
        v = torch.zeros_like(k).requires_grad_()
        out = bound(q, k, v, is_causal=is_causal)
        rows = [torch.autograd.grad(out[0, 0, i].sum(), v, retain_graph=True)[0][0, 0] for i in range(TOKENS)]
        return torch.stack(rows).mean(-1).detach()

    words = "the weight of each key for each query" + ", the mean over channels" * (not mechanism.traits.matrix)
    words = "how far each output moves with each input" if isinstance(mechanism, Mixer) else words
    exact = attention_rows("Softmax", q, k, queries=range(TOKENS))[0, 0]
    beside = [("exact attention", exact)] if isinstance(mechanism, Attention) and name != "Softmax" else []
    return beside + [("causal" if mode else "not causal", weights(mode)) for mode in mechanism.traits.modes], words


def attention_map(axes: Axes, matrix: Any, top: float) -> None:
    """An attention matrix on a square-root scale up to ``top``, negative weights shown as 0."""
    weights = np.clip(np.nan_to_num(np.asarray(matrix)), 0.0, None)
    norm = matplotlib.colors.PowerNorm(0.5, 0.0, max(top, 1e-9), clip=True)
    axes.imshow(weights, cmap=matplotlib.colormaps["magma"].resampled(64), norm=norm, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])


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
    passages = "Tokens " + " and ".join(f"{each.start} to {each.stop - 1}" for each in REPEATED)
    caption = (
        f"`{value(name)!r}` on {TOKENS} seeded tokens that change slowly. {passages} are the same passage. Drawn is "
        f"{words}. Brighter is more, on a square-root scale of each panel. Learned weights are untrained."
    )
    return picture, alt, caption


# What the newest benchmark says

EXACT = "exact attention"
SHOWN = (EXACT, "FavorPlus()", "BigBird()", "Linformer()", "Local()", "LinearAttention()", "AFTSimple()")


def times(bench: measured.Record) -> str:
    """Time of a forward pass against length, exact attention and a mechanism of each kind, as SVG."""
    timed = {(cell["mechanism"], cell["length"]): cell for cell in bench.held["cells"] if cell["forward_ratio"]}
    exact = {length: cell["forward_ms"] for (name, length), cell in timed.items() if name == EXACT}
    lines = {name: {n: timed[name, n]["forward_ratio"] * ms for n, ms in exact.items()} for name in SHOWN}
    longest, meta, above, colours = max(exact), bench.meta, math.inf, iter((INK, *COLOURS))
    told = "; ".join(f"{name} {line[longest]:,.0f}" for name, line in lines.items())
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(9.0, 4.2), layout="constrained", facecolor="white")
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for name, line in sorted(lines.items(), key=lambda item: -item[1][longest]):
            colour, above = next(colours), min(line[longest], above / 1.5)
            axes.plot([*line], [*line.values()], color=colour, linewidth=2.4 if name == EXACT else 1.6)
            label = name if name == EXACT else f"{name} {exact[longest] / line[longest]:.0f}x"
            beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
            axes.annotate(label, (longest, above), color=colour, **beside)
        axes.set_xticks([*exact], [f"{length:,}" for length in exact])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.margins(x=0.02)
        axes.grid(color=GRID, linewidth=0.5)
        axes.set_xlabel("tokens")
        about = f"{meta['heads']} heads of {meta['head_dim']}, {meta['dtype']}, {bench.machine}; {bench.name[:10]}"
        axes.set_title(f"milliseconds, forward, {about}", fontweight="normal")
        return svg(figure, f"Milliseconds of a forward pass against tokens. At {longest:,} tokens: {told}.")


# What the newest record of whole models says

FAMILIES = {"modernbert": "ModernBERT", "gemma3": "Gemma 3"}


def whole_models(record: measured.Record) -> str:
    """Time of a forward pass of whole models against length, before and after ``swap(model)``, as SVG."""
    told, meta = [], record.meta
    with matplotlib.rc_context(STYLE | {"font.size": 10}):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained", facecolor="white")
        for axes, (case, name) in zip(figure.subplots(1, len(FAMILIES), sharey=True), FAMILIES.items(), strict=True):
            rows = [row for row in record.held["rows"] if (row["case"], row["what"]) == (case, "forward")]
            rows.sort(key=lambda row: row["length"])
            lengths, last = [row["length"] for row in rows], rows[-1]
            before, after = ([row[what] for row in rows] for what in ("seconds", "swapped_seconds"))
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.plot(lengths, before, color=INK, linewidth=1.6, linestyle="--", label="transformers")
            axes.plot(lengths, after, color=COLOURS[0], linewidth=2.4, label="swap(model)")
            ticks = lengths[::-3][::-1]
            axes.set_xticks(ticks, [f"{length:,}" for length in ticks])
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.minorticks_off()
            axes.margins(x=0.06)
            axes.grid(color=GRID, linewidth=0.5)
            axes.set_title(f"{name}: {last['times']:.1f}x at {lengths[-1]:,}", fontweight="normal")
            told.append(f"{name}: {last['times']:.1f} times as fast at {lengths[-1]:,} tokens")
        figure.axes[0].legend(loc="upper left", handlelength=2.0, borderaxespad=0.1)
        threads = f"{meta['threads']} thread{'s' * (meta['threads'] > 1)}"
        figure.supxlabel(f"tokens\n{meta['hardware']}, {threads}; {record.name[:10]}", fontsize=9)
        figure.supylabel("seconds, forward, whole model", fontsize=9)
        alt = f"Seconds of a forward pass against tokens, before and after swap(model). {'; '.join(told)}."
        return adaptive(Picture(svg(figure, alt), alt))


def adaptive(picture: Picture) -> str:
    """A picture that turns dark where its reader's screen is set to dark."""

    def variables(dark: bool) -> str:
        return "".join(f"--{colour[1:]}:{DARK[colour] if dark else colour};" for colour in DARK)

    style = f":root{{{variables(False)}}}@media (prefers-color-scheme: dark){{:root{{{variables(True)}}}}}"
    return picture.themed.replace("<defs>", f"<style>{style}</style>\n <defs>", 1)
