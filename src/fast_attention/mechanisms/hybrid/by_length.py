"""Attention by length: one mechanism (exact, say) for queries that see few keys, another for those that see many.

Exact attention is the fastest there is for short sequences and the slowest for long ones: which of the two serves a
query is decided by the number of keys that it may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fast_attention.decoding import State
from fast_attention.mechanism import Attention, Mixer, Shape, Traits
from fast_attention.mechanisms.dense.softmax import Softmax
from fast_attention.mechanisms.hybrid import by_length_decoding, by_length_rows
from fast_attention.mechanisms.hybrid.by_length_decoding import ByLengthState, NewTokens
from fast_attention.mechanisms.hybrid.by_length_rows import Part
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.value import at_least

_READS: dict[tuple[bool, bool], Literal["qkv", "kv", "qv", "v"]] = {
    (True, True): "qkv", (False, True): "kv", (True, False): "qv", (False, False): "v",
}  # fmt: skip  # by whether queries and keys are read


class Weights(NamedTuple):
    """The weights of both mechanisms."""

    short: Any
    long: Any


Given = Weights | tuple[()]  # where neither has weights, none need be given


@dataclass(frozen=True, repr=False)
class ByLength(Attention[Given, ByLengthState]):
    """One mechanism for queries that see at most ``above`` keys, another for queries that see more.

    Query i, which may see n_i keys (masked ones do not count, itself does), gets row i of ``short`` where
    ``n_i <= above`` and row i of ``long`` elsewhere, each over all keys that it may see. So

    - causal, the first ``above`` tokens are ``short(q[:above], k[:above], v[:above])``, and all later ones are
      ``long``'s over all keys before them: the future never moves the past, and decoding in any split is one pass;
    - noncausal, all rows of a sequence come from the same mechanism, by the number of its visible keys, so that a
      padded sequence is computed as the shorter one; a batch of mixed lengths is split by sequence.

    Decoding keeps what ``short`` keeps (all keys and values, of exact attention) up to ``above`` tokens, and what
    ``long`` keeps beyond.

    Args:
        short: The mechanism of queries that see few keys; ``Softmax()`` leaves short texts exactly as they were.
        long: That of queries that see many. Its weights and those of ``short`` are this mechanism's.
        above: The most keys that ``short`` serves, at least 1.
    """

    short: Attention[Any, Any] = Softmax()  # noqa: RUF009
    long: Attention[Any, Any] = Local()  # noqa: RUF009
    above: int = 512

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """What both can do; time and what is approximated are those of ``long``."""
        return self._traits

    _traits = Traits(paper="", formula="", cost="", order=1.0)  # of each value, set when it is made

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: ``short`` or ``long`` is no attention, or ``above`` is no number from 1 on.
        """
        for name in ("short", "long"):
            part = getattr(self, name)
            if not isinstance(part, Attention):
                takes = "mixes whole tokens and takes no queries" if isinstance(part, Mixer) else "is no attention"
                raise ValueError(f"ByLength({name}={part!r}): {part!r} {takes}; give one such as Softmax() or Local()")
        at_least(self, "above", self.above, 1)
        object.__setattr__(self, "_traits", _combined(self.short, self.long, self.above))

    @property
    def needs_weights(self) -> bool:
        """Whether one of the two needs weights."""
        return self.short.needs_weights or self.long.needs_weights

    def weights(self, shape: Shape) -> Weights:
        """The weights of both."""
        return Weights(self.short.weights(shape), self.long.weights(shape))

    def redrawn(self, w: Given, shape: Shape) -> Weights:
        """The weights of both with their random tensors drawn again."""
        return Weights(*(part.mechanism.redrawn(part.w, shape) for part in self._parts(w)))

    def heads_of(self, w: Given) -> int | None:
        """The heads that the weights of either are for."""
        heads = [part.mechanism.heads_of(part.w) for part in self._parts(w) if part.mechanism.needs_weights]
        return next((number for number in heads if number is not None), None)

    def calibrated(self, q: Tensor, k: Tensor, w: Given, *, key_mask: Tensor | None = None) -> Weights:
        """The weights of both suited to these queries and keys."""
        return Weights(*(part.mechanism.calibrated(q, k, part.w, key_mask=key_mask) for part in self._parts(w)))

    def _parts(self, w: Given) -> tuple[Part, Part]:
        short, long = w or ((), ())
        return Part(self.short, short), Part(self.long, long)

    @property
    def shares_cache(self) -> bool:  # type: ignore[override]
        """Whether ``short`` does: ``long`` gets repeated heads."""
        return self.short.shares_cache

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Given, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Row i of ``short`` where query i sees at most ``above`` keys, of ``long`` elsewhere."""
        short, long = self._parts(w)
        return by_length_rows.attend(q, k, v, key_mask, short, long, above=self.above, is_causal=is_causal)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: Given, state: ByLengthState | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, ByLengthState]:
        """Attend with the new tokens, those up to ``above`` by ``short``; keep what later ones need."""
        short, long = self._parts(w)
        return by_length_decoding.advance(NewTokens(q, k, v, key_mask), state, short, long, above=self.above)

    def exact_step(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State] | None:
        """What ``decode`` gives for new tokens, all visible, where that comes to exact attention; None elsewhere.

        ``state`` is one of ``decode`` with the same weights: nothing of it is compared but its cache's shape.
        """
        if not (isinstance(self.short, Softmax) and self.short.is_plain):
            return None
        step = by_length_decoding.exact_step(q, k, v, state.held, self.short, above=self.above)
        return None if step is None else (step[0], state._replace(held=step[1]))


def exact_for(mechanism: Attention[Any, Any], keys: int) -> Softmax | None:
    """The exact attention, of dot products alone, that a mechanism is to so many keys; None: it is something else."""
    while isinstance(mechanism, ByLength):
        if keys > mechanism.above:
            return None
        by_length_rows.record_short(mechanism.short, mechanism.above)
        mechanism = mechanism.short
    return mechanism if isinstance(mechanism, Softmax) and mechanism.is_plain else None


def _combined(short: Attention[Any, Any], long: Attention[Any, Any], above: int) -> Traits:
    """What both can do; what one of them holds, as weights and in decoding."""
    a, b = short.traits, long.traits
    growing, streams = "growing" if b.memory == "growing" else "window", None not in (a.memory, b.memory)
    learned, target = a.learned or b.learned, b.approximates
    approximates = target if target in (type(short).__name__, a.approximates) and not learned else None
    return Traits(
        paper=f"a rule over mechanisms: {a.paper}; {b.paper}",
        formula=f"{short!r} for queries that see at most {above} keys, {long!r} for all others",
        cost=f"{a.cost} up to {above} tokens, {b.cost} beyond",
        order=b.order,
        reads=_READS["q" in a.reads + b.reads, "k" in a.reads + b.reads],
        causal=a.causal and b.causal,
        bidirectional=a.bidirectional and b.bidirectional,
        padding=a.padding and b.padding,
        cross=a.cross and b.cross,
        rotary=a.rotary and b.rotary,
        memory=growing if streams else None,
        bounded=a.bounded or b.bounded,
        random=a.random or b.random,
        matrix=a.matrix and b.matrix,
        learned=learned,
        compile=a.compile and b.compile,
        export=a.export and b.export,
        spans=a.spans or b.spans,
        approximates=approximates,
    )
