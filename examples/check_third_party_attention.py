"""Run the laws on a third-party attention: a linear attention with two faults that real packages have had."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fast_attention import LinearAttention, conformance

LINEAR = LinearAttention()


class SomebodysLinearAttention(nn.Module):
    """Causal kernel attention as it is often written."""

    causal = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q = (q - q.amax(-1, keepdim=True)).exp()
        k = (k - k.amax((-1, -2), keepdim=True)).exp() + 1e-4  # fault 1: a maximum over the future, then an epsilon
        if mask is not None:
            v = v * mask[:, None, :, None]  # fault 2: masked keys stay in the normaliser
        state = torch.einsum("bhnc,bhnd->bhncd", k, v).cumsum(2)
        out = torch.einsum("bhnc,bhncd->bhnd", q, state)
        return out / torch.einsum("bhnc,bhnc->bhn", q, k.cumsum(2))[..., None]


class TheSameRepaired(nn.Module):
    """What the laws ask for."""

    causal = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return LINEAR(q, k, v, is_causal=True, key_mask=mask)


def main() -> None:
    faulty = conformance.check(conformance.third_party(SomebodysLinearAttention))
    print(faulty, end="\n\n")
    broken = {finding.law for finding in faulty.broken}
    assert {"the future never moves the past", "padding is inert", "padded = shorter"} <= broken

    repaired = conformance.check(conformance.third_party(TheSameRepaired))
    print(repaired)
    assert not repaired.broken, repaired.broken


if __name__ == "__main__":
    main()
