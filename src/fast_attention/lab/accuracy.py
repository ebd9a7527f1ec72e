"""Error against exact attention on given tensors, head by head; and attention matrices to look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention import catalogue
from fast_attention.lab.capture import Layer
from fast_attention.lab.measure import Setting
from fast_attention.lab.records import Error
from fast_attention.mechanism import Attention, Shape, Unsupported
from fast_attention.nn.bound import Bound

LONGEST_MATRIX = 512


def measurable(mechanism: Any) -> bool:
    """Whether its error against exact attention means anything: it approximates, and nothing must be learned first."""
    return isinstance(mechanism, Attention) and mechanism.traits.approximates is not None


def accuracy(mechanism: Any, layers: list[Layer], setting: Setting, *, matrix: bool) -> Error:
    """Relative RMS error of the output (and of the matrix, up to 512 tokens) for every layer and head.

    The mechanism runs in the setting's dtype; what it is compared with runs in float64 on the same tensors.
    """
    length = layers[0].q.shape[-2]
    error = Error(repr(mechanism), length, mechanism.traits.approximates)
    error.matrix = [] if matrix and mechanism.traits.matrix and length <= LONGEST_MATRIX else None
    try:
        for layer in layers:
            ours, truth = _pair(mechanism, layer, layer.v, setting)
            error.output.append(relative_rms(ours, truth))
            if error.matrix is not None:
                error.matrix.append(relative_rms(*_pair(mechanism, layer, _identity(layer), setting)))
    except (Unsupported, ValueError, RuntimeError) as problem:
        error.output, error.matrix, error.note = [], None, str(problem).splitlines()[0]
    return error


def relative_rms(ours: Tensor, truth: Tensor) -> list[float]:
    """``||ours - truth|| / ||truth||`` of every head of (1, H, L, E)."""
    difference = (ours.to(truth.device).double() - truth.double()).square().sum((-2, -1))
    return (difference / truth.double().square().sum((-2, -1)).clamp_min(1e-300)).sqrt()[0].tolist()


def matrix_of(mechanism: Any, layer: Layer, head: int, setting: Setting) -> Tensor:
    """The attention matrix (L, L) of one head, on the CPU: what attending to the identity gives."""
    return _apply(mechanism, layer, _identity(layer), setting)[0, head].float().cpu()


def exact_matrix(layer: Layer, head: int, setting: Setting) -> Tensor:
    """Softmax attention's matrix (L, L) of one head."""
    return _truth("Softmax", layer, _identity(layer), setting)[0, head].float().cpu()


def typical_head(layers: list[Layer], setting: Setting) -> tuple[int, int]:
    """Layer and head whose exact attention has the median entropy: neither the sharpest nor the flattest."""
    entropies = []
    for number, layer in enumerate(layers):
        matrix = _truth("Softmax", layer, _identity(layer), setting)[0]
        found = torch.special.entr(matrix).sum(-1).mean(-1)
        entropies += [(value, number, head) for head, value in enumerate(found.tolist())]
    _, number, head = sorted(entropies)[len(entropies) // 2]
    return number, head


@torch.no_grad()
def _pair(mechanism: Any, layer: Layer, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    return _apply(mechanism, layer, v, setting), _truth(mechanism.traits.approximates, layer, v, setting)


@torch.no_grad()
def _apply(mechanism: Any, layer: Layer, v: Tensor, setting: Setting) -> Tensor:
    q, k, v = (x.to(setting.device, setting.dtype) for x in (layer.q, layer.k, v))
    torch.manual_seed(setting.seed)
    bound = Bound(mechanism, Shape(q.shape[1], q.shape[3], max_len=q.shape[2])).to(setting.device, setting.dtype)
    return bound(q, k, v, is_causal=setting.is_causal)


@torch.no_grad()
def _truth(against: str, layer: Layer, v: Tensor, setting: Setting) -> Tensor:
    place = "cpu" if setting.device.type == "mps" else setting.device  # mps has no float64
    q, k, v = (x.to(place, torch.float64) for x in (layer.q, layer.k, v))
    if against == "Softmax":
        return F.scaled_dot_product_attention(q, k, v, is_causal=setting.is_causal)
    exact: Any = catalogue.default(against)
    return exact(q, k, v, is_causal=setting.is_causal)


def _identity(layer: Layer) -> Tensor:
    heads, length = layer.q.shape[1:3]
    return torch.eye(length).expand(1, heads, length, length)
