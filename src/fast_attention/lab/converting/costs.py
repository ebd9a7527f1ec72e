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
from fast_attention.nn.models import Model

ROUNDS = 5
PATIENCE = 20.0  # seconds for the rounds of a length; one is always run
LONGEST = 60.0  # seconds of a pass that is not begun any more
SHORT = 0.5  # seconds of a pass up to which it is timed alone too: what measures its parts takes time itself
SHORT_ROUNDS, SHORT_PATIENCE = 60, 6.0


def measure(
    models: dict[str, Any], layers: Sequence[str], lengths: Sequence[int], positions: int | None,
    watch: Callable[[str], None], *, longest: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for every model and length: median seconds of a pass and of its attention modules, and peak bytes.

    Beyond the own positions of a Hugging Face model its position numbers begin anew: that tells times, and no quality.

    Args:
        models: By name, all with the same layers.
        layers: The names of their attention modules.
        lengths: Tokens, one sequence, in rising order.
        positions: How many positions the models know; None: any.
        watch: Called with what is measured.
        longest: Seconds of a pass that is not begun any more. None: a minute.
    """
    longest = LONGEST if longest is None else longest
    rows: list[dict[str, Any]] = []
    for length in lengths:
        watch(f"{length:,} tokens")
        skipped = {
            name: _beyond(model, length) or _too_long(rows, name, length, longest) for name, model in models.items()
        }
        attention: dict[str, list[float]] = {name: [] for name in models}
        passes = {
            name: _pass(model, _inputs(model, length, positions)) for name, model in models.items() if not skipped[name]
        }
        runs = {name: _attended(run, models[name], layers, attention[name]) for name, run in passes.items()}
        device = _device(next(iter(models.values())))
        clock.in_turns(runs, device, 1)  # which pays for set-up
        samples = clock.in_turns(runs, device, ROUNDS, PATIENCE)
        if max((min(times) for times in samples.values()), default=0.0) <= SHORT:
            samples = clock.in_turns(passes, device, SHORT_ROUNDS, SHORT_PATIENCE)
        for name in models:
            row: dict[str, Any] = {"model": name, "length": length, "note": skipped[name]}
            if name in runs:
                row |= {"seconds": statistics.median(samples[name]), "rounds": len(samples[name])}
                row |= {"attention_seconds": statistics.median(attention[name][1:]), "bytes": peak_bytes(passes[name])}
            rows.append(row)
    return rows


def _beyond(model: Any, length: int) -> str:
    """Why a model of this library does not read so many tokens, or nothing."""
    longest = model.config.longest if isinstance(model, Model) else None
    return "" if longest is None or length <= longest else f"it reads {longest:,} tokens at most"


def _too_long(rows: list[dict[str, Any]], name: str, length: int, longest: float) -> str:
    """Why a pass is not begun, or nothing: its time is predicted from the length before."""
    measured = [row for row in rows if row["model"] == name]
    if not measured:
        return ""
    if measured[-1]["note"]:
        return measured[-1]["note"]
    expected = measured[-1]["seconds"] * (length / measured[-1]["length"]) ** 2
    return f"it would take up to {expected:.0f} s" if expected > longest else ""


def _inputs(model: Any, length: int, positions: int | None) -> dict[str, Tensor | bool]:
    """Token numbers of one sequence; positions begin anew where they end."""
    generator, device = torch.Generator().manual_seed(0), _device(model)
    if isinstance(model, Model):
        return {"tokens": torch.randint(model.config.vocab_size, (1, length), generator=generator).to(device)}
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, length), generator=generator)
    known = inspect.signature(model.forward).parameters
    given: dict[str, Tensor | bool] = {"input_ids": ids}
    if "use_cache" in known:
        given["use_cache"] = False
    if positions is not None and length > positions:
        given["attention_mask"] = torch.ones_like(ids)
        given["position_ids"] = (torch.arange(length) % positions)[None]
        if getattr(model.config, "type_vocab_size", 0):
            given["token_type_ids"] = torch.zeros_like(ids)
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items() if name in known}


def _pass(model: Any, given: dict[str, Any]) -> Callable[[], Any]:
    """A pass of the model."""

    @torch.no_grad()
    def run() -> None:
        model(**given)

    return run


def _attended(run: Callable[[], Any], model: Any, layers: Sequence[str], spent: list[float]) -> Callable[[], Any]:
    """A pass of the model; what its attention modules took, projections included, is appended to ``spent``."""
    device, began = _device(model), [0.0]

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


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
