"""Runs attention on packed sequences: several that stand one after another along the axis of tokens, without padding.

Sequences of equal length become one batch and every other one a call by itself, so that any mechanism gives what one
call for each sequence gives, and none knows of it. A mechanism whose kernels can keep sequences apart takes all of them
at once (``Attention.attend_packed``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from fast_attention import checks
from fast_attention.engine import operation
from fast_attention.engine.tracing import exporting
from fast_attention.mechanism import Attention, Unsupported

CuSeqlens: TypeAlias = Tensor | tuple[Tensor, Tensor]
Lengths: TypeAlias = Tensor | Sequence[int] | tuple[Tensor | Sequence[int], Tensor | Sequence[int]]
Call: TypeAlias = Callable[..., Tensor]
PackedKernel: TypeAlias = Callable[..., Tensor | None]


@dataclass(frozen=True)
class Packing:
    """How many queries and keys each of the packed sequences has, in their order, and how a caller gave them."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    names: tuple[str, str] = field(default=("lengths_q", "lengths_k"), compare=False)  # the arguments, for errors
    borders: bool = field(default=False, compare=False)  # whether borders were given, rather than lengths
    is_pair: bool = field(default=True, compare=False)  # whether both were given, rather than one for both

    @property
    def longest(self) -> int:
        """The most queries or keys of any sequence."""
        return max((0, *self.queries, *self.keys))

    def groups(self) -> Iterator[list[int]]:
        """The numbers of the sequences that are equally long, in the order of the first of each."""
        members: dict[tuple[int, int], list[int]] = {}
        for i, sizes in enumerate(zip(self.queries, self.keys, strict=True)):
            members.setdefault(sizes, []).append(i)
        yield from members.values()

    def fitted(self, queries: int, keys: int) -> Packing:
        """Return the sequences, or raise a ``ValueError`` unless they are of so many packed queries and keys."""
        name = self.names[0]
        if not self.is_pair and queries != keys:
            raise ValueError(
                f"there are {queries} packed queries and {keys} keys: give {name} as a pair, ({name}_q, {name}_k)"
            )
        for each, sizes, tokens in zip(self.names, (self.queries, self.keys), (queries, keys), strict=True):
            if (total := sum(sizes)) != tokens:
                entry = f"{each}[{len(sizes)}]" if self.borders else f"the sum of {each}"
                raise ValueError(f"{entry} is {total} and there are {tokens} tokens: it must be their number")
        return self


def packing(
    cu_seqlens: CuSeqlens | None, lengths: Lengths | None, queries: int | None = None, keys: int | None = None,
    attn_mask: Tensor | None = None, *, name: str = "cu_seqlens",
) -> Packing | None:  # fmt: skip
    """The packed sequences that a caller's ``cu_seqlens`` or ``lengths`` describe; None where both are None.

    Both are as in ``fast_attention.attention``. There are so many ``queries`` and ``keys``, if that is known yet; an
    ``attn_mask`` beside them is refused. ``name`` is what errors call ``cu_seqlens``.

    Raises:
        TypeError: They are no whole numbers.
        ValueError: They do not begin at 0, fall, or do not end at the number of tokens; or more is given.
        Unsupported: Numbers of a tensor are asked for where code is traced.
    """
    if cu_seqlens is None and lengths is None:
        return None
    if cu_seqlens is not None and lengths is not None:
        raise ValueError("cu_seqlens and lengths say the same of packed sequences: give one of them")
    if attn_mask is not None:
        raise ValueError(
            "packed sequences take no attn_mask, which is laid out for one sequence: give is_causal, or key_mask for "
            "tokens that none may see, or call each sequence with its mask"
        )
    name, given = ("lengths", cast(Any, lengths)) if cu_seqlens is None else (name, cast(Any, cu_seqlens))
    read, borders = (_checked_lengths, False) if cu_seqlens is None else (_checked_borders, True)
    is_pair = isinstance(given, tuple | list) and len(given) == 2 and not any(isinstance(x, int) for x in given)
    names = (f"{name}_q", f"{name}_k") if is_pair else (name, name)
    sizes = [read(each, x) for each, x in zip(names, given, strict=True)] if is_pair else [read(name, given)] * 2
    if len(sizes[0]) != len(sizes[1]):
        raise ValueError(
            f"{names[0]} has {len(sizes[0])} sequences and {names[1]} has {len(sizes[1])}: every sequence of queries "
            "needs one of keys, if an empty one"
        )
    sequences = Packing(sizes[0], sizes[1], names, borders, is_pair)
    return sequences if queries is None or keys is None else sequences.fitted(queries, keys)


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sequences: Packing, key_mask: Tensor | None, *,
    kernel: PackedKernel | None = None,
) -> Tensor:  # fmt: skip
    """Attend within each sequence of q (..., H, T, E), k (..., H, S, E) and v (..., H, S, Ev): outputs (..., H, T, Ev).

    ``call(q, k, v, key_mask=)`` attends in a batch of sequences that are no longer packed, (batch, H, L, E); a
    ``kernel``, such as ``packed_kernel``, may take all sequences in one computation.

    Raises:
        ValueError: The tensors do not fit one another.
    """
    checks.tensors(q=q, k=k, v=v)
    checks.heads(q, k, v, same_width=False, grouped=True)  # the call says how many heads there may be
    if kernel is not None and sequences.queries == sequences.keys:
        out = kernel(q, k, v, sequences.queries, key_mask=key_mask)
        if out is not None:
            return out
    return _run(call, (q, k, v), (sequences.queries, sequences.keys, sequences.keys), sequences, key_mask, axes=3)


def packed_kernel(
    mechanism: Attention[Any, Any], q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, w: Any,
    is_causal: bool, key_mask: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """All sequences in one computation of ``mechanism``, which may say None."""
    if not operation.on_gpu(q) or len(lengths) < 2 or q.shape[-3] != k.shape[-3] or checks.empty(q, k, v):
        return None
    if key_mask is not None and mechanism.traits.positions == "absolute":
        return None  # some may begin with padding
    mechanism.check(mechanism.traits, q, k, v, is_causal, key_mask)
    weights = checks.weights(mechanism, w, q)
    k, v, mask = checks.without_masked(k, v, key_mask, mechanism.traits.inputs)
    return mechanism.attend_packed(q, k, v, weights, lengths, is_causal=is_causal, key_mask=mask)


def mix(call: Call, x: Tensor, sequences: Packing, key_mask: Tensor | None) -> Tensor:
    """Mix the tokens of each sequence of x (..., T, E) among themselves, by ``call`` (x, key_mask=) of a batch.

    Raises:
        ValueError: The tensors do not fit one another.
    """
    checks.tensors(x=x)
    return _run(call, (x,), (sequences.queries,), sequences, key_mask, axes=2)


def _run(
    call: Call, inputs: tuple[Tensor, ...], lengths: tuple[tuple[int, ...], ...], sequences: Packing,
    key_mask: Tensor | None, *, axes: int,
) -> Tensor:  # fmt: skip
    """Outputs of ``call`` on one group of equally long sequences after another, packed as its inputs are.

    All axes but the last ``axes`` become one, for torch's fused kernel takes four axes and no more.
    """
    batch, keys = inputs[0].shape[:-axes], inputs[-1].shape[-2]
    size = math.prod(batch)
    flat = [x.reshape(size, *x.shape[-axes:]) for x in inputs]
    mask = None
    if key_mask is not None:
        checks.key_mask(key_mask, tuple(batch), inputs[-1])
        mask = key_mask.expand(*batch, keys).reshape(size, keys, 1)
    starts = [[0, *accumulate(each)] for each in lengths]
    outputs: dict[int, Tensor] = {}
    for group in sequences.groups():
        parts = [_sequences(x, first, sizes, group) for x, first, sizes in zip(flat, starts, lengths, strict=True)]
        group_mask = None if mask is None else _sequences(mask, starts[-1], lengths[-1], group)[..., 0]
        out = call(*parts, key_mask=group_mask)
        outputs |= dict(zip(group, out.unflatten(0, (len(group), size)).unbind(), strict=True))
    flat_mask = None if mask is None else mask[..., 0]
    out = torch.cat([outputs[i] for i in range(len(outputs))], -2) if outputs else call(*flat, key_mask=flat_mask)
    return out.reshape(*batch, *out.shape[1:])


def _sequences(x: Tensor, starts: list[int], lengths: tuple[int, ...], group: list[int]) -> Tensor:
    """The sequences of a group, cut out of (batch, ..., T, E): (sequences * batch, ..., length, E)."""
    rows = [x.narrow(-2, starts[i], lengths[i]) for i in group]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _checked_borders(name: str, given: object) -> tuple[int, ...]:
    """The lengths between borders."""
    if not isinstance(given, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor of int32 or int64, or a pair of them; got {type(given).__name__} "
            "(lengths= takes Python's ints)"
        )
    if given.ndim != 1 or len(given) == 0:
        raise ValueError(f"{name} has shape {tuple(given.shape)}; it must be (sequences + 1,), one row of borders")
    borders = _numbers(name, given)
    if borders[0] != 0:
        raise ValueError(f"{name}[0] is {borders[0]}; the first sequence begins at token 0, so it must be 0")
    for i, (before, border) in enumerate(pairwise(borders), start=1):
        if border < before:
            raise ValueError(
                f"{name}[{i}] is {border} and {name}[{i - 1}] is {before}: entries must rise, for each is where a "
                "sequence ends and the next one begins"
            )
    return tuple(border - before for before, border in pairwise(borders))


def _checked_lengths(name: str, given: object) -> tuple[int, ...]:
    sizes = _numbers(name, given) if isinstance(given, Tensor) else given
    if not isinstance(sizes, tuple | list) or any(isinstance(n, bool) or not isinstance(n, int) for n in sizes):
        raise TypeError(f"{name} must be whole numbers, the tokens of each sequence, or a pair of such; got {given!r}")
    for i, n in enumerate(sizes):
        if n < 0:
            raise ValueError(f"{name}[{i}] is {n}: a sequence has 0 tokens or more")
    return tuple(sizes)


def _numbers(name: str, given: Tensor) -> list[int]:
    """The numbers of a tensor of one axis."""
    if given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {given.dtype}: give int32 or int64, such as {name}.int()")
    if given.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(given.shape)}; it must have one axis, of the sequences")
    if given.is_meta:
        raise ValueError(f"{name} is on the meta device, which holds no numbers: give it on another")
    if torch.compiler.is_compiling() or exporting():
        raise Unsupported(
            f"{name} is a tensor, whose numbers traced code cannot read. What would work: lengths=(3, 4, ...), a tuple "
            "of Python's ints, for which the code is traced anew where they change; or the call outside of "
            "torch.compile(fullgraph=True) and torch.export"
        )
    return given.tolist()
