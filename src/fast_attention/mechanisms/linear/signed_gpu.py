"""Attention from features of either sign, over one scale for each token, by Triton kernels: sines and cosines of FAVOR.

A query's sums are over the largest scale of the keys that it sees, c: by ``c_(t-1) - c_t`` sums decay from token to
token, which is what the kernels of sums that decay do. Features are made by torch in float32, some tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.engine import chunked, dispatch
from fast_attention.engine.scan import FLOOR, cummax
from fast_attention.engine.tracing import symbolic
from fast_attention.feature_maps.feature_map import Features
from fast_attention.feature_maps.features import Identity
from fast_attention.gpu import cases, decayed, maps, operations, self_check, walking
from fast_attention.mechanisms.linear import decayed_gpu, linear_state, reference
from fast_attention.mechanisms.linear.linear_state import LinearState, Sums

NUMBERS = 2**27  # features of queries that are held at a time: half a GiB, and as much of keys
LEAST = 2048  # tokens of a piece
WIDEST = 1 << 16  # numbers of a head: any, which kernels take a few of
AS_THEY_ARE = maps.IDENTITY, 0.0
Finish = Callable[[Sums, Tensor], Tensor]  # of sums over e^largest, and largest (..., L), which has a gradient


def obstacle(q: Tensor, k: Tensor, v: Tensor, features: int, key_mask: Tensor | None, *, is_causal: bool) -> str:
    """Why kernels cannot compute attention from so many features; empty where they can."""
    if why := dispatch.gpu_obstacle(q, k, v, widest=WIDEST):
        return why
    case = cases.decayed(Identity(), normalized=True) if is_causal else cases.elementwise(Identity())
    return self_check.obstacle(case, q.new_empty(0, features), v, masked=key_mask is not None)


@dataclass(frozen=True)
class Signed:
    """Features with their weights: ``of(*weights)`` maps tokens (..., n, d) to ``Features`` with scales.

    ``finish`` makes outputs of sums where these are more than numerators over denominators.
    """

    of: Callable[..., Callable[[Tensor], Features]]
    weights: tuple[Any, ...]
    finish: Finish | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, is_causal: bool) -> Tensor:
        """Outputs (..., L, Ev); causal ones aligned to the bottom right."""
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, self.weights[0])))
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
        if not is_causal:
            return self._read(q, self._summed(k, v, key_mask))
        extra, state = k.shape[-2] - q.shape[-2], None
        if extra > 0:  # every query sees the first keys
            state = self._summed(k[..., :extra, :], v[..., :extra, :], _some(key_mask, slice(0, extra)))
            k, v, key_mask = k[..., extra:, :], v[..., extra:, :], _some(key_mask, slice(extra, None))
        out = self.advance(q[..., max(-extra, 0) :, :], k, v, state, key_mask)[0]
        return F.pad(out, (0, 0, -extra, 0)) if extra < 0 else out  # the first queries see nothing

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, state: LinearState | None, key_mask: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """Causal outputs of new tokens behind ``state``, and the state after them."""
        tokens, size = [q, k, v, _column(key_mask, k)], self._size(q)
        if not size:
            return self._step(tokens, self.weights, state, None)

        def step(tokens: Sequence[Any], weights: Sequence[Any], before: tuple[Tensor, ...]) -> Any:
            out, after = self._step(tokens, weights, LinearState(*before), None)
            return (out,), tuple(after)

        (out,), after = chunked.scan(step, tokens, self.weights, state or self._nothing(k, v), size=size)
        return out, LinearState(*after)

    def packed(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], key_mask: Tensor | None) -> Tensor:
        """Causal outputs of sequences of so many tokens, one behind another."""
        return self._step([q, k, v, _column(key_mask, k)], self.weights, None, lengths)[0]

    def _step(
        self, tokens: Sequence[Any], weights: Sequence[Any], state: LinearState | None, lengths: tuple[int, ...] | None
    ) -> tuple[Tensor, LinearState]:
        q, k, v, mask = tokens
        phi, mask, E = self.of(*weights), None if mask is None else mask[..., 0], v.shape[-1]
        queries, keys = phi(q).values, reference.masked_keys(phi, k, mask)
        assert keys.log_scale is not None
        largest = cummax(keys.log_scale, -1) if lengths is None else _since_begin(keys.log_scale, lengths)
        largest = largest if state is None else torch.maximum(largest, state.log_scale)
        scale = largest.detach()
        before = torch.cat([(scale if state is None else state.log_scale.detach())[..., :1], scale[..., :-1]], -1)
        logs = (before - scale).clamp_min(decayed_gpu.NOTHING)
        logs = logs if lengths is None else decayed_gpu.begun(logs, lengths)
        logs = walking.as_heads(logs[..., None], q.shape[:-2])[..., 0]
        features = keys.values * (keys.log_scale - scale).exp()[..., None]
        if self.finish is not None:  # denominators as one more value
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        first, D = None if state is None else _row(state, v.shape[-1]), queries.shape[-1]
        keep = walking.trains(queries, features, v, first)
        forms, _ = decayed.forms(logs, 0.0, *AS_THEY_ARE, keep, self.finish is None)
        decodes = walking.steps(queries, features, v, first)
        out, last = walking.further(forms, queries, features, v, mask, first, decodes=decodes)
        if self.finish is not None:
            out, scale = self.finish(Sums(out[..., :E], out[..., E]), largest), largest
        kv = last[..., : D * v.shape[-1]].reshape(*last.shape[:-1], D, v.shape[-1])[..., :E]
        return out, LinearState(kv, last[..., -D:], scale[..., -1:])

    def _summed(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> LinearState:
        """The state after some keys; its scale has a gradient."""

        def step(tokens: Sequence[Any], weights: Sequence[Any], before: tuple[Tensor, ...]) -> Any:
            k, v, mask = tokens
            lead, mask = k.shape[:-2], None if mask is None else mask[..., 0]
            keys = reference.masked_keys(self.of(*weights), k, mask)
            assert keys.log_scale is not None
            largest = keys.log_scale.amax(-1, keepdim=True)
            features = keys.values * (keys.log_scale - largest.detach()).exp()[..., None]
            x, y = (walking.as_heads(each, lead) for each in (features, v))
            shown = None if mask is None else walking.as_heads(mask[..., None], lead)[..., 0]
            row, D = operations.key_sums(x, y, shown, *AS_THEY_ARE).reshape(*lead, -1), features.shape[-1]
            state = LinearState(row[..., :-D].reshape(*lead, D, -1), row[..., -D:], largest.detach())
            kv, z, _ = linear_state.combine(LinearState(before[0], before[1], before[2].detach()), state)
            return (), (kv, z, torch.maximum(before[2], largest))

        tokens, size = [k, v, _column(key_mask, k)], self._size(k)
        return LinearState(*_over(step, tokens, self.weights, self._nothing(k, v), size)[1])

    def _read(self, q: Tensor, state: LinearState) -> Tensor:
        """Outputs of queries that see all keys of a state."""
        lead = q.shape[:-2]

        def step(tokens: Sequence[Any], weights: Sequence[Any], before: tuple[Tensor, ...]) -> Any:
            *others, kv, k, largest = weights
            queries = self.of(*others)(tokens[0]).values
            if self.finish is not None:
                return (self.finish(linear_state.read(queries, LinearState(kv, k, largest)), largest),), ()
            row = walking.as_heads(torch.cat([kv.flatten(-2), k], -1)[..., None, :], lead)[..., 0, :]
            heads = walking.as_heads(queries, lead)
            out = operations.read_sums(heads, row, 0.0, *AS_THEY_ARE, walking.trains(heads, row))[0]
            return (out.reshape(*lead, *out.shape[-2:]),), ()

        dispatch.record(f"{dispatch.KERNEL}: chunks side by side", "on a GPU")
        return _over(step, [q], (*self.weights, *state), (), self._size(q))[0][0]

    def _size(self, x: Tensor) -> int:
        """Tokens of a piece, of which features are held at a time; 0 where all are one."""
        if symbolic():
            return 0
        features = self.of(*self.weights)(x[..., :1, :].detach()).values.numel()
        size = max(LEAST, NUMBERS // features)
        return size if x.shape[-2] > size else 0

    def _nothing(self, k: Tensor, v: Tensor) -> LinearState:
        """The state before the first key."""
        z = torch.zeros_like(self.of(*self.weights)(k[..., :1, :].detach()).values[..., 0, :])
        return LinearState(z.new_zeros((*z.shape, v.shape[-1])), z, torch.full_like(z[..., :1], FLOOR))


def _over(step: chunked.Step, tokens: Sequence[Any], weights: Sequence[Any], state: Any, size: int) -> Any:
    """``step`` over pieces of ``size`` tokens, or all at once where that is 0."""
    return chunked.scan(step, tokens, weights, state, size=size) if size else step(tokens, weights, state)


def _some(key_mask: Tensor | None, tokens: slice) -> Tensor | None:
    return None if key_mask is None else key_mask[..., tokens]


def _row(state: LinearState, values: int) -> Tensor:
    """A state as kernels read it; of so many values, the last of them may be the denominators."""
    kv = state.kv if state.kv.shape[-1] == values else torch.cat([state.kv, state.k[..., None]], -1)
    return torch.cat([kv.flatten(-2), state.k], -1)


def _column(key_mask: Tensor | None, k: Tensor) -> Tensor | None:
    return None if key_mask is None else key_mask.expand(k.shape[:-1])[..., None]


def _since_begin(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The largest number (..., n) since each token's sequence began."""
    starts = torch.tensor([*accumulate(lengths, initial=0)][:-1], device=x.device)
    at = torch.arange(x.shape[-1], device=x.device)
    since, step = at - starts.repeat_interleave(torch.tensor(lengths, device=x.device)), 1
    while step < max(lengths):
        earlier = F.pad(x[..., :-step], (step, 0), value=FLOOR)
        x, step = torch.maximum(x, earlier.masked_fill(since < step, FLOOR)), 2 * step
    return x
