"""
Five minutes to choose a mechanism
==================================

Shows what a call costs at your length, what ran, and how far its outputs are from exact attention's.

A mechanism pays where its time falls below exact attention's, and only if your task bears what it leaves out.
It needs ``pip install '.[lab]'`` in a clone of the library.
"""

# %%
# ``attention`` takes the arguments of ``scaled_dot_product_attention``, and a mechanism. ``explain`` says what ran.
from time import perf_counter

import matplotlib.pyplot as plt
import torch

from fast_attention import attention, explain

torch.manual_seed(0)
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 8, 1000, 64) for _ in range(3))  # (batch, heads, tokens, width)
print(explain("Local(window=64)", q, k, v, is_causal=True))

# %%
# What a mechanism cannot do it refuses by name, and names others that can.
try:
    attention(q, k, v, "Nystrom()", is_causal=True)
except NotImplementedError as error:
    print(error)

# %%
# How far outputs are from exact attention's depends on the data. On random tensors, which have no structure, exact
# weights are nearly even, and what only looks near is far off. Measure on your model: ``fast-attention compare``.
names = ("Softmax()", "Local(window=64)", "FavorPlus(num_features=64)", "LinearAttention()")
exact = attention(q, k, v, "Softmax()")
for name in names[1:]:
    out = attention(q, k, v, name)
    print(f"{name:27s} differs by {float((out - exact).norm() / exact.norm()):.2f} of the outputs' norm")


# %%
# Time against length, here and now on one core of the machine that built this page: the least of three calls each.
def seconds(name: str, length: int) -> float:
    """The least time of three calls."""
    q, k, v = (torch.randn(1, 8, length, 64) for _ in range(3))
    best = float("inf")
    for _ in range(3):
        start = perf_counter()
        attention(q, k, v, name)
        best = min(best, perf_counter() - start)
    return best


lengths = (128, 256, 512, 1024, 2048, 4096)
with torch.inference_mode():
    times = {name: [1e3 * seconds(name, length) for length in lengths] for name in names}

plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
for (name, each), marker in zip(times.items(), "os^v", strict=True):
    axes.loglog(lengths, each, marker=marker, label=name)
axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
axes.minorticks_off()
axes.set_title("A forward pass against length,\n8 heads of 64")
axes.set_xlabel("tokens")
axes.set_ylabel("milliseconds")
axes.legend()
plt.show()
