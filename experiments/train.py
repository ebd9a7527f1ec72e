"""Trains a small model on a task, in one process or several, and resumes a stopped run to the bit.

python -m experiments.train "MQAR(vocab=32, context=16)" --mechanism LinearAttention --steps 500 --out out/run
python -m experiments.train --out out/run --resume
accelerate launch --cpu --num_processes 2 -m experiments.train copy --steps 500 --out out/copy
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_type_hints

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import models, tasks
from experiments.arguments import Arguments, YesNo
from experiments.models import Model, ModelConfig, PositionTable
from experiments.tasks import IGNORED, Batch, Task
from fast_attention import __version__, catalogue, files
from fast_attention.value import Value, at_least, is_seed

RUN, LOG, MODEL, CHECKPOINTS = "run.json", "log.jsonl", "model", "checkpoints"  # in a run's folder
FIXED = ("batch_size", "accumulate", "seed", "order")  # settings that a resumed run keeps: they fix its data
ORDER = 1 << 32  # batch numbers of one order of the data


@dataclass(frozen=True, repr=False)
class TrainingSettings(Value):
    """The settings of a training run.

    Args:
        steps: Training steps; 0 for no limit but ``minutes``.
        minutes: Time to spend, evaluations included; 0 for no limit but ``steps``.
        clock: What counts time. ``"processor"`` counts what this process's threads compute on a CPU, so that a machine
            that others use too gives nobody fewer steps; threads that wait for each other may count as well.
        batch_size: Sequences in a batch, over all processes.
        accumulate: Batches whose gradients make one step.
        lr: The highest learning rate.
        warmup: Fraction of the run in which the rate rises to it; in the rest it falls to zero along a cosine.
        weight_decay: AdamW's, on matrices; not on norms, biases and learned positions.
        clip: The largest norm of a gradient; 0 for no limit.
        precision: ``"bfloat16"`` computes under autocast; weights and their updates stay in float32.
        evaluate_every: Steps between evaluations.
        evaluation_batches: Batches of the fixed validation set.
        patience: Evaluations without a new best after which training stops; 0: never.
        log_every: Steps between lines in the log.
        seed: For the weights and for dropout; the data has its own, in the task.
        order: The number of the order of the training data: another number gives other batches.
        save_every: Steps between checkpoints; 0 for none by steps.
        save_seconds: Seconds between checkpoints; 0 for none by time. One is always written at the end.
        device: ``"cpu"``, or ``"cuda"`` and the like for what accelerate finds.
    """

    steps: int = 1000
    minutes: float = 0.0
    clock: Literal["wall", "processor"] = "wall"
    batch_size: int = 32
    accumulate: int = 1
    lr: float = 2e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    evaluate_every: int = 100
    evaluation_batches: int = 8
    patience: int = 0
    log_every: int = 10
    seed: int = 0
    order: int = 0
    save_every: int = 0
    save_seconds: float = 120.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for setting in ("batch_size", "accumulate", "evaluate_every", "evaluation_batches", "log_every"):
            at_least(self, setting, getattr(self, setting), 1)
        for setting in ("steps", "patience", "save_every"):
            at_least(self, setting, getattr(self, setting), 0)
        for setting in ("minutes", "lr", "weight_decay", "clip", "save_seconds", "warmup"):
            at_least(self, setting, getattr(self, setting), 0.0)
        for setting in ("seed", "order"):
            is_seed(self, setting, getattr(self, setting))
        if self.clock == "processor" and self.device != "cpu":
            raise ValueError(f"TrainingSettings(clock='processor', device={self.device!r}): it counts CPUs only")
        if self.warmup >= 1.0:
            raise ValueError(f"TrainingSettings(warmup={self.warmup!r}): warmup is a fraction of the run, below 1")
        if not self.steps and not self.minutes:
            raise ValueError("TrainingSettings(steps=0, minutes=0.0): give steps or minutes, or training has no end")

    def read_clock(self) -> float:
        """Seconds of the clock, from any start."""
        return time.process_time() if self.clock == "processor" else time.monotonic()

    def done(self, step: int, seconds: float) -> float:
        """The finished fraction of the run: by steps or by time, whichever is further."""
        by_steps = step / self.steps if self.steps else 0.0
        return max(by_steps, seconds / (60 * self.minutes) if self.minutes else 0.0)


# The parts of a step


def config_for(task: Task, **settings: Any) -> ModelConfig:
    """Settings of a model for a task: its vocabulary, length, causality and head.

    Raises:
        ValueError: A setting of the model denies what the task needs.
    """
    needed: dict[str, Any] = {"vocab_size": task.vocab_size, "max_len": task.length, "causal": task.causal}
    needed |= {"reads": task.reads} | ({"head": "classes", "classes": task.classes} if task.classes else {})
    config = ModelConfig(**{**needed, **settings})
    check(task, config)
    return config


def check(task: Task, config: ModelConfig) -> None:
    """Raise a ``ValueError`` unless the model can learn the task."""
    if config.vocab_size < task.vocab_size:
        raise ValueError(f"{task!r} has {task.vocab_size} kinds of tokens and the model vocab_size={config.vocab_size}")
    if task.causal and not config.causal:
        raise ValueError(f"{task!r} asks for what comes next; a model with causal=False would see it")
    if config.longest is not None and config.longest < task.length:
        bounded = [name for name in config.mechanisms if catalogue.parse(name).traits.needs_max_len]
        why = bounded[0] if bounded else "learned positions"
        raise ValueError(f"{task!r} has {task.length} tokens and the model, with {why}, max_len={config.max_len}")
    if (config.head == "classes") != bool(task.classes) or config.classes < task.classes:
        raise ValueError(f"{task!r} has {task.classes} classes and the model head={config.head!r}, {config.classes}")


def optimiser_for(model: nn.Module, settings: TrainingSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, but not on norms, biases and learned positions."""
    tables = {id(p) for m in model.modules() if isinstance(m, PositionTable) for p in m.parameters()}
    decayed = [p for p in model.parameters() if p.ndim > 1 and id(p) not in tables]
    decayed_ids = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in decayed_ids]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = decayed[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW([group for group in groups if group["params"]], settings.lr, (0.9, 0.98), fused=fused)


def rate(settings: TrainingSettings, step: int, seconds: float) -> float:
    """The learning rate of a step: a linear warmup, then a cosine to zero."""
    done = min(max(settings.done(step, seconds), (step + 1) / (settings.steps + 1) if settings.steps else 0.0), 1.0)
    if done < settings.warmup:
        return settings.lr * done / settings.warmup
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (done - settings.warmup) / (1 - settings.warmup)))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses of all targets, in nats."""
    logits = model(batch.tokens, batch.key_mask).float()
    return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")


def num_targets(batch: Batch) -> int:
    """The number of targets."""
    return int((batch.targets != IGNORED).sum())


class Score(NamedTuple):
    """A model's score on the fixed validation set."""

    value: float  # in the task's metric
    loss: float  # nats per target
    by_position: list[
        tuple[int, int, float]
    ]  # first and last position, value; of causal language modelling, else empty


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, settings: TrainingSettings, accelerator: Accelerator | None = None) -> Score:
    """The score on the task's first validation batches, always the same ones.

    Args:
        model: The model; its mode stays as it is.
        task: The task, which gives batches and metric.
        settings: Size and number of the batches.
        accelerator: Whose processes share the batches; None for one process and the model's device.
    """
    device = next(model.parameters()).device
    sums, training = torch.zeros(3, task.length, dtype=torch.float64, device=device), model.training
    model.eval()
    for number in range(settings.evaluation_batches):
        batch = _mine(task.batch("valid", number, settings.batch_size), accelerator).to(device)
        logits, targets = model(batch.tokens, batch.key_mask).float(), batch.targets
        losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
        each = torch.stack([losses.view_as(targets), logits.argmax(-1) == targets, targets != IGNORED])
        sums[:, : each[0, 0].numel()] += each.sum(1, dtype=torch.float64).view(3, -1)
    model.train(training)
    whole: Any = sums if accelerator is None else accelerator.reduce(sums, "sum")
    sums = whole.cpu()
    loss, right, count = sums.sum(-1).tolist()
    loss, right, unit = loss / max(count, 1), right / max(count, 1), math.log(2) if "bits" in task.metric else 1.0
    if task.metric == "accuracy":
        return Score(right, loss, [])
    starts = [start for start in (0, *(32 << i for i in range(7))) if start < task.length] if task.causal else []
    buckets = zip(starts, [*starts[1:], task.length], strict=bool(starts))
    by_position = [(a, b - 1, float(sums[0, a:b].sum() / sums[2, a:b].sum()) / unit) for a, b in buckets]
    return Score(loss / unit, loss, by_position)


def better(task: Task, value: float, best: float | None) -> bool:
    """Whether a value of the task's metric beats another."""
    return best is None or (value > best if task.metric == "accuracy" else value < best)


def _mine(batch: Batch, accelerator: Accelerator | None) -> Batch:
    """This process's sequences of a batch."""
    return (
        batch if accelerator is None else batch.rows(slice(accelerator.process_index, None, accelerator.num_processes))
    )


# The run


class Outcome(NamedTuple):
    """How a run ended."""

    status: str  # "complete", "stopped early" or "interrupted"
    step: int
    seconds: float
    best: float | None  # in the task's metric; the model of that step is kept
    best_step: int
    valid: float | None  # at the last evaluation
    parameters: int
    by_position: list[tuple[int, int, float]]  # of the best


@dataclass
class Progress:
    """The progress of a run, without tensors and generators; a part of its checkpoints."""

    step: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int = -1
    valid: float | None = None
    evaluated: int = -1  # the step of the last evaluation
    stale: int = 0  # evaluations since the best one
    by_position: list[tuple[int, int, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """What accelerate saves."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what accelerate has loaded."""
        vars(self).update(state)


class Diverged(ArithmeticError):
    """The loss or its gradient is not finite."""


def train(
    task: Task, config: ModelConfig, settings: TrainingSettings, out: str | os.PathLike[str] | None = None, *,
    resume: bool = False, restart: bool = False, watch: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Outcome:  # fmt: skip
    """Train a model; ``out`` then holds ``model`` (the best one), ``log.jsonl``, ``run.json`` and ``checkpoints``.

    SIGTERM and SIGINT save and end the run between two steps. Under ``accelerate launch`` every process calls this
    with the same arguments and a folder that all can read.

    Args:
        task: What to learn.
        config: The model; see ``config_for``.
        settings: How to train.
        out: The run's folder; None for none: nothing is written.
        resume: Continue from the checkpoint in ``out``, or begin where there are no results.
        restart: Begin anew over the results in ``out``; with ``resume``, only where there is no checkpoint.
        watch: Called with each line of the log.

    Raises:
        ValueError: The model does not fit the task, ``out`` holds results that must not be overwritten, or another run.
        InUse: Another process trains in ``out``.
        Diverged: The loss is not finite.
    """
    check(task, config)
    AcceleratorState._reset_state()  # another run of this process may have had another precision
    precision = "bf16" if settings.precision == "bfloat16" else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=settings.device == "cpu")
    if accelerator.device.type != torch.device(settings.device).type:
        raise ValueError(f"device={settings.device!r}: accelerate finds {accelerator.device} here")
    if settings.batch_size < accelerator.num_processes:
        raise ValueError(f"batch_size={settings.batch_size} is below the {accelerator.num_processes} processes")
    first = accelerator.is_main_process
    with files.locked(out) if first and out is not None else nullcontext(), _noted_signals() as caught:
        folder = None if out is None else Path(out)
        return _run(task, config, settings, folder, accelerator, resume, restart, caught, watch)


def _run(
    task: Task, config: ModelConfig, settings: TrainingSettings, out: Path | None, accelerator: Accelerator,
    resume: bool, restart: bool, caught: list[int], watch: Callable[[dict[str, Any]], None],
) -> Outcome:  # fmt: skip
    first, world = accelerator.is_main_process, accelerator.num_processes
    torch.manual_seed(settings.seed)
    plain = Model(config).to(accelerator.device).train()
    model, optimiser = accelerator.prepare(plain, optimiser_for(plain, settings))
    torch.manual_seed(settings.seed + 1 + accelerator.process_index)  # dropout differs between processes
    progress, parameters = Progress(), sum(p.numel() for p in plain.parameters())
    accelerator.register_for_checkpointing(progress)
    task.batch("valid", 0, 1)  # large data are read before the clock starts

    # Resume from the checkpoint, if there is one to resume.
    if first and out is not None:
        _begin(out, {"task": repr(task), "data": task.describe()}, config, settings, resume, restart)
    accelerator.wait_for_everyone()
    if out is not None and (checkpoint := _checkpoint(out)):
        accelerator.load_state(str(checkpoint))
    if first and out is not None:
        _cut_log(out, progress)
    start = settings.read_clock() - progress.seconds
    saved, last_save, lap, tokens = (
        (progress.step, progress.evaluated),
        progress.seconds,
        [settings.read_clock(), progress.step],
        0,
    )

    def write(**line: Any) -> None:
        line = {"step": progress.step, **line, "seconds": round(progress.seconds, 3)}
        if first and out is not None:
            with (out / LOG).open("a", encoding="utf-8") as log:
                print(json.dumps(line), file=log)
        if first:
            watch(line)

    loss: Any = torch.zeros((), device=accelerator.device)
    norm: Any = loss

    def finite() -> None:
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise Diverged(
                f"at step {progress.step} the loss is {loss} and its gradient's norm {norm}: try a smaller lr (it is "
                f"{settings.lr}) or a longer warmup; the last checkpoint is sound"
            )

    def save() -> None:
        nonlocal saved, last_save
        if out is None or (progress.step, progress.evaluated) == saved or not progress.step:
            return
        finite()
        path = out / CHECKPOINTS / f"step-{progress.step:09}-{progress.evaluated:09}"
        partial = path.with_name(f".{path.name}.part")
        accelerator.save_state(str(partial), safe_serialization=False)  # torch's format keeps tied weights tied
        accelerator.wait_for_everyone()
        if first:
            partial.rename(path)
            for old in path.parent.iterdir():
                if old != path:
                    shutil.rmtree(old)
        accelerator.wait_for_everyone()
        saved, last_save = (progress.step, progress.evaluated), progress.seconds

    while True:
        # What all processes agree on: the time, and whether one of them is to stop.
        shared = torch.tensor([[settings.read_clock() - start, len(caught)]], device=accelerator.device).double()
        gathered: Any = accelerator.gather(shared)
        progress.seconds, stop = gathered.amax(0).tolist()
        if stop:
            save()
            return _outcome("interrupted", progress, parameters)

        # Evaluate, and keep the best model.
        done = settings.done(progress.step, progress.seconds) >= 1.0
        if (done or progress.step % settings.evaluate_every == 0) and progress.evaluated != progress.step:
            began = settings.read_clock()
            score = evaluate(model, task, settings, accelerator)
            progress.evaluated, progress.valid, progress.stale = progress.step, score.value, progress.stale + 1
            if better(task, score.value, progress.best):
                progress.best, progress.best_step, progress.stale = score.value, progress.step, 0
                progress.by_position = score.by_position
                if first and out is not None:
                    models.save(plain, out / MODEL)
            write(valid=score.value, valid_loss=score.loss, metric=task.metric)
            lap[0] += settings.read_clock() - began  # not part of the speed
        if done or (settings.patience and progress.stale >= settings.patience):
            save()
            return _outcome("complete" if done else "stopped early", progress, parameters)
        by_step = settings.save_every and progress.step % settings.save_every == 0
        if by_step or (settings.save_seconds and progress.seconds - last_save >= settings.save_seconds):
            save()

        # One step: the gradient of the mean loss of all targets of all processes.
        number = settings.order * ORDER + progress.step * settings.accumulate
        batches = [task.batch("train", number + i, settings.batch_size) for i in range(settings.accumulate)]
        targets = max(sum(map(num_targets, batches)), 1)
        optimiser.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=accelerator.device)
        for batch in batches:
            with nullcontext() if batch is batches[-1] else accelerator.no_sync(model):
                part = loss_of(model, _mine(batch, accelerator).to(accelerator.device)) / targets
                accelerator.backward(part * world)  # the processes' gradients are averaged
            loss = loss + part.detach()
        now = rate(settings, progress.step, progress.seconds)
        for group in optimiser.param_groups:
            group["lr"] = now
        norm = accelerator.clip_grad_norm_(model.parameters(), settings.clip or math.inf)
        optimiser.step()
        progress.step += 1
        tokens += sum(x.tokens.numel() if x.key_mask is None else int(x.key_mask.sum()) for x in batches)

        if progress.step % settings.log_every == 0:
            loss = accelerator.reduce(loss, "sum")
            finite()
            spent = max(settings.read_clock() - lap[0], 1e-9)
            speed, each = tokens / spent, spent / (progress.step - lap[1])
            lap, tokens = [settings.read_clock(), progress.step], 0
            costs = {"tokens_per_second": round(speed, 1), "step_seconds": round(each, 6)}
            write(loss=float(loss), rate=now, norm=float(norm), **costs)


def _outcome(status: str, at: Progress, parameters: int) -> Outcome:
    return Outcome(status, at.step, at.seconds, at.best, at.best_step, at.valid, parameters, at.by_position)


def _checkpoint(out: Path) -> Path | None:
    """The newest checkpoint: folders are renamed to such names when they are whole."""
    return max((out / CHECKPOINTS).glob("step-*"), default=None)


def _begin(
    out: Path, run: dict[str, Any], config: ModelConfig, settings: TrainingSettings, resume: bool, restart: bool
) -> None:
    """Refuse, or clear, a folder that holds a run; write what run it holds now."""
    run |= {"model": asdict(config), "settings": asdict(settings), "fast_attention": __version__}
    if resume and _checkpoint(out):
        held = run_of(out)
        pairs = {name: (held[name], run[name]) for name in ("task", "data")}
        pairs |= {name: (held["settings"][name], run["settings"][name]) for name in FIXED}
        pairs |= {name: (held["model"].get(name), x) for name, x in json.loads(json.dumps(run["model"])).items()}
        if differ := [f"{name} {old}, not {new}" for name, (old, new) in pairs.items() if old != new]:
            raise ValueError(f"{out} holds a run with {'; '.join(differ)}: it cannot be resumed so")
    else:
        if _checkpoint(out) and not restart:
            raise ValueError(f"{out} holds a run: resume it (--resume), begin anew (--restart), or name another folder")
        for name in (CHECKPOINTS, MODEL):
            shutil.rmtree(out / name, ignore_errors=True)
        (out / LOG).unlink(missing_ok=True)
    files.write(out / RUN, json.dumps(run, indent=1) + "\n")


def run_of(out: Path) -> dict[str, Any]:
    """Task, data, model and settings of the run in a folder."""
    return files.decoded((out / RUN).read_text(encoding="utf-8"))


def read_log(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's log that are whole."""
    text = (out / LOG).read_text(encoding="utf-8") if (out / LOG).exists() else ""
    return [files.decoded(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def _cut_log(out: Path, progress: Progress) -> None:
    """Delete the lines that a killed run wrote after its last checkpoint."""
    lines = [x for x in read_log(out) if x["step"] <= (progress.evaluated if "valid" in x else progress.step)]
    files.write(out / LOG, "".join(json.dumps(line) + "\n" for line in lines))


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Note SIGTERM and SIGINT in a list while the block runs; a second one ends the process at once."""
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        if caught:
            os._exit(128 + number)
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():  # where Python takes no handlers
        yield caught
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The command


def add_options(parser: argparse.ArgumentParser, kind: type, *names: str) -> None:
    """Options for settings of a dataclass, by their names; those that are not given are absent from the namespace."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        if names and each.name not in names:
            continue
        option, default = f"--{each.name.replace('_', '-')}", None if each.default is MISSING else each.default
        about: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"default: {default}"}
        if hints[each.name] is bool:
            parser.add_argument(option, action=YesNo, **about)
        else:
            parser.add_argument(option, type=type(default), metavar=type(default).__name__.upper(), **about)


SHAPE = (  # settings of a model that the command line takes; the task sets the others
    "width", "layers", "heads", "hidden", "max_len", "positions", "dropout", "reversible", "chunks", "tied", "conv",
)  # fmt: skip


def given(options: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The settings of a dataclass that were given."""
    return {each.name: getattr(options, each.name) for each in fields(kind) if hasattr(options, each.name)}


def settings_from(options: argparse.Namespace, held: Mapping[str, Any] = MappingProxyType({})) -> TrainingSettings:
    """The settings that were given, beside a resumed run's; minutes without steps mean as many steps as they hold."""
    own = given(options, TrainingSettings)
    own = {"steps": 0, **own} if "minutes" in own and not held else own
    return TrainingSettings(**{**held, **own})


def main(arguments: list[str] | None = None) -> int:
    """Train, and print the best model beside the baselines; 130 where a signal ended it."""
    about = argparse.RawDescriptionHelpFormatter
    parser = Arguments("experiments.train", description=__doc__, formatter_class=about)
    parser.add_argument("task", nargs="?", help="a task's name or expression, or a name and a file: 'classify FILE'")
    parser.add_argument("--mechanism", nargs="+", default=argparse.SUPPRESS, help="several go to the layers in turn")
    parser.add_argument("--out", type=Path, default=Path("out/train"), help="the run's folder")
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder, with its settings")
    parser.add_argument("--restart", action="store_true", help="begin anew over the run in the folder")
    add_options(parser, TrainingSettings)
    add_options(parser, ModelConfig, *SHAPE)
    options = parser.parse_args(arguments)
    try:
        held = run_of(options.out) if options.resume and (options.out / RUN).exists() else {}
        if not (options.task or held):
            raise ValueError("name a task, such as copy, or --resume a run")
        task = tasks.parse(options.task or held["task"])
        if held and repr(task) != held["task"]:
            raise ValueError(
                f"{options.out} holds a run with task {held['task']}, not {task!r}: it cannot be resumed so"
            )
        config = config_for(task, **held.get("model", {}) | given(options, ModelConfig))
        settings = settings_from(options, held.get("settings", {}))
        outcome = train(
            task, config, settings, options.out, resume=options.resume, restart=options.restart,
            watch=lambda line: print(json.dumps(line), file=sys.stderr, flush=True),
        )  # fmt: skip
    except (ValueError, OSError, NotImplementedError, Diverged) as error:
        print(f"experiments.train: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0":
        print(f"{task!r}, {config.mechanism}: {outcome.status} at step {outcome.step:,}, {outcome.seconds:.0f} s")
        print(f"best {task.metric} {outcome.best}, at step {outcome.best_step:,}; {outcome.parameters:,} parameters")
        for name, value in task.baselines().items() if outcome.status != "interrupted" else ():
            print(f"baseline {task.metric} {value:.4f}: {name}")
    return 130 if outcome.status == "interrupted" else 0


if __name__ == "__main__":
    sys.exit(main())
