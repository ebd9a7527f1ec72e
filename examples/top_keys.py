"""Write a mechanism of your own: a value, its traits and one method; then call it, build it in, and check its laws."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fast_attention import Attention, MultiheadAttention, Traits, attention, conformance
from fast_attention.engine.precision import in_float32


@dataclass(frozen=True, repr=False)
class TopKeys(Attention[Any, Any]):
    """Softmax over the ``best`` keys of each query."""

    best: int = 8
    traits = Traits(
        paper="none", formula="softmax over the best scores of q k^T / sqrt(d), times v",
        cost="n^2 d", complexity_exponent=2, causal=True, padding=True, cross=True, rotary=True, export=False,
    )  # fmt: skip

    @in_float32
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: Any, *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:  # fmt: skip
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if is_causal:  # query i sees keys up to i + S - L
            later = torch.ones_like(scores, dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
            scores = scores.masked_fill(later, -torch.inf)
        if key_mask is not None:  # (..., 1, S), True = may be seen
            scores = scores.masked_fill(~key_mask[..., None, :], -torch.inf)
        best, at = scores.topk(min(self.best, k.shape[-2]), -1)
        weights = best.softmax(-1).nan_to_num(0)  # a query that may see nothing gets zeros
        return torch.zeros_like(scores).scatter(-1, at, weights) @ v


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 100, 64) for _ in range(3))  # (batch, heads, tokens, width)
    out = attention(q, k, v, "TopKeys(best=4)", is_causal=True)
    print("called:", tuple(out.shape))
    assert torch.allclose(attention(q, k, v, TopKeys(best=100)), attention(q, k, v, "Softmax()"), atol=1e-5)

    layer = MultiheadAttention(512, 8, batch_first=True, mechanism="TopKeys()")
    x = torch.randn(1, 100, 512)
    layer(x, x, x)[0].square().mean().backward()
    print("built in, with gradients:", all(weight.grad is not None for weight in layer.parameters()))

    report = conformance.check(conformance.of("TopKeys()"))
    print(report)
    assert not report.broken, report.broken


if __name__ == "__main__":
    main()
