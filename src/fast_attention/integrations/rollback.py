"""Takes the last tokens out of a decoding state again, as assisted decoding asks: the states before them are kept.

A state cannot forget, but it is a value: the one before a call is still what it was. So a record holds states that
are a little older, and the queries, keys and values since, from which a state in between is decoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

LONGEST = 256  # tokens that can be taken back at least, however many came since


class Call(NamedTuple):
    """The new tokens of one call: (B, H, N, E), and which of them are real."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.q.shape[-2]

    def part(self, start: int, end: int) -> Call:
        """Some of its tokens."""
        q, k, v = (x[..., start:end, :] for x in self[:3])
        return Call(q, k, v, None if self.key_mask is None else self.key_mask[..., start:end])


class Past(NamedTuple):
    """A state, and the calls since it up to the next state that is kept."""

    state: Any
    calls: tuple[Call, ...]

    @property
    def tokens(self) -> int:
        """How many tokens came since the state."""
        return sum(call.tokens for call in self.calls)


Record = tuple[Past, ...]
Decode = Callable[[Call, Any], tuple[Tensor, Any]]


def length(record: Record) -> int:
    """How many of the last tokens can be taken back."""
    return sum(past.tokens for past in record)


def extended(record: Record, state: Any, call: Call) -> Record:
    """The record with a call of at most ``LONGEST`` tokens behind ``state``, copied: a view would hold on to more.

    It has at least the last ``LONGEST`` tokens, or all there were, fewer than twice as many, and two states at most: a
    state takes calls behind it up to ``LONGEST`` tokens, and the older one goes once the newer has so many.
    """
    copied = Call(*(None if x is None else x.clone() for x in call))  # pyright: ignore[reportArgumentType]
    if record and record[-1].tokens + call.tokens <= LONGEST:
        *earlier, last = record
        record = (*earlier, Past(last.state, (*last.calls, copied)))
    else:
        record = (*record, Past(state, (copied,)))
    return record[1:] if length(record[1:]) >= LONGEST else record


def before(record: Record, tokens: int, decode: Decode) -> Any:
    """The state without the last ``tokens`` of a record that has so many: call by call, as it was decoded before."""
    rest = length(record) - tokens
    first, *later = record
    for past in later:
        if rest >= first.tokens:
            rest, first = rest - first.tokens, past
    state = first.state
    for call in first.calls:
        if rest > 0:
            state = decode(call.part(0, rest), state)[1]
            rest -= call.tokens
    return state
