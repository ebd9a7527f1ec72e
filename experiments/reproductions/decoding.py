"""Transformers are RNNs (Katharopoulos et al. 2020): time of a token after many, with and without a cache.

Records: records/*-reproduce-decoding.json. Again: ``python -m experiments.reproductions.decoding --out out/decoding``
(10 minutes on a quiet machine).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.models import Model, ModelConfig
from experiments.reproductions import common
from experiments.reproductions.common import Budget, Claim, Reproduced, Reproduction, Row, Table
from fast_attention import Bound, Shape, clock
from fast_attention.lab.pictures import COLOURS, INK
from fast_attention.lab.tables import bytes_of, digits, milliseconds

WIDTH, LAYERS, HEADS, LEVELS = 256, 16, 8, 256  # pixels of 256 levels are the tokens
IMAGES = {784: ("MNIST", 317.0), 3072: ("CIFAR-10", 4462.0)}  # Tables 1 and 2: images a second over those without cache
POSITIONS = (1, 196, 392, 784, 1536, 3072)
ROUNDS, FEWEST = 7, 3
LINEAR, CACHED, PLAIN = "linear attention, its state", "exact attention, cached", "exact attention, no cache"
MECHANISMS = {LINEAR: "LinearAttention()", CACHED: "Softmax()", PLAIN: "Softmax()"}
FAR = tuple(2**power for power in range(8, 21, 2))
CACHE = 1 << 16  # tokens that exact attention is given to read at most, all pairs of them
PREFILL, TOKENS = 4096, 25  # tokens read at a time; tokens timed at each position
LIKE = 2.0  # a gain within this factor of the paper's, or above, bears it out
CPU = torch.device("cpu")


# Measuring


@torch.no_grad()
def measure(budget: Budget) -> Iterator[Row]:
    """Time of a token of a whole model, position by position; then of attention alone, to a million tokens."""
    models = {name: untrained(mechanism) for name, mechanism in MECHANISMS.items()}
    for position in POSITIONS:
        if budget.has(part="model", position=position):
            continue
        if not budget.left and position > POSITIONS[1]:
            return
        budget.say(f"a token at position {position:,}")
        for name, seconds in of_models(models, position, budget).items():
            yield {"part": "model", "name": name, "position": position, "seconds": seconds}
    for name in (LINEAR, CACHED):
        if not budget.has(part="attention", name=name):
            yield from of_attention(name, [n for n in FAR if name == LINEAR or n <= CACHE], budget)


def untrained(mechanism: str) -> Model:
    """The paper's model for CIFAR-10, at both lengths; positions that need no table, so that it reads any length."""
    torch.manual_seed(0)
    return Model(
        ModelConfig(
            LEVELS, mechanism, width=WIDTH, layers=LAYERS, heads=HEADS, positions="sinusoidal", causal=True,
            max_len=2 * POSITIONS[-1],
        )
    ).eval()  # fmt: skip


def of_models(models: dict[str, Model], position: int, budget: Budget) -> dict[str, float]:
    """Seconds of the next token behind so many, the median of some rounds in turns."""
    pixels = torch.randint(LEVELS, (1, position), generator=torch.Generator().manual_seed(0))
    runs: dict[str, Callable[[], Any]] = {PLAIN: lambda: models[PLAIN](pixels)}
    for name in (LINEAR, CACHED):
        state = models[name].decode(pixels[:, :-1])[1] if position > 1 else None
        runs[name] = lambda model=models[name], state=state: model.decode(pixels[:, -1:], state)
    part = budget.left / len(POSITIONS)
    clock.in_turns(runs, CPU, 1)
    samples = clock.in_turns(runs, CPU, FEWEST)
    more = clock.in_turns(runs, CPU, ROUNDS - FEWEST, part) if sum(map(sum, samples.values())) < part else {}
    return {name: statistics.median([*samples[name], *more.get(name, [])]) for name in MECHANISMS}


def of_attention(name: str, positions: list[int], budget: Budget) -> Iterator[Row]:
    """The median time of a token at every position, in turns, from a state that has read that many tokens."""
    torch.manual_seed(0)
    bound = Bound(MECHANISMS[name], Shape(HEADS, WIDTH // HEADS, max(positions) + 2 * TOKENS))

    def tokens(count: int) -> tuple[Tensor, ...]:
        return torch.randn(3, 1, HEADS, count, WIDTH // HEADS).unbind()

    states: dict[int, Any] = {}
    state, read, patience = None, 0, budget.left / 2
    began = budget.clock()
    for position in positions:
        if read and (budget.clock() - began) * position / read > patience:
            break  # reading so far would take too long
        budget.say(f"{name}: reads {position:,} tokens")
        while read < position:
            count = min(PREFILL, position - read)
            state, read = bound.decode(*tokens(count), state)[1], read + count
        states[position] = state
    token, sizes = tokens(1), {position: common.state_bytes(state) for position, state in states.items()}

    def advance(position: int) -> None:
        states[position] = bound.decode(*token, states[position])[1]

    samples = clock.in_turns({n: lambda n=n: advance(n) for n in states}, CPU, TOKENS + 2)
    for position, seconds in samples.items():
        row = {"part": "attention", "name": name, "position": position}
        yield {**row, "seconds": statistics.median(seconds[2:]), "state_bytes": sizes[position]}


# What it says


def times(record: Reproduced, part: str, name: str) -> dict[int, float]:
    """Seconds of a token by its position."""
    return {row["position"]: row["seconds"] for row in record.of(part=part, name=name)}


def whole(record: Reproduced, name: str, tokens: int) -> float | None:
    """Seconds of so many tokens: the sum over them, on lines between those that were timed."""
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


def draw(record: Reproduced) -> tuple[Figure, str]:
    """Time of a token against its position: of the whole model, and of one layer's attention to a million tokens."""
    figure, panels = common.figure(4.4, 2)
    alone = f"attention alone: {HEADS} heads of {WIDTH // HEADS}"
    titles = {"model": f"a whole model: {LAYERS} layers of {WIDTH}", "attention": alone}
    for axes, (part, title) in zip(panels, titles.items(), strict=True):
        common.logarithmic(axes, 2)
        for name, colour in zip(MECHANISMS, (COLOURS[0], INK, COLOURS[1]), strict=True):
            points = {position: 1000 * seconds for position, seconds in sorted(times(record, part, name).items())}
            common.line(axes, points, color=colour, label=name)
        axes.set_title(title)
        common.labelled(axes, "position of the token", "milliseconds for a token")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
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
        [row["name"], f"{row['position']:,}", milliseconds(1000 * row["seconds"]), bytes_of(row["state_bytes"])]
        for row in record.of(part="attention")
    ]
    return [
        Table("Linear attention against exact attention, and the time of one image", heads, rows),
        Table("Attention alone", ["one layer's attention", "position", "a token", "state"], far),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    return [
        "The paper counts images a second on a GPU, with as many images at once as fit. Here it is one image on a CPU.",
        "Without a cache a token costs a pass over all tokens before it. On a CPU such a pass uses the machine better "
        "than a single token does. On a GPU many images at once make up for it.",
        f"The model is the paper's for CIFAR-10, {LAYERS} layers of {WIDTH}, at both lengths. Its weights are random; "
        "time does not depend on them.",
        "Exact attention with a cache is the baseline to beat. The paper has it in its appendix only. It reads all "
        "keys for every token.",
        "The time of an image is the sum over its tokens. Some were timed; the others lie on lines between them.",
        f"Exact attention alone is measured up to {CACHE:,} tokens. To read them it needs all pairs.",
    ]


REPRODUCTION = Reproduction(
    "decoding", "Time of a generated token against its position",
    "Katharopoulos et al. 2020, arXiv 2006.16236, Tables 1 and 2", minutes=10, seeds=0,
    measure=measure, claims=claims, draw=draw, tables=tables, why=why,
)  # fmt: skip

if __name__ == "__main__":
    common.start(REPRODUCTION)
