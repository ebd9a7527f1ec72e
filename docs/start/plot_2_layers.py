"""
Five minutes with layers of your own
====================================

Shows how to build a mechanism into your own model, and that it learns: three small language models of bytes.

``MultiheadAttention`` has the signature of ``torch.nn.MultiheadAttention``. ``TokenMixer`` takes every mechanism.
It needs ``pip install '.[lab]'`` in a clone of the library.
"""

# %%
# A layer of torch with another attention. A checkpoint of torch's loads, and masks mean what they mean in torch.
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fast_attention import MultiheadAttention, TokenMixer

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
layer.self_attn = MultiheadAttention(64, 4, batch_first=True, mechanism="Local(window=64)")
print(tuple(layer(torch.randn(2, 300, 64)).shape))


# %%
# A small model of your own: two blocks of a ``TokenMixer`` and a feed-forward layer. Only the mechanism differs.
class Model(nn.Module):
    """A language model of bytes whose layers hold any mechanism."""

    def __init__(self, mechanism: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.mixers = nn.ModuleList([TokenMixer(64, 4, mechanism) for _ in range(2)])
        self.feeds = nn.ModuleList([nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(64) for _ in range(4)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, 256) of the next byte."""
        x = self.embedding(tokens)
        for i, (mixer, feed) in enumerate(zip(self.mixers, self.feeds, strict=True)):
            x = x + mixer(self.norms[2 * i](x), is_causal=True)
            x = x + feed(self.norms[2 * i + 1](x))
        return self.head(x)


# %%
# Train each on the help topics of Python: the next byte from up to 256 earlier ones, 80 steps. No positions are given.
# A decay tells ``WKV`` how far back a byte is. The others see a set of bytes without an order.
text = torch.tensor([*"\n".join(topics.values()).encode()])
curves = {}
for mechanism in ("WKV()", "Local(window=16)", "Softmax()"):
    torch.manual_seed(0)
    model = Model(mechanism)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(80):
        at = torch.randint(len(text) - 257, (8, 1)) + torch.arange(257)
        batch = text[at]
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / 0.6931)  # bits
    curves[mechanism] = losses
    print(f"{mechanism:18s} {sum(losses[-10:]) / 10:.2f} bits per byte in the last ten steps")

# %%
# The models of a study train longer and more carefully: :doc:`the tutorial </tutorial>`.
plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
for (mechanism, losses), style in zip(curves.items(), ("-", "--", ":"), strict=True):
    axes.plot(losses, style, label=mechanism)
axes.set_title("What three small models learn of bytes,\nwithout positions")
axes.set_xlabel("training step")
axes.set_ylabel("bits per byte (lower is better)")
axes.legend()
plt.show()
