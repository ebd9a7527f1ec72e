"""
Streaming a million tokens
==========================

Shows that linear attention reads 1,000,000 tokens in a state that never grows, and what exact attention would keep.

Decoding hands a state from one call to the next. Exact attention's is a cache of all keys and values; that of linear
attention is a sum of fixed size. Both are plain values: the outputs are the same however the stream is cut.
"""

# %%
# Two heads of 16 numbers, and tokens that come in chunks of 4,000.
import time

import matplotlib.pyplot as plt
import torch

from fast_attention import LinearAttention, Softmax

tokens, chunk, heads, width = 1_000_000, 4_000, 2, 16


def size(state: object) -> int:
    """Bytes of all tensors in a state: a tuple of tensors, perhaps nested."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(size(part) for part in state) if isinstance(state, tuple) else 0


@torch.inference_mode()
def stream(mechanism: LinearAttention | Softmax, tokens: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens read, bytes of the state and milliseconds, after every chunk of a random stream."""
    generator, state, read, held, taken = torch.Generator().manual_seed(0), None, [], [], []
    for start in range(0, tokens, chunk):
        q, k, v = torch.randn(3, 1, heads, chunk, width, generator=generator)
        begun = time.perf_counter()
        _, state = mechanism.decode(q, k, v, state=state)
        taken.append(1e3 * (time.perf_counter() - begun))
        read.append(start + chunk)
        held.append(size(state))
    return read, held, taken


# %%
# Linear attention reads all of the million. Exact attention reads the first 40,000 tokens, since each of its chunks
# costs more than the one before. Its bytes beyond are computed, not measured: the cache grows by the same number with
# every token.
linear = stream(LinearAttention(), tokens)
exact = stream(Softmax(), 40_000)
per_token = exact[1][-1] / exact[0][-1]
print(f"LinearAttention: {linear[1][0]:,} bytes after {chunk:,} tokens, {linear[1][-1]:,} after {linear[0][-1]:,}")
print(f"Softmax: {exact[1][-1]:,} bytes after {exact[0][-1]:,} tokens, {per_token * tokens:,.0f} after {tokens:,}")
print(f"LinearAttention: {sum(linear[2]) / 1e3:.1f} s for all of it, {linear[2][-1]:.1f} ms for the last chunk")
hours = exact[2][-1] / exact[0][-1] * tokens**2 / chunk / 2 / 3.6e6  # its chunks' times grow with what was read
print(f"Softmax: {exact[2][-1]:.0f} ms for its last chunk; at that growth all of it would take {hours:.1f} hours")

# %%
plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, (bytes_axes, time_axes) = plt.subplots(2, 1, figsize=(7, 7), sharex=True, layout="constrained")
figure.suptitle("A million tokens, 4,000 at a time: state and time")
bytes_axes.loglog(exact[0], exact[1], "s", color="C1", markersize=5, label="exact attention, measured")
bytes_axes.loglog(linear[0], [per_token * n for n in linear[0]], ":", color="C1", label="exact attention, computed")
bytes_axes.loglog(linear[0], linear[1], color="C0", linewidth=3, label="linear attention, measured")
bytes_axes.set_ylabel("state (bytes)")
time_axes.loglog(exact[0], exact[2], "s-", color="C1", markersize=5, label="exact attention")
time_axes.loglog(linear[0], linear[2], color="C0", label="linear attention")
time_axes.set_ylabel("time of a chunk (ms)")
time_axes.set_xlabel("tokens read")
for axes in (bytes_axes, time_axes):
    axes.legend(fontsize=11)
plt.show()
