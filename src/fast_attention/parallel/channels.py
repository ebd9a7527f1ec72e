"""Spreads mixers by channels: between two transpositions each process has some channels of all tokens.

What mixes tokens does so channel by channel; what mixes channels does so token by token, where the tokens are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import checks
from fast_attention.engine import masks
from fast_attention.engine.precision import in_float32
from fast_attention.mechanisms.mixers import gmlp
from fast_attention.mechanisms.mixers.gmlp import TinyAttention
from fast_attention.parallel import collectives, fetching
from fast_attention.parallel.shards import Shards
from fast_attention.parallel.strategy import Call, Sizes, Strategy


def columns(width: int, world: int) -> list[int]:
    """How many of ``width`` channels each process has between the transpositions; the first ones one more, or all."""
    return [width // world + (rank < width % world) for rank in range(world)]


def to_channels(x: Tensor, sizes: list[int], shards: Shards) -> Tensor:
    """This process's channels (..., N, sizes[rank]) of all tokens, from all channels (..., L, sum) of its tokens."""
    outgoing = [part.reshape(-1) for part in x.split(sizes, -1)]
    token = x.shape[:-2].numel() * sizes[shards.rank]
    incoming = [n * token for n in shards.queries]
    flat = collectives.all_to_all(torch.cat(outgoing), [part.numel() for part in outgoing], incoming, shards.group)
    parts = zip(flat.split(incoming), shards.queries, strict=True)
    return torch.cat([part.view(*x.shape[:-2], n, sizes[shards.rank]) for part, n in parts], -2)


def to_tokens(x: Tensor, sizes: list[int], shards: Shards) -> Tensor:
    """All channels of this process's tokens, those of the first process first: the inverse of ``to_channels``."""
    outgoing = [part.reshape(-1) for part in x.split(list(shards.queries), -2)]
    batch, length = x.shape[:-2], shards.queries[shards.rank]
    incoming = [batch.numel() * length * n for n in sizes]
    flat = collectives.all_to_all(torch.cat(outgoing), [part.numel() for part in outgoing], incoming, shards.group)
    parts = zip(flat.split(incoming), sizes, strict=True)
    return torch.cat([part.view(*batch, length, n) for part, n in parts], -1)


def _moved(there: list[int], back: list[int], shards: Shards) -> int:
    """Numbers that this process sends in both transpositions, of one sequence."""
    rank, length = shards.rank, shards.queries[shards.rank]
    return length * (sum(there) - there[rank]) + (shards.length - length) * back[rank]


def _itemsize(sizes: Sizes) -> int:
    return max(sizes.itemsize, 4)  # half precision is computed, and sent, in float32


def mix_tokens(call: Call, x: Tensor) -> Tensor:
    """An MLP over the tokens, the same for every channel."""
    call.mechanism.within(call.shards.length, call.w.b2.shape[0])
    sizes = columns(x.shape[-1], call.shards.world)
    channels = to_channels(masks.drop(x, call.key_mask), sizes, call.shards)
    if channels.numel():
        channels = call.mechanism.mix(channels, call.w, is_causal=call.is_causal, key_mask=None)
    else:
        channels = checks.zeros(channels.shape, channels, *call.w)
    return to_tokens(channels, sizes, call.shards)


def mixed_bytes(call: Call, sizes: Sizes) -> int:
    """Bytes sent: the tokens, there and back."""
    held = columns(sizes.width, call.shards.world)
    return sizes.batch * _moved(held, held, call.shards) * sizes.itemsize


def gate_tokens(call: Call, x: Tensor) -> Tensor:
    """A gated MLP, whose gate alone is mixed over the tokens."""
    call.mechanism.within(call.shards.length, call.w.b.shape[0])
    return _gated(x, call)


@in_float32
def _gated(x: Tensor, call: Call) -> Tensor:
    w, shards = call.w, call.shards
    x = masks.drop(x, call.key_mask)
    kept, gate = gmlp.halves(x, w, key_mask=call.key_mask)
    sizes = columns(gate.shape[-1], shards.world)
    gate = to_channels(gate, sizes, shards)
    empty = not gate.numel()
    gate = checks.zeros(gate.shape, gate, w.W, w.b) if empty else gmlp.spatial(gate, w, is_causal=call.is_causal)
    gate = to_tokens(gate, sizes, shards)
    if w.tiny is not None:
        gate = gate + _tiny_attention(call, x, w.tiny)
    return F.linear(kept * gate, w.V.mT, w.V_bias)


def _tiny_attention(call: Call, x: Tensor, w: TinyAttention) -> Tensor:
    """The small head: queries stay, keys and values, and whether they are visible, go to all who see them."""
    q, k, v = (x @ w.QKV).chunk(3, -1)
    flags = [] if call.key_mask is None else [call.key_mask.expand(x.shape[:-1])[..., None].to(x.dtype)]
    tokens = fetching.fetch(torch.cat([k, v, *flags], -1), _visible(call), call.shards)
    k, v, *visible = tokens.split([k.shape[-1], v.shape[-1], *(1 for _ in flags)], -1)
    key_mask = visible[0][..., 0] > 0.5 if visible else None
    mask = masks.visible(q.shape[-2], k.shape[-2], is_causal=call.is_causal, key_mask=key_mask, device=x.device)
    return gmlp.tiny_attention(q, k, v, mask) @ w.O


def _visible(call: Call) -> fetching.Ranges:
    """The tokens that each process's queries see."""
    ends = call.shards.starts(keys=False)[1:]
    return [(0, end if call.is_causal else call.shards.length) for end in ends]


def gated_bytes(call: Call, sizes: Sizes) -> int:
    """Bytes sent: the gate, there and back, and what the small head's queries see."""
    tiny, held = call.w.tiny, columns(call.w.gain.shape[0], call.shards.world)
    numbers = _moved(held, held, call.shards)
    if tiny is not None:
        numbers += fetching.tokens_sent(_visible(call), call.shards) * (2 * tiny.O.shape[0] + call.masked)
    return sizes.batch * numbers * _itemsize(sizes)


def transform(call: Call, x: Tensor) -> Tensor:
    """The real part of a Fourier transform over tokens and channels."""
    return _transformed(x, call)


@in_float32
def _transformed(x: Tensor, call: Call) -> Tensor:
    """Half of the channels' spectrum goes there, real numbers come back: also of the half that mirrors it."""
    shards, norm = call.shards, call.mechanism.norm
    held, mirrored = _spectrum(x.shape[-1], shards.world)
    half = _real_spectrum(x, norm)
    parts = to_channels(half, [2 * n for n in held], shards).unflatten(-1, (held[shards.rank], 2))
    mixed = torch.fft.fft(torch.view_as_complex(parts), dim=-2, norm=norm).real if parts.numel() else parts[..., 0]
    first = int(shards.rank == 0 and mirrored[0] > 0)  # channel 0 mirrors itself
    mirror = mixed.narrow(-1, first, mirrored[shards.rank]).flip(-2).roll(1, -2)
    sizes = [a + b for a, b in zip(held, mirrored, strict=True)]
    pairs = [n for pair in zip(held, mirrored, strict=True) for n in pair]
    columns_of = to_tokens(torch.cat([mixed, mirror], -1), sizes, shards).split(pairs, -1)
    return torch.cat([*columns_of[::2], torch.cat(columns_of[1::2], -1).flip(-1)], -1)


def _real_spectrum(x: Tensor, norm: str) -> Tensor:
    """Half of the spectrum of every token, real and imaginary parts side by side; FFTs take no empty tensors."""
    if not x.numel():
        return checks.zeros((*x.shape[:-1], 2 * (x.shape[-1] // 2 + 1)), x)
    return torch.view_as_real(torch.fft.rfft(x, dim=-1, norm=norm)).flatten(-2)


def _spectrum(width: int, world: int) -> tuple[list[int], list[int]]:
    """How many channels of half of the spectrum each process has, and how many others mirror one of them."""
    held, end = columns(width // 2 + 1, world), (width + 1) // 2
    starts = [sum(held[:rank]) for rank in range(world)]
    return held, [max(0, min(end, a + n) - max(1, a)) for a, n in zip(starts, held, strict=True)]


def transformed_bytes(call: Call, sizes: Sizes) -> int:
    """Bytes sent: half of a complex spectrum there, all real numbers back."""
    held, mirrored = _spectrum(sizes.width, call.shards.world)
    back = [a + b for a, b in zip(held, mirrored, strict=True)]
    return sizes.batch * _moved([2 * n for n in held], back, call.shards) * _itemsize(sizes)


_TWICE = "two all-to-alls, from tokens to channels and back"
TOKEN_MLP = Strategy("channels", _TWICE, mix_tokens, mixed_bytes)
GATE = Strategy("channels", f"{_TWICE}, of the gate", gate_tokens, gated_bytes)
FOURIER = Strategy("channels", f"{_TWICE}, of half of the spectrum", transform, transformed_bytes)
