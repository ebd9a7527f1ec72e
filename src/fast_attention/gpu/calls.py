"""Calls of a family of kernels: all keys or those before each query, and decoding; tensors as kernels read them.

Every family of kernels is a value of ``KernelSet``, so that one loop over chunks and one self-check serve all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import trace
from fast_attention.engine.tracing import symbolic, wrapped

Pass = TypeVar("Pass", bound=Callable[..., Any])


class KernelSet(NamedTuple):
    """Four functions of heads (B, H, n, width), masks (B, H, n) or (B, 1, n), and states in a row (B, H, numbers).

    ``scan(q, k, v, key_mask, first)``: causal outputs behind a state, and the state after; ``sums(k, v, key_mask)``:
    the state after some keys; ``read(q, state)``: outputs of queries that see all of a state;
    ``step(q, k, v, key_mask, state)``: as ``scan`` of one token, without gradients. ``sums`` and ``read`` are None
    where only causal calls have kernels.
    """

    scan: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
    sums: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None
    read: Callable[[Tensor, Tensor], Tensor] | None
    step: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, ...]]


def steps(q: Tensor, *others: Tensor | None) -> bool:
    """Whether these tokens are one, of which no gradient is wanted: decoding's kernel has none."""
    return not symbolic() and q.shape[-2] == 1 and not _trains(q, *others)


def run(kernel_set: KernelSet, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Outputs (..., L, Ev) of queries that see all keys, or those before them, aligned to the end."""
    batch_shape = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    (q, k, v), mask = (as_heads(x, batch_shape) for x in (q, k, v)), _mask(key_mask, batch_shape)
    trace.record(f"{trace.KERNEL}: chunks side by side", "on a GPU")
    if not is_causal:
        assert kernel_set.sums is not None
        assert kernel_set.read is not None
        out = kernel_set.read(q, kernel_set.sums(k, v, mask))
        return out.reshape(*batch_shape, *out.shape[-2:])
    extra, first = k.shape[-2] - q.shape[-2], None
    if extra > 0:  # every query sees the first keys
        assert kernel_set.sums is not None
        first = kernel_set.sums(k[..., :extra, :], v[..., :extra, :], None if mask is None else mask[..., :extra])
        k, v, mask = k[..., extra:, :], v[..., extra:, :], None if mask is None else mask[..., extra:]
    out = kernel_set.scan(q[..., max(-extra, 0) :, :], k, v, mask, first)[0]
    out = F.pad(out, (0, 0, -extra, 0)) if extra < 0 else out  # the first queries see nothing
    return out.reshape(*batch_shape, *out.shape[-2:])


def advance(
    kernel_set: KernelSet, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, state: Tensor | None, *,
    decodes: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal outputs of new tokens behind a state in a row, and the state after them; ``decodes``: see ``steps``."""
    batch_shape = q.shape[:-2]
    (q, k, v), mask = (as_heads(x, batch_shape) for x in (q, k, v)), _mask(key_mask, batch_shape)
    first = None if state is None else state.float().expand(*batch_shape, -1).reshape(*q.shape[:2], -1)
    if decodes and first is not None:
        trace.record(f"{trace.KERNEL}: one token", "on a GPU")
        out, last = kernel_set.step(q, k, v, mask, first)
    else:
        trace.record(f"{trace.KERNEL}: chunks side by side", "on a GPU")
        out, last = kernel_set.scan(q, k, v, mask, first)
    return out.reshape(*batch_shape, *out.shape[-2:]), last.reshape(*batch_shape, -1)


def _trains(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may come."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def as_heads(x: Tensor, batch_shape: torch.Size) -> Tensor:
    """``x`` as (B, H, n, width), without a copy where it has two leading sizes."""
    x = x.expand(*batch_shape, *x.shape[-2:])
    return x if len(batch_shape) == 2 else x.reshape(1, -1, *x.shape[-2:])


def _mask(key_mask: Tensor | None, batch_shape: torch.Size) -> Tensor | None:
    return None if key_mask is None else as_heads(key_mask[..., None], batch_shape)[..., 0]


class Chunks(NamedTuple):
    """Where packed tokens stand once every sequence fills whole chunks, the last of them with tokens that none sees."""

    at: Tensor  # (tokens,)
    length: int
    begins: Tensor  # (chunks,), whether a sequence begins there

    @classmethod
    def of(cls, lengths: tuple[int, ...], chunk: int, device: torch.device) -> Chunks:
        """Chunks of sequences of so many tokens."""
        counts = [-(-length // chunk) for length in lengths]
        starts, total = [*accumulate(counts, initial=0)], sum(counts)
        first = torch.zeros(total, dtype=torch.uint8)
        first[[start for start, count in zip(starts, counts, strict=False) if count]] = 1
        shift = torch.tensor(starts[:-1]) * chunk - torch.tensor([*accumulate(lengths, initial=0)][:-1])
        at = torch.arange(sum(lengths)) + shift.repeat_interleave(torch.tensor(lengths))
        return cls(at.to(device), total * chunk, first.to(device))

    def spread(self, x: Tensor) -> Tensor:
        """Packed tokens (..., n, width) where they stand among chunks."""
        return x.new_zeros((*x.shape[:-2], self.length, x.shape[-1])).index_copy(-2, self.at, x)

    def visible(self, key_mask: Tensor | None) -> Tensor:
        """Which tokens among chunks may be seen, (..., length)."""
        shown = torch.ones_like(self.at, dtype=torch.bool) if key_mask is None else key_mask
        return shown.new_zeros((*shown.shape[:-1], self.length)).index_copy(-1, self.at, shown)

    def gathered(self, x: Tensor) -> Tensor:
        """Tokens among chunks as they were packed."""
        return x.index_select(-2, self.at)


def one_by_one(
    scan: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None,
    first: Tensor | None, begins: Tensor, *others: Any, **settings: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run a scan ``(q, k, v, key_mask, first, *others)`` of one sequence for several, chunks of which begin them."""
    size, outs, last = q.shape[-2] // len(begins), [], q
    starts = [0, *(i * size for i, begin in enumerate(begins.tolist()) if begin and i), q.shape[-2]]
    for start, stop in pairwise(starts):
        rows = slice(start, stop)
        tokens, mask = (x[..., rows, :] for x in (q, k, v)), None if key_mask is None else key_mask[..., rows]
        out, last = scan(*tokens, mask, first, *others, **settings)
        outs.append(out)
        first = None
    return torch.cat(outs, -2), last


def launched(run: Pass) -> Pass:
    """A pass on the device of its first tensor: Triton launches on the current one."""

    @functools.wraps(run)
    def wrapped(*given: Any, **settings: Any) -> Any:
        with torch.cuda.device_of(given[0] if isinstance(given[0], Tensor) else given[0][0]):
            return run(*given, **settings)

    return wrapped  # type: ignore[return-value]


def launch(kernel: Any, programs: int, x: Tensor | None, *given: Any, **constants: Any) -> None:
    """Run so many programs of a kernel; none on tensors without memory, of which a compiler asks the sizes."""
    if not wrapped((x,)):
        kernel[(programs,)](x, *given, **constants)


def contiguous(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose numbers of one token lie side by side, as kernels read them."""
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]


def as_bytes(key_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """A key mask as kernels read it, for the tokens of ``like``."""
    if key_mask is None:
        return None
    rows = key_mask if key_mask.stride(-1) == 1 else key_mask.contiguous()
    return rows.view(torch.uint8).expand(like.shape[:-1])


def outputs_like(q: Tensor, width: int, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Room for outputs, and for what rounding takes of them, where they are rounded and it is kept."""
    out = q.new_empty((*q.shape[:-1], width))
    return out, out.new_empty(out.shape if keep and out.dtype != torch.float32 else (0,))


def strides(x: Tensor | None, count: int) -> tuple[int, ...]:
    """The first strides, of batch, heads and tokens; zeros where there is no tensor."""
    return (0,) * count if x is None else x.stride()[:count]


def chunks_of(length: int, chunk: int) -> int:
    """How many chunks so many tokens are."""
    return (length + chunk - 1) // chunk


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (int(size) - 1).bit_length()
