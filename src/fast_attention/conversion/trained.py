"""The weights that each stage of a conversion trains, with their learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fast_attention.conversion import adapters, transfer
from fast_attention.conversion.checkpoint import Stage
from fast_attention.conversion.settings import ConversionSettings
from fast_attention.conversion.teachers import Teacher

MAP_RATE_FACTOR = 10.0  # learning rate of the mechanisms' own weights in the fine-tune, relative to all others
Groups = list[dict[str, Any]]  # as AdamW takes them, ``"top"`` the highest rate of each


def groups(stage: Stage, model: Any, names: Sequence[str], settings: ConversionSettings, teacher: Teacher) -> Groups:
    """What a stage trains. No transfer for a teacher that reads chunks."""
    if stage == "transfer":
        return transfer_groups(model, names, settings) if teacher == "original" else []
    return tuned_groups(model, names, settings)


def transfer_groups(model: Any, names: Sequence[str], settings: ConversionSettings) -> Groups:
    """The mechanisms' own weights in the layers ``names`` and, unless they alone are trained, the projections."""
    maps, projections = transfer.weights(model, names)
    projections = [] if settings.train == "mechanism" else projections
    rates = ((maps, settings.lr_maps), (projections, settings.lr_projections))
    return [{"params": params, "top": rate, "weight_decay": 0.0} for params, rate in rates if params and rate]


def tuned_groups(model: Any, names: Sequence[str], settings: ConversionSettings) -> Groups:
    """The mechanisms' own weights and, unless they alone are trained, all others but the input embeddings."""
    maps = transfer.weights(model, names)[0]
    excluded = {id(p) for p in (*adapters.of(model).embeddings(model), *maps)}
    others = [] if settings.train == "mechanism" else [p for p in model.parameters() if id(p) not in excluded]
    groups = [
        {"params": maps, "top": MAP_RATE_FACTOR * settings.lr, "weight_decay": 0.0},
        {"params": [p for p in others if p.ndim == 2], "top": settings.lr, "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.ndim != 2], "top": settings.lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
