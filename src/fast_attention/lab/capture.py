"""Captures real queries, keys and values from every layer and head of a Hugging Face model while it reads."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fast_attention.engine import heads
from fast_attention.integrations import swap
from fast_attention.integrations.extending import extend
from fast_attention.lab import loading, texts
from fast_attention.lab.inputs import InputError
from fast_attention.lab.refusals import first_line
from fast_attention.lab.texts import Corpus
from fast_attention.mechanism import Attention, Unsupported
from fast_attention.nn.bound import Bound

GAUSSIAN = "gaussian"
_SHAPES = re.compile(r"([0-9]+)x([0-9]+)")


class Layer(NamedTuple):
    """Tensors that one layer attends with, (1, H, L, E) each; q is scaled so that 1/sqrt(E) is the right factor."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    bound: Bound | None = None  # what attends with them in a model
    keywords: Mapping[str, Any] = {}  # the rest of its arguments


@torch.no_grad()
def layers_during(model: nn.Module, run: Callable[[], Any]) -> list[Layer]:
    """Calls of all bound attentions in a model during ``run``, in their order, with what they are given."""
    layers: list[Layer] = []

    def watch(name: str, part: Bound) -> Any:
        layer = name.removesuffix(".bound").removesuffix(".fast_attention").removesuffix(".attention")

        def keep(module: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            chosen = {x: options[x] for x in ("is_causal", "key_mask", "attn_mask") if options.get(x) is not None}
            before = sum(each.bound is part for each in layers)  # some models run one layer several times
            again = f", time {before + 1}" if before else ""
            q, k, v = inputs[:3]
            k, v = heads.repeated(q.shape[-3], k=k, v=v)
            layers.append(Layer(layer + again, q, k, v, bool(chosen.get("is_causal")), part, chosen))

        return part.register_forward_pre_hook(keep, with_kwargs=True)

    with ExitStack() as hooks:
        for name, part in model.named_modules():
            if isinstance(part, Bound) and isinstance(part.mechanism, Attention):
                hooks.enter_context(watch(name, part))
        run()
    return layers


def reading(model: nn.Module, tokens: Tensor) -> list[Layer]:
    """The layers while a model reads tokens (1, L), without a cache: its state would be advanced past the mechanism's
    own call."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return layers_during(model, lambda: model(tokens, **options))


class Gaussian:
    """No model: independent Gaussian q, k, v; "layers" are the standard deviations of q and k, 0.5, 1 and 2."""

    scales = (0.5, 1.0, 2.0)
    context: int | None = None
    own_context: int | None = None
    extension = ""
    is_causal = False

    def __init__(self, heads: int = 4, head_dim: int = 64, seed: int = 0) -> None:
        self.heads, self.head_dim, self.seed = heads, head_dim, seed
        self.title = f"Gaussian q and k of standard deviation 0.5, 1 and 2; v of 1 ({heads} heads of width {head_dim})"

    def layers(self, length: int) -> tuple[list[Layer], str]:
        """One layer per standard deviation, and what was read."""
        generator = torch.Generator().manual_seed(self.seed)
        layers = []
        for scale in self.scales:
            q, k, v = torch.randn(3, 1, self.heads, length, self.head_dim, generator=generator)
            layers.append(Layer(f"sd {scale}", scale * q, scale * k, v, False))
        return layers, f"{length} random tokens"


class HuggingFace:
    """An encoder or decoder from a folder or from the hub, reading a corpus with its own tokenizer.

    Where it has fewer positions than ``longest``, longer texts are read by a copy whose positions are extended, if they
    can be.

    Raises:
        InputError: It cannot be loaded, or q, k and v do not say what its attention computes.
    """

    def __init__(self, name: str, corpus: Corpus, longest: int = 0) -> None:
        self.name, self.corpus = name, corpus
        model = loading.load(name, head="none").float()
        try:
            self.tokenizer = loading.tokenizer(name)
        except InputError as error:
            raise InputError(f"{error}, or take the model gaussian, which reads nothing") from error
        self.model = model.get_encoder() if model.config.is_encoder_decoder else model
        positions = context(self.model.config, self.tokenizer)
        self.own_context = self.context = positions  # the longest sequence that it reads; None: any
        self.extended, self.extension = self.model, ""  # how it reads beyond its own positions, or why it cannot
        if positions is not None and positions < longest:
            self._extend(positions, longest)
        self._make_readable()
        layers, _ = self.layers(min(8, positions or 8))
        self.heads, self.head_dim = layers[0].q.shape[1], layers[0].q.shape[3]
        self.is_causal = layers[0].is_causal
        count, kind = len(layers), "decoder" if self.is_causal else "encoder"
        self.title = (
            f"{type(self.model).__name__} {_short(name)} ({kind}, {count} layers, {self.heads} heads of width "
            f"{self.head_dim}) reading {corpus.name}"
        )

    def _extend(self, positions: int, longest: int) -> None:
        """Make a copy that reads ``longest`` tokens; ``extension`` says how, or why there is none."""
        model = copy.deepcopy(self.model)
        try:
            done = extend(model, longest)
        except (Unsupported, ValueError) as error:
            self.extension = f"nothing longer was read: {first_line(error)}"
        else:
            self.context, self.extended = longest, model
            self.extension = f"{done.kind} positions extended from {positions:,} tokens ({done.method}), untrained"

    def _make_readable(self) -> None:
        """Swap in exact attention, whose calls can be read, unless a mechanism was swapped in before."""
        for model in {id(each): each for each in (self.model, self.extended)}.values():
            if not any(isinstance(part, Bound) for part in model.modules()):
                try:
                    swap(model, "Softmax")
                except (Unsupported, ValueError) as error:
                    raise InputError(f"{self.name}: {first_line(error)}") from error

    @torch.no_grad()
    def layers(self, length: int) -> tuple[list[Layer], str]:
        """Run the model once and keep what every layer attends with, if that is q, k and v alone; and what was read."""
        ids, read = self.corpus.tokens(self.tokenizer, length)
        beyond = self.own_context is not None and ids.shape[1] > self.own_context
        try:
            layers = reading(self.extended if beyond else self.model, ids)
        except Exception as error:  # a model's own complaint, in its own type
            reason = first_line(error)
            raise InputError(f"{self.name}: fails on {ids.shape[1]} tokens: {reason}") from error
        for layer in layers:
            added = "attn_mask" if "attn_mask" in layer.keywords else ""
            if (bias := getattr(layer.bound and layer.bound.mechanism, "bias", None)) is not None:
                added = repr(bias)
            if added:
                raise InputError(
                    f"{layer.name} attends with {added} besides q, k and v, which alone do not say what it computes "
                    "(a layer with a window does so beyond it: give shorter --lengths)"
                )
        if not layers:
            raise InputError("no layer of this model attends with queries and keys")
        return layers, f"{read}, {self.extension}" if beyond else read


Source = Gaussian | HuggingFace


def context(config: Any, tokenizer: Any) -> int | None:
    """The longest sequence that a model with this config and tokenizer reads; None: any."""
    sizes = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    known = [int(size) for size in sizes if size is not None and 0 < size < 10**9]
    return min(known, default=None)


def _short(name: str) -> str:
    path = Path(name)
    if not path.exists():
        return name
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def source(model: str | None, text: str | None, seed: int, longest: int = 0) -> Source:
    """The source called ``model``: what ``loading.find`` knows, ``gaussian``, or ``HEADSxWIDTH`` (such tensors).

    A Hugging Face model's positions are extended to ``longest`` tokens where it has fewer.
    """
    sizes = _SHAPES.fullmatch(model or "")
    if sizes or model == GAUSSIAN:
        if text:
            raise InputError(f"--model {model} reads nothing: leave out --text")
        if sizes is None:
            return Gaussian(seed=seed)
        if not all(0 < len(size.lstrip("0")) < 10 for size in sizes.groups()):
            raise InputError(f"{model}: write HEADSxWIDTH, both at least 1 and below 10^9, such as 8x64")
        heads, width = map(int, sizes.groups())
        return Gaussian(heads, width, seed)
    try:
        name = model or loading.default_model()
        loading.find(name)
    except InputError as error:
        raise InputError(
            f"{error}. For a model of another kind give its heads and their width, such as 8x64"
        ) from error
    return HuggingFace(name, texts.read(text), longest)
