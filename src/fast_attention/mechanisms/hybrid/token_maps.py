"""Features of the tokens of a call, chunk by chunk, with their gradients; those of few keys are made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fast_attention.engine.custom_gradient import Tensors
from fast_attention.feature_maps.feature_map import Features
from fast_attention.mechanisms.hybrid.arguments import Maps
from fast_attention.mechanisms.linear.reference import masked_keys

FEW = 2**24  # features of all keys, 64 MiB in float32, up to which they are made once
Add = Callable[[Tensor, Tensor | None], None]  # takes the gradients of values and log scales


class Held(NamedTuple):
    """The features of all keys, and the gradients of these."""

    keys: Features
    gradients: tuple[Tensor, Tensor] | None = None  # of values and log scales

    def of(self, tokens: slice) -> Features:
        """Those of some keys."""
        values, log_scale = self.keys
        return Features(values[:, tokens], None if log_scale is None else log_scale[:, tokens])

    def add(self, tokens: slice, d_values: Tensor, d_log_scale: Tensor | None) -> None:
        """Add the gradients of those of some keys."""
        for whole, part in zip(self.gradients or (), (d_values, d_log_scale), strict=False):
            if part is not None:
                whole[:, tokens].add_(part)


class TokenMaps(NamedTuple):
    """The maps of queries (0) and keys (1), and the tokens that they take, with all leading sizes."""

    maps: Maps
    weights: Tensors
    tokens: tuple[Tensor, Tensor]
    visible: Tensor | None  # None: every key is
    held: Held | None = None

    def features(self, which: int, tokens: slice) -> Features:
        """Of some queries or keys, (heads, n, C), without a gradient."""
        if which == 1 and self.held is not None:
            return self.held.of(tokens)
        return _flattened(self._apply(which, tokens, self.tokens[which][..., tokens, :], self.weights))

    def _apply(self, which: int, tokens: slice, x: Tensor, weights: Sequence[Tensor | None]) -> Features:
        visible = None if which == 0 or self.visible is None else self.visible[..., tokens]
        return masked_keys(self.maps(*weights)[which], x, visible)

    def differentiable(
        self, which: int, tokens: slice, into: Tensor, d_weights: Sequence[Tensor | None]
    ) -> tuple[Features, Add]:
        """``features``, and what adds the gradients of tokens and weights, given those of features."""
        if which == 1 and self.held is not None:
            return self.held.of(tokens), partial(self.held.add, tokens)
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

    def holding(self, features: Features, gradients: tuple[Tensor, Tensor] | None = None) -> TokenMaps:
        """With the features of all keys."""
        return self._replace(held=Held(features, gradients))


def _flattened(features: Features) -> Features:
    values, log_scale = features
    return Features(values.flatten(0, -3), None if log_scale is None else log_scale.flatten(0, -2))
