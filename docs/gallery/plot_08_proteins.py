"""
A protein model with other attention
====================================

Shows the attention of a small protein model on one protein, as it was trained and with a mechanism put in its place.

``protein-mini`` is shipped with this library: four layers, trained in ten minutes to guess masked residues by exact
attention. A model of this library is swapped by building it anew with another mechanism and loading its weights.
"""

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from fast_attention import Bound, attention_rows, data
from fast_attention.nn import saving
from fast_attention.nn.models import Model
from fast_attention.tasks.proteins import PAD, encoded, masked

original = saving.load(data.models()["protein-mini"])
proteins = [protein for protein in data.proteins() if len(protein.sequence) <= 400][:48]
shown = proteins[0]
print(f"{shown.header}: {len(shown.sequence)} residues")


def with_mechanism(expression: str) -> Model:
    """The model with the same weights and another mechanism in all of its layers; its own weights are fresh."""
    torch.manual_seed(0)
    model = Model(replace(original.config, mechanism=expression))
    assert not model.load_state_dict(original.state_dict(), strict=False).unexpected_keys
    return model.eval()


# %%
# What it guesses: 15 % of the residues of 48 shipped proteins are targets, and the mean of their negative log
# probabilities is the loss in nats. Who knows only how often each residue occurs has the dashed line.
tokens = torch.nn.utils.rnn.pad_sequence([encoded(p.sequence) for p in proteins], True, PAD).long()
inputs, targets = masked(tokens, torch.Generator().manual_seed(0))
counts = torch.bincount(tokens[tokens < 20], minlength=20)
guessing = float(cross_entropy((counts / counts.sum()).log().expand(int((targets >= 0).sum()), 20), targets[targets >= 0]))


@torch.inference_mode()
def nats(model: Model) -> float:
    """Mean loss of the targets."""
    return float(cross_entropy(model(inputs, key_mask=tokens != PAD)[targets >= 0], targets[targets >= 0]))


@torch.inference_mode()
def attention_map(model: Model, layer: int = 1) -> torch.Tensor:
    """The attention matrix of one layer on the protein that is shown, as a mean over its heads."""
    maps = []

    def look(bound: Bound, qkv: tuple[torch.Tensor, ...], *_: object) -> None:
        maps.append(attention_rows(bound.mechanism, *qkv[:2], bound.w, queries=range(qkv[0].shape[-2]))[0].mean(0))

    hooks = [part.register_forward_hook(look) for part in model.modules() if isinstance(part, Bound)]
    model(encoded(shown.sequence).long()[None])
    for hook in hooks:
        hook.remove()
    return maps[layer]


models = {"Softmax() (trained)": original}
for expression in ("Hybrid(near=Local(window=16))", "Local(window=16)", "BigBird(block_size=16)", "FavorPlus()",
                   "LinearAttention()"):  # fmt: skip
    models[expression] = with_mechanism(expression)
losses = {name: nats(model) for name, model in models.items()}
print({name: round(loss, 3) for name, loss in losses.items()}, "residue counts:", round(guessing, 3))
figure, axes = plt.subplots(2, 4)
for l in range(4):
    axes[0][l].imshow(attention_map(models["Softmax() (trained)"], l)**.5, cmap="cividis")
    axes[1][l].imshow(attention_map(models["FavorPlus()"], l)**.5, cmap="cividis")
