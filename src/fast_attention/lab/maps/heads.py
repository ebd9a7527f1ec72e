"""What every layer of a model attends with, and rows of its heads' attention matrices, coarse enough to look at."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fast_attention.attention_maps import attention_rows
from fast_attention.mechanism import Attention
from fast_attention.nn.bound import Bound

MOST = 64  # rows, and blocks of keys, of a map


class Call(NamedTuple):
    """One layer's call: the mechanism, what it got (q, k, v: (1, H, L, E)), and the rest of its arguments."""

    layer: str
    bound: Bound
    q: Tensor
    k: Tensor
    v: Tensor
    keywords: dict[str, Any]

    def rows(self, queries: list[int], like: Call | None = None) -> Tensor:
        """Rows (H, R, S) of its matrix; with the queries and keys of another call, those that it would have made."""
        of = like or self
        return attention_rows(self.bound.mechanism, of.q, of.k, self.bound.w, queries=queries, **self.keywords)[0]


@torch.no_grad()
def heard(model: nn.Module, run: Callable[[], Any]) -> list[Call]:
    """The calls of all bound attentions in a model during ``run``, in their order."""
    calls: list[Call] = []

    def watch(name: str, part: Bound) -> Any:
        layer = name.removesuffix(".bound").removesuffix(".fast_attention").removesuffix(".attention")

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            chosen = {x: options[x] for x in ("is_causal", "key_mask", "attn_mask") if options.get(x) is not None}
            before = sum(call.bound is part for call in calls)  # some models run one layer several times
            again = f", time {before + 1}" if before else ""
            calls.append(Call(layer + again, part, inputs[0], inputs[1], inputs[2], chosen))

        return part.register_forward_pre_hook(keep, with_kwargs=True)

    bounds = {name: part for name, part in model.named_modules() if isinstance(part, Bound)}
    hooks = [watch(name, part) for name, part in bounds.items() if isinstance(part.mechanism, Attention)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def reading(model: nn.Module, tokens: Tensor) -> list[Call]:
    """The calls while a model reads tokens (1, L), without a cache: its state would be advanced past the mechanism's
    own call."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return heard(model, lambda: model(tokens, **options))


@dataclass
class Head:
    """One head before and after: how far its rows are apart, and what there is to look at.

    Maps are (R, B): the weight that each of R sampled queries lays on each of B blocks of keys; curves (C, B) are the
    same of the chosen queries.
    """

    layer: str
    head: int
    distance: float  # mean over the sampled queries of half the sum of absolute differences: of two laws, 0 to 1
    own_distance: float  # the same where both attend with the original's queries and keys
    original: list[list[float]]
    swapped: list[list[float]]
    original_curves: list[list[float]]
    swapped_curves: list[list[float]]


def sampled(length: int, most: int = MOST) -> list[int]:
    """At most ``most`` positions, evenly over a sequence, its ends among them."""
    count = min(length, most)
    return [round(i * (length - 1) / max(count - 1, 1)) for i in range(count)]


def blocks(keys: int, most: int = MOST) -> list[int]:
    """Where at most ``most`` blocks of keys begin, and the end: sizes differ by one at most."""
    count = min(keys, most)
    return [i * keys // count for i in range(count + 1)]


def coarse(rows: Tensor) -> Tensor:
    """Rows (..., S) summed over the blocks of keys (..., B)."""
    edges = torch.tensor(blocks(rows.shape[-1]))
    sums = torch.nn.functional.pad(rows.double().cumsum(-1), (1, 0))
    return sums[..., edges[1:]] - sums[..., edges[:-1]]


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean over rows (..., R, S) of half the sum of absolute differences: the total variation, where rows are laws."""
    return 0.5 * (a.double() - b.double()).abs().sum(-1).mean(-1)


def compared(before: Call, after: Call, chosen: list[int]) -> list[Head]:
    """All heads of a layer; the rows of the matrices are let go again.

    Raises:
        Unsupported: A mechanism has no attention matrix.
    """
    places = sampled(before.q.shape[-2])
    asked = places + chosen
    exact, swapped = before.rows(asked), after.rows(asked)
    apart = distance(exact[:, : len(places)], swapped[:, : len(places)]).tolist()
    alone = distance(exact[:, : len(places)], after.rows(places, before)).tolist()
    shown = [coarse(rows).tolist() for rows in (exact, swapped)]
    cut = len(places)
    return [
        Head(before.layer, i, apart[i], alone[i], a[:cut], b[:cut], a[cut:], b[cut:])
        for i, (a, b) in enumerate(zip(*shown, strict=True))
    ]
