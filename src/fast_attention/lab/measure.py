"""Measures what mechanisms cost: in turns, round by round, after each was warmed up and its memory was counted."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import clock
from fast_attention.counting import counted
from fast_attention.lab import environment, inputs
from fast_attention.lab.inputs import InputError
from fast_attention.lab.records import EXACT, Cell, Status, Timed, Times
from fast_attention.lab.refusals import failure, first_line
from fast_attention.mechanism import Attention, Mixer, Shape, Unsupported
from fast_attention.nn.bound import Bound

FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
PASSES = FEWEST_ROUNDS + 2  # with the one whose memory and operations are counted, and a warm-up
Run = Callable[[], Any]
Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """Inputs of every competitor: Gaussian tokens, one sequence unless ``batch`` says more."""

    heads: int
    head_dim: int
    device: torch.device
    dtype: torch.dtype
    is_causal: bool
    backward: bool
    seed: int = 0
    batch: int = 1

    def tensors(self, length: int) -> Tensors:
        """Queries, keys and values of one length, which ask for gradients if backward is measured."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(3, self.batch, self.heads, length, self.head_dim, generator=generator)
        q, k, v = (x.to(self.device, self.dtype).requires_grad_(self.backward) for x in drawn)
        return q, k, v

    def tokens(self, length: int) -> Tensor:
        """The queries of ``tensors`` as whole tokens (batch, length, heads * head_dim)."""
        return self.tensors(length)[0].detach().transpose(1, 2).flatten(2).requires_grad_(self.backward)


@dataclass(frozen=True)
class Passes:
    """A competitor with weights for one length: its forward pass, its forward and backward pass, its weights."""

    forward: Run
    training: Run
    weight_bytes: int = 0

    @classmethod
    def of(
        cls, attend: Callable[[], Tensor], inputs: Iterable[Tensor], weights: Iterable[Tensor] = ()
    ) -> Passes:  # fmt: skip
        """The passes of ``attend()``, made from ``inputs`` and ``weights``; gradients go to both."""
        weights = list(weights)
        needs_grad = [x for x in (*inputs, *weights) if x.requires_grad]

        def training() -> Any:
            out = attend()
            return torch.autograd.grad(out, needs_grad, torch.ones_like(out), allow_unused=True)

        return cls(torch.no_grad()(attend), training, sum(weight.nbytes for weight in weights))


class Competitor(NamedTuple):
    """A measured function: ``make(setting, length)`` builds it with fresh weights and inputs."""

    name: str
    make: Callable[[Setting, int], Passes]
    order: float  # the exponent of its time


def against_exact(mechanisms: list[Any]) -> list[Competitor]:
    """Exact attention, the baseline, and mechanisms."""

    def make(form: Callable[..., Passes], *mechanism: Any) -> Callable[[Setting, int], Passes]:
        return lambda setting, length: form(*mechanism, setting, setting.tensors(length))

    others = [Competitor(repr(x), make(competitor, x), x.traits.complexity_exponent) for x in mechanisms]
    return [Competitor(EXACT, make(exact), 2.0), *others]


def exact(setting: Setting, tensors: Tensors) -> Passes:
    """torch's fused exact attention on the same tensors: the baseline."""
    return Passes.of(lambda: F.scaled_dot_product_attention(*tensors, is_causal=setting.is_causal), tensors)


def competitor(mechanism: Attention[Any, Any] | Mixer[Any, Any], setting: Setting, tensors: Tensors) -> Passes:
    """A mechanism with fresh weights for the tensors' length; a mixer gets whole tokens of the same width."""
    length = tensors[0].shape[-2]
    torch.manual_seed(setting.seed)
    bound = Bound(mechanism, Shape(setting.heads, setting.head_dim, length)).to(setting.device, setting.dtype)
    inputs = (setting.tokens(length),) if isinstance(mechanism, Mixer) else tensors
    weights = [*bound.parameters(), *bound.buffers()]
    return Passes.of(lambda: bound(*inputs, is_causal=setting.is_causal), inputs, weights)


def useful_threads() -> int:
    """The cores that this process may use, unless half of them or one are faster: on a busy machine threads wait.

    Leaves torch's number of threads at the answer.
    """
    cores, q = environment.usable_cores(), torch.randn(3, 8, 256, 32)

    def run(count: int) -> Any:
        torch.set_num_threads(count)
        return F.scaled_dot_product_attention(q, q, q).exp().sum()

    counts = sorted({cores, max(cores // 2, 1), 1}, reverse=True)
    times = clock.in_turns({count: lambda count=count: run(count) for count in counts}, q.device, 15)
    medians = {count: statistics.median(samples) for count, samples in times.items()}
    chosen = next(count for count in counts if medians[count] <= medians[1])
    torch.set_num_threads(chosen)
    return chosen


def memory_at_hand(device: torch.device) -> int:
    """Bytes that may still be taken; 4 GiB where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    except OSError:
        sizes = []
    return sizes[0] if sizes else 4 * 2**30


@contextmanager
def by_threads(asked: int | None) -> Iterator[Callable[[], list[str]]]:
    """Measure by so many threads, or by as many as are useful here; torch has its own number again at the end.

    Yields a function that returns a sentence for each thing that a reader of the times must know.
    """
    own, usable = torch.get_num_threads(), environment.usable_cores()
    try:
        inputs.threads(asked or useful_threads())
        others, used, words = environment.Others(), torch.get_num_threads(), list[str]()
        may = f"this process may use {usable} core{'s' * (usable > 1)}"
        if used > usable:
            words = [f"--threads {asked}, and {may}: threads wait for each other, and times are longer."]
        elif own > usable:
            words = [f"torch had {own} threads, and {may}: times are of {used}."]
        yield lambda: [*words, *others.words()]
    finally:
        torch.set_num_threads(own)


@dataclass
class TimingGroup:
    """Times competitors in the same rounds, at one length; those that do not fit the time are left out."""

    setting: Setting
    competitors: Sequence[Competitor]  # exact attention, then the others; the first have the first claim to the time
    record: Timed  # where the cells go
    length: int  # tokens
    seconds: float  # for this group
    watch: Callable[[str], None]  # called with every step
    started: float = field(default_factory=lambda: time.perf_counter())
    runners: dict[str, Passes] = field(default_factory=dict)
    estimates: dict[str, list[float]] = field(default_factory=dict)  # seconds of one call of each pass
    added: float = 0.0  # seconds until the last was added

    def run(self) -> None:
        """Measure all competitors."""
        for competitor in self.competitors:
            self.watch(f"{self.length:,} tokens: {competitor.name}")
            cell = Cell(competitor.name, self.length)
            self.record.cells.append(cell)
            if competitor.name != EXACT and (reason := self.left_out(competitor)):
                cell.status, cell.note = reason
            else:
                self.add(competitor, cell)
        self.added = self.spent
        self.rounds()
        self.runners.clear()
        gc.collect()

    def left_out(self, competitor: Competitor) -> tuple[Status, str] | None:
        """Why a competitor's memory or the time left does not suffice, predicted from the greatest length before.

        What is not known yet is tried, if time is left.
        """
        seconds, size = predicted(self.record.cells, competitor.name, competitor.order, self.length)
        if size > memory_at_hand(self.setting.device) / 2:
            return "too large", f"it would take about {size / 2**30:.1f} GiB, more than half of the free memory"
        if self.spent + self.promised + PASSES * seconds > self.seconds:
            pass_takes = f"about {seconds:.1f} s a pass: " if seconds else ""
            return "over budget", f"{pass_takes}those before it fill the {self.seconds:.0f} s for this length"
        return None

    @property
    def spent(self) -> float:
        """Seconds since this group began."""
        return time.perf_counter() - self.started

    @property
    def promised(self) -> float:
        """Seconds of the fewest rounds of those that were added."""
        return FEWEST_ROUNDS * sum(map(self.cost, self.runners))

    def enough(self, names: Sequence[str]) -> float:
        """Seconds that would have let in these competitors too: each as slow as the slowest that is known."""
        known = [sum(seconds) for seconds in self.estimates.values()]
        known += [predicted(self.record.cells, each.name, each.order, self.length)[0] for each in self.competitors]
        rounds = FEWEST_ROUNDS * sum(map(self.cost, self.estimates))
        return self.added + rounds + len(names) * PASSES * max(known, default=0.0)

    def cost(self, name: str) -> float:
        """Seconds that a competitor takes for its part of a round."""
        return sum(seconds * clock.repeats_for(seconds) for seconds in self.estimates[name])

    def add(self, competitor: Competitor, cell: Cell) -> None:
        """Build a competitor, count its costs in the first call of each pass and time the second.

        One that cannot run says so.
        """
        device = self.setting.device
        try:
            passes = competitor.make(self.setting, self.length)
            cell.operations, cell.forward_bytes = counted(passes.forward, device)
            seconds = [clock.seconds(passes.forward, device)]
            if self.setting.backward:
                cell.training_operations, cell.training_bytes = counted(passes.training, device)
                seconds.append(clock.seconds(passes.training, device))
            cell.weight_bytes = passes.weight_bytes
            self.runners[competitor.name], self.estimates[competitor.name] = passes, seconds
        except Unsupported as error:
            cell.status, cell.note = "refused", first_line(error, 300)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:  # a fault, not a refusal
            cell.status, cell.note = "failed", failure(error, 300)
        if competitor.name == EXACT and cell.status == "failed":
            raise InputError(f"{EXACT} itself fails at {self.length} tokens: {cell.note}")

    def rounds(self) -> None:
        """Rounds in which all run once in turn, until the time is spent; an interruption keeps complete rounds."""
        names, device = list(self.runners), self.setting.device
        samples: dict[str, list[list[float]]] = {name: [[] for _ in self.estimates[name]] for name in names}
        try:
            for number in range(MOST_ROUNDS):
                self.watch(f"{self.length:,} tokens: round {number + 1}")
                patience = 1.0 if number >= FEWEST_ROUNDS else 1.5
                if number and self.spent + sum(map(self.cost, names)) > patience * self.seconds:
                    break
                for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                    runs = (self.runners[name].forward, self.runners[name].training)
                    for run, once, taken in zip(runs, self.estimates[name], samples[name], strict=False):
                        taken.append(clock.seconds(run, device, clock.repeats_for(once)))
        finally:
            for cell in (cell for cell in self.record.cells if cell.length == self.length and cell.mechanism in names):
                _note(cell, samples[cell.mechanism], samples[EXACT])


def _note(cell: Cell, samples: list[list[float]], baseline: list[list[float]]) -> None:
    """Write the summary of a competitor's samples of each pass into its cell."""
    for which, ours, theirs in zip(("forward", "training"), samples, baseline, strict=False):
        if ours and theirs:
            times, rounds = timing(ours, theirs)
            cell.status, cell.rounds = "measured", max(cell.rounds, rounds)
            for key, value in times._asdict().items():
                setattr(cell, f"{which}_{key}", value)


def timing(samples: list[float], reference: list[float]) -> tuple[Times, int]:
    """Summarise the seconds of one competitor against the reference's of the same rounds, whose number it returns."""
    shared = min(len(samples), len(reference))
    ratios = [sample / baseline for sample, baseline in zip(samples[:shared], reference[:shared], strict=True)]
    low, middle, high = statistics.quantiles([*ratios, *ratios[: shared == 1]], n=4, method="inclusive")
    best = min(samples)
    return Times(1000 * statistics.median(samples), 1000 * best, middle, best / min(reference), low, high), shared


def predicted(cells: list[Cell], name: str, order: float, length: int) -> tuple[float, float]:
    """Seconds of one pass of each kind, and bytes, at ``length``: from the greatest shorter one that was measured."""
    shorter = [c for c in cells if c.mechanism == name and c.length < length and c.forward_best_ms is not None]
    if not shorter:
        return 0.0, 0.0
    before = max(shorter, key=lambda cell: cell.length)
    growth = (length / before.length) ** max(order, 1.0)
    size = (before.peak_bytes or 0) + (before.weight_bytes or 0)
    return ((before.forward_best_ms or 0.0) + (before.training_best_ms or 0.0)) / 1000 * growth, size * growth
