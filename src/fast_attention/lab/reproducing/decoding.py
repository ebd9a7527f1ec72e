"""Transformers are RNNs (Katharopoulos et al. 2020): time of a token after many, with and without a cache."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.figure import Figure

from fast_attention import clock
from fast_attention.catalogue import parse
from fast_attention.lab.bench import decoding
from fast_attention.lab.drawing import COLOURS, INK, figure_grid, labelled, line, logarithmic, picture
from fast_attention.lab.hover import Series
from fast_attention.lab.measure import Setting
from fast_attention.lab.numbers import bytes_of, digits, milliseconds
from fast_attention.lab.reproducing.reproduction import Budget, Claim, Published, Reproduced, Reproduction, Row
from fast_attention.lab.tables import Table
from fast_attention.nn.models import Model, ModelConfig

WIDTH, LAYERS, HEADS, LEVELS = 256, 16, 8, 256  # pixels of 256 levels are the tokens
IMAGES = {784: ("MNIST", 317.0), 3072: ("CIFAR-10", 4462.0)}
POSITIONS = (1, 196, 392, 784, 1536, 3072)
ROUNDS, FEWEST = 7, 3
LINEAR, CACHED, PLAIN = "linear attention, its state", "exact attention, cached", "exact attention, no cache"
MECHANISMS = {LINEAR: "LinearAttention()", CACHED: "Softmax()", PLAIN: "Softmax()"}
FAR = tuple(2**power for power in range(8, 21, 2))
CACHE = 1 << 16  # tokens that exact attention is given to read at most, all pairs of them
LIKE = 2.0  # a gain within this factor of the paper's, or above, bears it out
PUBLISHED = tuple(
    Published(
        f"images a second, {name} ({tokens} tokens), over exact attention without a cache", gain, "Tables 1 and 2"
    )
    for tokens, (name, gain) in IMAGES.items()
)


@torch.no_grad()
def run(budget: Budget) -> Iterator[Row]:
    """Time of a token of a whole model, position by position; then of attention alone, to a million tokens."""
    models = {name: _model(mechanism) for name, mechanism in MECHANISMS.items()}
    for position in POSITIONS:
        if budget.has(part="model", position=position):
            continue
        if not budget.left and position > POSITIONS[1]:
            return
        budget.watch(f"a token at position {position:,}")
        for name, seconds in _tokens(models, position, budget).items():
            yield {"part": "model", "name": name, "position": position, "seconds": seconds}
    setting = Setting(HEADS, WIDTH // HEADS, torch.device("cpu"), torch.float32, True, False)
    for name, mechanism in (item for item in MECHANISMS.items() if item[0] != PLAIN):
        if not budget.has(part="attention", name=name):
            positions = [n for n in FAR if name == LINEAR or n <= CACHE]
            steps = decoding.decoding(
                parse(mechanism), 1, setting, positions, patience=budget.left / 2, watch=budget.watch
            )
            yield from (
                {"part": "attention", "name": name, "position": step.position, "seconds": step.seconds,
                 "state_bytes": step.state_bytes} for step in steps if step.seconds is not None
            )  # fmt: skip


def _model(mechanism: str) -> Model:
    """The paper's model, untrained; positions that need no table, so that it reads any length."""
    torch.manual_seed(0)
    config = ModelConfig(
        LEVELS, mechanism, width=WIDTH, layers=LAYERS, heads=HEADS, positions="sinusoidal", causal=True,
        max_len=2 * POSITIONS[-1],
    )  # fmt: skip
    return Model(config).eval()


def _tokens(models: dict[str, Model], position: int, budget: Budget) -> dict[str, float]:
    """Seconds of the next token behind so many, the median of some rounds in turns."""
    pixels = torch.randint(LEVELS, (1, position), generator=torch.Generator().manual_seed(0))
    states: dict[str, Any] = {}
    for name in (LINEAR, CACHED):
        states[name] = models[name].decode(pixels[:, :-1])[1] if position > 1 else None
    runs: dict[str, Callable[[], Any]] = {
        name: lambda name=name: models[name].decode(pixels[:, -1:], states[name]) for name in states
    }
    runs[PLAIN] = lambda: models[PLAIN](pixels)
    device, part = torch.device("cpu"), budget.left / len(POSITIONS)
    clock.in_turns(runs, device, 1)
    samples = clock.in_turns(runs, device, FEWEST)
    more = clock.in_turns(runs, device, ROUNDS - FEWEST, part) if sum(map(sum, samples.values())) < part else {}
    return {name: statistics.median([*times, *more.get(name, [])]) for name, times in samples.items()}


def times(record: Reproduced, part: str, name: str) -> dict[int, float]:
    """Seconds of a token by its position."""
    return {row["position"]: row["seconds"] for row in record.of(part=part, name=name)}


def whole(record: Reproduced, name: str, tokens: int) -> float | None:
    """Seconds of generating so many tokens: between the positions that were timed, a line; None: not so far."""
    points = {position: seconds for position, seconds in times(record, "model", name).items() if position <= tokens}
    if not points or max(points) < tokens:
        return None
    pairs = itertools.pairwise(sorted(points.items()))
    return points[min(points)] + sum((b - a) * (low + high) / 2 for (a, low), (b, high) in pairs)


def gain(record: Reproduced, name: str, tokens: int) -> float | None:
    """How many times as fast as ``name`` linear attention generates so many tokens."""
    slow, fast = whole(record, name, tokens), whole(record, LINEAR, tokens)
    return None if slow is None or fast is None else slow / fast


def claims(record: Reproduced) -> list[Claim]:
    """The gains, and that the time of a token does not grow."""
    listed = []
    for tokens, (name, published) in IMAGES.items():
        plain, cached = gain(record, PLAIN, tokens), gain(record, CACHED, tokens)
        words = "not measured"
        if plain is not None and cached is not None:
            words = f"{digits(plain)} times, and {digits(cached)} times as fast as with a cache"
        holds = None if plain is None else plain >= published / LIKE
        paper = f"{tokens:,} tokens ({name}) are generated {published:,.0f} times as fast as by exact attention"
        listed.append(Claim(f"{paper} without a cache", words, holds))
    flat = times(record, "attention", LINEAR)
    words, holds = "not measured", None
    if len(flat) > 1:
        first, last = min(flat), max(flat)
        ratio = flat[last] / flat[first]
        words, holds = f"at {last:,} it takes {ratio:.2f} times what it takes at {first:,}", ratio < 1.5
    return [*listed, Claim("the time of a token does not grow with its position", words, holds)]


@picture
def drawing(record: Reproduced) -> tuple[Figure, str]:
    """Time of a token against its position: of the whole model, and of one layer's attention to a million tokens."""
    figure, panels = figure_grid(4.4, 1, 2)
    alone = f"attention alone: {HEADS} heads of {WIDTH // HEADS}"
    titles = {"model": f"a whole model: {LAYERS} layers of {WIDTH}", "attention": alone}
    for axes, (part, title) in zip(panels, titles.items(), strict=True):
        logarithmic(axes, 2)
        for name, colour in zip(MECHANISMS, (COLOURS[0], INK, COLOURS[1]), strict=True):
            points = {position: 1000 * seconds for position, seconds in sorted(times(record, part, name).items())}
            if points:
                line(axes, points, "-", Series(name, up=milliseconds), color=colour, label=name)
        axes.set_title(title)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        labelled(axes, "position of the token", "milliseconds for a token")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure, "Milliseconds of a token against its position, with a constant state, with a cache, and without."


def tables(record: Reproduced) -> list[Table]:
    """Gains beside the paper's, times of tokens, states."""
    rows = []
    for tokens, (name, published) in IMAGES.items():
        seconds = [whole(record, each, tokens) for each in MECHANISMS]
        gains = [gain(record, each, tokens) for each in (PLAIN, CACHED)]
        shown = ["-" if ratio is None else f"{digits(ratio)}x" for ratio in gains]
        spent = [milliseconds(None if each is None else 1000 * each) for each in seconds]
        rows.append([f"{name}, {tokens:,} tokens", f"{published:,.0f}x", *shown, *spent])
    heads = ["image", "published, no cache", "here, no cache", "here, cached", *MECHANISMS]
    far = [
        [f"{row['name']}", f"{row['position']:,}", milliseconds(1000 * row["seconds"]), bytes_of(row["state_bytes"])]
        for row in record.of(part="attention")
    ]  # fmt: skip
    return [
        Table(heads, rows, title="Linear attention against exact attention, and the time of one image"),
        Table(["one layer's attention", "position", "a token", "state"], far, title="Attention alone"),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    return [
        "The paper counts images a second on a GPU with as many images at once as fit; here it is one image on a CPU. "
        "Without a cache a token costs a pass over all tokens before it, and that pass uses a machine better than a "
        "single token does, most of all on a GPU: there many images at once make up for it, here nothing does.",
        "Exact attention with a cache, which everybody has today, is the baseline to beat; the paper has it in its "
        "appendix only. It reads all keys for every token.",
        "The time of an image is the sum over its tokens: some were timed, the others lie on lines between them.",
        f"Exact attention alone is measured up to {CACHE:,} tokens: to read them it needs all pairs.",
    ]


DECODING = Reproduction(
    name="decoding",
    title="Time of a generated token against its position",
    paper="Katharopoulos et al. 2020, arXiv 2006.16236, Tables 1 and 2",
    minutes=10,
    seeds=0,
    published=PUBLISHED,
    run=run,
    claims=claims,
    drawing=drawing,
    tables=tables,
    why=why,
)
