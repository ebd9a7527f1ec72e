"""Attention by length: one mechanism (exact, say) for queries that see few keys, another for those that see many.

Exact attention is the fastest there is for short sequences and the slowest for long ones: which of the two serves a
query is decided by the number of keys that it may see.

Decoding by length: the state of the mechanism for few keys until all sequences have more, then that of the other.

Where the first is exact attention, whose cache holds all keys, the second reads them out of it when the first sequence
crosses: before that the state is a cache, and when all have crossed, it is the second's alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.decoding import State
from fast_attention.engine import trace
from fast_attention.engine.heads import repeated, viewed
from fast_attention.engine.kv_cache import KVCache, append, concat_tokens
from fast_attention.engine.tracing import traced
from fast_attention.mechanism import Attention, Mixer, Places, Shape, Traits
from fast_attention.mechanisms.dense.softmax import Softmax, softmax_attention
from fast_attention.mechanisms.hybrid import by_length_rows
from fast_attention.mechanisms.hybrid.by_length_rows import Part, covered
from fast_attention.mechanisms.sparse.local import Local
from fast_attention.traits import PARTS
from fast_attention.value import at_least

_READS: dict[tuple[bool, bool], Literal["qkv", "kv", "qv", "v"]] = {
    (True, True): "qkv", (False, True): "kv", (True, False): "qv", (False, False): "v",
}  # fmt: skip  # by whether queries and keys are read


class Weights(NamedTuple):
    """The weights of both mechanisms."""

    short: Any
    long: Any


Given = Weights | tuple[()]  # where neither has weights, none need be given


class ByLengthState(NamedTuple):
    """The states of both mechanisms, as far as they are needed."""

    count: Any  # visible keys so far: a number while all sequences have as many, else a tensor (..., 1, 1)
    short: Any  # None once every sequence has more keys than above
    long: Any  # None as long as the keys can be read from the state of ``short``


class NewTokens(NamedTuple):
    """Tokens that a state has not read yet."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None

    def some(self, start: int, end: int) -> NewTokens:
        """Rows from number ``start`` up to ``end``."""
        if end - start == self.v.shape[-2]:
            return self
        q, k, v = (x[..., start:end, :] for x in self[:3])
        return NewTokens(q, k, v, None if self.key_mask is None else self.key_mask[..., start:end])

    def after(self, part: Part, state: Any) -> tuple[Tensor, Any]:
        """A mechanism's outputs behind its ``state``, and its state after them."""
        if isinstance(part.mechanism, Softmax):
            cache = append(state, self.k, self.v, self.key_mask)
            attend = partial(covered, short=part, is_causal=True)
            return viewed(attend, self.q, cache.k, cache.v, key_mask=cache.visible), cache
        k, v = _read(part, self.q.shape[-3], self.k, self.v)
        return part.mechanism.advance(self.q, k, v, part.w, state, key_mask=self.key_mask)

    def read_by(self, part: Part, state: Any) -> Any:
        """A mechanism's state after them, where their outputs are not wanted."""
        if part.mechanism.traits.memory != "constant":
            return self.after(part, state)[1]
        k, v = _read(part, self.q.shape[-3], self.k, self.v)
        summary = part.mechanism.summarise_keys(k, v, part.w, key_mask=self.key_mask)
        return summary if state is None else part.mechanism.merge_states(state, summary)


class NewRows(NamedTuple):
    """Which of the new tokens are rows of ``short``: all up to ``first``, and of some sequences those up to ``end``."""

    first: int
    end: int
    few: Tensor | None  # (..., 1, N), True for rows of ``short``; None where the two are equal
    count: Any  # as in the state, after these tokens

    @staticmethod
    def of(count: Any, key_mask: Tensor | None, v: Tensor, above: int) -> NewRows:
        """For new tokens with values ``v`` behind ``count`` visible keys."""
        length = v.shape[-2]
        if key_mask is None and isinstance(count, int):
            first = min(max(above - count, 0), length)
            return NewRows(first, first, None, count + length)
        visible = torch.ones_like(v[..., :1, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        number = count + visible.expand(*v.shape[:-3], 1, length).cumsum(-1)
        few = number <= above
        if traced():
            return NewRows(0, length, few, number[..., -1:])
        rows = few.sum(-1)
        return NewRows(int(rows.min()), int(rows.max()), few, number[..., -1:])


def advance(
    new: NewTokens, state: ByLengthState | None, short: Part, long: Part, *, above: int
) -> tuple[Tensor, ByLengthState]:
    """Outputs of new tokens behind ``state``, and the state after them."""
    if state is not None and state.short is None:
        trace.record(long.mechanism.expression, "every sequence has more keys than above", above=above)
        out, late = new.after(long, state.long)
        return out, ByLengthState(state.count, None, late)
    held = ByLengthState(0, None, None) if state is None else state
    rows, length = NewRows.of(held.count, new.key_mask, new.v, above), new.v.shape[-2]
    early, after = new.some(0, rows.end).after(short, held.short) if rows.end else (None, held.short)
    late, readable = held.long, _readable(short, long)
    if readable and late is None and held.short is not None and rows.first < length:
        trace.record(f"{long.mechanism.expression} reads the cache", "a sequence has more keys than above", above=above)
        k, v = _read(long, new.q.shape[-3], *held.short[:2])
        late = NewTokens(k, k, v, held.short.visible).read_by(long, None)
    if rows.first and (rows.first < length or late is not None or not readable):
        late = new.some(0, rows.first).read_by(long, late)
    outs = [] if early is None else [early[..., : rows.first, :]]
    if rows.first < length:
        out, late = new.some(rows.first, length).after(long, late)
        both = rows.end - rows.first
        if early is not None and rows.few is not None:
            few = rows.few[..., rows.first : rows.end, None]
            outs.append(torch.where(few, early[..., rows.first :, :], out[..., :both, :]))
        outs.append(out[..., both:, :])
    out = outs[0] if len(outs) == 1 else torch.cat(outs, -2)
    return out, ByLengthState(rows.count, after if rows.end == length else None, late)


def exact_step(
    q: Tensor, k: Tensor, v: Tensor, state: Any, short: Softmax, *, above: int
) -> tuple[Tensor, ByLengthState] | None:
    """Result of ``advance``, at once, for new visible tokens behind visible ones, all of them rows of ``short``.

    ``state`` is one that ``advance`` made; None where these are not such tokens, or do not fit its cache.
    """
    if not isinstance(state, ByLengthState) or not isinstance(state.count, int) or state.long is not None:
        return None
    count, held = state.count + k.shape[-2], state.short
    if count > above or not isinstance(held, KVCache) or k.dtype != held.k.dtype or k.shape[:-2] != held.k.shape[:-2]:
        return None
    keys, values = concat_tokens(held.k, k), concat_tokens(held.v, v)
    visible = held.visible[..., :1].expand(*held.visible.shape[:-1], count)  # all are
    cache = KVCache(keys, values, visible)
    if q.shape[-2] == 1 and not torch.is_grad_enabled() and q.dtype != torch.float16:
        trace.record("torch's fused kernel", "one query that sees all keys")
        shares = q.shape[-3] != keys.shape[-3]
        out = F.scaled_dot_product_attention(q, keys, values, scale=short.scale, enable_gqa=shares)
    else:
        attend = partial(softmax_attention, scale=short.scale, is_causal=q.shape[-2] > 1)
        out = viewed(attend, q, keys, values, key_mask=None)
    return out, ByLengthState(count, cache, None)


def _read(part: Part, heads: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as a mechanism reads: ``heads``, or fewer where its cache is shared."""
    if not part.mechanism.shares_cache:
        k, v = repeated(heads, k=k, v=v)
    return k, v


def _readable(short: Part, long: Part) -> bool:
    """Whether the state of ``long`` follows from the keys and values that the state of ``short`` holds."""
    traits = long.mechanism.traits
    is_read = traits.memory in ("constant", "window") and traits.inputs in ("qkv", "kv")
    return is_read and isinstance(short.mechanism, Softmax)


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
        """Traits that both have; time and what is approximated are those of ``long``."""
        return self._traits

    _traits = Traits(paper="", formula="", cost="", complexity_exponent=1.0, gpu=PARTS)  # set when a value is made

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
        at_least(self, "above", self.above, 1, nothing=self.long)
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
        return advance(NewTokens(q, k, v, key_mask), state, short, long, above=self.above)

    def exact_step(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State] | None:
        """Result of ``advance``, at once, for new visible tokens behind visible ones, all of them rows of ``short``.

        ``state`` is one of ``decode`` with the same weights: nothing of it is compared but its cache's shape.
        """
        if not (isinstance(self.short, Softmax) and self.short.is_plain):
            return None
        step = exact_step(q, k, v, state.content, self.short, above=self.above)
        return None if step is None else (step[0], state._replace(content=step[1]))


def exact_for(mechanism: Attention[Any, Any], keys: int) -> Softmax | None:
    """The exact attention, of dot products alone, that a mechanism is to so many keys; None: it is something else."""
    while isinstance(mechanism, ByLength):
        if keys > mechanism.above:
            return None
        by_length_rows.record_short(mechanism.short, mechanism.above)
        mechanism = mechanism.short
    return mechanism if isinstance(mechanism, Softmax) and mechanism.is_plain else None


def _combined(short: Attention[Any, Any], long: Attention[Any, Any], above: int) -> Traits:
    """Traits that both have; what one of them holds, as weights and in decoding."""
    a, b = short.traits, long.traits
    growing, streams = "growing" if b.memory == "growing" else "window", None not in (a.memory, b.memory)
    learned, target = a.learned or b.learned, b.approximates
    approximates = target if target in (type(short).__name__, a.approximates) and not learned else None
    places: list[Places] = [a.positions, b.positions]
    return Traits(
        paper=f"a rule over mechanisms: {a.paper}; {b.paper}",
        formula=f"{short!r} for queries that see at most {above} keys, {long!r} for all others",
        cost=f"{a.cost} up to {above} tokens, {b.cost} beyond",
        complexity_exponent=b.complexity_exponent,
        gpu=PARTS,
        inputs=_READS["q" in a.inputs + b.inputs, "k" in a.inputs + b.inputs],
        causal=a.causal and b.causal,
        bidirectional=a.bidirectional and b.bidirectional,
        padding=a.padding and b.padding,
        cross=a.cross and b.cross,
        rotary=a.rotary and b.rotary,
        memory=growing if streams else None,
        positions=max(places, key=get_args(Places).index),
        needs_max_len=a.needs_max_len or b.needs_max_len,
        random=a.random or b.random,
        matrix=a.matrix and b.matrix,
        learned=learned,
        compile=a.compile and b.compile,
        export=a.export and b.export,
        sees_padding=a.sees_padding or b.sees_padding,
        approximates=approximates,
    )
