"""Attention by length: one mechanism (exact, say) for queries that see few keys, another for those that see many.

Exact attention is the fastest there is for short sequences and the slowest for long ones: which of the two serves a
query is decided by the number of keys that it may see. What one of them need not compute is left out: causal rows by
slices, whole sequences by gathering them out of the batch. Where operations are traced and lengths are open, both
compute all rows, and exact attention reads no more than ``above`` keys for it.

Decoding keeps the state of the mechanism for few keys until all sequences have more, then that of the other. Where the
first is exact attention, whose cache holds all keys, the second reads them out of it when the first sequence crosses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from fast_attention.decoding import State
from fast_attention.engine import masks, trace
from fast_attention.engine.fused import fused_attention
from fast_attention.engine.heads import repeated, viewed
from fast_attention.engine.kv_cache import KVCache, append, concat_tokens
from fast_attention.engine.tracing import exporting, traced
from fast_attention.mechanism import Attention, Mixer, Places, Shape, Traits
from fast_attention.mechanisms.dense.softmax import Softmax, softmax_attention
from fast_attention.mechanisms.hybrid.reference import SinkTokens
from fast_attention.mechanisms.sparse.local import Local, NearKeys
from fast_attention.traits import PARTS
from fast_attention.value import at_least

FEW = "no more keys than above"


class Part(NamedTuple):
    """A mechanism with its weights."""

    mechanism: Attention[Any, Any]
    w: Any

    @property
    def exact(self) -> Softmax | None:
        """Exact attention of dot products alone, wherever keys stand; None if it is another mechanism."""
        return self.mechanism if isinstance(self.mechanism, Softmax) and self.mechanism.is_plain else None

    @property
    def streams_keys(self) -> bool:
        """Whether its state of decoding follows from keys and values that another mechanism has cached."""
        traits = self.mechanism.traits
        return traits.memory in ("constant", "window") and traits.inputs in ("qkv", "kv")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Outputs of the part."""
        return self.mechanism.attend(q, k, v, self.w, is_causal=is_causal, key_mask=key_mask)

    def last(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: int) -> Tensor:
        """Causal outputs of the part for all queries from number ``first`` on."""
        traits = self.mechanism.traits
        if not traits.cross or traits.needs_max_len:  # weights of a longest sequence count from the first query
            return self(q, k, v, is_causal=True, key_mask=key_mask)[..., first:, :]
        return self(q[..., first:, :], k, v, is_causal=True, key_mask=key_mask)


def covered(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, short: Part, *, is_causal: bool) -> Tensor:
    """The outputs of ``short`` for all rows.

    Exact attention is torch's own kernel, also where another form is faster: a model that was swapped gives the numbers
    that it gave, to the bit. With gradients the kernel's mask would hold a number for every pair.
    """
    exact = short.exact
    if exact is None or traced() or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        return short(q, k, v, is_causal=is_causal, key_mask=key_mask)
    length, keys = q.shape[-2], k.shape[-2]
    if key_mask is None or bool(key_mask.all()):
        if length == keys or not is_causal:
            trace.record("torch's fused kernel", "the numbers that a model gave")
            return fused_attention(q, k, v, is_causal=is_causal and keys > 1, scale=exact.scale)
        return short(q, k, v, is_causal=is_causal, key_mask=None)
    visible = masks.visible(length, keys, is_causal=is_causal and length > 1, key_mask=key_mask, device=q.device)
    return softmax_attention(q, k, v, attn_mask=visible, scale=exact.scale)


class Rows(NamedTuple):
    """Which rows are those of ``short``: all up to ``first``, and of some sequences those up to ``end``."""

    first: int
    end: int
    few: Tensor | None  # (..., 1, rows), True for rows of ``short``; None where the two are equal

    @staticmethod
    def of(number: Int[Tensor, "*batch rows"], above: int) -> Rows:
        """For queries that see so many keys."""
        few = number <= above
        if traced():
            return Rows(0, number.shape[-1], few)
        rows = few.sum(-1)
        return Rows(int(rows.min()), int(rows.max()), few)

    def joined(self, early: Tensor, late: Tensor) -> Tensor:
        """All rows, from those of ``short`` up to ``end`` and those of ``long`` from ``first`` on."""
        parts, number = [early[..., : self.first, :]], self.end - self.first
        if self.few is not None:
            few = self.few[..., self.first : self.end, None]
            parts.append(torch.where(few, early[..., self.first :, :], late[..., :number, :]))
        return torch.cat([*parts, late[..., number:, :]], -2)


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Rows, short: Part, long: Part) -> Tensor:
    """Causal outputs whose first rows are those of ``short``."""
    late = long.last(q, k, v, mask, rows.first)
    keys = rows.end + k.shape[-2] - q.shape[-2]  # negative where these queries stand before the first key
    if not rows.end or keys <= 0:
        return F.pad(late, (0, 0, rows.first, 0)) if rows.first else late
    seen = None if mask is None else mask[..., :keys]
    early = short(q[..., : rows.end, :], k[..., :keys, :], v[..., :keys, :], is_causal=True, key_mask=seen)
    return rows.joined(early, late)


def _all_rows(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, short: Part, long: Part, *, above: int, is_causal: bool
) -> Tensor:
    """All rows of both, one of which is taken: in operations that do not depend on how many keys are visible."""
    mask = append(None, k, v, key_mask).visible
    number = _counts(mask, q.shape[-2]) if is_causal else mask.sum(-1, keepdim=True)
    if (exact := short.exact) is not None:
        early = _exact(q, k, v, mask, exact, above, is_causal=is_causal)
    else:
        early = short(q, k, v, is_causal=is_causal, key_mask=key_mask)
    return torch.where((number <= above)[..., None], early, long(q, k, v, is_causal=is_causal, key_mask=key_mask))


def _counts(mask: Bool[Tensor, "*batch keys"], length: int) -> Int[Tensor, "*batch length"]:
    """How many of the keys each of the last ``length`` positions may see, causally."""
    number, position = mask.cumsum(-1), torch.arange(length, device=mask.device) + (mask.shape[-1] - length)
    return number[..., position.clamp(min=0)].masked_fill(position < 0, 0)


def _exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, short: Softmax, most: int, *, is_causal: bool) -> Tensor:
    """Softmax over the first ``most`` visible keys of every sequence, which are brought together."""
    first = SinkTokens.of(k, v, mask, first=most, last=0)[0]
    if not is_causal:
        return softmax_attention(q, first.k, first.v, key_mask=first.present, scale=short.scale)
    visible = torch.arange(most, device=mask.device) < _counts(mask, q.shape[-2])[..., None]
    return softmax_attention(q, first.k, first.v, attn_mask=visible, scale=short.scale)


class Weights(NamedTuple):
    """The weights of both mechanisms."""

    short: Any
    long: Any


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


def _read(part: Part, heads: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as a mechanism reads: ``heads``, or fewer where its cache is shared."""
    if not part.mechanism.shares_cache:
        k, v = repeated(heads, k=k, v=v)
    return k, v


@dataclass(frozen=True, repr=False)
class ByLength(Attention[Any, ByLengthState]):
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

    def redrawn(self, w: Any, shape: Shape) -> Weights:
        """The weights of both with their random tensors drawn again."""
        return Weights(*(part.mechanism.redrawn(part.w, shape) for part in self._parts(w)))

    def heads_of(self, w: Any) -> int | None:
        """The heads that the weights of either are for."""
        heads = [part.mechanism.heads_of(part.w) for part in self._parts(w) if part.mechanism.needs_weights]
        return next((number for number in heads if number is not None), None)

    def calibrated(self, q: Tensor, k: Tensor, w: Any, *, key_mask: Tensor | None = None) -> Weights:
        """The weights of both suited to these queries and keys."""
        return Weights(*(part.mechanism.calibrated(q, k, part.w, key_mask=key_mask) for part in self._parts(w)))

    def _parts(self, w: Any) -> tuple[Part, Part]:
        short, long = w or ((), ())
        return Part(self.short, short), Part(self.long, long)

    @property
    def shares_cache(self) -> bool:  # type: ignore[override]
        """Whether ``short`` does; ``long`` gets repeated heads."""
        return self.short.shares_cache

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Row i of ``short`` where query i sees at most ``above`` keys, of ``long`` elsewhere."""
        (short, long), above = self._parts(w), self.above
        if exporting() or (key_mask is not None and k.shape[-2] > above and traced()):
            trace.record("both, and of each row one", "traced: numbers of visible keys are not known", above=above)
            return _all_rows(q, k, v, key_mask, short, long, above=above, is_causal=is_causal)
        if k.shape[-2] <= above:
            trace.record(short.mechanism.expression, FEW, above=above)
            return covered(q, k, v, key_mask, short, is_causal=is_causal)
        before = k.shape[-2] - q.shape[-2]
        if key_mask is None and (not is_causal or before >= above):
            trace.record(long.mechanism.expression, "every query sees more keys than above", above=above)
            return long(q, k, v, is_causal=is_causal, key_mask=None)
        if key_mask is None:
            path = f"{short.mechanism.expression}, then {long.mechanism.expression}"
            trace.record(path, "causal: by the query's position", above=above)
            number = above - before
            return _causal(q, k, v, None, Rows(number, number, None), short, long)

        def of_many(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            if is_causal:
                return _causal(q, k, v, mask, Rows.of(_counts(mask, q.shape[-2]), above), short, long)
            return long(q, k, v, is_causal=False, key_mask=mask)

        few = (key_mask.sum(-1) <= above).expand(*q.shape[:-3], 1).flatten()
        if bool(few.all()):
            return short(q, k, v, is_causal=is_causal, key_mask=key_mask)
        if not bool(few.any()):
            return of_many(q, k, v, key_mask)
        trace.record("sequences apart by their visible keys", "some are short", short=int(few.sum()), above=above)
        batch, groups = q.shape[:-3], [x.nonzero()[:, 0] for x in (few, ~few)]
        mask = key_mask.expand(*batch, *key_mask.shape[-2:])
        (q, k, v, mask), (a, b) = (x.reshape(-1, *x.shape[len(batch) :]) for x in (q, k, v, mask)), groups
        outputs = short(q[a], k[a], v[a], is_causal=is_causal, key_mask=mask[a]), of_many(q[b], k[b], v[b], mask[b])
        return torch.cat(outputs)[torch.cat(groups).argsort()].unflatten(0, batch)

    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Any,
        state: ByLengthState | None,
        *,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, ByLengthState]:
        """Attend with the new tokens, those up to ``above`` by ``short``; keep what later ones need."""
        (short, long), above, new = self._parts(w), self.above, NewTokens(q, k, v, key_mask)
        if state is not None and state.short is None:
            trace.record(long.mechanism.expression, "every sequence has more keys than above", above=above)
            out, late = new.after(long, state.long)
            return out, ByLengthState(state.count, None, late)
        state = ByLengthState(0, None, None) if state is None else state
        length, count = v.shape[-2], state.count
        if key_mask is None and isinstance(count, int):
            first, count = min(max(above - count, 0), length), count + length
            rows = Rows(first, first, None)
        else:
            number = count + append(None, k, v, key_mask).visible.cumsum(-1)
            rows, count = Rows.of(number, above), number[..., -1:]
        early, after = new.some(0, rows.end).after(short, state.short) if rows.end else (None, state.short)
        late, readable = state.long, isinstance(short.mechanism, Softmax) and long.streams_keys
        if readable and late is None and state.short is not None and rows.first < length:
            why = "a sequence has more keys than above"
            trace.record(f"{long.mechanism.expression} reads the cache", why, above=above)
            k, v = _read(long, new.q.shape[-3], *state.short[:2])
            late = NewTokens(k, k, v, state.short.visible).read_by(long, None)
        if rows.first and (rows.first < length or late is not None or not readable):
            late = new.some(0, rows.first).read_by(long, late)
        out = early
        if rows.first < length:
            out, late = new.some(rows.first, length).after(long, late)
            out = out if early is None else rows.joined(early, out)
        assert out is not None
        return out, ByLengthState(count, after if rows.end == length else None, late)

    def exact_step(self, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State] | None:
        """Result of ``advance``, at once, for new visible tokens behind visible ones, all of them rows of ``short``.

        ``state`` is one of ``decode`` with the same weights: nothing of it is compared but its cache's shape. None
        where these are not such tokens, or do not fit its cache.
        """
        past = state.content
        if not (isinstance(self.short, Softmax) and self.short.is_plain and isinstance(past, ByLengthState)):
            return None
        if not isinstance(past.count, int) or past.long is not None:
            return None
        count, cache, scale = past.count + k.shape[-2], past.short, self.short.scale
        if count > self.above or not isinstance(cache, KVCache):
            return None
        if k.dtype != cache.k.dtype or k.shape[:-2] != cache.k.shape[:-2]:
            return None
        keys, values = concat_tokens(cache.k, k), concat_tokens(cache.v, v)
        visible = cache.visible[..., :1].expand(*cache.visible.shape[:-1], count)  # all are
        if q.shape[-2] == 1 and not torch.is_grad_enabled() and q.dtype != torch.float16:
            trace.record("torch's fused kernel", "one query that sees all keys")
            shares = q.shape[-3] != keys.shape[-3]
            out = F.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=shares)
        else:
            attend = partial(softmax_attention, scale=scale, is_causal=q.shape[-2] > 1)
            out = viewed(attend, q, keys, values, key_mask=None)
        return out, state._replace(content=ByLengthState(count, KVCache(keys, values, visible), None))


def exact_for(mechanism: Attention[Any, Any], length: int, keys: int, *, is_causal: bool) -> Softmax | None:
    """The exact attention, of dot products alone, that a mechanism is to so many keys; None: it is something else."""
    while isinstance(mechanism, ByLength):
        if keys > mechanism.above:
            return None
        trace.record(mechanism.short.expression, FEW, above=mechanism.above)
        mechanism = mechanism.short
    if isinstance(mechanism, NearKeys) and mechanism.is_plain and mechanism.covers(length, keys, is_causal=is_causal):
        return Softmax(mechanism.scale)
    return mechanism if isinstance(mechanism, Softmax) and mechanism.is_plain else None


def _combined(short: Attention[Any, Any], long: Attention[Any, Any], above: int) -> Traits:
    """Traits that both have; what one of them holds, as weights and in decoding."""
    a, b = short.traits, long.traits
    growing, streams = "growing" if b.memory == "growing" else "window", None not in (a.memory, b.memory)
    learned, target = a.learned or b.learned, b.approximates
    inputs: Any = "".join(name for name in "qkv" if name in a.inputs + b.inputs)
    shared = ("causal", "bidirectional", "padding", "cross", "rotary", "matrix", "compile", "export")
    either = ("needs_max_len", "random", "sees_padding")
    places: list[Places] = [a.positions, b.positions]
    return Traits(
        paper=f"a rule over mechanisms: {a.paper}; {b.paper}",
        formula=f"{short!r} for queries that see at most {above} keys, {long!r} for all others",
        cost=f"{a.cost} up to {above} tokens, {b.cost} beyond",
        complexity_exponent=b.complexity_exponent,
        gpu=PARTS,
        inputs=inputs,
        memory=growing if streams else None,
        positions=max(places, key=get_args(Places).index),
        learned=learned,
        approximates=target if target in (type(short).__name__, a.approximates) and not learned else None,
        **{name: getattr(a, name) and getattr(b, name) for name in shared},
        **{name: getattr(a, name) or getattr(b, name) for name in either},
    )
