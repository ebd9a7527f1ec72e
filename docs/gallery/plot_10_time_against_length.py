"""
Time against length on this machine
===================================

Shows from which length on fast mechanisms are faster than exact attention, measured where this page was built.

Twice the tokens are four times the work for exact attention, and twice for the others. But torch's exact kernel is
very good: for short inputs nothing beats it, and a fast mechanism first has to earn back its overhead.
"""

# %%
# One sequence of four heads of 64 numbers, not causal. Mechanisms are timed in turns, so that a busy moment meets all
# of them alike; of several rounds the fastest counts.
import platform

import matplotlib.pyplot as plt
import torch

from fast_attention import Bound, Shape
from fast_attention.clock import in_turns

torch.manual_seed(0)
heads, width = 4, 64
lengths = [128, 256, 512, 1024, 2048, 4096]
expressions = [
    "Softmax()", "Local(window=64)", "BlockLocal()", "BigBird()", "LinearAttention()", "FavorPlus(num_features=64)",
    "Nystrom()",
]  # fmt: skip
modules = {text: Bound(text, Shape(heads, width)) for text in expressions}
times: dict[str, list[float]] = {text: [] for text in expressions}
with torch.inference_mode():
    for length in lengths:
        q, k, v = torch.randn(3, 1, heads, length, width)
        runs = {text: (lambda module=module: module(q, k, v)) for text, module in modules.items()}
        in_turns(runs, q.device, rounds=1)  # the first calls allocate
        samples = in_turns(runs, q.device, rounds=9 if length < 2048 else 5)
        for text in expressions:
            times[text].append(1e3 * min(samples[text]))

# %%
# The table says how many times as fast as exact attention each one is; below 1 it is slower.
print(f"{platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}")
print(f"{'times as fast as exact attention':34s}" + "".join(f"{n:>7,}" for n in lengths))
for text in expressions[1:]:
    ratios = [exact / its for exact, its in zip(times["Softmax()"], times[text], strict=True)]
    print(f"{text:34s}" + "".join(f"{ratio:7.2f}" for ratio in ratios))

# %%
# Below some 500 tokens there is little to gain. BigBird may even be slower there: its blocks cover nearly all of so
# few tokens, and have to be gathered. ``fast-attention advise`` asks the same question for a model of yours.
plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
for text, marker in zip(expressions, "os^vDPX", strict=True):
    axes.loglog(lengths, times[text], marker=marker, label=text, linewidth=3 if text == "Softmax()" else 1.5)
axes.set_xscale("log", base=2)
axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
axes.set_title("Time of one attention against length, this machine")
axes.set_xlabel("length (tokens)")
axes.set_ylabel("time of a forward pass (ms)")
axes.legend(fontsize=11)
plt.show()
