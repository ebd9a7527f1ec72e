"""Builds competitors with weights for one length, and what their passes cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import clock
from fast_attention.lab import environment
from fast_attention.lab.records import EXACT
from fast_attention.mechanism import Attention, Mixer, Shape
from fast_attention.nn.bound import Bound

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
        wanted = [x for x in (*inputs, *weights) if x.requires_grad]

        def training() -> Any:
            out = attend()
            return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

        return cls(torch.no_grad()(attend), training, sum(weight.nbytes for weight in weights))


@dataclass(frozen=True)
class Competitor:
    """A measured function: ``make(setting, length)`` builds it with fresh weights and inputs."""

    name: str
    reference: str  # the name of its baseline, whose times its own are compared with
    make: Callable[[Setting, int], Passes]
    order: float  # the exponent of its time


def against_exact(mechanisms: list[Any]) -> list[Competitor]:
    """Exact attention, and mechanisms whose baseline it is."""
    competitors = [Competitor(EXACT, EXACT, lambda setting, length: exact(setting, setting.tensors(length)), 2.0)]
    for mechanism in mechanisms:

        def make(setting: Setting, length: int, mechanism: Any = mechanism) -> Passes:
            return competitor(mechanism, setting, setting.tensors(length))

        competitors.append(Competitor(repr(mechanism), EXACT, make, mechanism.traits.complexity_exponent))
    return competitors


def exact(setting: Setting, tensors: Tensors) -> Passes:
    """torch's fused exact attention on the same tensors: the baseline."""
    q, k, v = tensors

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=setting.is_causal)

    return Passes.of(attend, tensors)


def competitor(mechanism: Attention[Any, Any] | Mixer[Any, Any], setting: Setting, tensors: Tensors) -> Passes:
    """A mechanism with fresh weights for the tensors' length; a mixer gets whole tokens of the same width."""
    q, k, v = tensors
    torch.manual_seed(setting.seed)
    bound = Bound(mechanism, Shape(setting.heads, setting.head_dim, q.shape[-2])).to(setting.device, setting.dtype)
    x = q.detach().transpose(1, 2).flatten(2).requires_grad_(setting.backward)
    inputs = (x,) if isinstance(mechanism, Mixer) else (q, k, v)

    def attend() -> Tensor:
        return bound(*inputs, is_causal=setting.is_causal)

    return Passes.of(attend, inputs, [*bound.parameters(), *bound.buffers()])


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a state."""
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(state_bytes(part) for part in state) if isinstance(state, tuple | list) else 0


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
