"""Softmax over some of the pairs by torch's FlexAttention: block masks from intervals of keys or from tables of blocks.

FlexAttention is compiled once for every kind of shapes; which keys are visible it reads from tensors, so that neither a
window nor a mask compiles anything again. Lengths are rounded up to a few sizes. No tensor here has a number for every
pair of tokens, only one for every pair of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import masks, operation, trace
from fast_attention.engine.tracing import symbolic

SIZE = 128  # tokens of FlexAttention's blocks
SHORTEST, LONGEST = 1024, 1 << 17  # tokens; pairs of blocks are a million at most
KINDS = 64  # kinds of shapes that one process compiles
STEPS = 4  # lengths between two powers of two
WIDTHS = (16, 32, 64, 128, 256)
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_kinds: set[tuple[Any, ...]] = set()


class Pattern(NamedTuple):
    """Which keys queries see, of rounded lengths.

    ``visible(b, h, i, j)`` says it of one pair; ``some`` and ``every`` (H or 1, blocks, blocks) of which blocks of
    queries and keys some pairs are visible, and of which all.
    """

    visible: Visible
    some: Tensor
    every: Tensor


def rounded(length: int) -> int:
    """The next of ``STEPS`` lengths between two powers of two, in whole blocks."""
    step = max(SIZE, (1 << (length - 1).bit_length()) // 2 // STEPS)
    return -(-length // step) * step


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why FlexAttention does not compute softmax over parts of these pairs; empty where it does."""
    if symbolic():
        return "traced"
    if why := operation.gpu_unsupported_reason(q, k, v, widest=max(WIDTHS)):
        return why
    if q.dtype == torch.float32:
        return "float32, which FlexAttention is not used for"
    if not {q.shape[-1], v.shape[-1]} <= {*WIDTHS}:
        return f"heads of other widths than {', '.join(map(str, WIDTHS))}"
    if not SHORTEST <= q.shape[-2] <= LONGEST or not SHORTEST <= k.shape[-2] <= LONGEST:
        return f"fewer than {SHORTEST} or more than {LONGEST} tokens"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a graph is being captured"
    if len(_kinds) >= KINDS and _kind(q, k, v) not in _kinds:
        return f"more than {KINDS} kinds of shapes"
    return ""


def intervals(lows: Tensor, highs: Tensor, keys: int) -> Pattern:
    """Query i sees the keys from ``lows[i]`` to ``highs[i]``, both of which never fall; ``keys`` there are."""
    length, blocks = rounded(len(lows)), rounded(keys) // SIZE
    lows = F.pad(lows.clamp(min=0), (0, length - len(lows)), value=keys).int()  # rows behind the last see nothing
    highs = torch.cat([highs, highs[-1:].expand(length - len(highs))]).clamp(max=keys - 1).int()

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (lows[i] <= j) & (j <= highs[i])

    begins = torch.arange(blocks, device=lows.device) * SIZE
    low, high = lows.view(-1, SIZE), highs.view(-1, SIZE)
    some = (low[:, :1] < begins + SIZE) & (high[:, -1:] >= begins)
    every = (low[:, -1:] <= begins) & (high[:, :1] >= begins + SIZE - 1)
    return Pattern(visible, some[None], (some & every)[None])


def tables(table: Tensor, size: int, length: int, *, is_causal: bool) -> Pattern:
    """Which blocks of ``size`` tokens, a part of ``SIZE``, see which: (H, blocks, blocks) of one sequence's heads."""
    count, per = rounded(length) // size, SIZE // size
    table = F.pad(table, (0, count - table.shape[-1], 0, count - table.shape[-2]))
    table = table.tril() if is_causal else table
    end = torch.tensor(length, device=table.device)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inside = table[h, i // size, j // size] & (i < end) & (j < end)
        return inside & (j <= i) if is_causal else inside

    blocks = table.unflatten(-1, (-1, per)).unflatten(-3, (-1, per))  # (H, blocks, per, blocks, per)
    some, every = blocks.any(-1).any(-2), blocks.all(-1).all(-2)
    numbers = torch.arange(some.shape[-1], device=table.device)
    full = (numbers + 1) * SIZE <= length
    every = every & full & full[:, None]
    return Pattern(visible, some, every & (numbers < numbers[:, None]) if is_causal else every)


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, key_mask: Tensor | None, *, scale: float | None
) -> Tensor:  # fmt: skip
    """Softmax over the visible keys (..., L, Ev); a query that sees none gets zeros.

    A pattern of more than one head has as many as all leading sizes together.
    """
    return _run(q, k, v, pattern, key_mask, scale=scale)[0]


def attend_with_logs(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, key_mask: Tensor | None, *, scale: float | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``attend``, and the logarithms of the normalisers (..., L) in float32, minus infinity where nothing is seen."""
    from torch.nn.attention.flex_attention import AuxRequest

    out, more = _run(q, k, v, pattern, key_mask, scale=scale, return_aux=AuxRequest(lse=True))
    return out, more.lse[..., : q.shape[-2]].reshape(out.shape[:-1])


def _run(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, key_mask: Tensor | None, *, scale: float | None,
    return_aux: Any = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    batch_shape, length = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v))), q.shape[-2]
    trace.record(f"{trace.KERNEL}: FlexAttention", "on a GPU", block=SIZE)
    _kinds.add(_kind(q, k, v))
    k, v = masks.drop(k, key_mask), masks.drop(v, key_mask)  # no NaN of hidden tokens gets into products
    q, k, v = (_padded(x, batch_shape, flat=len(pattern.some) > 1) for x in (q, k, v))
    if key_mask is not None:
        heads = key_mask.expand(*batch_shape, key_mask.shape[-1]).reshape(*q.shape[:2], -1)
        pattern = _masked(pattern, F.pad(heads, (0, k.shape[-2] - heads.shape[-1])))
    named = {} if return_aux is None else {"return_aux": return_aux}
    out = compiled()(q, k, v, block_mask=block_mask(pattern, q.shape[-2], k.shape[-2]), scale=scale, **named)
    out, more = (out, None) if return_aux is None else out
    return out[..., :length, :].reshape(*batch_shape, length, out.shape[-1]), more


def block_mask(pattern: Pattern, length: int, keys: int) -> Any:
    """FlexAttention's mask: for every block of queries the blocks of keys that it sees, in part and as a whole."""
    from torch.nn.attention.flex_attention import BlockMask

    parts = [x for kind in (pattern.some & ~pattern.every, pattern.every) for x in _listed(kind)]
    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=SIZE, mask_mod=pattern.visible, seq_lengths=(length, keys))


@cache
def compiled() -> Any:
    """FlexAttention, compiled for each kind of shapes."""
    from torch.nn.attention.flex_attention import flex_attention  # which imports the compiler

    run = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    most = 16 * KINDS  # masks or none, gradients or none, scales: beyond it a call would raise an error

    def many(*given: Any, **named: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=most, accumulated_recompile_limit=most):
            return run(*given, **named)

    return many


def _masked(pattern: Pattern, mask: Tensor) -> Pattern:
    inside = pattern.visible

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return inside(b, h, i, j) & mask[b, h, j]

    return Pattern(visible, pattern.some, torch.zeros_like(pattern.every))


def _listed(kind: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and which: (1, H, blocks) and (1, H, blocks, blocks)."""
    order = kind.byte().argsort(dim=-1, descending=True, stable=True)
    return kind.sum(-1, dtype=torch.int32)[None], order.int()[None]


def _padded(x: Tensor, batch_shape: torch.Size, *, flat: bool) -> Tensor:
    x = F.pad(x, (0, 0, 0, rounded(x.shape[-2]) - x.shape[-2])).expand(*batch_shape, -1, -1)
    return x if len(batch_shape) == 2 and not flat else x.reshape(1, -1, *x.shape[-2:])


def _kind(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    sizes = [(*x.shape[:-2], rounded(x.shape[-2]), x.shape[-1]) for x in (q, k, v)]
    return (*sizes, q.dtype, q.device, torch.is_grad_enabled())
