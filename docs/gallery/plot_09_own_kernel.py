"""
Your own kernel
===============

Shows how a few lines of features become an attention of linear time, and how sharp three such kernels are.

Linear attention replaces the exponential of softmax by a product of features, ``phi(q) . phi(k)``. Any function of
single tokens will do. As a frozen dataclass it is a setting like any other: printed, compared, decoded, put into
layers.
"""

# %%
# ``elu + 1``, the usual map, gives every key nearly the same weight. This one keeps apart what is positive and what
# is negative, and raises both to a power: keys that point elsewhere share few features with a query.
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from fast_attention import LinearAttention, Softmax, TokenMixer, attention_rows, conformance
from fast_attention.feature_maps.features import FeatureMap


@dataclass(frozen=True, repr=False)
class TwoSided(FeatureMap):
    """phi(x) = [max(x, 0), max(-x, 0)]^power + floor: never negative, so that the weights are not."""

    power: int = 2
    floor: float = 1e-3
    largest: float = 1e30  # as good as none

    def __call__(self, x: Tensor) -> Tensor:
        """Features (..., n, 2 d) of tokens (..., n, d)."""
        x = x.clamp(-self.largest, self.largest)
        return torch.cat([x.relu(), (-x).relu()], -1) ** self.power + self.floor


# %%
# The laws take it as they take every mechanism of the library: an output must not depend on the future, on padding or
# on the other sequences of a batch, must be finite for large inputs, and decoding must equal one pass. One law is
# broken: the cube of a huge number is infinite. Numbers beyond 10,000 are therefore cut off, and all laws are kept.
laws = (*conformance.ESSENTIAL, conformance.promises.decoding, conformance.promises.combining)
for feature_map in (TwoSided(power=3), TwoSided(power=3, largest=1e4)):
    report = conformance.check(conformance.of(LinearAttention(feature_map=feature_map)), laws=laws)
    print(f"{report.subject}: {len(report.findings) - len(report.broken)} laws of {len(laws)} kept")
    for finding in report.broken:
        print(f"  broken: {finding.law} ({finding.detail})")

# %%
# It is a layer, too, in linear time and with decoding from a state of constant size.
mixer = TokenMixer(64, 4, LinearAttention(feature_map=TwoSided(power=3, largest=1e4)))
print(mixer.attention, "gives", tuple(mixer(torch.randn(2, 1000, 64), is_causal=True).shape))

# %%
# How sharp is it? One query, and keys turned away from it by 0 to 180 degrees, as a mean over 400 directions of 32
# numbers and of length 6. ``attention_rows`` gives the weights of any mechanism; each curve is relative to its
# largest weight.
torch.manual_seed(0)
first, second = torch.linalg.qr(torch.randn(400, 32, 2))[0].unbind(-1)
degrees = torch.arange(0, 181, 5)
radians = degrees[None, :, None].deg2rad()
q = 6 * first[:, None, None]
k = 6 * (radians.cos() * first[:, None] + radians.sin() * second[:, None])[:, None]
curves = {"exact attention: exp": Softmax(), "elu + 1": LinearAttention()}
curves |= {f"two-sided, power {p}": LinearAttention(feature_map=TwoSided(p, 0.0, 1e4)) for p in (1, 2, 3)}

plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 4.8), layout="constrained")
for (name, each), marker in zip(curves.items(), "os^vD", strict=True):
    weights = attention_rows(each, q, k, queries=[0]).mean(0).flatten()
    axes.plot(degrees, weights / weights.max(), marker=marker, markersize=4, label=name)
axes.set_xticks(range(0, 181, 30))
axes.set_title("Weight of a key by its angle to the query,\nfor kernels of one's own and two known ones")
axes.set_xlabel("angle between query and key (degrees)")
axes.set_ylabel("weight, relative to the largest")
axes.legend()
plt.show()
