"""Exact attention up to a number of tokens, a mechanism beyond: the number is given, or measured on this machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from glob import escape
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import clock
from fast_attention.integrations import relative
from fast_attention.integrations.modules import restored_generators
from fast_attention.integrations.report import Layer, chosen
from fast_attention.mechanism import Attention, Shape
from fast_attention.mechanisms.dense.softmax import Softmax
from fast_attention.mechanisms.hybrid.by_length import ByLength, Weights
from fast_attention.nn.bound import Bound

ExactUpTo = int | Literal["auto"]
SHORTEST, LONGEST = 64, 1 << 17  # tokens at which times are compared
DRAW = 1.05  # of exact attention's time: no slower
SLOWEST = 1.0  # seconds of exact attention beyond which no greater length is tried
ROUNDS, PATIENCE = 9, 1.0  # of timing both in turns; seconds after which no further round begins


def check(exact_up_to: object) -> None:
    """Raise a ``ValueError`` unless this is a number of tokens or ``"auto"``."""
    is_number = isinstance(exact_up_to, int) and not isinstance(exact_up_to, bool) and exact_up_to >= 1
    if not is_number and exact_up_to != "auto":
        raise ValueError(f"exact_up_to={exact_up_to!r}: give a number of tokens, at least 1, or 'auto' to measure it")


def exact_below(wanted: Any, tokens: int) -> Any:
    """``ByLength`` of exact attention up to ``tokens`` and a mechanism, or every one in a dictionary of patterns.

    Exact attention and mixers stay as they are.

    Raises:
        ValueError: A mechanism is a ``ByLength``, which has a limit of its own.
    """
    if isinstance(wanted, dict):
        return {pattern: exact_below(mechanism, tokens) for pattern, mechanism in wanted.items()}
    if isinstance(wanted, ByLength):
        raise ValueError(f"exact_up_to={tokens}: {wanted!r} says itself up to where it is exact; leave one of them out")
    if not isinstance(wanted, Attention) or isinstance(wanted, Softmax):
        return wanted
    return ByLength(Softmax(), wanted, tokens)


def limited(bound: Bound, exact: Bound, tokens: int, like: Tensor) -> Bound:
    """A bound mechanism behind exact attention up to a number of tokens, with their weights; nothing is drawn.

    Args:
        bound: The mechanism.
        exact: What the layer ran before: exact attention with its bias, or anything in place of which it then runs.
        tokens: Up to where exact attention serves.
        like: A tensor of the device and dtype of its weights.
    """
    if isinstance(bound.mechanism, Softmax):
        return bound
    mechanism, short = exact_below(bound.mechanism, tokens), ()
    if isinstance(exact.mechanism, Softmax):
        mechanism, short = replace(mechanism, short=exact.mechanism), exact.w
    with restored_generators():
        new = relative.bound(mechanism, bound.shape, getattr(bound, "positions", None))
    new = new.to(like.device, like.dtype)
    new.adopt(Weights(new.w.short if isinstance(new, relative.Tied) else short, bound.w))
    return new.train(bound.training)


def measured(
    wanted: Any, model: nn.Module, swap: Callable[[Any], Sequence[Layer]], swap_back: Callable[[], Any]
) -> Sequence[Layer]:
    """Swap twice: to find every layer's sizes, and with each mechanism exact up to where it becomes faster there."""
    limits: dict[Any, int] = {}
    exact: dict[str, Any] = {}
    with restored_generators(model):
        layers = swap(exact_below(wanted, ByLength.above))
    for layer in layers:
        mechanism = chosen(layer.name, wanted)
        tokens = ByLength.above
        if layer.replaced and isinstance(mechanism, Attention) and not isinstance(mechanism, Softmax):
            kind = (layer.heads, layer.head_dim, layer.is_causal, mechanism)
            if kind not in limits:
                like = next(model.get_submodule(layer.name).parameters())
                shape = Shape(layer.heads, layer.head_dim)
                limits[kind] = crossover(mechanism, shape, like, is_causal=layer.is_causal)
            tokens = limits[kind]
        if mechanism is not None:
            exact[escape(layer.name)] = exact_below(mechanism, tokens)
    swap_back()
    return swap(exact)


@torch.no_grad()
def crossover(mechanism: Attention[Any, Any], shape: Shape, like: Tensor, *, is_causal: bool) -> int:
    """The number of tokens from which on a mechanism is no slower than exact attention, measured on this machine.

    Lengths are doubled until ``ByLength`` of both with ``above=length - 1``, which has just crossed, takes no
    longer than exact attention: causal, at most 5 % longer, for there it computes all rows but the last exactly and
    reads all keys besides. Two lengths between the last two are tried then. Where exact attention takes a second
    before that, it is that length.
    """
    slower, length, limit = 0, SHORTEST, DRAW if is_causal else 1.0

    def pair(length: int) -> tuple[float, float]:
        return seconds(mechanism, replace(shape, max_len=length), like, is_causal=is_causal)

    while length < LONGEST:
        exact, ours = pair(length)
        if ours <= limit * exact:
            break
        if exact > SLOWEST:
            return length
        slower, length = length, 2 * length
    for _ in range(2 if slower else 0):
        middle = SHORTEST * round(math.sqrt(slower * length) / SHORTEST)
        if slower < middle < length:
            exact, ours = pair(middle)
            slower, length = (slower, middle) if ours <= limit * exact else (middle, length)
    return length


def seconds(mechanism: Attention[Any, Any], shape: Shape, like: Tensor, *, is_causal: bool) -> tuple[float, float]:
    """Exact attention's time at ``shape.max_len`` tokens and that of ``ByLength`` that has just crossed: medians."""
    with torch.random.fork_rng(devices=[]):
        bound = Bound(ByLength(Softmax(), mechanism, max(shape.max_len - 1, 1)), shape).to(like.device, like.dtype)
    size, generator = (1, shape.heads, shape.max_len, shape.head_dim), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, generator=generator).to(like.device, like.dtype) for _ in range(3))
    runs = (
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal),
        lambda: bound(q, k, v, is_causal=is_causal),
    )
    estimates = [min(clock.seconds(run, like.device) for _ in range(2)) for run in runs]
    repeats = clock.repeats_for(min(estimates))
    samples = clock.in_turns(dict(enumerate(runs)), like.device, ROUNDS, PATIENCE, repeats)
    exact, ours = map(statistics.median, samples.values())
    return exact, ours
