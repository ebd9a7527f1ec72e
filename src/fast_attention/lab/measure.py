"""Fair time, memory and operations: every competitor beside exact attention, round by round, in one process."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.counting import count_operations, peak_bytes
from fast_attention.mechanism import Attention, Mixer, Shape
from fast_attention.nn.bound import Bound

Run = Callable[[], Any]
Tensors = tuple[Tensor, Tensor, Tensor]
SHORTEST_SAMPLE = 0.002  # seconds: faster calls are repeated and averaged within one sample
MOST_REPEATS = 50


@dataclass(frozen=True)
class Setting:
    """What every competitor is measured with: Gaussian tokens, one sequence unless ``batch`` says more."""

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
class Competitor:
    """One mechanism with weights for one length: its forward pass, its forward and backward pass, what it holds."""

    forward: Run
    training: Run
    decoded: Callable[[], int | None]
    weight_bytes: int = 0


def exact(setting: Setting, tensors: Tensors) -> Competitor:
    """torch's fused exact attention on the same tensors: the line to beat."""
    q, k, v = tensors

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=setting.is_causal)

    def held() -> int:
        return k.nbytes + v.nbytes

    return Competitor(_without_gradients(attend), _with_gradients(attend, [q, k, v]), held)


def competitor(mechanism: Attention[Any, Any] | Mixer[Any, Any], setting: Setting, tensors: Tensors) -> Competitor:
    """A mechanism with fresh weights for the tensors' length; a mixer gets whole tokens of the same width."""
    q, k, v = tensors
    length = q.shape[-2]
    torch.manual_seed(setting.seed)
    bound = Bound(mechanism, Shape(setting.heads, setting.head_dim, length)).to(setting.device, setting.dtype)
    x = q.detach().transpose(1, 2).flatten(2).requires_grad_(setting.backward)
    inputs = (x,) if isinstance(mechanism, Mixer) else (q, k, v)

    def attend() -> Tensor:
        return bound(*inputs, is_causal=setting.is_causal)

    @torch.no_grad()
    def decoded() -> int | None:
        memory = mechanism.traits.memory
        if memory is None or not isinstance(mechanism, Attention):
            return None
        stretch = 16 if memory == "constant" else length
        return state_bytes(bound.decode(*(z[..., :stretch, :] for z in (q, k, v)))[1])

    held = sum(weight.nbytes for weight in (*bound.parameters(), *bound.buffers()))
    wanted = [*inputs, *bound.parameters()]
    return Competitor(_without_gradients(attend), _with_gradients(attend, wanted), decoded, held)


def runner(attend: Callable[[], Tensor], inputs: list[Tensor], weights: list[Tensor]) -> Competitor:
    """A competitor that calls ``attend()``, made from ``inputs`` and ``weights``; gradients go to both."""
    wanted = [x for x in (*inputs, *weights) if x.requires_grad]
    held = sum(weight.nbytes for weight in weights)
    return Competitor(_without_gradients(attend), _with_gradients(attend, wanted), lambda: None, held)


def _without_gradients(attend: Callable[[], Tensor]) -> Run:
    @torch.no_grad()
    def forward() -> Tensor:
        return attend()

    return forward


def _with_gradients(attend: Callable[[], Tensor], wanted: list[Tensor]) -> Run:
    def training() -> Any:
        out = attend()
        return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    return training


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a state."""
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(state_bytes(part) for part in state) if isinstance(state, tuple | list) else 0


def costs(runner: Competitor, setting: Setting) -> dict[str, int | None]:
    """Peak memory of each pass, operations of the forward pass, and the size of the decoding state."""
    return {
        "forward_bytes": peak_bytes(runner.forward, setting.device),
        "training_bytes": peak_bytes(runner.training, setting.device) if setting.backward else None,
        "operations": count_operations(runner.forward),
        "state_bytes": runner.decoded(),
        "weight_bytes": runner.weight_bytes,
    }


def repeats_for(estimate: float) -> int:
    """How many calls make a sample long enough to time."""
    return max(1, min(MOST_REPEATS, round(SHORTEST_SAMPLE / max(estimate, 1e-9))))


@dataclass(frozen=True)
class Timing:
    """Seconds, median and least over the rounds; ratios are to the reference, the median of each round's."""

    median: float
    ratio: float
    best: float
    best_ratio: float
    rounds: int
    low: float  # the ratio's quartiles over the rounds
    high: float


def timing(samples: list[float], reference: list[float]) -> Timing:
    """Summarise the samples of one competitor against the reference's samples of the same rounds."""
    shared = min(len(samples), len(reference))
    ratios = [mine / theirs for mine, theirs in zip(samples[:shared], reference[:shared], strict=True)]
    best = min(samples)
    low, _, high = statistics.quantiles([*ratios, *ratios[: shared == 1]], n=4, method="inclusive")
    middle = statistics.median(samples), statistics.median(ratios)
    return Timing(*middle, best, best / min(reference), shared, low, high)


def useful_threads() -> int:
    """All cores, unless that is slower here and now than half of them or one: on a busy machine threads wait.

    Leaves torch's number of threads at the answer.
    """
    cores = os.cpu_count() or 1
    q = torch.randn(3, 8, 256, 32)
    times: dict[int, list[float]] = {count: [] for count in sorted({cores, max(cores // 2, 1), 1}, reverse=True)}
    for _ in range(15):
        for count, found in times.items():
            torch.set_num_threads(count)
            start = time.perf_counter()
            F.scaled_dot_product_attention(q, q, q).exp().sum()
            found.append(time.perf_counter() - start)
    medians = {count: statistics.median(found) for count, found in times.items()}
    chosen = next(count for count, median in medians.items() if median <= medians[1])
    torch.set_num_threads(chosen)
    return chosen


def memory_at_hand(device: torch.device) -> int:
    """Bytes that may still be taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    except OSError:
        found = []
    if found:
        return found[0]
    return 4 * 2**30  # no way to ask that works everywhere
