"""Measures decoding one token at a time: the time of a token early and late in the sequence, and the state's size."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fast_attention import clock
from fast_attention.lab import measure
from fast_attention.lab.bench.record import Step
from fast_attention.lab.measure import Setting
from fast_attention.lab.refusals import failure
from fast_attention.mechanism import Attention, Shape
from fast_attention.nn.bound import Bound

POSITIONS = (256, 1024, 4096, 16384, 65536)
BATCHES = (1, 8)
ROUNDS = 25
CHUNK = 4096  # tokens of a prefill at a time


def bounded_state(mechanism: Any) -> bool:
    """Whether its decoding state has a size that does not grow."""
    return isinstance(mechanism, Attention) and mechanism.traits.memory in ("constant", "window")


@torch.no_grad()
def decoding(
    mechanism: Any,
    batch: int,
    setting: Setting,
    positions: Iterable[int] = POSITIONS,
    rounds: int = ROUNDS,
    patience: float = math.inf,
    watch: Callable[[str], None] = lambda _: None,
) -> list[Step]:
    """Seconds of one token at every position, in interleaved rounds, from a state that has read that many tokens.

    Positions that would take more than ``patience`` seconds to reach are left out and say so.
    """
    steps = [Step(repr(mechanism), batch, position) for position in positions]
    torch.manual_seed(setting.seed)
    longest = max(positions) + rounds * len(steps) + 8
    bound = Bound(mechanism, Shape(setting.heads, setting.head_dim, longest)).to(setting.device, setting.dtype)

    def tokens(count: int) -> tuple[Any, Any, Any]:
        size = (batch, setting.heads, count, setting.head_dim)
        q, k, v = (torch.randn(size).to(setting.device, setting.dtype) for _ in range(3))
        return q, k, v

    states: dict[int, Any] = {}
    state, read, began = None, 0, time.perf_counter()
    try:
        for position in positions:
            ahead = (time.perf_counter() - began) * (position / read) if read else 0.0
            if ahead > patience:
                break
            watch(f"decoding: {mechanism!r}, batch {batch}, reads {position:,} tokens")
            while read < position:
                count = min(CHUNK, position - read)
                _, state = bound.decode(*tokens(count), state)
                read += count
            states[position] = state
        samples = _timed(bound, tokens(1), states, rounds, setting)
    except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError) as error:
        for step in steps:
            step.note = failure(error)
        return steps
    for step in steps:
        if step.position not in states:
            step.note = f"over budget: reading so far would take more than {patience:.0f} s"
            continue
        step.seconds = statistics.median(samples[step.position])
        step.state_bytes = measure.state_bytes(states[step.position])
    return steps


def _timed(
    bound: Bound, token: tuple[Any, Any, Any], states: dict[int, Any], rounds: int, setting: Setting
) -> dict[int, list[float]]:
    """Samples of every position; each decodes from its own state, which advances by a token each time."""
    advancing = dict(states)

    def step(at: int) -> None:
        _, advancing[at] = bound.decode(*token, advancing[at])

    runs = {position: lambda at=position: step(at) for position in states}
    return {position: samples[2:] for position, samples in clock.in_turns(runs, setting.device, rounds + 2).items()}


def flatness(steps: Iterable[Step]) -> dict[tuple[str, int], float]:
    """Time of a token at the last position over that at the first, for every mechanism and batch."""
    known: dict[tuple[str, int], dict[int, float]] = {}
    for step in steps:
        if step.seconds is not None:
            known.setdefault((step.name, step.batch), {})[step.position] = step.seconds
    return {key: times[max(times)] / times[min(times)] for key, times in known.items() if len(times) > 1}
