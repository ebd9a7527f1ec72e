"""Shows the result of a run: the learning curve beside the baselines, as a picture and as a table."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from fast_attention.lab import drawing
from fast_attention.lab.drawing import COLOURS, figure_grid, picture
from fast_attention.lab.tables import Row, Table, Value
from fast_attention.tasks.task import Task
from fast_attention.training import steps
from fast_attention.training.loop import Outcome


def in_words(value: float | None, metric: str) -> str:
    """A value of a metric as people read it: ``97.5 %``, ``2.711 nats``."""
    if value is None:
        return "-"
    return f"{100 * value:.4g} %" if metric == "accuracy" else f"{value:.4g} {metric}"


@picture
def drawn(log: list[dict[str, Any]], task: Task, baselines: dict[str, float], title: str) -> tuple[Figure, str]:
    """The metric on the validation side against steps, the baselines as lines, and the loss in training below.

    Args:
        log: The lines of the run's log.
        task: Whose metric it is.
        baselines: What can be had without learning.
        title: Stands above.
    """
    evaluations = [(line["step"], line["valid"]) for line in log if "valid" in line]
    losses = [(line["step"], line["loss"]) for line in log if "loss" in line]
    last = in_words(evaluations[-1][1], task.metric) if evaluations else "nothing yet"
    lines = {f"{name} {in_words(value, task.metric)}": value for name, value in baselines.items()}
    alt = "; ".join([f"{title}: {last} after {evaluations[-1][0] if evaluations else 0} steps", *lines])
    figure, (upper, lower) = figure_grid(4.6, 2, width=7.0, sharex=True, height_ratios=(2, 1))
    upper.set_title(title)
    upper.plot(*zip(*evaluations, strict=True), color=COLOURS[0], linewidth=1.6, marker="o", markersize=2.5)
    drawing.baselines(upper, lines)
    upper.set_ylabel(f"validation, {task.metric}")
    if losses:
        lower.plot(*zip(*losses, strict=True), color=COLOURS[5], linewidth=0.8)
    lower.set_ylabel("training loss, nats")
    lower.set_xlabel("steps")
    return figure, alt


def table(outcome: Outcome, task: Task, baselines: dict[str, float]) -> Table:
    """The best model and every baseline; green where the model is better."""
    where = f"the model, best at step {outcome.best_step:,}"
    rows: list[Any] = [Row([where, in_words(outcome.best, task.metric), ""], "strong")]
    for name, value in baselines.items():
        words = Value("-")
        if outcome.best is not None:
            wins = steps.better(task, outcome.best, value)
            gap = in_words(abs(outcome.best - value), task.metric)
            words = Value(f"{gap} {'better' if wins else 'worse'}", "fast" if wins else "slow")
        rows.append([name, in_words(value, task.metric), words])
    return Table(["", task.metric, "the model is"], rows)
