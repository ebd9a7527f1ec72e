"""Batch invariance: outputs are the same bits alone and in any batch, by decoding in any split and in one pass.

Last bits of matrix products depend on their sizes. So each sequence is computed by itself, and causal ones one token at
a time, whether they come in one call or in many: the same operations on the same sizes, however a call is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fast_attention.engine import dispatch
from fast_attention.engine.precision import in_dtype_of_tokens
from fast_attention.engine.tracing import traced
from fast_attention.traits import Unsupported

_asked: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Let eager calls inside give a sequence's outputs bit for bit, whatever else is in the batch.

    Causal calls and decoding are then one: each sequence token by token, in a call or over many, behind the same state
    and beside any others, padded at the end or not. Calls that are not causal take each sequence of the length given by
    itself; pack texts of several lengths (``lengths=``) instead of padding them. It holds for one machine, one version
    of torch and one number of threads, and costs time: sequences one after another, and causal ones without a pass over
    many tokens. States from elsewhere (``summarise``, ``combine``) are read as they are.

    Raises:
        Unsupported: By a call inside: a causal call of a mechanism without a state (``traits.memory``), with an
            ``attn_mask`` or dropout, or with fewer or more queries than keys; one sequence over several processes.
    """
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> bool:
    """Whether calls are to be batch-invariant; not while tracing."""
    return not traced() and _asked.get()


@contextmanager
def _inside() -> Iterator[None]:
    """Parts that a mechanism calls need not be told again."""
    token = _asked.set(False)
    try:
        yield
    finally:
        _asked.reset(token)


@in_dtype_of_tokens
def attend(
    mechanism: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None, **scores: Any
) -> Tensor:
    """``mechanism.attend``, or ``attend_masked`` where there are ``scores`` (``attn_mask``, ``dropout``)."""
    run = mechanism.attend_masked if scores else mechanism.attend
    if not asked():
        return run(q, k, v, w, is_causal=is_causal, key_mask=key_mask, **scores)
    if is_causal:
        _check_causal(mechanism, q, k, scores)
        return advance(mechanism, q, k, v, w, None, key_mask=key_mask)[0]
    if scores and scores["attn_mask"] is not None:
        scores["attn_mask"] = scores["attn_mask"].expand(*q.shape[:-1], k.shape[-2])
    dispatch.record("each sequence by itself", "batch_invariant()")

    def one(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor:
        given = scores if attn_mask is None else {**scores, "attn_mask": attn_mask}
        return run(q, k, v, w, is_causal=False, key_mask=key_mask, **given)

    return _apart(one, (q, k, v, _rows(key_mask, q), scores.get("attn_mask")), lead=q.dim() - 3)


@in_dtype_of_tokens
def advance(
    mechanism: Any, q: Tensor, k: Tensor, v: Tensor, w: Any, state: Any, *, key_mask: Tensor | None
) -> tuple[Tensor, Any]:
    """``mechanism.advance``."""
    if not asked():
        return mechanism.advance(q, k, v, w, state, key_mask=key_mask)
    dispatch.record("each sequence by itself, token by token", "batch_invariant()")

    def one(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        outs = []
        for at in range(q.shape[-2]):
            token = [_settled(x[..., at : at + 1, :]) for x in (q, k, v)]
            mask = None if key_mask is None or bool(key_mask[..., at].all()) else key_mask[..., at : at + 1]
            out, state = mechanism.advance(*token, w, state, key_mask=mask)
            outs.append(out)
            state = tree_map(_settled, state)  # in new memory, as it comes from a state of the caller's
        return torch.cat(outs, -2), state

    return _apart(one, (q, k, v, _rows(key_mask, q), state), lead=q.dim() - 3)


@in_dtype_of_tokens
def mix(mechanism: Any, x: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
    """``mechanism.mix``."""
    if not asked():
        return mechanism.mix(x, w, is_causal=is_causal, key_mask=key_mask)
    if is_causal:
        raise mechanism.refuse("batch_invariant() in causal calls", "memory")

    def one(x: Tensor, key_mask: Tensor | None) -> Tensor:
        return mechanism.mix(x, w, is_causal=False, key_mask=key_mask)

    mask = None if key_mask is None else key_mask.expand(x.shape[:-1])
    return _apart(one, (x, mask), lead=x.dim() - 2)


def refuse_group(mechanism: Any) -> None:
    """Raise ``Unsupported`` where a sequence spread over processes is to be batch-invariant."""
    if asked():
        raise Unsupported(f"{mechanism!r} over processes is not batch-invariant. What would work: no group")


def _check_causal(mechanism: Any, q: Tensor, k: Tensor, scores: Any) -> None:
    if mechanism.traits.memory is None:
        raise mechanism.refuse("batch_invariant() in causal calls", "memory")
    if scores or q.shape[-2] != k.shape[-2]:
        what = "an attn_mask or dropout" if scores else f"{q.shape[-2]} queries and {k.shape[-2]} keys"
        raise Unsupported(
            f"{mechanism!r} does not support {what} in a causal call within batch_invariant(), which is decoding token "
            "by token. What would work: as many queries as keys, a key_mask"
        )


def _rows(key_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask (..., 1, S) of every sequence."""
    return None if key_mask is None else key_mask.expand(*q.shape[:-3], *key_mask.shape[-2:])


def _apart(run: Callable[..., Any], arguments: tuple[Any, ...], *, lead: int) -> Any:
    """``run`` for each sequence: trees of tensors with ``lead`` leading axes, in memory of their own as (1, ...)."""
    batch = arguments[0].shape[:lead]

    def part(x: Any, number: int) -> Any:
        if not isinstance(x, Tensor) or x.dim() == 0:
            return x
        x = x.expand(*batch, *x.shape[lead:])
        return _settled((x.flatten(0, lead - 1) if lead else x[None])[number : number + 1])

    with _inside():
        results = [
            tree_flatten(run(*(tree_map(lambda x, i=i: part(x, i), each) for each in arguments)))
            for i in range(batch.numel())
        ]
    together = [
        torch.cat(parts).reshape(*batch, *parts[0].shape[1:]) if isinstance(parts[0], Tensor) and parts[0].dim() else
        parts[0]
        for parts in zip(*(leaves for leaves, _ in results), strict=True)
    ]  # fmt: skip
    return tree_unflatten(together, results[0][1])


def _settled(x: Any) -> Any:
    """A tensor in memory of its own: aligned and contiguous, however it came."""
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x
