"""``convert``: swap, attention transfer, fine-tune. Each finished stage is measured and can be resumed from."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fast_attention import catalogue
from fast_attention.conversion import goals, outcome
from fast_attention.conversion.goals import Batch, Chunks, HeldOutBatch, Teacher, layers_of
from fast_attention.conversion.outcome import STAGES, Conversion, ConversionSettings, Diverged, State
from fast_attention.integrations import crossover, swap, swap_back
from fast_attention.integrations.crossover import ExactUpTo
from fast_attention.integrations.modules import restored_generators
from fast_attention.integrations.swapping import pretrained
from fast_attention.mechanism import Mechanism, Unsupported
from fast_attention.refusals import is_module

Groups = Mapping[str, Sequence[Batch]]  # what is prepared out; "" is the name of all if they are not in groups
Prepared = Mapping[str, Sequence[HeldOutBatch]]
Watch = Callable[[dict[str, Any]], None]

TRAINING = {"transferred": "transfer", "tuned": "fine-tune"}  # what leads to a stage
DECAY = 0.95  # of the running mean of losses, per step
BETAS = (0.9, 0.98)  # AdamW's
MAP_RATE_FACTOR = 10.0  # learning rate of the mechanisms' own weights in the fine-tune, relative to all others


def convert(
    model: Any, mechanism: Mechanism[Any, Any] | str, batches: Callable[[int], Batch],
    held_out: Sequence[Batch] | Groups, *, settings: ConversionSettings | None = None, keep: Sequence[int] = (),
    exact_up_to: ExactUpTo | None = "auto", teacher: Teacher = "original",
    checkpoint: str | os.PathLike[str] | None = None, resume: bool = False, watch: Watch = lambda line: None,
) -> Conversion:  # fmt: skip
    """Give a pretrained model another attention, in place, and train it until it is near the original.

    First every layer learns to give the original layer's output on the original's inputs. Then all is tuned together: a
    decoder with a head of tokens on the loss of its text, any other model on the teacher's hidden states and on the
    cosine of the embeddings. The model gets the weights of the stage that was best on ``held_out``, the untrained swap
    among them; groups whose names begin with "trained text" do not count there. It stays in evaluation mode.

    Ctrl-C (``KeyboardInterrupt``) leaves the model as it was after the last finished stage, status ``"interrupted"``.
    Any other exception, and Ctrl-C before the first stage is finished, gives it its own attention and weights back.

    Args:
        model: A Hugging Face model, encoder or decoder.
        mechanism: What to run in every layer that does not stay exact.
        batches: Batch number i, the same for the same number: tensors by name, as the model's forward takes them. A
            language model predicts ``labels`` where there are some, -100 for none, and ``input_ids`` else.
        held_out: Batches that ``batches`` never gives: all figures are of these. Or groups of them by name, such as
            ``{"short": [...], "other text, 2048": [...]}``: each gets figures of its own, too.
        settings: What is trained, for how long, at which rates.
        keep: Numbers of layers that stay exact, counted from 0 in the order of the model.
        exact_up_to: Run exact attention for queries that see at most so many tokens. ``"auto"`` measures from which
            length on the mechanism is faster on this machine, and stays within a chunk of a teacher that reads chunks.
            None: never. All figures are with it.
        teacher: ``"original"`` reads every text whole, by exact attention; ``Chunks(tokens=512)``, for encoders that
            give embeddings, in chunks, whose mean is the embedding that is asked for. There is no transfer then.
        checkpoint: A file to which every finished stage is written, whole or not at all.
        resume: Continue after the last stage in that file, if it exists. With ``settings.steps`` and no minutes, the
            result equals that of an uninterrupted run to the bit.
        watch: Called with a line (a dictionary) for every step and every measurement.

    Raises:
        Unsupported: No layer can run the mechanism, or the model is no Hugging Face model, or both encoder and decoder.
        TypeError: ``settings`` are none.
        ValueError: An argument cannot be used, or the checkpoint is damaged or another conversion's.
        Diverged: The training loss is not finite.
    """
    settings = ConversionSettings() if settings is None else settings
    if not isinstance(settings, ConversionSettings):
        raise TypeError(f"settings are ConversionSettings(...); got {settings!r}")
    is_module("model", model)
    name = type(model).__name__
    if "" not in pretrained(model):
        raise Unsupported(
            f"convert takes a Hugging Face model, and {name} is none. What would work: swap(...), and training the "
            "model as it was trained"
        )
    if model.config.is_encoder_decoder:
        raise Unsupported(f"convert takes an encoder or a decoder, and {name} is both. What would work: its encoder")
    if not callable(batches):
        raise ValueError(f"batches is a function of a number, such as lambda i: my_batches[i]; got {type(batches)}")
    groups, parsed = _groups(held_out), catalogue.parse(mechanism)
    if exact_up_to is not None:
        crossover.check(exact_up_to)
        crossover.exact_below(parsed, 1)  # which refuses mechanisms that say it themselves
    if resume and checkpoint is None:
        raise ValueError("resume=True needs the file to continue from: give checkpoint=...")
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.is_dir():
        raise ValueError(f"checkpoint={str(path)!r} is a folder: name a file, such as one in it")
    goal = goals.goal_of(model, teacher)
    return _Run(model, parsed, batches, goal, settings, keep, exact_up_to, teacher, watch).run(groups, path, resume)


def _groups(held_out: Sequence[Batch] | Groups) -> Groups:
    """Held-out batches by their groups."""
    if isinstance(held_out, Mapping) and any(isinstance(x, Tensor) for x in held_out.values()):
        raise ValueError("held_out is one batch: give a list of batches, such as [batch], or lists of them by name")
    groups = dict(held_out) if isinstance(held_out, Mapping) else {"": held_out}
    empty = [f"[{name!r}]" if name else "" for name, batches in groups.items() if not batches]
    if empty or not groups:
        which = "".join(empty[:1])
        raise ValueError(f"held_out{which} is empty: give at least one batch that the training does not see")
    return groups


class _Run:
    """A conversion under way: the model, a frozen copy of the original, and the states of the finished stages."""

    def __init__(
        self, model: Any, mechanism: Any, batches: Callable[[int], Batch], goal: goals.Goal,
        settings: ConversionSettings, keep: Sequence[int], exact_up_to: ExactUpTo | None, teacher: Teacher,
        watch: Watch,
    ) -> None:  # fmt: skip
        self.model, self.mechanism, self.batches, self.goal, self.settings = model, mechanism, batches, goal, settings
        self.exact_up_to, self.teacher, self.watch = exact_up_to, teacher, watch
        swap_back(model)
        self.original = copy.deepcopy(model).eval().requires_grad_(False)
        swap(self.original, "Softmax")
        layers = [*layers_of(self.original)]
        for number in keep:
            if not 0 <= number < len(layers):
                raise ValueError(f"keep names layer {number}; the model's layers go from 0 to {len(layers) - 1}")
        self.requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        exact = {name: "asked for" for i, name in enumerate(layers) if i in keep}
        with restored_generators(model):
            torch.manual_seed(settings.seed)
            report = swap(model, {name: mechanism for name in layers if name not in exact})
        exact |= {layer.name: layer.why for layer in report.unchanged if layer.name not in exact}
        model.eval()
        self.result = Conversion(goal.name, repr(mechanism), layers, exact)
        self.result.exact_up_to = None if exact_up_to == "auto" else exact_up_to
        self.bounds = {name: layers_of(model)[name].bound for name in self.result.converted}
        self.finished: State = {}  # the model's state after the last finished stage
        self.best: State = {}  # and after the best one

    def run(self, groups: Groups, path: Path | None, resume: bool) -> Conversion:
        """Carry out all stages that are left, and leave the model with the best of them."""
        try:
            of = {} if path is None else self._identity()
            if resume and path is not None and path.exists():
                self.result, self.finished, self.best = outcome.load(path, of)
                self.model.load_state_dict(self.finished)
                self.watch({"message": f"resumes from {path}: {', '.join(self.result.figures)} are measured"})
            if left := [stage for stage in STAGES if stage not in self.result.figures]:
                checked = {name: [*map(self._checked, batches)] for name, batches in groups.items()}
                prepared = {name: self.goal.prepare(self.original, batches) for name, batches in checked.items()}
                if "original" not in self.result.figures:
                    self._measure(self.result, "original", self.original, prepared)
                    self.watch({"measured": "original", **self.result.figures["original"]})
                    self._find_exact_up_to()
                for stage in left:
                    result, state = self._carried_out(stage, prepared)
                    best = state if result.best == stage else self.best
                    if path is not None:
                        outcome.save(path, of, result, state, best)
                    self.result, self.finished, self.best = result, state, best
                    self.watch({"measured": stage, **result.figures[stage]})
            self._leave(self.result.best, self.best, "complete")
        except KeyboardInterrupt:
            if not self.finished:
                self._restore()
                raise
            last = [stage for stage in STAGES if stage in self.result.figures][-1]
            self._leave(last, self.finished, "interrupted")
        except BaseException:
            self._restore()
            raise
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.grad = None
                parameter.requires_grad_(self.requires_grad.get(name, True))
        return self.result

    def _identity(self) -> dict[str, str]:
        """A conversion's model and settings, by name: another cannot resume from its file."""
        size = sum(p.numel() for p in self.original.parameters())
        limit = "" if self.exact_up_to is None else f", exact up to {self.exact_up_to}"
        return {
            "model": f"{type(self.original).__name__} of {size:,} parameters",
            "weights": outcome.fingerprint(self.original), "mechanism": f"{self.mechanism!r}{limit}",
            "layers that stay exact": repr([*self.result.kept]), "teacher": repr(self.teacher),
            "settings": repr(self.settings),
        }  # fmt: skip

    def _carried_out(self, stage: str, prepared: Prepared) -> tuple[Conversion, State]:
        """Train and measure a stage: the result with its figures, and the model's state."""
        result = copy.deepcopy(self.result)
        if stage == "swapped":
            goals.calibrate(self.model, self.original, result.converted, self._checked(self.batches(0)))
        else:
            self._train(stage, result)
        if self.teacher == "original":
            batches = [each.batch for each in chain(*prepared.values())]
            result.errors[stage] = goals.layer_errors(self.model, self.original, result.converted, batches)
        self._bind(limited=True)
        self._measure(result, stage, self.model, prepared)
        self._bind(limited=False)
        if not result.best or result.held_out_loss(stage) < result.held_out_loss(result.best):
            result.best = stage
        return result, {name: x.clone() for name, x in self.model.state_dict().items()}

    def _train(self, stage: str, result: Conversion) -> None:
        """Take the steps of a stage: none if it has no time, or nothing to train."""
        settings, words = self.settings, TRAINING[stage]
        share = settings.share * (self.teacher == "original")  # no transfer from a teacher that reads chunks
        fraction = share if stage == "transferred" else 1 - share
        groups = self._weights(stage)
        self.model.requires_grad_(False)
        trained = [parameter.requires_grad_(True) for group in groups for parameter in group["params"]]
        if not trained or not fraction:
            return
        optimiser = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True)
        low = torch.autocast(trained[0].device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
        step, seconds, mean, start = 0, 0.0, None, time.monotonic()
        while settings.done(fraction, step, seconds) < 1.0:
            pace, batch = settings.pace(fraction, step, seconds), self._checked(self.batches(result.steps))
            if stage == "transferred":
                with low:
                    errors = goals.layer_errors(
                        self.model, self.original, result.converted, [batch], Tensor.backward
                    )  # fmt: skip
                loss = sum(errors.values()) / len(errors)
            else:
                with low:
                    total = self.goal.loss(self.model, self.original, batch)
                if total.requires_grad:  # a window over everything has nothing to train
                    total.backward()
                torch.nn.utils.clip_grad_norm_(trained, settings.clip or math.inf)
                loss = float(total.detach())
            if not math.isfinite(loss):
                raise Diverged(f"in the {words}, at step {step}, the loss is {loss}: try lower rates")
            for group in optimiser.param_groups:
                group["lr"] = group["top"] * pace
            optimiser.step()
            optimiser.zero_grad()
            mean = loss if mean is None else DECAY * mean + (1 - DECAY) * loss
            step, seconds, result.steps = step + 1, time.monotonic() - start, result.steps + 1
            done = min(settings.done(fraction, step, seconds), 1.0)
            self.watch({"stage": words, "step": step, "seconds": seconds, "loss": mean, "done": done})

    def _weights(self, stage: str) -> list[dict[str, Any]]:
        """The parameters that a stage trains, as AdamW takes it, ``"top"`` the highest rate of each group."""
        model, settings, everything = self.model, self.settings, self.settings.train == "model"
        maps = [parameter for bound in self.bounds.values() for parameter in bound.parameters()]
        known = {id(parameter) for parameter in maps}
        if stage == "transferred":
            parts = [p for name in self.bounds for p in model.get_submodule(name).parameters() if id(p) not in known]
            rates = [(maps, settings.lr_maps, 0.0), (parts if everything else [], settings.lr_projections, 0.0)]
            rates = [each for each in rates if each[1]]
        else:
            known |= {id(parameter) for parameter in model.get_input_embeddings().parameters()}
            others = [p for p in model.parameters() if id(p) not in known] if everything else []
            rates = [
                (maps, MAP_RATE_FACTOR * settings.lr, 0.0),
                ([p for p in others if p.ndim == 2], settings.lr, settings.weight_decay),
                ([p for p in others if p.ndim != 2], settings.lr, 0.0),
            ]
        return [{"params": params, "top": rate, "weight_decay": decay} for params, rate, decay in rates if params]

    def _checked(self, batch: Batch) -> Batch:
        """A batch on the model's device, each of whose texts has a token: means over none are no numbers."""
        if not isinstance(batch, Mapping) or not all(isinstance(x, Tensor) for x in batch.values()):
            shown = {name: type(x).__name__ for name, x in batch.items()} if isinstance(batch, Mapping) else type(batch)
            raise ValueError(f"a batch is tensors by name, as the model takes them: {{'input_ids': ...}}; got {shown}")
        mask = batch.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not mask.any(-1).all():
            row = mask.any(-1).tolist().index(False)
            raise ValueError(f"text {row} of a batch has no token, its attention_mask is all padding: leave it out")
        return {name: x.to(next(self.model.parameters()).device) for name, x in batch.items()}

    def _measure(self, result: Conversion, when: str, model: Any, prepared: Prepared) -> None:
        self.watch({"measuring": when})
        result.figures[when], groups = goals.measure(self.goal, model, prepared)
        if [*groups] != [""]:
            result.by_group[when] = groups

    def _find_exact_up_to(self) -> None:
        """Measure up to which length exact attention is faster, but for what a teacher that reads chunks never sees."""
        if self.exact_up_to != "auto":
            return
        self.watch({"measuring": "up to which length exact attention is faster"})
        name, bound = next(iter(self.bounds.items()))
        is_causal = bool(getattr(self.model.get_submodule(name), "is_causal", False))
        like = next(self.model.parameters())
        tokens = crossover.crossover(bound.mechanism, bound.shape, like, is_causal=is_causal)
        self.result.exact_up_to = min(tokens, self.teacher.tokens) if isinstance(self.teacher, Chunks) else tokens

    def _bind(self, *, limited: bool) -> None:
        """Let exact attention serve the queries that see few tokens, if that was asked for; or the mechanism all."""
        tokens, like = self.result.exact_up_to if limited else None, next(self.model.parameters())
        swapped, exact = layers_of(self.model), layers_of(self.original)
        for name, bound in self.bounds.items():
            short = exact[name].bound
            swapped[name].bound = bound if tokens is None else crossover.limited(bound, short, tokens, like)

    def _leave(self, stage: str, state: State, status: str) -> None:
        """Leave the model with the weights of a finished stage, behind exact attention for short inputs."""
        self._bind(limited=False)
        self.model.load_state_dict(state)
        self._bind(limited=True)
        self.result.best, self.result.status = stage, status
        if self.result.exact_up_to is not None:
            self.result.mechanism = repr(crossover.exact_below(self.mechanism, self.result.exact_up_to))

    def _restore(self) -> None:
        """Make the model what it was, weights included."""
        swap_back(self.model)
        state = self.original.state_dict()
        self.model.load_state_dict({name: state[name] for name in self.model.state_dict()})
