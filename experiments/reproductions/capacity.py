"""Capacity of associative memories, Fig. 2 of Schlag et al. 2021: what one layer retrieves of 20 to 600 associations.

Records: records/*-reproduce-capacity.json. Again: ``python -m experiments.reproductions.capacity --out out/capacity``
(30 minutes of processor time). The record also has ABC, which the library had then; it is left out now.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.reproductions import common
from experiments.reproductions.common import Budget, Claim, Reproduced, Reproduction, Row, Table
from fast_attention import Bound, Shape, catalogue
from fast_attention.feature_maps.feature_map import Features, Logs
from fast_attention.lab.pictures import COLOURS, INK, PALE, PAPER
from fast_attention.mechanisms.linear.kernelised import Kernelised

BATCH, RATE = 32, 1e-3
EVERY, SEQUENCES, QUERIES = 100, 20, 200  # steps between evaluations; of each the sequences, and their queries at most
LEARNT, PATIENCE = 1e-3, 10  # a loss that ends the training; evaluations in a row that may bring nothing new
LEAST = 12.0  # seconds that a training may take however small its share of the time is
MANY = 400
FULL = 0.01  # a loss below which all is retrieved
NEAR = 0.03  # two losses this near are the same
SIZES, HEAVY = (20, 60, 100, 200, 400), (20, 60)  # the latter for maps of a thousand features


@dataclass(frozen=True)
class Contender:
    """A mechanism as it is trained here.

    Args:
        label: In tables and pictures.
        mechanism: Its expression.
        width: Of queries and keys.
        redrawn: Whether its random features are drawn anew in every pass.
        channels: Whether values and outputs are projected, since it mixes channel by channel, each as wide as the keys.
        sizes: How many associations a sequence has.
        losses: The paper's loss at each of these sizes, from the logs of its code, Fig. 2.
    """

    label: str
    mechanism: str
    width: int = 64
    redrawn: bool = False
    channels: bool = False
    sizes: tuple[int, ...] = SIZES
    losses: tuple[float, ...] = ()


FAVOR = "FavorPlus(num_features={}, features='hyperbolic')"
CONTENDERS = (
    Contender("softmax", "Softmax()", sizes=(*SIZES, 600), losses=(0.0006, 0.0001, 0.0, 0.0, 0.0, 0.0303)),
    Contender("elu + 1", "LinearAttention()", sizes=(*SIZES, 600),
              losses=(0.0009, 0.0245, 0.164, 0.342, 0.422, 0.451)),
    Contender("DPFP-1", "LinearAttention(feature_map=DPFP())", losses=(0.0008, 0.0004, 0.0002, 0.173, 0.342)),
    Contender("DPFP-2", "LinearAttention(feature_map=DPFP(nu=2))", losses=(0.0003, 0.0010, 0.0005, 0.0004, 0.164)),
    Contender("DPFP-3", "LinearAttention(feature_map=DPFP(nu=3))", losses=(0.0005, 0.0005, 0.0007, 0.0009, 0.036)),
    Contender("FAVOR+ 64, redrawn", FAVOR.format(64), redrawn=True, losses=(0.117, 0.483, 0.496, 0.5, 0.5)),
    Contender("FAVOR+ 512, redrawn", FAVOR.format(512), redrawn=True, sizes=HEAVY, losses=(0.024, 0.407)),
    Contender("FAVOR+ 64, fixed", FAVOR.format(64)),
    Contender("FAVOR+ 512, fixed", FAVOR.format(512), sizes=HEAVY),
    Contender("learned features", "LearnedFeatures(num_features=64)"),
    Contender("Hybrid", "Hybrid(near=BlockLocal(block_size=16), far=LearnedFeatures(num_features=64))"),
    Contender("Taylor of 16", "LinearAttention(feature_map=Taylor())", width=16),
    Contender("ABC", "ABC()"),
    Contender("window of 64", "Local(window=64)"),
    Contender("AFT", "AFTSimple()", channels=True),
    Contender("Manhattan", "Manhattan()", channels=True),
)  # fmt: skip
FEATURES = {"elu + 1": 64, "DPFP-1": 128, "DPFP-2": 256, "DPFP-3": 384}  # of a key of 64 numbers
COSTS = {**FEATURES, "Hybrid": 800}  # of a key in a step, in features of a linear map


# The task: keys with values, a query for one of them, one layer


class Batch(NamedTuple):
    """Keys and values (B, S), each a permutation, and the positions (B,) of what is asked for.

    One row of keys and values serves where all queries are about the same sequence.
    """

    keys: Tensor
    values: Tensor
    asked: Tensor

    @classmethod
    def drawn(cls, size: int, generator: torch.Generator) -> Batch:
        """Sequences of ``size`` associations with a query each."""
        keys, values = (torch.rand(BATCH, size, generator=generator).argsort(-1) for _ in range(2))
        return cls(keys, values, torch.randint(size, (BATCH,), generator=generator))

    @classmethod
    def one_sequence(cls, size: int, generator: torch.Generator) -> Batch:
        """A sequence with a query for each of its keys, or for some of many."""
        keys, values = (torch.rand(1, size, generator=generator).argsort(-1) for _ in range(2))
        return cls(keys, values, torch.randperm(size, generator=generator)[:QUERIES])


class Retrieval(nn.Module):
    """Embedded keys beside one-hot values are projected to keys, an embedded key to the query; one head attends.

    Values are the one-hot vectors themselves and nothing is projected behind attention, so that the output is the
    row of attention weights, sorted by value: ``forward`` returns it by position, and what it should have been.
    """

    def __init__(self, contender: Contender, size: int) -> None:
        super().__init__()
        self.contender, self.size, width = contender, size, contender.width
        embedding = int(2 * size * 1.1)
        self.embedding = nn.Parameter(torch.randn(size, embedding))
        self.key, self.query = nn.Linear(size + embedding, width), nn.Linear(embedding, width)
        self.bound = Bound(contender.mechanism, Shape(1, width, size + 1))
        self.kernelised = isinstance(self.bound.mechanism, Kernelised)
        for layer in (self.key, self.query):
            nn.init.xavier_uniform_(layer.weight)
        if contender.channels:
            self.value, self.out = nn.Linear(size + embedding, width), nn.Linear(width, size)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Predictions (B, S) and the numbers (B,) of what they should hold a one at."""
        if self.contender.redrawn:
            self.bound.redraw()
        asked = batch.keys.expand(len(batch.asked), -1).gather(1, batch.asked[:, None])
        q = self.query(F.embedding(asked, self.embedding))[:, None]  # (B, 1, 1, width)
        k = self.tokens(self.key, batch)[:, None]  # (B or 1, 1, S, width)
        if self.contender.channels:
            targets = batch.values.expand(len(batch.asked), -1).gather(1, batch.asked[:, None])[:, 0]
            return self._by_channel(q, k, batch), targets
        if self.kernelised:
            return kernel_weights(self.bound.mechanism, self.bound.w, q, k)[:, 0, 0], batch.asked
        one_hot = torch.eye(self.size).expand(len(q), 1, -1, -1)  # values whose outputs are the weights
        return self.bound(q, k.expand(len(q), -1, -1, -1), one_hot)[:, 0, 0], batch.asked

    def tokens(self, layer: nn.Linear, batch: Batch) -> Tensor:
        """The layer of one-hot values beside embedded keys, whose products are looked up."""
        of_values, of_keys = layer.weight.split([self.size, layer.in_features - self.size], 1)
        keys = self.embedding @ of_keys.mT + layer.bias
        return F.embedding(batch.values, of_values.mT) + F.embedding(batch.keys, keys)

    def _by_channel(self, q: Tensor, k: Tensor, batch: Batch) -> Tensor:
        """The query token stands behind the others, as its own key, with a value of zeros."""
        many, v = len(q), self.tokens(self.value, batch)[:, None]
        k, v = (x.expand(many, -1, -1, -1) for x in (k, v))
        k, v = torch.cat([k, q], -2), torch.cat([v, torch.zeros_like(q)], -2)
        queries = torch.cat([torch.zeros_like(k[..., :-1, :]), q], -2)
        return self.out(self.bound(queries, k, v)[:, 0, -1])

    @torch.no_grad()
    def state_numbers(self) -> int:
        """Numbers of the state that decoding keeps of all associations."""
        values = self.contender.width if self.contender.channels else self.size
        q, k = torch.randn(2, 1, 1, self.size, self.contender.width)
        return common.state_bytes(self.bound.decode(q, k, torch.randn(1, 1, self.size, values))[1]) // 4


def kernel_weights(mechanism: Kernelised[Any], w: Any, q: Tensor, k: Tensor) -> Tensor:
    """``phi(q_i) . phi(k_j)`` over their sum over j: rows (..., L, S) of a kernelised mechanism's attention matrix."""
    queries, keys = (phi(x) for phi, x in zip(mechanism.maps(w), (q, k), strict=True))
    if isinstance(queries, Logs):
        assert isinstance(keys, Logs)
        most = keys.logs.detach().amax(-2, keepdim=True)  # of each feature: no exponent is above zero
        exponents = queries.logs + most
        products = (exponents - exponents.detach().amax(-1, keepdim=True)).exp() @ (keys.logs - most).exp().mT
        return products / products.sum(-1, keepdim=True)
    assert isinstance(keys, Features)
    assert keys.log_scale is None
    products = queries.values @ keys.values.mT
    return products / (products.sum(-1, keepdim=True) + 1e-6)


def loss_of(predictions: Tensor, targets: Tensor) -> Tensor:
    """Half the squared distance to the one-hot target, the mean over the batch; 0.5 where nothing is predicted."""
    right = predictions.gather(1, targets[:, None])[:, 0]
    return (0.5 * (predictions.square().sum(-1) - 2 * right + 1)).mean()


@torch.no_grad()
def evaluated(model: Retrieval, generator: torch.Generator) -> tuple[float, float]:
    """Loss, and share of queries whose highest output is the right one, over some sequences."""
    losses, right, count = 0.0, 0, 0
    for _ in range(SEQUENCES):
        predictions, targets = model(Batch.one_sequence(model.size, generator))
        losses += loss_of(predictions, targets).item()
        right, count = right + int((predictions.argmax(-1) == targets).sum()), count + len(targets)
    return losses / SEQUENCES, right / count


def trained(contender: Contender, size: int, seed: int, seconds: float) -> Row:
    """Train until it is learnt, until nothing more is, or for so much processor time; the best evaluation."""
    torch.manual_seed(seed)
    model, generator = Retrieval(contender, size), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], RATE, fused=True)
    best, recall, idle, step, stopped, began = math.inf, 0.0, 0, 0, "", time.process_time()
    while not stopped:
        step += 1
        loss = loss_of(*model(Batch.drawn(size, generator)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        late = time.process_time() - began > seconds
        if step % EVERY and not late:
            continue
        value, share = evaluated(model, generator)
        idle = 0 if value < best else idle + 1
        if value < best:
            best, recall = value, share
        if best <= LEARNT or idle > PATIENCE or late:
            stopped = "learnt" if best <= LEARNT else "time" if late else "no progress"
    spent = round(time.process_time() - began, 2)
    held = {"loss": best, "recall": recall, "steps": step, "seconds": spent, "stopped": stopped}
    return {**held, "state": model.state_numbers()}


def measure(budget: Budget) -> Iterator[Row]:
    """Train every contender at every size, small sizes first; the time at hand for each is by what its steps cost."""
    known = [each for each in CONTENDERS if each.mechanism.split("(")[0] in catalogue.names()]
    cells = [
        (seed, size, each)
        for seed in range(1, budget.seeds + 1)
        for size in sorted({size for each in known for size in each.sizes})
        for each in known
        if size in each.sizes and not budget.has(contender=each.label, associations=size, seed=seed)
    ]
    for at, (seed, size, each) in enumerate(cells):
        if not budget.left and (at or budget.rows):
            return
        share = _cost(each, size) / sum(_cost(other, many) for _, many, other in cells[at:])  # more, if some end early
        seconds = min(max(share * budget.left, LEAST), budget.left)
        budget.say(f"{each.label}, {size} associations, seed {seed}")
        row = {"contender": each.label, "mechanism": each.mechanism, "associations": size, "seed": seed}
        yield {**row, **trained(each, size, seed, seconds)}


def _cost(each: Contender, size: int) -> int:
    """Numbers that a step makes of the keys, but for a factor."""
    return size * (COSTS.get(each.label) or (1024 if "512" in each.label else 200))


# What it says


def losses(record: Reproduced, label: str, *, ended: bool = False) -> dict[int, float]:
    """The loss by the number of associations, the mean over the seeds; ``ended``: without trainings that time ended."""
    known: dict[int, list[float]] = {}
    for row in record.of(contender=label):
        if not ended or row["stopped"] != "time":
            known.setdefault(row["associations"], []).append(row["loss"])
    return {size: statistics.fmean(values) for size, values in sorted(known.items())}


def published(label: str) -> dict[int, float]:
    """The loss of the paper's logs by the number of associations."""
    each = next(each for each in CONTENDERS if each.label == label)
    return dict(zip(each.sizes, each.losses, strict=False))


def claims(record: Reproduced) -> list[Claim]:
    """What Fig. 2 shows, of trainings that ended by the paper's own rules."""
    return [_softmax(record), _order(record), _capacity(record), _numbers(record), _favor(record)]


def _softmax(record: Reproduced) -> Claim:
    known = {size: loss for size, loss in losses(record, "softmax", ended=True).items() if size <= MANY}
    words = f"its loss is at most {max(known.values()):.4f} up to {max(known)}" if known else "not measured"
    holds = max(known.values()) <= FULL if MANY in known else None
    return Claim(f"softmax retrieves everything up to {MANY} associations", words, holds)


def _order(record: Reproduced) -> Claim:
    names, ordered, shared = list(FEATURES), [], []
    for larger, smaller in zip(names[1:], names, strict=False):
        few, many = (losses(record, name, ended=True) for name in (smaller, larger))
        for size in few.keys() & many.keys():
            if max(few[size], many[size]) > FULL:
                shared.append(size)
                ordered += [size] if many[size] < few[size] else []
    words = f"so in {len(ordered)} of {len(shared)} pairs of which either fails" if shared else "not measured"
    holds = len(ordered) == len(shared) if shared else None
    return Claim("a map of more features loses less, from elu + 1 to DPFP-3", words, holds)


def _capacity(record: Reproduced) -> Claim:
    """A map of C features holds fewer than C associations: what is left of them is lost."""
    words, holds = [], []
    for name, count in FEATURES.items():
        known = losses(record, name, ended=True)
        full = [size for size, loss in known.items() if loss <= FULL]
        over = [size for size, loss in known.items() if size > count]
        if full and over:
            words.append(f"{name} ({count} features) holds {max(full)} and not {min(over)}")
            holds.append(max(full) < min(over) and all(known[size] > FULL for size in over))
    paper, ours = "as many associations are held as there are features", "; ".join(words) or "not measured"
    return Claim(paper, ours, all(holds) if holds else None)


def _numbers(record: Reproduced) -> Claim:
    pairs = {
        f"{label} at {size} ({ours:.3f} for {published(label)[size]:.3f})": abs(ours - published(label)[size])
        for label in ("softmax", *FEATURES)
        for size, ours in losses(record, label, ended=True).items()
        if size in published(label)
    }
    far = [name for name, gap in pairs.items() if gap > NEAR]
    words = f"{len(pairs) - len(far)} of {len(pairs)} losses are within {NEAR} of the paper's"
    words += f", not those of {', '.join(far)}" if far else ""
    return Claim("its losses of softmax, elu + 1 and DPFP are these", words, not far if pairs else None)


def _favor(record: Reproduced) -> Claim:
    names = [f"FAVOR+ {m}, {how}" for m in (64, 512) for how in ("redrawn", "fixed")]
    ours = {name: {n: loss for n, loss in losses(record, name, ended=True).items() if n >= 60} for name in names}
    shown = {name: known for name, known in ours.items() if known}
    words = "; ".join(
        f"{name}: {', '.join(f'{loss:.3f} at {size}' for size, loss in known.items())}" for name, known in shown.items()
    )
    holds = all(loss >= 0.4 for known in shown.values() for loss in known.values()) if shown else None
    return Claim("FAVOR+ learns next to nothing from 60 associations on", words or "not measured", holds)


def contenders(record: Reproduced) -> list[Contender]:
    """Those that the record has."""
    return [each for each in CONTENDERS if record.of(contender=each.label)]


def draw(record: Reproduced) -> tuple[Figure, str]:
    """Loss against associations, ours and the paper's; recall against the size of the state."""
    figure, (left, right) = common.figure(5.2, 2)
    shown, inks = contenders(record), (INK, *COLOURS, PALE)
    trained = {n: len({r["contender"] for r in record.of(associations=n)}) for n in SIZES}
    size = max((n for n, many in trained.items() if many >= len(shown) - 2), default=SIZES[0])
    for at, each in enumerate(shown):
        style: Any = {"color": inks[at % len(inks)], "marker": "o" if at < len(inks) else "^"}
        points, ended = losses(record, each.label), losses(record, each.label, ended=True)
        common.line(left, points, linewidth=1.2, label=each.label, markersize=4, **style)
        late = {n: loss for n, loss in points.items() if n not in ended}
        common.line(left, late, "", markerfacecolor=PAPER, markersize=4, **style)
        common.line(left, published(each.label), ":", color=style["color"], linewidth=1, marker="")
        if rows := record.of(contender=each.label, associations=size):
            right.scatter(rows[0]["state"], statistics.fmean(r["recall"] for r in rows), s=42, **style)
    left.set_xticks(SIZES, [str(n) for n in SIZES])
    common.labelled(left, "associations in a sequence of one layer; dotted: the paper", "loss (0.5: nothing retrieved)")
    right.set_xscale("log")
    right.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    common.labelled(right, f"numbers in the state, {size} associations", "recall: share of queries answered right")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    words = "loss against associations, dotted the paper's, hollow where time ended the training; recall against state"
    return figure, f"Of {len(shown)} mechanisms: {words}"


def tables(record: Reproduced) -> list[Table]:
    """The losses beside the paper's, and the share of queries answered right."""
    sizes = sorted({size for each in CONTENDERS for size in each.sizes})
    rows, recall = [], []
    for each in contenders(record):
        ours, ended, paper = losses(record, each.label), losses(record, each.label, ended=True), published(each.label)
        cells = []
        for size in sizes:
            text = f"{ours[size]:.4f}{'' if size in ended else '*'}" if size in ours else "-"
            text = f"**{text}**" if ours.get(size, 1.0) <= FULL else text
            cells.append(f"{text} ({paper[size]:.4f})" if size in paper else text)
        rows.append([each.label, *cells])
        held = {size: record.of(contender=each.label, associations=size) for size in sizes}
        right = [f"{100 * statistics.fmean(r['recall'] for r in own):.0f} %" if own else "-" for own in held.values()]
        state = next(own[0]["state"] for own in reversed(held.values()) if own)
        measured = record.of(contender=each.label)[0]["mechanism"]
        recall.append([each.label, *right, f"{state:,}", f"`{measured}`"])
    heads = ["", *(f"{size} associations" for size in sizes)]
    return [
        Table("Loss here, and in brackets the paper's; *: time ended the training", heads, rows),
        Table("Queries answered right", [*heads, "numbers in the state at its most", "mechanism"], recall),
    ]


def why(record: Reproduced) -> list[str]:
    """The reasons."""
    late = sum(row["stopped"] == "time" for row in record.rows)
    return [
        "The task, the model's sizes, Adam at 0.001, batches of 32 and an evaluation every 100 steps are theirs. So is "
        "the end: a loss of 0.001, or 11 evaluations without progress. Seeds and the order of draws are not.",
        f"Time ended {late} of {len(record.rows)} trainings here, which their rules would have let go on. They are "
        "hollow in the picture and have a star in the table. No verdict above rests on them.",
        "Their FAVOR+ draws its projection anew in every pass and does not scale queries and keys. It divides by no "
        "largest term. Where keys are long, exp(-|k|^2 / 2) is then zero in float32, and so is the output: a loss of "
        "0.5. Ours scales and divides. The fixed one trains its queries and keys for its projection.",
        "Mechanisms that mix channel by channel (AFT, Manhattan) cannot carry one-hot values as wide as the "
        "vocabulary. Theirs are projected to 64 numbers and read out by a trained layer. No query picks a key.",
        "The Taylor map has 1 + d + d^2 features. Its queries and keys are 16 wide, as in Based, which makes 273.",
        "ABC left the library after this record, and so did Hybrid's sliding windows. The script trains the others, "
        "and a Hybrid with blocks.",
    ]


REPRODUCTION = Reproduction(
    "capacity", "Associations that one layer retrieves", "Schlag et al. 2021, arXiv 2102.11174, Fig. 2",
    minutes=30, seeds=1, measure=measure, claims=claims, draw=draw, tables=tables, why=why, trains=True,
)  # fmt: skip

if __name__ == "__main__":
    common.start(REPRODUCTION)
