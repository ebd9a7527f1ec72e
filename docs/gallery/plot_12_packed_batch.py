"""
A packed batch
==============

Shows what padding wastes, and that texts packed into one row give what each of them gives alone.

A batch of texts is usually padded to its longest. A packed batch puts them one after another and says where each
begins. They do not see each other, with any mechanism.
"""

# %%
# Sixteen texts whose lengths are drawn between 20 and 1,000 tokens, most of them short.
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch.nn.utils.rnn import pad_sequence

from fast_attention import attention
from fast_attention.clock import in_turns

torch.manual_seed(0)
heads, width = 4, 64
lengths = tuple(sorted(int(x) for x in torch.empty(16).uniform_(3.0, 6.93).exp()))
texts = [torch.randn(3, heads, n, width) for n in lengths]  # queries, keys and values of each
longest, total = max(lengths), sum(lengths)
padded = pad_sequence([x.permute(2, 0, 1, 3) for x in texts], True).permute(2, 0, 3, 1, 4)  # (3, texts, heads, ...)
key_mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
packed = torch.cat(texts, -2)[:, None]  # (3, 1, heads, all tokens, width)
print(f"{total:,} tokens; padded {len(lengths) * longest:,}: {1 - total / (len(lengths) * longest):.0%} is padding")


def attend(qkv: torch.Tensor, mechanism: str, **options: Any) -> torch.Tensor:
    """Attention with queries, keys and values in one tensor."""
    q, k, v = qkv
    return attention(q, k, v, mechanism, **options)


# %%
# Three ways, for each of four mechanisms. Packed rows give what separate calls give, to rounding, and so does the
# padded batch at the tokens that are no padding.
expressions = ["Softmax()", "Local(window=64)", "BlockLocal()", "LinearAttention()"]
ways = ("padded", "separate calls", "packed")
times: dict[str, list[float]] = {way: [] for way in ways}
with torch.inference_mode():
    for mechanism in expressions:
        runs = {
            "padded": partial(attend, padded, mechanism, key_mask=key_mask),
            "separate calls": lambda m=mechanism: [attend(text[:, None], m) for text in texts],
            "packed": partial(attend, packed, mechanism, lengths=lengths),
        }
        alone = torch.cat(runs["separate calls"](), -2)
        out = torch.cat([row[:, :n] for row, n in zip(runs["padded"](), lengths, strict=True)], -2)[None]
        apart = [float((x - alone).abs().max()) for x in (runs["packed"](), out)]
        print(f"{mechanism}: packed differs from separate calls by {apart[0]:.0e}, padded by {apart[1]:.0e}")
        samples = in_turns(runs, packed.device, rounds=7)
        for way in ways:
            times[way].append(1e3 * min(samples[way]))

# %%
# Packed texts of different lengths are one call each inside, so that packing is no faster than separate calls: what
# it gains is that the layers around the attention see one row without padding. Beside a padded batch both take a
# fraction of the time, as much as there was padding.
plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4, "axes.axisbelow": True}])
figure, (batch, bars) = plt.subplots(2, 1, figsize=(7, 7.4), layout="constrained")
figure.suptitle("Sixteen texts: what padding adds, and the time of their attention")
batch.barh(range(len(lengths)), lengths, color="C0", label="tokens")
batch.barh(range(len(lengths)), [longest - n for n in lengths], left=lengths, color="C2", hatch="//", label="padding")
batch.set_xlabel("length of a row (tokens)")
batch.set_ylabel("text (number)")
batch.set_yticks(range(0, 16, 3), range(1, 17, 3))
batch.legend(loc="lower right", framealpha=1)
for number, way in enumerate(ways):
    at = [place + 0.27 * (number - 1) for place in range(len(expressions))]
    bars.bar(at, times[way], 0.25, color=("C2", "C5", "C0")[number], hatch=("//", "", "")[number], label=way)
bars.set_xticks(range(len(expressions)), [text.replace("(w", "\n(w") for text in expressions], fontsize=11)
bars.set_ylabel("time of attention (ms)")
bars.set_xlabel("mechanism")
bars.legend()
plt.show()
