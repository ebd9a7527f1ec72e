"""Attends with local shards of one sequence: every process hands in its tokens and gets their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fast_attention import checks, packed
from fast_attention.decoding import State
from fast_attention.engine import dispatch
from fast_attention.mechanism import Attention, Mechanism, Mixer, Unsupported
from fast_attention.packed import CuSeqlens, Described, Lengths
from fast_attention.parallel import streaming
from fast_attention.parallel.agreeing import agreed
from fast_attention.parallel.packing import packed_over
from fast_attention.parallel.shards import Shards
from fast_attention.parallel.strategies import strategy
from fast_attention.parallel.strategy import Call, Sizes


def attend(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, v: Tensor, w: Any = (), *, group: Any,
    is_causal: bool = False, key_mask: Tensor | None = None, cu_seqlens: CuSeqlens | None = None,
    lengths: Lengths | None = None,
) -> Tensor:  # fmt: skip
    """Attend over the sequence that the shards of all processes of a group make, in the order of ranks.

    Args:
        mechanism: The mechanism, the same on every process.
        q, k, v: This process's tokens: (..., H, L, E), (..., H, S, E) and (..., H, S, Ev). Processes may differ in L.
        w: Weights, equal on every process. Their gradients are this process's share: their sum is the whole.
        group: The ``ProcessGroup``; or the ``Shards`` of it that ``parallel.shards`` gave, with which nothing is agreed
            on again: then all processes give a ``key_mask`` or none, and weights are not compared.
        is_causal: A query sees keys up to its own position in the whole sequence; L must be S.
        key_mask: Boolean (..., S) of this process's keys, True = may be seen.
        cu_seqlens: The tokens of all processes are packed sequences: the borders in the whole row, equal on every
            process, or a pair, as in ``fast_attention.attention``.
        lengths: Instead of it the number of tokens of each sequence, or a pair.

    Returns:
        This process's outputs (..., H, L, Ev).

    Raises:
        Unsupported: The mechanism cannot be spread over these processes; the message says what would work.
        ValueError: Sizes do not fit, or processes differ in more than their tokens. All processes raise, also those
            whose own arguments are sound: a process that goes on alone would wait for ever.
    """
    sequences, error = _checked(
        lambda: mechanism.check(mechanism.traits, q, k, v, is_causal, key_mask), cu_seqlens, lengths
    )
    call, inputs = _call(mechanism, w, (q, k, v), group, is_causal, key_mask, error, sequences)
    if is_causal:
        _as_many(call, sequences)
    return _spread(call, sequences, inputs, Sizes(*_sizes(q), v.shape[-1], q.element_size()))


def decode(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, v: Tensor, w: Any = (), state: State | None = None, *,
    group: Any, key_mask: Tensor | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """Read the tokens of all processes causally after ``state``, and give every process the state after all of them.

    A long prompt is read over many processes, and one of them goes on alone with ``mechanism.decode``.

    Args:
        mechanism: The mechanism, the same on every process.
        q, k, v: This process's tokens: (..., H, N, E), (..., H, N, E) and (..., H, N, Ev).
        w: Weights, as in ``attend``, and so is ``group``.
        state: The state before the first process's first token, equal on every process; None at the start.
        key_mask: Boolean (..., N) of this process's tokens, True = may be seen, now and later.

    Returns:
        This process's outputs (..., H, N, Ev), and the state, equal on every process.

    Raises:
        Unsupported: The mechanism cannot decode, or has states that grow or end and heads that the processes do not
            divide.
        ValueError: As in ``attend``, on all processes; or the state is another mechanism's.
    """
    if mechanism.traits.memory is None:
        raise mechanism.refuse("decoding", "memory")
    _, error = _checked(lambda: mechanism.check(mechanism.traits, q, k, v, True, key_mask))
    call, (q, k, v) = _call(mechanism, w, (q, k, v), group, True, key_mask, error, None, state)
    _as_many(call, None)
    return streaming.decode(call, q, k, v, state)


def mix(
    mechanism: Mixer[Any, Any], x: Tensor, w: Any = (), *, group: Any, is_causal: bool = False,
    key_mask: Tensor | None = None, cu_seqlens: CuSeqlens | None = None, lengths: Lengths | None = None,
) -> Tensor:  # fmt: skip
    """Mix the tokens of the sequence that the shards of all processes of a group make, in the order of ranks.

    Args:
        mechanism: The mixer, the same on every process.
        x: This process's tokens (..., N, E). Processes may differ in N.
        w: Weights, as in ``attend``, and so is ``group``.
        group: The ``ProcessGroup``, or the ``Shards`` of it.
        is_causal: Output i depends on tokens up to i of the whole sequence.
        key_mask: Boolean (..., N) of this process's tokens, True = may be seen.
        cu_seqlens: The tokens of all processes are packed sequences, as in ``attend``.
        lengths: Instead of it the number of tokens of each sequence.

    Returns:
        This process's outputs (..., N, E).

    Raises:
        Unsupported: The mixer's traits deny what was asked, or it is none of ours.
        ValueError: As in ``attend``, on all processes.
    """
    sequences, error = _checked(lambda: mechanism.check(x, is_causal, key_mask), cu_seqlens, lengths)
    call, inputs = _call(mechanism, w, (x,), group, is_causal, key_mask, error, sequences)
    batch = x.shape[:-2].numel()
    return _spread(call, sequences, inputs, Sizes(batch, 1, x.shape[-1], x.shape[-1], x.element_size()))


def _spread(call: Call, sequences: Described | None, inputs: tuple[Tensor, ...], sizes: Sizes) -> Tensor:
    """Outputs by the mechanism's strategy."""
    chosen = strategy(call.mechanism, call.is_causal)
    if sequences is not None:
        chosen = packed_over(chosen, sequences.of(call.shards.length, call.shards.num_keys))
    if dispatch.asked():
        number = chosen.sends(call._replace(key_mask=None), sizes)
        dispatch.record(f"over {call.shards.world} processes: {chosen.name}", chosen.collectives, bytes=number)
    return chosen.attend(call, *inputs)


def _sizes(q: Tensor) -> tuple[int, int, int]:
    return q.shape[:-3].numel(), q.shape[-3], q.shape[-1]


def _as_many(call: Call, sequences: Described | None) -> None:
    """Raise ``ValueError`` unless causal queries and keys are as many on every process, and in every sequence."""
    queries, keys = call.shards.queries, call.shards.keys
    if queries != keys:
        raise ValueError(f"causal shards need as many queries as keys; they hold {list(queries)} and {list(keys)}")
    if sequences is not None and sequences.queries != sequences.keys:
        raise ValueError(
            "causal packed sequences over processes need as many queries as keys; "
            f"{sequences.names[0]} and {sequences.names[1]} are of {list(sequences.queries)} and {list(sequences.keys)}"
        )


def _checked(
    check: Callable[[], None], cu_seqlens: CuSeqlens | None = None, lengths: Lengths | None = None
) -> tuple[Described | None, Exception | None]:
    """The packed sequences, and what is wrong with this process's arguments."""
    try:
        check()
        return packed.described(cu_seqlens, lengths), None
    except (TypeError, ValueError, NotImplementedError) as error:
        return None, error


def _call(
    mechanism: Mechanism[Any, Any], w: Any, inputs: tuple[Tensor, ...], group: Any, is_causal: bool,
    key_mask: Tensor | None, error: Exception | None, sequences: Described | None, state: State | None = None,
) -> tuple[Call, tuple[Tensor, ...]]:  # fmt: skip
    """The call and its inputs as every process knows them; raises on all processes what is wrong on any."""
    call = Call(mechanism, w, group, is_causal, key_mask)
    if not isinstance(group, Shards):
        call, inputs = agreed(call, inputs, error, sequences, state)
    elif error is not None:
        raise error
    return call._replace(w=checks.weights(mechanism, w, inputs[0])), inputs


def run(
    mechanism: Any, inputs: tuple[Tensor, ...], w: Any, *, attn_mask: Tensor | None = None, dropout: float = 0.0,
    **options: Any,
) -> Tensor:  # fmt: skip
    """A module's call over processes: ``attend``, after what cannot be spread is refused."""
    if attn_mask is not None or dropout != 0.0:
        what = "an attn_mask" if attn_mask is not None else "attention dropout"
        raise Unsupported(
            f"{mechanism!r} does not take {what} over several processes. What would work: is_causal, key_mask, and "
            "dropout=0.0"
        )
    if isinstance(mechanism, Mixer):
        return mix(mechanism, inputs[0], w, **options)
    q, k, v = inputs
    return attend(mechanism, q, k, v, w, **options)
