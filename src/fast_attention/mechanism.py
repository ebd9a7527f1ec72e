"""The base classes of mechanisms: frozen values with traits, whose calls are all validated here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from fast_attention import checks, decoding, left_padding
from fast_attention.decoding import State
from fast_attention.engine import masks
from fast_attention.engine.precision import in_dtype_of_tokens
from fast_attention.engine.tracing import replaced
from fast_attention.refusals import granting
from fast_attention.traits import Memory as Memory
from fast_attention.traits import Places as Places
from fast_attention.traits import Shape as Shape
from fast_attention.traits import Traits as Traits
from fast_attention.traits import Unsupported as Unsupported
from fast_attention.value import Value

W = TypeVar("W")
S = TypeVar("S")


class Mechanism(Value, ABC, Generic[W, S]):
    """A frozen value holding settings only: no sizes, no tensors. ``W`` are its weights, ``S`` its decoding state."""

    traits: ClassVar[Traits]

    def weights(self, shape: Shape) -> W:
        """Fresh weights for ``shape``: a NamedTuple of ``nn.Parameter`` (learned) and plain tensors (drawn or fixed).

        The only place that draws random numbers, all from torch's global generator. Without weights: ``()``.
        An attention's first weight has the heads as its first axis, or ``heads_of`` says otherwise.
        """
        return ()  # type: ignore[return-value]

    def heads_of(self, w: W) -> int | None:
        """The number of heads that these weights are for; None where they serve any number."""
        first: Any = w
        while isinstance(first, tuple) and first:
            first = first[0]
        return first.shape[0] if isinstance(first, Tensor) and isinstance(self, Attention) else None

    def redrawn(self, w: W, shape: Shape) -> W:
        """``w`` with its random tensors drawn again; ``Bound.redraw`` takes all but its parameters."""
        return self.weights(shape)

    @property
    def needs_weights(self) -> bool:
        """Whether a call needs weights."""
        return type(self).weights is not Mechanism.weights

    def refuse(self, what: str, trait: str, needed: str | None = None) -> Unsupported:
        """The error for a denied trait, or value of one: it names the mechanism, the trait and those most like it that
        grant it.
        """
        kind = Attention if isinstance(self, Attention) else Mixer
        granted = ", ".join(f"{name}()" for name in granting(kind, trait, self, needed)[:6])
        return Unsupported(
            f"{self!r} does not support {what} (traits.{trait} is {getattr(self.traits, trait)!r}). "
            + (f"What would work: {granted}." if granted else f"No {kind.__name__.lower()} in the catalogue does.")
        )

    def within(self, length: int, max_len: int) -> None:
        """Raise a ``ValueError`` unless ``length`` tokens fit weights for ``max_len`` tokens."""
        if length > max_len:
            remedy = f"build it with Shape(..., max_len={length}) or more"
            raise ValueError(f"{self!r} was built for at most max_len={max_len} tokens and got {length}: {remedy}")

    def _check_masks(self, traits: Traits, is_causal: bool, key_mask: Tensor | None, batch: Any, keys: Tensor) -> None:
        checks.flag("is_causal", is_causal)
        if trait := traits.denying(is_causal):
            raise self.refuse(f"is_causal={is_causal}", trait)
        if key_mask is not None:
            if not traits.padding:
                raise self.refuse("a key_mask", "padding")
            checks.key_mask(key_mask, tuple(batch), keys)


class Attention(Mechanism[W, S]):
    """A mechanism of queries (..., H, L, E), keys (..., H, S, E) and values (..., H, S, Ev), head by head."""

    unordered: ClassVar[bool] = False  # without causal order an output depends on its query and all keys, no positions
    shares_cache: ClassVar[bool] = False  # ``advance`` takes fewer heads of keys and values than of queries

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Compute outputs after validation. ``key_mask`` is None or boolean (..., 1, S), True = may be seen."""

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, lengths: tuple[int, ...], *, is_causal: bool,
        key_mask: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """``attend`` of sequences of so many tokens, one behind another, at once; None: one by one is best."""
        return None

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, state: S | None, *, key_mask: Tensor | None
    ) -> tuple[Tensor, S]:
        """Compute causal outputs of one or more new tokens, and the state after them, after validation."""
        raise self.refuse("decoding", "memory")

    def calibrated(self, q: Tensor, k: Tensor, w: W, *, key_mask: Tensor | None = None) -> W:
        """``w`` fitted to these queries and keys; unchanged where nothing can be fitted. See ``Bound.adopt``."""
        return w

    def summarise_keys(self, k: Tensor, v: Tensor, w: W, *, key_mask: Tensor | None) -> S:
        """The state of a chunk of keys and values, after validation (``memory="constant"`` only)."""
        raise self.refuse("summarising", "memory", "constant")

    def merge_states(self, earlier: S, later: S) -> S:
        """The state of two neighbouring chunks, associatively (``memory="constant"`` only)."""
        raise self.refuse("combining states", "memory", "constant")

    def read_summary(self, q: Tensor, k: Tensor, v: Tensor, w: W, state: S, *, key_mask: Tensor | None) -> Tensor:
        """Compute ``read`` after validation; unless overridden, by new tokens that are masked."""
        nothing = torch.zeros(*q.shape[:-3], 1, q.shape[-2], dtype=torch.bool, device=q.device)
        keys, values = (q.new_zeros(*q.shape[:-1], x.shape[-1]) for x in (k, v))
        return self.advance(q, keys, values, w, state, key_mask=nothing)[0]

    def parts_by_states(self, is_causal: bool) -> bool:
        """Whether parts of a sequence need only states of one another: then ``parallel`` sends these between processes.

        Causal, a part advances from the state of all earlier ones, which passes gradients on; else every part reads
        from the state of all, wherever it stands.
        """
        return self.traits.memory == "constant" and not self.traits.needs_max_len

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, w: W | tuple[()] = (), *, is_causal: bool = False,
        key_mask: Tensor | None = None, attn_mask: Tensor | None = None, dropout: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Attend.

        Args:
            q: Queries (..., H, L, E).
            k: Keys (..., H, S, E).
            v: Values (..., H, S, Ev).
            w: Weights of any dtype from ``weights(shape)``; not needed where ``needs_weights`` is False.
            is_causal: Query i sees keys up to i + S - L (aligned to the bottom right).
            key_mask: Boolean (..., S) without the head axis, True = may be seen.
            attn_mask: Boolean (True = may be seen) or additive, broadcastable to (..., H, L, S).
            dropout: Probability with which an attention weight is dropped.

        Returns:
            Outputs (..., H, L, Ev) in the dtype of ``q``; a query that may see nothing gets zeros.

        Raises:
            Unsupported: The mechanism's traits deny what was asked.
            ValueError: Sizes, dtypes or weights do not fit.
        """
        traits = self.traits
        self.check(traits, q, k, v, is_causal, key_mask)
        weights = checks.weights(self, w, q)
        unmasked, has_scores = attn_mask is None and dropout == 0.0, isinstance(self, MaskedAttention)
        if not unmasked and not has_scores:
            raise self.refuse("an arbitrary attn_mask" if attn_mask is not None else "attention dropout", "mask")
        checks.scores(attn_mask, dropout, q, k)
        if checks.empty(q, k, v):
            return checks.zeros((*q.shape[:-1], v.shape[-1]), q, k, v)

        def run(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor:
            k, v, mask = checks.without_masked(k, v, key_mask, traits.inputs)
            options: Any = {"is_causal": is_causal, "key_mask": mask}
            if not has_scores or (unmasked and type(self).attend is not MaskedAttention.attend):
                return in_dtype_of_tokens(self.attend, q, k, v, weights, **options)
            options |= {"attn_mask": attn_mask, "dropout": dropout}
            return in_dtype_of_tokens(self.attend_masked, q, k, v, weights, **options)  # type: ignore[attr-defined]

        if key_mask is not None and left_padding.may_begin_late(self, key_mask):
            return left_padding.attend(self, run, q, k, v, key_mask, attn_mask, is_causal=is_causal)
        return run(q, k, v, key_mask=key_mask, attn_mask=attn_mask)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, w: W | tuple[()] = (), state: State | None = None, *,
        key_mask: Tensor | None = None, enable_gqa: bool = False,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Attend causally with one or more new tokens; any split of a sequence gives the same outputs.

        Args:
            q, k, v: The new tokens, (..., H, N, E), (..., H, N, E), (..., H, N, Ev).
            w: Weights, as in a call.
            state: What the previous call returned; None at the start.
            key_mask: Boolean (..., N), True = may be seen, now and later.
            enable_gqa: k and v may have fewer heads G, a divisor of H: query head h gets those of head h // (H / G).
                The state of exact attention has G heads then, too.

        Returns:
            Outputs (..., H, N, Ev) and the state for the next call.

        Raises:
            Unsupported: ``traits.memory`` is None.
            ValueError: Sizes, dtypes or weights do not fit.
        """
        traits = self.traits
        if traits.memory is None:
            raise self.refuse("decoding", "memory")
        given = k, v, key_mask
        checks.flag("enable_gqa", enable_gqa)
        if enable_gqa:
            k, v = checks.grouped(q, k, v, shares=self.shares_cache)
        self.check(traits, q[..., : k.shape[-3], :, :] if enable_gqa else q, k, v, True, key_mask)
        if q.shape[-2] != k.shape[-2]:
            raise ValueError(f"decode takes as many queries as keys; got {q.shape[-2]} queries and {k.shape[-2]} keys")
        if q.is_meta:
            raise ValueError("decode keeps what it read, and tensors on the meta device hold nothing: give others")
        weights, new_state = checks.weights(self, w, q), decoding.empty(self, q, k, v, w)
        content = decoding.validated(state, new_state)
        if checks.empty(q, k, v):
            return checks.zeros((*q.shape[:-1], v.shape[-1]), q, k, v), replaced(new_state, content=content)
        k, v, mask = checks.without_masked(k, v, key_mask, traits.inputs)

        def run(q: Tensor, k: Tensor, v: Tensor, content: Any, *, key_mask: Tensor | None) -> tuple[Tensor, Any]:
            return in_dtype_of_tokens(self.advance, q, k, v, weights, content, key_mask=key_mask)

        if isinstance(content, left_padding.Rows) or (
            content is None and left_padding.may_begin_late(self, key_mask, streams=True)
        ):
            out, content = left_padding.advance(self, run, q, k, v, key_mask, content)
        else:
            out, content = run(q, k, v, content, key_mask=mask)
        return out, replaced(new_state, content=decoding.copy_if_aliased(content, *given, at_start=state is None))

    def summarise(self, k: Tensor, v: Tensor, w: W | tuple[()] = (), *, key_mask: Tensor | None = None) -> State:
        """The state of a chunk of keys (..., H, N, E) and values (..., H, N, Ev), some masked by ``key_mask``.

        Raises:
            Unsupported: ``traits.memory`` is not ``"constant"``.
            ValueError: Sizes, dtypes or weights do not fit.
        """
        traits = self.traits
        if traits.memory != "constant":
            raise self.refuse("summarising", "memory", "constant")
        self.check(traits, k, k, v, True, key_mask)
        keys, values, mask = checks.without_masked(k, v, key_mask, traits.inputs)
        content = self.summarise_keys(keys, values, checks.weights(self, w, k), key_mask=mask)
        content = decoding.copy_if_aliased(content, k, v, key_mask, at_start=True)
        return replaced(decoding.empty(self, k, k, v, w), content=content)

    def combine(self, earlier: State, later: State) -> State:
        """The state of two neighbouring chunks, associatively (``memory="constant"`` only).

        Raises:
            Unsupported: ``traits.memory`` is not ``"constant"``.
            ValueError: They are not two states of this mechanism and of the same sizes.
        """
        if self.traits.memory != "constant":
            raise self.refuse("combining states", "memory", "constant")
        for state in (earlier, later):
            if not isinstance(state, State):
                raise ValueError(f"combine takes two states; got a {type(state).__name__}")
            if state.mechanism != self.expression:
                raise ValueError(f"the state is of {state}; this is {self.expression}")
        content = self.merge_states(decoding.validated(earlier, later), later.content)
        return replaced(later, content=content)

    def read(
        self, q: Tensor, k: Tensor, v: Tensor, w: W | tuple[()], state: State, *, key_mask: Tensor | None = None
    ) -> Tensor:
        """Outputs (..., H, L, Ev) of queries that see all of a state, and nothing else.

        ``k`` and ``v``, some masked, are those beside the queries: some mechanisms weigh a token's own apart.

        Raises:
            Unsupported: ``traits.memory`` is not ``"constant"``.
            ValueError: Sizes, dtypes or weights do not fit.
        """
        traits = self.traits
        if traits.memory != "constant":
            raise self.refuse("reading from a state", "memory", "constant")
        self.check(traits, q, k, v, False, key_mask)
        weights, content = checks.weights(self, w, q), decoding.validated(state, decoding.empty(self, q, k, v, w))
        if checks.empty(q):
            return checks.zeros((*q.shape[:-1], v.shape[-1]), q, k, v)
        k, v, mask = checks.without_masked(k, v, key_mask, traits.inputs)
        return self.read_summary(q, k, v, weights, content, key_mask=mask)

    def check(self, traits: Traits, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, key_mask: Tensor | None) -> None:
        """Raise unless the tensors fit one another and these traits, which are the mechanism's."""
        checks.tensors(q=q, k=k, v=v)
        checks.heads(q, k, v, same_width=traits.inputs == "qkv")
        if q.shape[-2] != k.shape[-2] and not traits.cross:
            raise self.refuse(f"cross attention ({q.shape[-2]} queries, {k.shape[-2]} keys)", "cross")
        self._check_masks(traits, is_causal, key_mask, q.shape[:-3], k)


class MaskedAttention(Attention[W, S]):
    """An attention that forms its scores, so that any mask and attention dropout can act on them."""

    @abstractmethod
    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None,
        attn_mask: Tensor | None, dropout: float,
    ) -> Tensor:  # fmt: skip
        """``attend`` with a boolean or additive mask on the scores and dropout on the weights."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """``attend_masked`` without mask and dropout."""
        return self.attend_masked(q, k, v, w, is_causal=is_causal, key_mask=key_mask, attn_mask=None, dropout=0.0)


class Mixer(Mechanism[W, S]):
    """A mechanism of whole tokens, without queries or heads: (..., N, E) -> (..., N, E) with E = ``Shape.width``."""

    @abstractmethod
    def mix(self, x: Tensor, w: W, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Compute outputs after validation. ``key_mask`` is None or boolean (..., N), True = may be seen."""

    def __call__(
        self, x: Tensor, w: W | tuple[()] = (), *, is_causal: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        """Tokens (..., N, E), mixed, in the dtype of ``x``; raises as an attention does.

        Args:
            x: Tokens (..., N, E).
            w: Weights of any dtype from ``weights(shape)``; not needed where ``needs_weights`` is False.
            is_causal: Output i depends on tokens up to i.
            key_mask: Boolean (..., N), True = may be seen.
        """
        self.check(x, is_causal, key_mask)
        checks.threads()  # mixers begin with a product or an FFT
        weights = checks.weights(self, w, x)
        if checks.empty(x):
            return checks.zeros(x.shape, x)
        x = masks.drop(x, key_mask)

        def mix(x: Tensor, *, key_mask: Tensor | None) -> Tensor:
            return in_dtype_of_tokens(self.mix, x, weights, is_causal=is_causal, key_mask=key_mask)

        if key_mask is not None and left_padding.may_begin_late(self, key_mask):
            return left_padding.mix(mix, x, key_mask)
        return mix(x, key_mask=key_mask)

    def check(self, x: Tensor, is_causal: bool, key_mask: Tensor | None) -> None:
        """Raise unless these are tokens and the traits grant what is asked."""
        checks.tokens(x)
        self._check_masks(self.traits, is_causal, key_mask, x.shape[:-2], x)
