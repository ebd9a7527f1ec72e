"""
Associative recall against the size of the state
================================================

Shows how many pairs of key and value a state holds, for states of different kinds and sizes. Nothing is trained.

Each mechanism reads N random pairs into its state, one after the other, and is then asked for the value of each key.
Exact attention keeps all pairs, so that it never forgets and never stops growing. A state of fixed size must mix them
up or forget the oldest.
"""

# %%
# Keys are random directions of 32 numbers and of length 12, so that exact attention tells them apart well. A value is
# one of 64 kinds, as a vector with a single one in it. An answer is right if the largest of its 64 numbers stands
# where the value's one stands: guessing is right in 1 of 64.
import matplotlib.pyplot as plt
import torch
from torch.nn.functional import normalize, one_hot

from fast_attention import Bound, Shape, decoding

width, kinds, rounds = 32, 64, 8
counts = [8, 16, 32, 64, 128, 256, 512]
mechanisms = [
    "Softmax()", "Local(window=32)", "LinearAttention()", "LinearAttention(feature_map=DPFP(nu=1))",
    "LinearAttention(feature_map=DPFP(nu=4))", "LinearAttention(feature_map=Taylor())", "FavorPlus(num_features=512)",
]  # fmt: skip


def size(state: object) -> int:
    """Numbers in a state: a tuple of tensors, perhaps nested."""
    if isinstance(state, torch.Tensor):
        return state.numel()
    return sum(size(part) for part in state) if isinstance(state, tuple) else 0


# %%
# A state is a value and is never changed in place. So all questions are asked of the same one: it is repeated N
# times, and every copy decodes one question, whose own key is masked.
@torch.inference_mode()
def recalled(text: str, pairs: int, seed: int) -> tuple[float, int]:
    """The fraction of values read back right, and the numbers in the state."""
    torch.manual_seed(seed)
    keys = 12 * normalize(torch.randn(pairs, width), dim=-1)
    values = torch.randint(kinds, (pairs,))
    bound = Bound(text, Shape(heads=1, head_dim=width))
    written = one_hot(values, kinds).float()[None, None]
    state = bound.decode(keys[None, None], keys[None, None], written)[1]
    copies = decoding.select(state, torch.zeros(pairs, dtype=torch.long))
    questions, nothing = keys[:, None, None], torch.zeros(pairs, 1, 1, kinds)
    hidden = torch.zeros(pairs, 1, dtype=torch.bool)
    answers = bound.decode(questions, questions, nothing, copies, key_mask=hidden)[0]
    return float((answers.flatten(1).argmax(-1) == values).float().mean()), size(state)


# %%
# Recall follows the size of the state, but not only that. A window of 32 knows the last 32 pairs and nothing else.
# The features of ``elu + 1`` are alike for all keys, and so are answers soon; products of neighbours (DPFP) keep keys
# apart, and the second-order expansion of the exponential (Taylor) does so best, with the largest state. FAVOR+ has
# eight times the state of DPFP with nu=1 and is wrong more often: keys of this length are too sharp for random
# features.
plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, axes = plt.subplots(figsize=(7, 6.4), layout="constrained")
for text, marker in zip(mechanisms, "os^vDPX", strict=True):
    results = [[recalled(text, n, seed) for seed in range(rounds)] for n in counts]
    wrong = [100 - 100 * sum(right for right, _ in each) / rounds for each in results]
    smallest, largest = results[0][0][1], results[-1][0][1]
    span = f"{largest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
    print(f"{text}: {span} numbers of state; {wrong[-2]:.0f} % wrong with {counts[-2]} pairs")
    name = (
        text.replace("LinearAttention(feature_map=", "Linear, ").replace("))", ")").replace("tion()", "tion, elu + 1")
    )
    axes.plot(counts, wrong, marker=marker, label=f"{name}: {span}")
axes.set_xscale("log", base=2)
axes.set_xticks(counts, [str(n) for n in counts])
axes.set_title("Recall of random pairs from states of different sizes")
axes.set_xlabel("pairs written (number)")
axes.set_ylabel("values read back wrong (%)")
axes.legend(title="mechanism: numbers of its state", fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.16))
plt.show()
