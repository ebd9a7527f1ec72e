"""Draw the model of cost of docs/parallel.md from the newest benchmark: ``python docs/parallel_costs.py``.

Predicted, not measured: the benchmark's time per token, at the same share of the peak of a stated GPU, and declared
bytes over stated links.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fast_attention import catalogue, files
from fast_attention.lab.drawing import COLOURS, INK, STYLE, svg
from fast_attention.parallel import Shards, strategy
from fast_attention.parallel.strategy import Call, Sizes

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "parallel.svg"
GPU = 989e12  # operations a second of an H100 SXM, dense bfloat16, as its maker states them
LINKS = (450e9, 50e9)  # bytes a second one way: among up to 8 GPUs, and beyond
LATENCY = 10e-6  # seconds a message
FITS = 80e9  # bytes of a GPU; a layer's q, k, v and outputs and their gradients in bfloat16 are held
PROCESSES = (8, 64, 256, 1024)
TOKENS = [2**n for n in range(20, 31)]
LINES = {
    "LinearAttention, causal: states": ("LinearAttention(), causal", "LinearAttention"),
    "Local(window=128), causal: neighbours": ("Local(), causal", "Local"),
    "exact attention, causal: 8 heads, 8 GPUs": ("exact attention, causal", "Softmax"),
}
LENGTH = 4096  # of the benchmark's times


def source() -> str:
    """What the picture says of its record: name and SHA-256."""
    record = sorted((ROOT / "records").glob("*-bench.json"))[-1]
    return f"{record.relative_to(ROOT)} sha256 {hashlib.sha256(record.read_bytes()).hexdigest()}"


def stale() -> bool:
    """Whether the picture is of another record than the newest benchmark."""
    return not PICTURE.exists() or source() not in PICTURE.read_text(encoding="utf-8")


def seconds(held: dict[str, Any], row: str, name: str, tokens: int, world: int) -> tuple[float, float]:
    """Predicted seconds of computing and of sending, of one layer forward and backward on each of ``world`` GPUs."""
    peak = statistics.median(each["gemm_gflops"] for each in held["ceilings"]) * 1e9
    cells = [
        cell for cell in held["cells"] if cell["mechanism"] == row and cell["length"] == LENGTH and cell["training_ms"]
    ]
    each = statistics.median(cell["training_ms"] for cell in cells) / 1e3 / LENGTH * peak / GPU
    mechanism: Any = catalogue.default(name)
    growth = tokens / LENGTH if name == "Softmax" else 1.0
    shards = Shards(None, world // 2, (tokens // world,) * world, (tokens // world,) * world)
    heads, width = held["meta"]["heads"], held["meta"]["head_dim"]
    sends = strategy(mechanism, True).sends(Call(mechanism, (), shards, True), Sizes(1, heads, width, width, 2))
    messages = 1 if name == "Local" else world - 1
    return each * growth * tokens / world, 2 * (messages * LATENCY + sends / LINKS[world > 8])


def draw(held: dict[str, Any]) -> str:
    """Seconds per layer against tokens, a panel for each mechanism and a line for each number of GPUs, as SVG."""
    heads, width = held["meta"]["heads"], held["meta"]["head_dim"]
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(11.0, 4.4), layout="constrained", facecolor="white")
        panels = figure.subplots(1, 3, sharey=True)
        for axes, (title, names) in zip(panels, LINES.items(), strict=True):
            for world, colour in zip(PROCESSES if names[1] != "Softmax" else (8,), (INK, *COLOURS), strict=False):
                fits = [n for n in TOKENS if n / world * 16 * heads * width <= FITS]
                parts = [seconds(held, *names, n, world) for n in fits]
                axes.plot(fits, [sum(each) for each in parts], color=colour, label=f"{world:,} GPUs")
                axes.plot(fits, [each[1] for each in parts], color=colour, linestyle=":", linewidth=1)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks([2**20, 2**25, 2**30], ["1M", "32M", "1G"])
            axes.minorticks_off()
            axes.grid(color="#e4e7eb", linewidth=0.5)
            axes.set_xlabel("tokens of one sequence")
            axes.set_title(title)
            axes.legend(loc="upper left")
        figure.suptitle(
            f"Predicted, not measured: seconds per layer, forward and backward, {heads} heads of {width}; "
            f"dotted: sending\n{GPU / 1e12:.0f} TFLOP/s a GPU at the share of its peak that "
            f"{held['meta']['hardware']} reached; "
            f"{LINKS[0] / 1e9:.0f} GB/s among 8 GPUs, {LINKS[1] / 1e9:.0f} GB/s beyond, "
            f"{LATENCY * 1e6:.0f} us a message",
            fontsize=9,
        )  # fmt: skip
        alt = "Predicted seconds per layer against tokens for 8 to 1,024 GPUs; the lines end where tokens do not fit."
        return svg(figure, alt).replace("</svg>", f"<!-- {source()} -->\n</svg>")


def main() -> None:
    """Write the picture, and print the ends of its lines."""
    held = json.loads((ROOT / source().split(" ")[0]).read_text(encoding="utf-8"))
    for title, names in LINES.items():
        for world in PROCESSES if names[1] != "Softmax" else (8,):
            for tokens in (TOKENS[0], TOKENS[5], TOKENS[-1]):
                compute, sending = seconds(held, *names, tokens, world)
                print(f"{title}; {world} GPUs, {tokens:,} tokens: computing {compute:.2e} s, sending {sending:.2e} s")
    files.write(PICTURE, draw(held))


if __name__ == "__main__":
    main()
