"""Draw what each mechanism attends to on the same seeded tokens, for its page: by ``attention_rows`` where it can.

Every value is small enough for its pattern to show within the tokens that are drawn, and is named under the picture.
"""

from __future__ import annotations

import functools
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fast_attention import Attention, Bound, Mixer, Shape, attention_rows, catalogue
from fast_attention.lab.drawing import INK, STYLE, attention_map, svg

TOKENS, WIDTH = 64, 16
REPEATED = (range(8, 20), range(40, 52))  # the second says what the first said
DRAWN = {  # settings whose pattern fits into 64 tokens; all others are drawn with their defaults
    "Local": "Local(window=6)",
    "BlockLocal": "BlockLocal(block_size=8)",
    "Local2d": "Local2d(height=8, width=8, window=3)",
    "BlockLocal2d": "BlockLocal2d(height=8, width=8, block_size=4)",
    "BigBird": "BigBird(block_size=4, num_random_blocks=2)",
    "Selected": "Selected(block_size=4, topk=4)",
    "LSH": "LSH(bucket_size=8)",
    "Sinkhorn": "Sinkhorn(block_size=8)",
    "SortCut": "SortCut(block_size=8)",
    "Linformer": "Linformer(rank=16)",
    "Nystrom": "Nystrom(num_landmarks=8)",
    "LARA": "LARA(num_landmarks=8)",
    "Agent": "Agent(num_agents=8)",
    "ABC": "ABC(num_slots=8)",
    "AFTLocal": "AFTLocal(window=8)",
    "Hybrid": "Hybrid(near=BlockLocal(block_size=4))",
    "ByLength": "ByLength(long=Local(window=6), above=24)",
    "Adapted": "Adapted(mechanism=Local(window=6))",
}
Panel = tuple[str, Tensor]


def value(name: str) -> Attention[Any, Any] | Mixer[Any, Any]:
    """The mechanism as it is drawn."""
    return catalogue.parse(DRAWN.get(name, name))


def tokens() -> tuple[Tensor, Tensor]:
    """Queries and keys (1, 1, 64, 16): slowly changing, so that neighbours are alike, and one passage said twice."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    for i in range(1, TOKENS):
        x[i] = 0.75 * x[i - 1] + (1 - 0.75**2) ** 0.5 * x[i]
    x[list(REPEATED[1])] = x[list(REPEATED[0])]
    q, k = (1.1 * x + 0.3 * torch.randn_like(x) for _ in range(2))
    return q[None, None], k[None, None]


def panels(name: str) -> tuple[list[Panel], str]:
    """The matrices of a mechanism's picture with their titles, and what is drawn in them."""
    mechanism = value(name)
    torch.manual_seed(0)
    if isinstance(mechanism, Mixer):
        bound, said = Bound(mechanism, Shape(1, WIDTH, TOKENS)), "how far each output moves with each input"
        return [(_order(c), _moves(bound, c)) for c in mechanism.traits.modes], said
    bound, every = Bound(mechanism, Shape(1, WIDTH, TOKENS)), range(TOKENS)
    q, k = tokens()
    if mechanism.traits.matrix:
        own = [
            (_order(c), attention_rows(mechanism, q, k, bound.w, queries=every, is_causal=c)[0, 0])
            for c in mechanism.traits.modes
        ]
        said = "the weight of each key for each query"
    else:
        own = [(_order(c), _channels(bound, q, k, c)) for c in mechanism.traits.modes]
        said = "the weight of each key for each query, the mean over channels, each of which has weights of its own"
    exact = attention_rows("Softmax", q, k, queries=every)[0, 0]
    return ([] if name == "Softmax" else [("exact attention", exact)]) + own, said


def _order(is_causal: bool) -> str:
    return "causal" if is_causal else "not causal"


def _channels(bound: Any, q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """The mean over channels of what output i takes of value j, out of one backward pass for every query."""
    v = torch.zeros_like(k).requires_grad_()
    out = bound(q, k, v, is_causal=is_causal)
    rows = [torch.autograd.grad(out[0, 0, i].sum(), v, retain_graph=True)[0][0, 0] for i in range(TOKENS)]
    return torch.stack(rows).mean(-1).detach()


def _moves(bound: Any, is_causal: bool) -> Tensor:
    """The size of the derivative of each output token with respect to each input token."""
    x = tokens()[0][0]
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: bound(x, is_causal=is_causal)[0], x)
    size = jacobian[:, :, 0].square().sum((1, 3)).sqrt()
    return size / size.sum(-1, keepdim=True).clamp_min(1e-30)


@functools.cache
def draw(name: str) -> tuple[str, str, str]:
    """The picture as SVG, its alternative text, and the words under it."""
    parts, said = panels(name)
    alt = f"{name}: {said}, {TOKENS} tokens; panels: {', '.join(title for title, _ in parts)}."
    with matplotlib.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(2.7 * len(parts), 2.95), layout="constrained", facecolor="white")
        for axes, (title, matrix) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
            attention_map(axes, matrix, float(matrix.max()))
            axes.set_title(title, color=INK, fontweight="normal")
            axes.set_xlabel("keys" if "weight" in said else "inputs")
            axes.set_ylabel("queries" if "weight" in said else "outputs")
        picture = svg(figure, alt)
    passages = " and ".join(f"{each.start} to {each.stop - 1}" for each in REPEATED)
    caption = (
        f"`{value(name)!r}` on {TOKENS} seeded tokens that change slowly, {passages} being the same passage: {said}, "
        f"brighter is more, on a square-root scale of each panel."
    )
    if value(name).traits.learned:
        caption += " Learned weights are as they are drawn at first, untrained."
    return picture, alt, caption
