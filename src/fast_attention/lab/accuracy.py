"""Measures the error against exact attention on given tensors, head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import catalogue
from fast_attention.lab.capture import Layer
from fast_attention.lab.measure import Setting
from fast_attention.lab.records import Error
from fast_attention.lab.refusals import first_line
from fast_attention.mechanism import Attention, Shape, Unsupported
from fast_attention.nn.bound import Bound

SAMPLED_KEYS = 512  # of which it is counted how many queries weigh them


def measurable(mechanism: Any) -> bool:
    """Whether a mechanism has an error to measure: it approximates exact attention, and needs no training."""
    return isinstance(mechanism, Attention) and mechanism.traits.approximates is not None


def relative_rms(ours: Tensor, truth: Tensor) -> list[list[float]]:
    """``||ours - truth|| / ||truth||`` of every head of every layer of (layers, H, L, E)."""
    difference = (ours.to(truth.device).double() - truth.double()).square().sum((-2, -1))
    return (difference / truth.double().square().sum((-2, -1)).clamp_min(1e-300)).sqrt().tolist()


class Scene:
    """Computes errors on the tensors of all layers at one length, against exact attention in float64, computed once.

    Mechanisms run in the setting's dtype. Layers of equal shape are one batch.
    """

    def __init__(self, layers: list[Layer], setting: Setting) -> None:
        self.layers, self.setting = layers, setting
        self.length = layers[0].q.shape[-2]
        self.batches: list[tuple[Tensor, ...]] = []
        for layer in layers:
            tensors = (layer.q, layer.k, layer.v)
            if self.batches and all(a.shape[1:] == b.shape[1:] for a, b in zip(tensors, self.batches[-1], strict=True)):
                self.batches[-1] = tuple(torch.cat([a, b]) for a, b in zip(self.batches[-1], tensors, strict=True))
            else:
                self.batches.append(tensors)
        self._truths: dict[str, list[Tensor]] = {}

    def error(self, mechanism: Any) -> Error:
        """Relative RMS error of the outputs."""
        against = mechanism.traits.approximates
        error = Error(repr(mechanism), self.length, against)
        try:
            for ours, truth in zip(self.ours(mechanism), self.truths(against), strict=True):
                error.output += relative_rms(ours, truth)
            error.visible_fraction = self.visible_fraction(mechanism)
        except (Unsupported, ValueError, RuntimeError) as problem:
            error.output, error.note = [], first_line(problem)
        return error

    @torch.no_grad()
    def ours(self, mechanism: Any) -> list[Tensor]:
        """The mechanism's outputs of every batch."""
        outputs = []
        for batch in self.batches:
            q, k, v = (x.to(self.setting.device, self.setting.dtype) for x in batch)
            torch.manual_seed(self.setting.seed)
            bound = Bound(mechanism, Shape(q.shape[1], q.shape[3], max_len=self.length))
            bound.to(self.setting.device, self.setting.dtype)
            outputs.append(bound(q, k, v, is_causal=self.setting.is_causal))
        return outputs

    @torch.no_grad()
    def truths(self, against: str = "Softmax") -> list[Tensor]:
        """The exact outputs of every batch, by the mechanism ``against``."""
        if against not in self._truths:
            device = "cpu" if self.setting.device.type == "mps" else self.setting.device  # mps has no float64
            exact: Any = F.scaled_dot_product_attention if against == "Softmax" else catalogue.default(against)
            doubles = [[x.to(device, torch.float64) for x in batch] for batch in self.batches]
            self._truths[against] = [exact(*batch, is_causal=self.setting.is_causal) for batch in doubles]
        return self._truths[against]

    @torch.no_grad()
    def visible_fraction(self, mechanism: Any) -> float | None:
        """The fraction of the visible pairs of a query and a key that it weighs, in the first head, by sampled keys.

        None where the mechanism has no weights of pairs.
        """
        if not mechanism.traits.matrix:
            return None
        torch.manual_seed(self.setting.seed)
        q, k = (x[:1, :1].to(self.setting.device, torch.float64) for x in self.batches[0][:2])
        sampled = torch.arange(0, self.length, max(self.length // SAMPLED_KEYS, 1))
        one_hot = torch.zeros(self.length, len(sampled), dtype=torch.float64)
        one_hot[sampled, torch.arange(len(sampled))] = 1.0
        bound = Bound(mechanism, Shape(1, q.shape[-1], max_len=self.length)).to(q)
        weights = bound(q, k, one_hot[None, None].to(q), is_causal=self.setting.is_causal)
        pairs = int((self.length - sampled).sum()) if self.setting.is_causal else weights.numel()
        return int((weights != 0).sum()) / pairs
