"""Attends with local shards of one sequence: every process hands in its tokens and gets their outputs.

Packed sequences that one process holds stay there, and those over borders are spread one by one. Before a call every
process learns the lengths of all, and all raise what is wrong on any or differs: unlike arguments would give wrong
numbers, or buffers of unlike sizes, at which gloo aborts or waits.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fast_attention import checks, decoding, grouped, packed
from fast_attention.decoding import State, leaves
from fast_attention.engine import heads, trace
from fast_attention.expressions import in_words
from fast_attention.mechanism import Attention, Mechanism, Unsupported
from fast_attention.packed import CuSeqlens, Lengths, Packing
from fast_attention.parallel import collectives
from fast_attention.parallel.shards import Call, Shards, Strategy, member_of, shards
from fast_attention.parallel.strategies import HEADS, STATES, WINDOWS, Windowed

Inputs = tuple[Tensor, ...]
UNLIKE = {
    "packed sequences": "processes describe different packed sequences: cu_seqlens or lengths are those of the whole "
    "row, equal on every process",
    "weights": "processes hold different weights: draw them once and send them to all, or seed alike",
}


def strategy(mechanism: Mechanism[Any, Any], is_causal: bool, *, masked: bool = False) -> Strategy:
    """How calls of a mechanism are spread over processes.

    A part of the keys does not show where a padded text begins, from where some mechanisms count positions.

    Raises:
        Unsupported: It mixes whole tokens.
    """
    if not isinstance(mechanism, Attention):
        raise _refused(mechanism)
    if mechanism.parts_by_states(is_causal):
        return STATES
    counts = masked and mechanism.traits.positions == "absolute"
    return WINDOWS if isinstance(mechanism, Windowed) and not counts else HEADS


def _refused(mechanism: Mechanism[Any, Any]) -> Unsupported | TypeError:
    if not isinstance(mechanism, Mechanism):
        return TypeError(f"mechanism is a value, such as Local(window=64); got {in_words(mechanism)}")
    return Unsupported(
        f"{mechanism!r} mixes whole tokens and has no heads to spread over processes. What would work: an attention, "
        "such as LinearAttention(), Local() or Softmax(), or one process"
    )


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
    call = Call(mechanism, w, group, is_causal, key_mask)
    call, inputs, sequences = _known_to_all(call, (q, k, v), cu_seqlens, lengths)
    chosen = strategy(mechanism, is_causal, masked=call.masked)
    if sequences is not None:
        chosen = packed_over(chosen, sequences.fitted(call.shards.length, call.shards.num_keys))
    if (steps := trace.collected()) is None:
        return chosen.attend(call, *inputs)
    place, path = len(steps), f"over {call.shards.world} processes: {chosen.name}"
    with collectives.counted() as traffic:
        out = chosen.attend(call, *inputs)
    steps.insert(place, trace.Step(path, chosen.collectives, {"bytes": traffic.bytes}))
    return out


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
    if isinstance(mechanism, Attention) and mechanism.traits.memory is None:
        raise mechanism.refuse("decoding", "memory")
    call, (q, k, v), _ = _known_to_all(Call(mechanism, w, group, True, key_mask), (q, k, v), state=state)
    decoding.validated(state, decoding.empty(mechanism, q, k, v, w))
    return strategy(mechanism, is_causal=True).decode(call, q, k, v, state)


def run(
    mechanism: Any, inputs: tuple[Tensor, ...], w: Any, *, group: Any = None, is_causal: bool = False,
    key_mask: Tensor | None = None, attn_mask: Tensor | None = None, dropout: float = 0.0,
    cu_seqlens: CuSeqlens | None = None, lengths: Lengths | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Call a mechanism on packed sequences, with fewer heads of keys, or over several processes, where that is asked.

    Args:
        mechanism: The mechanism, and ``w`` its weights.
        inputs: q, k and v of an attention, or x of a mixer; of a ``group`` this process's tokens.
        group: This and all that follows as in ``fast_attention.attention``.

    Raises:
        Unsupported: The mechanism's traits deny what was asked, or it cannot be spread over processes.
        ValueError: Sizes do not fit.
    """
    attends, packs = isinstance(mechanism, Attention), cu_seqlens is not None or lengths is not None
    if group is not None:
        if attn_mask is not None or dropout != 0.0:
            what = "an attn_mask" if attn_mask is not None else "attention dropout"
            raise Unsupported(
                f"{mechanism!r} does not take {what} over several processes. What would work: is_causal, key_mask, and "
                "dropout=0.0"
            )
        if not attends:
            raise _refused(mechanism)
        q, k, v = inputs
        k, v = heads.repeated(q.shape[-3], k=k, v=v) if enable_gqa else (k, v)
        packing = {"cu_seqlens": cu_seqlens, "lengths": lengths} if packs else {}
        return attend(mechanism, q, k, v, w, group=group, is_causal=is_causal, key_mask=key_mask, **packing)
    call: Any = partial(grouped.attend, mechanism) if enable_gqa else mechanism
    if attends:
        call = partial(call, w=w, is_causal=is_causal, attn_mask=attn_mask, dropout=dropout)
    elif attn_mask is not None or dropout != 0.0:
        raise mechanism.refuse("an arbitrary attn_mask or attention dropout", "mask")
    else:
        call = partial(mechanism, w=w, is_causal=is_causal)
    if not packs:
        return call(*inputs, key_mask=key_mask)
    sequences = packed.packing(cu_seqlens, lengths, inputs[0].shape[-2], inputs[-1].shape[-2], attn_mask)
    assert sequences is not None
    if not attends:
        return packed.mix(call, inputs[0], sequences, key_mask)
    kernel = None if enable_gqa or dropout > 0.0 else partial(packed.packed_kernel, mechanism, w=w, is_causal=is_causal)
    q, k, v = inputs
    return packed.attend(call, q, k, v, sequences, key_mask, kernel=kernel)


def _known_to_all(
    call: Call, inputs: Inputs, cu_seqlens: CuSeqlens | None = None, lengths: Lengths | None = None,
    state: State | None = None,
) -> tuple[Call, Inputs, Packing | None]:  # fmt: skip
    """The call, its inputs and its packed sequences as all processes know them.

    That is with everyone's shards, and with a mask on all of them or on none. Where the inputs of any process want
    gradients, those of all do: a process that skips a backward pass leaves the others waiting.

    Raises:
        Unsupported: The mechanism mixes whole tokens.
        ValueError: Arguments are wrong or differ, a process has no token, or causal queries and keys are not as many;
            on all processes.
    """
    mechanism, w, (q, k, v), sequences, error = call.mechanism, call.w, inputs, None, None
    if not isinstance(mechanism, Attention):
        raise _refused(mechanism)
    try:
        mechanism.check(mechanism.traits, q, k, v, call.is_causal, call.key_mask)
        sequences = packed.packing(cu_seqlens, lengths)
    except (TypeError, ValueError, NotImplementedError) as wrong:
        error = wrong
    if not isinstance(call.shards, Shards):
        call, inputs = _agreed(call, inputs, error, sequences, state)
    elif error is not None:
        raise error
    queries, keys = call.shards.queries, call.shards.keys
    if call.is_causal and queries != keys:
        raise ValueError(f"causal shards need as many queries as keys; they hold {list(queries)} and {list(keys)}")
    if call.is_causal and sequences is not None and sequences.queries != sequences.keys:
        raise ValueError(
            "causal packed sequences over processes need as many queries as keys; "
            f"{sequences.names[0]} and {sequences.names[1]} are of {list(sequences.queries)} and {list(sequences.keys)}"
        )
    return call._replace(w=checks.weights(mechanism, w, q)), inputs, sequences


def _agreed(
    call: Call, inputs: Inputs, error: Exception | None, sequences: Packing | None, state: State | None
) -> tuple[Call, Inputs]:
    """``_known_to_all``, where the call has the ``ProcessGroup`` in the place of its shards."""
    group, facts, row = member_of(call.shards), {}, [1.0] + [0.0] * 13
    if error is None:
        facts, wants = _facts(call, inputs, sequences, state), [x.requires_grad for x in inputs]
        row = [0.0, inputs[0].shape[-2], inputs[-1].shape[-2], call.masked, *wants, *map(_digest, facts.values())]
    device = inputs[-1].device if isinstance(inputs[-1], Tensor) else torch.device("cpu")
    rows = collectives.all_gather(torch.tensor(row, dtype=torch.float64, device=device), group).tolist()
    if error is not None:
        raise error
    refused, queries, keys, masked, *columns = zip(*rows, strict=True)
    if any(refused):
        rank = refused.index(1.0)
        raise ValueError(f"{call.mechanism!r}: the arguments of process {rank} were refused there; see its error")
    for (name, words), column in zip(facts.items(), columns[3:], strict=True):
        if unlike := [rank for rank, number in enumerate(column) if number != column[0]]:
            other = f"processes 0 and {unlike[0]} differ in {name}, which must be equal on all; here: {words}"
            raise ValueError(UNLIKE.get(name, other))
    queries, keys = tuple(map(int, queries)), tuple(map(int, keys))
    if 0 in queries or 0 in keys:
        raise ValueError(
            f"every process needs a token or more; they hold {list(queries)} queries and {list(keys)} keys"
        )
    inputs = tuple(
        x.detach().requires_grad_() if any(wanted) and not x.requires_grad else x
        for x, wanted in zip(inputs, columns[:3], strict=True)
    )
    mask = call.key_mask
    if mask is None and any(masked):
        k = inputs[1]
        mask = torch.ones(*k.shape[:-3], k.shape[-2], dtype=torch.bool, device=k.device)
    return call._replace(shards=Shards(group, dist.get_rank(group), queries, keys), key_mask=mask), inputs


def _facts(call: Call, inputs: Inputs, sequences: Packing | None, state: State | None) -> dict[str, str]:
    """Facts that must be equal on all processes, in words."""
    tensors = [f"{tuple(x.shape[:-2])} of width {x.shape[-1]} in {x.dtype}" for x in inputs]
    weights = [x.requires_grad for x in leaves(call.w)]
    return {
        "the mechanism": repr(call.mechanism),
        "is_causal": repr(call.is_causal),
        "packed sequences": repr(sequences and (sequences.queries, sequences.keys)),
        "weights": repr(_checksum(call.w)),
        "sizes or dtypes, the number of tokens apart": ", ".join(tensors),
        "gradients": f"{'on' if torch.is_grad_enabled() else 'off'}, of the weights {weights}",
        "the state": str(state),
    }


def _digest(text: str) -> float:
    """A number that tells texts apart."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def _checksum(w: Any) -> list[float]:
    """Two numbers that tell weights apart."""
    tensors = [x.detach().double().reshape(-1) for x in leaves(w)]
    if not tensors:
        return [0.0, 0.0]
    flat = torch.cat(tensors)
    rising = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
    return [flat.sum().item(), (flat * rising).sum().item()]


def _parts(sequences: Packing, everyone: Shards) -> list[Shards]:
    """The shards of each packed sequence, in their order, but for those without a token."""

    def of_processes(lengths: tuple[int, ...], borders: list[tuple[int, int]]) -> list[tuple[int, ...]]:
        spans = pairwise([0, *accumulate(lengths)])
        return [tuple(max(0, min(b, last) - max(a, first)) for first, last in borders) for a, b in spans]

    pairs = zip(
        of_processes(sequences.queries, everyone.borders(keys=False)),
        of_processes(sequences.keys, everyone.borders()),
        strict=True,
    )
    return [replace(everyone, queries=queries, keys=keys) for queries, keys in pairs if any(queries + keys)]


def packed_over(inner: Strategy, sequences: Packing) -> Strategy:
    """The strategy of packed sequences, from that of one."""

    def attend(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, each = call.shards.rank, _parts(sequences, call.shards)
        queries, keys = [part.queries[rank] for part in each], [part.keys[rank] for part in each]
        split = [x.split(lengths, -2) for x, lengths in ((q, queries), (k, keys), (v, keys))]
        masks = [None] * len(each) if call.key_mask is None else call.key_mask.split(keys, -1)
        outs: dict[int, Tensor] = {}
        for i, part in enumerate(each):
            if part.is_over_a_border:
                over = call._replace(shards=part, key_mask=masks[i])
                outs[i] = inner.attend(over, *(parts[i] for parts in split))
        whole = [i for i, part in enumerate(each) if not part.is_over_a_border]
        if whole:
            rows = [torch.cat([parts[i] for i in whole], -2) for parts in split]
            mask = None if call.key_mask is None else torch.cat([masks[i] for i in whole], -1)  # type: ignore[misc]
            lengths = Packing(tuple(queries[i] for i in whole), tuple(keys[i] for i in whole))
            run = partial(call.mechanism, w=call.w, is_causal=call.is_causal)
            out = packed.attend(run, rows[0], rows[1], rows[2], lengths, mask)
            outs |= dict(zip(whole, out.split(list(lengths.queries), -2), strict=True))
        return torch.cat([outs[i] for i in sorted(outs)], -2)

    name, collectives = f"packed, {inner.name}", f"for each sequence over a border: {inner.collectives}"
    return replace(inner, name=name, collectives=collectives, attend=attend)


def longest(
    group: Any, queries: int, keys: int, device: torch.device, cu_seqlens: CuSeqlens | None, lengths: Lengths | None
) -> int:
    """The most queries or keys that a sequence has on all processes together, for weights that depend on it.

    This process has ``queries`` and ``keys``; ``group``, ``cu_seqlens`` and ``lengths`` are as in ``attend``.
    """
    everyone = group if isinstance(group, Shards) else shards(group, queries, keys, device)
    sequences = packed.packing(cu_seqlens, lengths, everyone.length, everyone.num_keys)
    return max(everyone.length, everyone.num_keys) if sequences is None else sequences.longest
