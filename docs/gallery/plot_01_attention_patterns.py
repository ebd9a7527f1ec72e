"""
Attention patterns of all mechanisms
====================================

Shows which token looks where, under every mechanism of the catalogue that has an attention matrix.

Exact attention gives every query a weight for every key. Fast mechanisms leave pairs out, estimate the weights, or
replace them by others. All maps below are of the same queries and keys.
"""

# %%
# A text of 96 tokens about two topics in turn, A B A C: tokens of one topic have similar queries and keys, and so
# have neighbours. The first topic comes back after 48 tokens, so that some pairs are far apart and still belong
# together.
import matplotlib.pyplot as plt
import torch

from fast_attention import Attention, Shape, attention_rows, catalogue

torch.manual_seed(0)
tokens, width = 96, 32
topics = torch.randn(3, width)[torch.tensor([0, 1, 0, 2]).repeat_interleave(tokens // 4)]
angles = torch.arange(tokens)[:, None] / 6 * torch.rand(width // 2)
places = torch.cat([angles.cos(), angles.sin()], -1)
q, k = (1.1 * topics + 1.2 * places + 0.3 * torch.randn(tokens, width) for _ in range(2))
q, k = q[None], k[None]  # (heads, tokens, width), with one head

# %%
# The default windows and blocks would cover so short a text, so they are made smaller here. Everything else has its
# default settings. Where weights are learned, these are fresh ones: such a map shows where training begins.
smaller = [
    "Local(window=8)", "BlockLocal(block_size=12)", "Local2d(height=8, width=12, window=3)",
    "BlockLocal2d(height=8, width=12, block_size=4)", "Selected(block_size=8, topk=3)",
    "BigBird(block_size=8, num_random_blocks=1)", "LSH(num_buckets=8, bucket_size=12)", "Sinkhorn(block_size=12)",
    "SortCut(block_size=12)", "Nystrom(num_landmarks=12)",
    "Hybrid(near=BlockLocal(block_size=8))", "ByLength(long=Local(window=8), above=48)", "Linformer(rank=16)",
]  # fmt: skip
settings = {text.split("(")[0]: text for text in smaller}
maps, without = {}, []
for name in catalogue.names():
    mechanism = catalogue.parse(settings.get(name, name))
    if not isinstance(mechanism, Attention) or not mechanism.traits.matrix:
        without.append(name)
        continue
    causal = not mechanism.traits.bidirectional
    w = mechanism.weights(Shape(heads=1, head_dim=width, max_len=tokens))
    rows = attention_rows(mechanism, q, k, w, queries=range(tokens), is_causal=causal)
    maps[name + " (causal)" * causal] = rows[0]
print(f"{len(maps)} maps; no single matrix for: {', '.join(without)}")

# %%
# Those that are left out weigh every channel by itself, mix whole tokens, or change the values as well: they have no
# one matrix, and ``attention_rows`` refuses them.
#
# Dark blue is no weight. Yellow is the largest weight of that map, on a square-root scale; negative weights are drawn
# as none. Windows are bands, blocks are squares, BigBird adds columns and a few random blocks, Nystrom is the product
# of two thin matrices, and the feature maps of linear attention see everything a little.
columns = 4
rows_of_maps = -(-len(maps) // columns)
figure, axes = plt.subplots(rows_of_maps, columns, figsize=(7.5, 2.1 * rows_of_maps), layout="constrained")
figure.suptitle("Attention patterns: each query's weights (rows) over 96 keys (columns)", fontsize=12)
figure.supxlabel("position of the key (tokens)", fontsize=11)
figure.supylabel("position of the query (tokens)", fontsize=11)
for panel in axes.flat:
    panel.set_visible(False)
for panel, (name, rows) in zip(axes.flat, maps.items(), strict=False):
    panel.set_visible(True)
    panel.imshow((rows.clamp(min=0) / rows.max()).sqrt(), cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
    short = name.replace("Factorized", "Factorized\n").replace("Decayed", "Decayed\n").replace(" (", "\n(")
    panel.set_title(short, fontsize=10)
    panel.set_xticks([0, 95])
    panel.set_yticks([0, 95])
    panel.tick_params(labelsize=7)
plt.show()
