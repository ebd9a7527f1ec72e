"""
A protein model with other attention
====================================

Shows the attention of a small protein model on one protein, as it was trained and with a mechanism put in its place.

``protein-mini`` stands in ``experiments/data`` of a checkout: four layers, trained in ten minutes to guess masked
residues by exact attention. It is swapped by building it anew with another mechanism and loading its weights.
"""

# %%
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import fast_attention
from fast_attention import Bound, attention_rows

sys.path.append(str(Path(fast_attention.__file__).parents[2]))  # a checkout, where experiments stands
from experiments import data
from experiments.models import Model, load
from experiments.tasks import PAD, encoded, masked

original = load("protein-mini")
proteins = [protein for protein in data.proteins() if len(protein["sequence"]) <= 400][:32]
shown = next(protein for protein in proteins if 100 <= len(protein["sequence"]) <= 140)
print(f"{shown['header']}: {len(shown['sequence'])} residues")


def with_mechanism(expression: str) -> Model:
    """The model with the same weights and another mechanism in all of its layers; its own weights are fresh."""
    torch.manual_seed(0)
    model = Model(replace(original.config, mechanism=expression)).eval()
    model.load_state_dict(original.state_dict(), strict=False)
    return model


# %%
# What it guesses: 15 % of the residues of 32 of the proteins there, some of which it may have learned from. The loss is
# the mean of their negative log probabilities. Who knows only how often each residue occurs has the dashed line.
tokens = pad_sequence([encoded(p["sequence"]) for p in proteins], True, PAD).long()
inputs, targets = masked(tokens, torch.Generator().manual_seed(0))
asked = targets >= 0
share = torch.bincount(tokens[tokens < 20]) / (tokens < 20).sum()
guessing = -float(share.log()[targets[asked]].mean())


@torch.inference_mode()
def attention_map(model: Model) -> torch.Tensor:
    """The attention matrix of the third layer on the protein that is shown, as a mean over its heads."""
    maps = []

    def look(bound: Bound, qkv: tuple[torch.Tensor, ...], *_: object) -> None:
        q, k = qkv[:2]
        maps.append(attention_rows(bound.mechanism, q, k, bound.w, queries=range(q.shape[-2]))[0].mean(0))

    with [part for part in model.modules() if isinstance(part, Bound)][2].register_forward_hook(look):
        model(encoded(shown["sequence"]).long()[None])
    return maps[0]


# %%
# Exact attention as it was trained, two mechanisms that keep exact weights of near residues, two without any.
names = ("Hybrid(near=BlockLocal(block_size=16))", "Local(window=16)", "FavorPlusPlus()", "FavorPlus()")
models = {"Softmax()": original} | {name: with_mechanism(name) for name in names}
with torch.inference_mode():
    logits = {name: model(inputs, key_mask=tokens != PAD)[asked] for name, model in models.items()}
losses = {name: float(cross_entropy(x, targets[asked])) for name, x in logits.items()}

# %%
# The third layer looks along the chain, a few residues to both sides. A window keeps that and loses little; a Hybrid
# adds an estimate of the far residues. FAVOR+ alone, untrained, smears it out, and the model is hardly better than
# counting.
plt.style.use(["tableau-colorblind10", {"font.size": 11, "axes.grid": True, "grid.alpha": 0.4}])
figure = plt.figure(figsize=(7, 6), layout="constrained")
figure.suptitle("A protein model: attention of its third layer, and its loss")
(upper,), (lower,) = figure.subfigures(2, 1, squeeze=False)
for panel, name in zip(upper.subplots(1, 3), ("Softmax()", "Local(window=16)", "FavorPlus()"), strict=True):
    rows = attention_map(models[name])
    panel.imshow((rows / rows.max()).sqrt(), cmap="cividis")
    panel.set(title=name, xlabel="key (residue)", ylabel="query (residue)")
    panel.grid(False)
axes = lower.subplots()
axes.plot(list(losses.values()), list(losses), "o", color="C0", markersize=9, label="with the trained weights")
axes.axvline(guessing, color="C1", linestyle="--", label="counts of residues")
axes.set(ylim=(4.5, -0.5), ylabel="mechanism", xlabel="loss (nats per masked residue)")
axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.22), ncols=2)
plt.show()
