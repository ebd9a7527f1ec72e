"""The tensors of a call as the fast path reads them: heads in a row, masks in the form that the kernel takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from fast_attention.engine.operation import Tensors
from fast_attention.engine.tiles import sink_gradient
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.arguments import Arguments, Maps
from fast_attention.mechanisms.hybrid.far_sums import FarSums
from fast_attention.mechanisms.hybrid.positions import Chunk, Plan
from fast_attention.mechanisms.hybrid.sink_tokens import MISSING, SinkTokens, hidden
from fast_attention.mechanisms.linear.reference import masked_keys


class Tokens(NamedTuple):
    """Queries, keys and values, and the keys that are masked."""

    q: Float[Tensor, "heads length width"]
    k: Float[Tensor, "heads keys width"]
    v: Float[Tensor, "heads keys width"]
    masked: Bool[Tensor, "#heads keys"] | None  # None: every key is visible

    def part(self, chunk: Chunk) -> Tokens:
        """The queries and keys of a chunk."""
        keys = chunk.keys
        masked = None if self.masked is None else self.masked[:, keys]
        return Tokens(self.q[:, chunk.queries], self.k[:, keys], self.v[:, keys], masked)


class Gradients(NamedTuple):
    """The gradients of a call, with views of those of queries and keys that have the sizes of the call."""

    tokens: Tokens
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: SinkTokens
    weights: list[Tensor | None]


Add = Callable[[Tensor, Tensor | None], None]  # takes the gradients of values and log scales


class TokenMaps(NamedTuple):
    """The maps of queries (0) and keys (1), and the tokens that they take, with all leading sizes."""

    maps: Maps
    weights: Tensors
    tokens: tuple[Tensor, Tensor]
    visible: Tensor | None  # None: every key is

    def features(self, which: int, tokens: slice) -> Features:
        """Of some queries or keys, (heads, n, C), without a gradient."""
        return _flattened(self._apply(which, tokens, self.tokens[which][..., tokens, :], self.weights))

    def _apply(self, which: int, tokens: slice, x: Tensor, weights: Sequence[Tensor | None]) -> Features:
        visible = None if which == 0 or self.visible is None else self.visible[..., tokens]
        return masked_keys(self.maps(*weights)[which], x, visible)

    def differentiable(
        self, which: int, tokens: slice, into: Tensor, d_weights: Sequence[Tensor | None]
    ) -> tuple[Features, Add]:
        """``features``, and what adds the gradients of tokens and weights, given those of features."""
        twins = [
            w if d is None or w is None else w.detach().requires_grad_()
            for w, d in zip(self.weights, d_weights, strict=True)
        ]
        x = self.tokens[which][..., tokens, :].detach().requires_grad_()
        with torch.enable_grad():
            values, log_scale = self._apply(which, tokens, x, twins)
        goals = [into[..., tokens, :], *(d for d in d_weights if d is not None)]
        wanted = [x, *(w for w, d in zip(twins, d_weights, strict=True) if d is not None and w is not None)]

        def add(d_values: Tensor, d_log_scale: Tensor | None) -> None:
            pairs = [(values, d_values)]
            if log_scale is not None and d_log_scale is not None:
                pairs.append((log_scale, d_log_scale))
            pairs = [(x, d.view(x.shape)) for x, d in pairs if x.requires_grad]
            if not pairs:
                return
            gradients = torch.autograd.grad([x for x, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True)
            for goal, gradient in zip(goals, gradients, strict=True):
                if gradient is not None:
                    goal.add_(gradient)

        return _flattened(Features(values.detach(), None if log_scale is None else log_scale.detach())), add


def _flattened(features: Features) -> Features:
    values, log_scale = features
    return Features(values.flatten(0, -3), None if log_scale is None else log_scale.flatten(0, -2))


class Call(NamedTuple):
    """Tensors with one axis of heads; queries, keys and values padded to one width, as the fused kernel wants them."""

    lead: torch.Size  # heads, as they came
    widths: tuple[int, int]  # of queries and values, as they came
    plan: Plan
    maps: TokenMaps
    tokens: Tokens
    summed: Bool[Tensor, "#heads keys"]  # the visible keys without the sink tokens
    sinks: SinkTokens
    earlier: FarSums
    apart: bool  # whether sink tokens are none of the near keys, which have a bias, wherever they stand
    learned: Float[Tensor, "heads 1"] | None  # scores in the normaliser without a value

    @staticmethod
    def of(tensors: tuple[Any, ...], maps: Maps, plan: Plan) -> Call:
        """From the flat tuple of ``Arguments``."""
        x = Arguments.of(tensors)
        lead, widths = x.q.shape[:-2], (x.q.shape[-1], x.v.shape[-1])
        summed, position = _rows(x.visible, lead), _rows(x.sinks.position, lead)
        masked = _masked(summed, position) if x.numbers is None else ~summed
        token_maps = TokenMaps(maps, x.weights, (x.q, x.k), None if masked is None else x.visible)
        q, k, v = (_wide(t, max(widths)) for t in x[:3])
        tokens = Tokens(q, k, v, masked)
        sinks = SinkTokens(_wide(x.sinks.k, max(widths)), _wide(x.sinks.v, max(widths)), position)
        earlier = FarSums(x.earlier.sums.flatten(0, -4), x.earlier.log_scale.flatten(0, -2))
        learned = None if x.learned_sinks is None else x.learned_sinks.to(x.q.dtype).expand(lead).reshape(-1, 1)
        return Call(lead, widths, plan, token_maps, tokens, summed, sinks, earlier, x.numbers is not None, learned)

    @property
    def scale(self) -> float:
        """The factor of dot products."""
        return self.widths[0] ** -0.5

    def zeros(self, weights: Any) -> Gradients:
        """Gradients yet to be added to, also for those of the weights that want one."""
        q, k, v = (torch.zeros_like(t) for t in self.tokens[:3])
        sinks = SinkTokens(torch.zeros_like(self.sinks.k), torch.zeros_like(self.sinks.v), self.sinks.position)
        wanted = [torch.zeros_like(w) if w is not None and w.requires_grad else None for w in weights]
        views = self.unflattened(q, 0), self.unflattened(k, 0), self.unflattened(v, 1)
        return Gradients(Tokens(q, k, v, None), *views, sinks, wanted)

    def of_learned(self, log_sums: Tensor, gradient: Tensor, out: Tensor) -> Float[Tensor, "heads"] | None:
        """The gradient of the learned sinks: each has a weight, and all weights are over outputs as values."""
        if self.learned is None:
            return None
        heads = self.lead[-1]
        return sink_gradient(self.learned[:heads, 0], *(x.unflatten(0, (-1, heads)) for x in (log_sums, gradient, out)))

    def unflattened(self, x: Tensor, which: int) -> Tensor:
        """With the sizes of the call: the width is that of queries (0) or values (1)."""
        return x.view(*self.lead, *x.shape[1:])[..., : self.widths[which]]

    def wide(self, x: Tensor) -> Tensor:
        """Flattened and padded as queries, keys and values are."""
        return _wide(x, max(self.widths))

    def logits(self, chunk: Chunk) -> Float[Tensor, "heads two_and_sinks length"]:
        """Two rows for the near and the far keys, yet minus infinity, and the logits of the sink tokens for a chunk of
        queries, minus infinity where they are hidden.
        """
        q, sinks, plan = self.tokens.q[:, chunk.queries], self.sinks.k, self.plan
        plan = plan._replace(left=-MISSING, right=-MISSING) if self.apart else plan
        logits = q.new_full((len(q), 2 + sinks.shape[1], q.shape[1]), float("-inf"))
        torch.mul(torch.bmm(sinks, q.mT), self.scale, out=logits[:, 2:])
        logits[:, 2:].masked_fill_(hidden(plan, self.sinks, chunk.queries), float("-inf"))
        return logits


def _masked(summed: Bool[Tensor, "#heads keys"], sinks: Int[Tensor, "#heads sinks"]) -> Tensor | None:
    """The keys that are masked: neither summed nor sink tokens; None if there are none."""
    keys = summed.shape[-1]
    inside = (sinks >= 0) & (sinks < keys)
    if int(summed.sum()) + int(inside.sum()) == summed.numel():
        return None
    return ~(summed | (torch.arange(keys, device=sinks.device) == sinks[..., None]).any(-2))


def _rows(x: Tensor, lead: torch.Size) -> Tensor:
    """One row for all heads, or one for each."""
    x = x if x.shape[:-1].numel() == 1 else x.expand(*lead, x.shape[-1])
    return x.flatten(0, -2)


def _wide(x: Tensor, width: int) -> Tensor:
    """Flattened and padded, the numbers of a token side by side: torch's kernel reads them so, wherever they are."""
    x = x.flatten(0, -3)
    x = x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
