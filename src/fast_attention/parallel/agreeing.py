"""Agrees on a call: every process learns the lengths of all, and all raise what is wrong on any or differs.

Where nobody looked, unlike arguments gave wrong numbers, or buffers of unlike sizes, at which gloo aborts or waits.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fast_attention.decoding import State
from fast_attention.packed import PackedLengths
from fast_attention.parallel import collectives
from fast_attention.parallel.shards import Call, Shards, member_of
from fast_attention.parallel.states import leaves

Inputs = tuple[Tensor, ...]
WORDS = {
    "packed sequences": "processes describe different packed sequences: cu_seqlens or lengths are those of the whole "
    "row, equal on every process",
    "weights": "processes hold different weights: draw them once and send them to all, or seed alike",
}


def agreed(
    call: Call, inputs: Inputs, error: Exception | None, sequences: PackedLengths | None, state: State | None
) -> tuple[Call, Inputs]:
    """The call and its inputs as all processes know them: with everyone's shards, a mask on all of them or on none.

    Where the inputs of any process want gradients, those of all do: a process that skips a backward pass leaves the
    others waiting.

    Args:
        call: This process's call, with the ``ProcessGroup`` in the place of its shards.
        inputs: Queries, keys and values.
        error: What is wrong with this process's arguments.
        sequences: The packed sequences, if the tokens are some.
        state: The state that the tokens follow, if they follow one.

    Raises:
        ValueError: Arguments are wrong or differ, or a process has no token; on all processes.
    """
    group, facts = member_of(call.shards), {} if error is not None else _facts(call, inputs, sequences, state)
    sizes = [0, 0] if error is not None else [inputs[0].shape[-2], inputs[-1].shape[-2]]
    wants = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
    row = [error is not None, *sizes, call.masked, *wants, *(map(_digest, facts.values()) if facts else [0] * 7)]
    device = inputs[-1].device if isinstance(inputs[-1], Tensor) else torch.device("cpu")
    rows = collectives.all_gather(torch.tensor(row, dtype=torch.float64, device=device), group).tolist()
    if error is not None:
        raise error
    _raise_where_unlike(call.mechanism, [*map(bool, next(zip(*rows, strict=True)))], [each[7:] for each in rows], facts)
    queries, keys = (tuple(int(each[i]) for each in rows) for i in (1, 2))
    if 0 in queries or 0 in keys:
        raise ValueError(
            f"every process needs a token or more; they hold {list(queries)} queries and {list(keys)} keys"
        )
    inputs = tuple(_wanting(x, any(each[4 + i] for each in rows)) for i, x in enumerate(inputs))
    mask = call.key_mask
    if mask is None and any(each[3] for each in rows):
        k = inputs[1]
        mask = torch.ones(*k.shape[:-3], k.shape[-2], dtype=torch.bool, device=k.device)
    return call._replace(shards=Shards(group, dist.get_rank(group), queries, keys), key_mask=mask), inputs


def _facts(call: Call, inputs: Inputs, sequences: PackedLengths | None, state: State | None) -> dict[str, str]:
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


def _raise_where_unlike(mechanism: Any, refused: list[bool], digests: list[list[float]], facts: dict[str, str]) -> None:
    """Raise the same on all processes where one refused its arguments, or facts differ."""
    if any(refused):
        rank = refused.index(True)
        raise ValueError(f"{mechanism!r}: the arguments of process {rank} were refused there; see its error")
    for i, (name, words) in enumerate(facts.items()):
        unlike = [rank for rank, each in enumerate(digests) if each[i] != digests[0][i]]
        if unlike:
            other = f"processes 0 and {unlike[0]} differ in {name}, which must be equal on all; here: {words}"
            raise ValueError(WORDS.get(name, other))


def _digest(text: str) -> float:
    """A number that tells texts apart."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))


def _wanting(x: Tensor, wants: bool) -> Tensor:
    return x.detach().requires_grad_() if wants and not x.requires_grad else x


def _checksum(w: Any) -> list[float]:
    """Two numbers that tell weights apart."""
    tensors = [x.detach().double().reshape(-1) for x in leaves(w)]
    if not tensors:
        return [0.0, 0.0]
    flat = torch.cat(tensors)
    rising = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
    return [flat.sum().item(), (flat * rising).sum().item()]
