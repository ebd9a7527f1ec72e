"""
The leak of a published package, caught by the laws
===================================================

Shows how the future gets into a causal attention whose outputs look right, and that a law finds it.

performer-pytorch subtracts one number from all keys' exponents, so that none overflows: their maximum over *all*
positions. In a causal layer that number comes from the future. It would cancel, were it not for the small constant
that is added to every feature afterwards. The package itself is not installed where this page is built: here is a
small attention that makes its mistake, and ``make test-peers`` runs the laws on five published packages, this one
too.
"""

# %%
# Causal attention by 256 positive random features, as the Performer has it.
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fast_attention import FavorPlus, attention, conformance

torch.manual_seed(0)
projection = torch.randn(256, 16)


def leaky(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The Performer's causal attention, with performer-pytorch's maximum over all positions of the keys."""
    q, k = (x / 16**0.25 for x in (q, k))
    q, k = (x @ projection.T - (x * x).sum(-1, keepdim=True) / 2 for x in (q, k))
    q = (q - q.amax(-1, keepdim=True)).exp() + 1e-4
    k = (k - k.amax((-1, -2), keepdim=True)).exp() + 1e-4  # the mistake: -2 is the axis of positions
    weights = (q @ k.mT).tril()
    return weights / weights.sum(-1, keepdim=True) @ v


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This library's, seeded so that every call has the same features."""
    torch.manual_seed(0)
    return attention(q, k, v, FavorPlus(num_features=256), is_causal=True)


# %%
# A test against exact attention sees nothing: both are estimates, and both are about as near.
q, k, v = (scale * torch.randn(1, 2, 64, 16) for scale in (0.6, 0.6, 1.0))
exact = attention(q, k, v, "Softmax", is_causal=True)
for function in (leaky, ours):
    error = (function(q, k, v) - exact).norm() / exact.norm()
    print(f"{function.__name__}: error against exact attention {error:.2f}")

# %%
# A law asks another question: does an output move when only later tokens change? What it reports is the size of the
# change, relative to the outputs.
for function in (leaky, ours):
    subject = conformance.third_party(lambda function=function: function, name=function.__name__, causal=True)
    print(conformance.check(subject, laws=conformance.ESSENTIAL[:2]), end="\n\n")

# %%
# The same by hand, where the law replaces later tokens by other ones: here those from 40 on become six times as large.
# In a causal layer no output before 40 may know.
plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
larger = torch.where(torch.arange(64)[:, None] >= 40, 6.0, 1.0)
for function, marker in ((leaky, "o"), (ours, "s")):
    before, after = function(q, k, v), function(q * larger, k * larger, v * larger)
    change = (after - before).norm(dim=-1).mean((0, 1)) / before.norm(dim=-1).mean((0, 1))
    print(f"{function.__name__}: outputs before token 40 move by up to {100 * float(change[:40].max()):.3g} %")
    axes.plot(100 * change[:48], marker=marker, markersize=4, label=function.__name__)
axes.axvspan(40, 47, color="C2", alpha=0.3, label="tokens that changed")
axes.set_yscale("symlog", linthresh=1e-4)
axes.set_ylim(-5e-5, 3e3)
axes.set_title("A causal attention whose past moves\nwhen tokens from 40 on change")
axes.set_xlabel("position of the output (tokens)")
axes.set_ylabel("change of the output (%)")
axes.legend(loc="upper left")
plt.show()
