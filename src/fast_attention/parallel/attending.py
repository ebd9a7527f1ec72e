"""Attends with local shards of one sequence: every process hands in its tokens and gets their outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fast_attention.mechanism import Attention
from fast_attention.parallel import collectives
from fast_attention.parallel.shards import Shards
from fast_attention.parallel.states import leaves
from fast_attention.parallel.strategies import strategy
from fast_attention.parallel.strategy import Call


def attend(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, v: Tensor, w: Any = (), *, group: Any,
    is_causal: bool = False, key_mask: Tensor | None = None,
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

    Returns:
        This process's outputs (..., H, L, Ev).

    Raises:
        Unsupported: The mechanism cannot be spread over these processes; the message says what would work.
        ValueError: Sizes do not fit, or processes hold different weights. All processes raise, also those whose own
            arguments are sound: a process that goes on alone would wait for ever.
    """
    error = _error(mechanism, q, k, v, is_causal, key_mask)
    if isinstance(group, Shards):
        if error is not None:
            raise error
        shards = group
    else:
        shards, masked = _agreed(mechanism, q, k, w, group, key_mask, error)
        if masked and key_mask is None:
            key_mask = torch.ones(*k.shape[:-3], k.shape[-2], dtype=torch.bool, device=k.device)
    if is_causal and shards.queries != shards.keys:
        raise ValueError(
            f"causal shards need as many queries as keys; they hold {list(shards.queries)} and {list(shards.keys)}"
        )
    return strategy(mechanism, is_causal).attend(Call(mechanism, w, shards, is_causal, key_mask), q, k, v)


def _error(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, v: Tensor, is_causal: bool, key_mask: Tensor | None
) -> Exception | None:
    """What is wrong with this process's arguments."""
    try:
        mechanism.check(mechanism.traits, q, k, v, is_causal, key_mask)
    except (TypeError, ValueError, NotImplementedError) as error:
        return error
    return None


def _agreed(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, w: Any, group: Any, key_mask: Tensor | None,
    error: Exception | None,
) -> tuple[Shards, bool]:  # fmt: skip
    """Everyone's lengths, and whether anyone has a mask; raises on all processes what is wrong on any."""
    sizes = [0, 0] if error is not None else [q.shape[-2], k.shape[-2]]
    facts = [float(error is not None), *sizes, float(key_mask is not None), *_checksum(w)]
    device = k.device if isinstance(k, Tensor) else torch.device("cpu")
    rows = collectives.all_gather(torch.tensor(facts, dtype=torch.float64, device=device), group).tolist()
    if error is not None:
        raise error
    if wrong := [rank for rank, row in enumerate(rows) if row[0]]:
        raise ValueError(f"{mechanism!r}: the arguments of process {wrong[0]} were refused there; see its error")
    if any(row[4:] != rows[0][4:] for row in rows):
        raise ValueError("processes hold different weights: draw them once and send them to all, or seed alike")
    queries, keys = (tuple(int(row[i]) for row in rows) for i in (1, 2))
    if 0 in queries or 0 in keys:
        raise ValueError(
            f"every process needs a token or more; they hold {list(queries)} queries and {list(keys)} keys"
        )
    return Shards(group, dist.get_rank(group), queries, keys), any(row[3] for row in rows)


def _checksum(w: Any) -> list[float]:
    """Two numbers that tell weights apart."""
    tensors = [x.detach().double().reshape(-1) for x in leaves(w)]
    if not tensors:
        return [0.0, 0.0]
    flat = torch.cat(tensors)
    rising = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
    return [flat.sum().item(), (flat * rising).sum().item()]
