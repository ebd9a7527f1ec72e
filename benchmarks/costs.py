"""Measures what whole models cost: time and memory of a forward pass at several lengths, side by side."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention import clock
from fast_attention.counting import peak_bytes

ROUNDS, PATIENCE = 60, 6.0  # of timing all models in turns; seconds after which no further round begins
WATCHED = 5  # rounds in which the attention modules are timed too, which takes time itself
LONGEST = 60.0  # seconds of a pass that is not begun any more


def measure(
    models: dict[str, Any], layers: Sequence[str], lengths: Sequence[int], positions: int | None,
    watch: Callable[[str], None], *, longest: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for every model and length: median seconds of a pass and of its attention modules, and peak bytes.

    Beyond a model's own positions the numbers of positions begin anew: that tells times, and no quality.

    Args:
        models: Hugging Face models by name, all with the same layers.
        layers: The names of their attention modules.
        lengths: Tokens, one sequence, in rising order.
        positions: How many positions the models know; None: any.
        watch: Called with what is measured.
        longest: Seconds of a pass that is not begun any more. None: a minute.
    """
    longest = LONGEST if longest is None else longest
    device = next(next(iter(models.values())).parameters()).device
    rows: list[dict[str, Any]] = []
    for length in lengths:
        watch(f"{length:,} tokens")
        skipped = {name: _too_long(rows, name, length, longest) for name in models}
        attention: dict[str, list[float]] = {name: [] for name in models}
        passes = {
            name: _pass(model, _inputs(model, length, positions)) for name, model in models.items() if not skipped[name]
        }
        watched = {name: _watched(run, models[name], layers, attention[name], device) for name, run in passes.items()}
        clock.in_turns(watched, device, 1)  # which pays for set-up
        clock.in_turns(watched, device, WATCHED, PATIENCE)
        samples = clock.in_turns(passes, device, ROUNDS, PATIENCE)
        for name in models:
            row: dict[str, Any] = {"model": name, "length": length, "note": skipped[name]}
            if name in passes:
                row |= {"seconds": statistics.median(samples[name]), "rounds": len(samples[name])}
                row |= {"attention_seconds": statistics.median(attention[name][1:]), "bytes": peak_bytes(passes[name])}
            rows.append(row)
    return rows


def _too_long(rows: list[dict[str, Any]], name: str, length: int, longest: float) -> str:
    """Why a pass is not begun, or nothing: its time is predicted from the length before."""
    last = next((row for row in reversed(rows) if row["model"] == name), None)
    if last is None or last["note"]:
        return last["note"] if last else ""
    expected = last["seconds"] * (length / last["length"]) ** 2
    return f"it would take up to {expected:.0f} s" if expected > longest else ""


def _inputs(model: Any, length: int, positions: int | None) -> dict[str, Any]:
    """Token numbers of one sequence; positions begin anew where they end."""
    ids = torch.randint(
        model.config.get_text_config().vocab_size, (1, length), generator=torch.Generator().manual_seed(0)
    )
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if positions is not None and length > positions:
        given |= {"attention_mask": torch.ones_like(ids), "position_ids": (torch.arange(length) % positions)[None]}
        if getattr(model.config, "type_vocab_size", 0):
            given["token_type_ids"] = torch.zeros_like(ids)
    known, device = inspect.signature(model.forward).parameters, next(model.parameters()).device
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items() if name in known}


def _pass(model: Any, given: dict[str, Any]) -> Callable[[], Any]:
    @torch.no_grad()
    def run() -> None:
        model(**given)

    return run


def _watched(
    run: Callable[[], Any], model: Any, layers: Sequence[str], spent: list[float], device: torch.device
) -> Callable[[], Any]:
    """A pass of the model; what its attention modules took, projections included, is appended to ``spent``."""
    began = [0.0]

    def before(module: nn.Module, args: Any) -> None:
        clock.wait(device)
        began[0] = time.perf_counter()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        clock.wait(device)
        spent[-1] += time.perf_counter() - began[0]

    def watched() -> None:
        spent.append(0.0)
        modules = [model.get_submodule(name) for name in layers]
        handles = [m.register_forward_pre_hook(before) for m in modules]
        handles += [m.register_forward_hook(after) for m in modules]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()

    return watched
