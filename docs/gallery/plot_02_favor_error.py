"""
Error of FAVOR+ against features and norms
==========================================

Shows how many random features the Performer's attention needs, and that sharp attention needs more than anyone has.

FAVOR+ (`arXiv 2009.14794 <https://arxiv.org/abs/2009.14794>`_) estimates exact attention by m random features of
queries and keys. The estimate is unbiased, but its variance grows exponentially with their squared norms. Pretrained
models have large ones.
"""

# %%
# Gaussian queries and keys of 16 numbers, all of them scaled to one norm, and Gaussian values. The scores of exact
# attention lie within ``norm ** 2 / sqrt(16)`` around zero: up to 1/4 for a norm of 1, up to 9 for one of 6.
import matplotlib.pyplot as plt
import torch
from torch.nn.functional import normalize

from fast_attention import FavorPlus, Softmax, attention

torch.manual_seed(0)
tokens, width = 512, 16
directions = [normalize(torch.randn(1, 4, tokens, width), dim=-1) for _ in range(2)]
v = torch.randn(1, 4, tokens, width)
norms = (1.0, 2.0, 3.0, 4.0, 6.0)
features = [2**i for i in range(3, 13)]

# %%
# The error is ``|estimate - exact| / |exact|`` over all outputs: the median of five draws of the features. Beside it
# stands the error of uniform weights: who answers every query with the mean of all values has that without any
# features. An estimate above it is worse than not looking at all.
errors, uniform = {}, {}
for norm in norms:
    q, k = (norm * x for x in directions)
    exact = attention(q, k, v, Softmax())
    uniform[norm] = float((v.mean(-2, keepdim=True) - exact).norm() / exact.norm())
    errors[norm] = []
    for m in features:
        draws = [attention(q, k, v, FavorPlus(num_features=m)) for _ in range(5)]
        errors[norm].append(float(torch.stack([(x - exact).norm() / exact.norm() for x in draws]).median()))
    enough = [m for m, error in zip(features, errors[norm], strict=True) if error < uniform[norm]]
    said = f"FAVOR+ is nearer from {enough[0]} features on" if enough else "FAVOR+ is never nearer"
    print(f"norm {norm:g}: uniform weights err by {uniform[norm]:.2f}; {said}")

# %%
# For norms of 1 and 2 a line falls by about half where features grow fourfold: the square root that any average of
# random numbers obeys. For the largest norm a few draws carry the whole sum, and its line is nearly flat. Dotted, in
# the same colour: uniform weights.
plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
for number, norm in enumerate(norms):
    axes.loglog(features, errors[norm], marker="os^Dv"[number], color=f"C{number}", label=f"{norm:g}")
    axes.axhline(uniform[norm], color=f"C{number}", linestyle=":")
axes.set_xscale("log", base=2)
axes.set_xticks(features, [str(m) for m in features])
axes.set_title("FAVOR+: error against features and norms\n(dotted: uniform weights)")
axes.set_xlabel("random features m (number)")
axes.set_ylabel("relative error of the output (1 = as large as it)")
axes.legend(title="norm of q and k")
plt.show()
