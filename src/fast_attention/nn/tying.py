"""``TiedHead``: a model whose head shares the embedding's weights keeps doing so where torch gives each its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class TiedHead(nn.Module):
    """The base of a model with an ``embedding`` and an ``out`` whose weights may be one parameter.

    ``to_empty`` of a model on the meta device and ``load_state_dict(assign=True)`` make two of one: in training they
    would drift apart, or be changed twice where they still share memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_remember)
        self.register_load_state_dict_post_hook(_tie_again)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        tied = is_tied(self)
        result = super()._apply(fn, recurse)
        if tied and not is_tied(self):
            _tie(self)
        return result


def is_tied(model: nn.Module) -> bool:
    """Whether the weights of head and embedding are one parameter."""
    embedding, out = (getattr(getattr(model, name, None), "weight", None) for name in ("embedding", "out"))
    return embedding is not None and embedding is out


def _tie(model: Any) -> None:
    model.out.weight = model.embedding.weight


def _remember(model: Any, *_: Any) -> None:
    model.__dict__["_shared"] = model.embedding.weight if is_tied(model) else None


def _tie_again(model: Any, _: Any) -> None:
    """Tie what loading has untied, unless it brought weights that differ."""
    shared = model.__dict__.pop("_shared", None)
    if shared is None or is_tied(model):
        return
    embedding, out = model.embedding.weight, model.out.weight
    if embedding is shared:  # only the head's were brought
        model.embedding.weight = out
    elif out is shared or (not embedding.is_meta and torch.equal(embedding, out)):
        _tie(model)
