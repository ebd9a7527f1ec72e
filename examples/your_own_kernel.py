"""Bring your own kernel: write down its features, get linear-time attention, decoding and a layer for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fast_attention import Bound, LinearAttention, MultiheadAttention, Shape
from fast_attention.feature_maps.features import FeatureMap


@dataclass(frozen=True, repr=False)
class SquaredRelu(FeatureMap):
    """phi(x) = max(x, 0)^power + floor: never negative, so the weights are too."""

    power: int = 2
    floor: float = 0.01

    def __call__(self, x: Tensor) -> Tensor:
        return x.relu() ** self.power + self.floor


def main() -> None:
    torch.manual_seed(0)
    mechanism = LinearAttention(feature_map=SquaredRelu(power=3))
    print(f"mechanism: {mechanism!r}")
    q, k, v = (torch.randn(1, 2, 50, 8, dtype=torch.float64) for _ in range(3))

    # 1. It is the attention you would write by hand with an n x n matrix, without ever building one.
    phi = SquaredRelu(power=3)
    weights = (phi(q) @ phi(k).mT).tril()
    by_hand = weights / weights.sum(-1, keepdim=True) @ v
    out = mechanism(q, k, v, is_causal=True)
    error = float((out - by_hand).abs().max())
    print(f"equals the kernel's definition to {error:.0e}")
    assert error < 1e-4

    # 2. It streams, because linear attention does.
    bound, state, steps = Bound(mechanism, Shape(heads=2, head_dim=8)), None, []
    for t in range(50):
        step, state = bound.decode(q[..., t : t + 1, :], k[..., t : t + 1, :], v[..., t : t + 1, :], state)
        steps.append(step)
    error = float((torch.cat(steps, -2) - out).abs().max())
    print(f"token by token: the same to {error:.0e}")
    assert error < 1e-10

    # 3. It is a layer like torch's, and its attention matrix can be read.
    layer = MultiheadAttention(16, 2, batch_first=True, mechanism=mechanism)
    x = torch.randn(1, 5, 16)
    rows = layer(x, x, x)[1].detach().sum(-1)
    print("rows of the layer's attention matrix sum to", [round(float(r), 3) for r in rows[0]])
    assert torch.allclose(rows, torch.ones(1, 5), atol=1e-2)


if __name__ == "__main__":
    main()
