"""Attends with local shards of one sequence: every process hands in its tokens and gets their outputs.

Causal mechanisms whose state has constant size send that state alone (LASP-2, Sun et al. 2025, arXiv 2502.07563);
others send tokens, so that each process has some heads of all of them (Ulysses, Jacobs et al. 2023, arXiv 2309.14509).
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fast_attention import checks
from fast_attention.engine.precision import rebuild
from fast_attention.mechanism import Attention, Unsupported
from fast_attention.parallel import collectives


def attend(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, v: Tensor, w: Any = (), *, group: Any,
    is_causal: bool = False, key_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend over the sequence that the shards of all processes of a group make, in the order of ranks.

    Args:
        mechanism: The mechanism, the same on every process.
        q, k, v: This process's tokens: (..., H, L, E), (..., H, S, E) and (..., H, S, Ev), one or more.
        w: Weights, equal on every process. Their gradients are this process's share: their sum is the whole.
        group: The ``ProcessGroup``.
        is_causal: A query sees keys up to its own position in the whole sequence; L must be S.
        key_mask: Boolean (..., S) of this process's keys, True = may be seen.

    Returns:
        This process's outputs (..., H, L, Ev).

    Raises:
        Unsupported: The mechanism cannot be spread over these processes; the message says what would work.
        ValueError: Sizes do not fit, or processes hold different weights. All processes raise what all can see.
    """
    checks.tensors(q=q, k=k, v=v)
    checks.heads(q, k, v, alike=mechanism.traits.reads == "qkv")
    if key_mask is not None:
        checks.key_mask(key_mask, tuple(k.shape[:-3]), k)
    facts = [q.shape[-2], k.shape[-2], float(key_mask is not None), *_checksum(w)]
    shards = collectives.all_gather(torch.tensor(facts, dtype=torch.float64, device=q.device), group).tolist()
    queries, keys = ([int(shard[i]) for shard in shards] for i in (0, 1))
    if any(shard[3:] != shards[0][3:] for shard in shards):
        raise ValueError("processes hold different weights: draw them once and send them to all, or seed alike")
    if 0 in queries or 0 in keys:
        raise ValueError(f"every process needs a token or more; they hold {queries} queries and {keys} keys")
    if is_causal and queries != keys:
        raise ValueError(f"causal shards need as many queries as keys; they hold {queries} and {keys}")
    if any(shard[2] for shard in shards) and key_mask is None:
        key_mask = torch.ones(*k.shape[:-3], k.shape[-2], dtype=torch.bool, device=k.device)
    if is_causal and mechanism.traits.memory == "constant":
        if getattr(mechanism, "clamp", None):
            raise Unsupported(
                f"{mechanism!r} clamps by the largest norm of all keys so far, which states hold without a gradient. "
                "What would work: clamp=None, or one process"
            )
        return _by_states(mechanism, q, k, v, w, group, key_mask)
    return _by_heads(mechanism, (q, k, v), w, group, (queries, keys, keys), is_causal, key_mask)


def _by_states(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, v: Tensor, w: Any, group: Any, key_mask: Tensor | None
) -> Tensor:
    """Decode from the state of all earlier shards: one all-gather of states, a prefix of ``combine``."""
    state = mechanism.summarise(k, v, w, key_mask=key_mask)
    leaves = _leaves(state.held)
    dtype = reduce(torch.promote_types, (x.dtype for x in leaves))
    flat = torch.cat([x.reshape(-1).to(dtype) for x in leaves])
    gathered = collectives.all_gather(flat, group)
    earlier = [state._replace(held=_unpacked(state.held, row)) for row in gathered[: dist.get_rank(group)]]
    before = reduce(mechanism.combine, earlier) if earlier else None
    out, _ = mechanism.decode(q, k, v, w, before, key_mask=key_mask)
    return collectives.with_gradient(out, gathered)


def _by_heads(
    mechanism: Attention[Any, Any], inputs: tuple[Tensor, ...], w: Any, group: Any, lengths: tuple[list[int], ...],
    is_causal: bool, key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend with all tokens of some heads, between two transpositions."""
    world, heads = dist.get_world_size(group), inputs[0].shape[-3]
    if w and mechanism.heads_of(w) is not None:
        raise Unsupported(
            f"{mechanism!r} has weights of its own for each head, which are not shared out over processes"
            + (" where is_causal is False" if mechanism.traits.memory == "constant" else "")
            + ". What would work: one process, or Softmax()"
        )
    if heads % world:
        raise Unsupported(
            f"{mechanism!r} with {heads} heads on {world} processes: each takes heads / processes of them. What would "
            f"work: a number of processes that divides {heads}, or LinearAttention() in causal order"
        )
    all_q, all_k, all_v = (_to_heads(x, sizes, group) for x, sizes in zip(inputs, lengths, strict=True))
    if key_mask is not None:
        expanded = key_mask.expand(*inputs[1].shape[:-3], key_mask.shape[-1])
        rows = expanded[..., None, :, None].expand(*expanded.shape[:-1], world, -1, 1)
        key_mask = _to_heads(rows.to(torch.uint8), lengths[1], group)[..., 0, :, 0].bool()
    out = mechanism(all_q, all_k, all_v, w, is_causal=is_causal, key_mask=key_mask)
    return _to_sequence(out, lengths[0], group)


def _to_heads(x: Tensor, lengths: list[int], group: Any) -> Tensor:
    """This process's heads (..., H / W, L, E) of all tokens, from all heads of its tokens."""
    world = dist.get_world_size(group)
    by_rank = x.unflatten(-3, (world, -1)).movedim(-4, 0)
    shape = by_rank.shape[1:]
    token = by_rank[0].numel() // shape[-2]
    outgoing, incoming = [by_rank[0].numel()] * world, [n * token for n in lengths]
    flat = collectives.all_to_all(by_rank.reshape(-1), outgoing, incoming, group)
    parts = flat.split(incoming)
    return torch.cat([part.view(*shape[:-2], n, shape[-1]) for part, n in zip(parts, lengths, strict=True)], -2)


def _to_sequence(x: Tensor, lengths: list[int], group: Any) -> Tensor:
    """All heads of this process's tokens, from its heads (..., H / W, L, E) of all tokens."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    starts = [0, *accumulate(lengths)]
    parts = [x.narrow(-2, start, n).reshape(-1) for start, n in zip(starts, lengths, strict=False)]
    incoming = [parts[rank].numel()] * world
    flat = collectives.all_to_all(torch.cat(parts), [part.numel() for part in parts], incoming, group)
    by_rank = flat.view(world, *x.shape[:-2], lengths[rank], x.shape[-1])
    return by_rank.movedim(0, -4).flatten(-4, -3)


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [x for part in tree for x in _leaves(part)] if isinstance(tree, tuple) else []


def _unpacked(tree: Any, flat: Tensor) -> Any:
    """``tree`` with the numbers of a flat tensor."""
    leaves = _leaves(tree)
    parts = iter(
        [part.view_as(x).to(x.dtype) for part, x in zip(flat.split([x.numel() for x in leaves]), leaves, strict=True)]
    )

    def filled(node: Any) -> Any:
        if isinstance(node, Tensor):
            return next(parts)
        return rebuild(node, [filled(each) for each in node]) if isinstance(node, tuple) else node

    return filled(tree)


def _checksum(w: Any) -> list[float]:
    """Two numbers that tell weights apart."""
    leaves = [x.detach().double().reshape(-1) for x in _leaves(w)]
    if not leaves:
        return [0.0, 0.0]
    flat = torch.cat(leaves)
    return [
        flat.sum().item(),
        (flat * torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)).sum().item(),
    ]
