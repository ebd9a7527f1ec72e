"""Training throughput: a small model with ``Softmax()`` beside the same model of ``nn.TransformerEncoderLayer``.

``python -m benchmarks.training`` times both in turns, step by step, and prints the ratio of their medians.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.arguments import Arguments
from experiments.models import Model, ModelConfig


class Torch(nn.Module):
    """The same model in torch's own layers: pre-norm, GELU, learned positions, tied output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Parameter(torch.randn(config.max_len, config.width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.width, config.heads, config.hidden or 4 * config.width, 0.0, "gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(config.layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.vocab_size)
        self.out.weight = self.embedding.weight
        self.causal = config.causal

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places[: tokens.shape[-1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[-1]) if self.causal else None
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=self.causal)
        return self.out(self.norm(x))


def main() -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    for causal in (False, True):
        config = ModelConfig(vocab_size=256, max_len=asked.length, causal=causal)
        models = {"fast-attention": Model(config), "torch": Torch(config)}
        steps = {name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()}
        tokens = torch.randint(256, (asked.batch, asked.length + 1))
        times: dict[str, list[float]] = {name: [] for name in models}
        for number in range(asked.rounds + 2):
            for name, model in models.items():
                start = time.perf_counter()
                F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                steps[name].step()
                steps[name].zero_grad(set_to_none=True)
                if number >= 2:
                    times[name].append(time.perf_counter() - start)
        ours, theirs = (statistics.median(times[name]) for name in models)
        counts = [sum(p.numel() for p in model.parameters()) for model in models.values()]
        print(
            f"{'causal' if causal else 'both sides'}: {1000 * ours:.1f} ms a step, torch {1000 * theirs:.1f} ms: "
            f"{theirs / ours:.2f} times its throughput; parameters {counts[0]:,} and {counts[1]:,}"
        )


if __name__ == "__main__":
    main()
