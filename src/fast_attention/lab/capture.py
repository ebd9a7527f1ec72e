"""Captures real queries, keys and values from every layer and head of a Hugging Face model while it reads."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.integrations.extending import extend
from fast_attention.lab import loading
from fast_attention.lab.calls import Call, reading
from fast_attention.lab.corpus import Corpus
from fast_attention.lab.inputs import InputError
from fast_attention.lab.refusals import first_line
from fast_attention.mechanism import Unsupported
from fast_attention.nn.bound import Bound

GAUSSIAN = "gaussian"
_NAME = "fast_attention_capture"


class Layer(NamedTuple):
    """What one layer attends with, (1, H, L, E) each; q is scaled so that 1/sqrt(E) is the right factor."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool


class Source(Protocol):
    """A source of queries, keys and values."""

    title: str  # for the report
    heads: int
    head_dim: int
    context: int | None  # the longest sequence it can read; None: any
    extension: str  # how it reads beyond its own positions, or why it cannot; "" where nobody asked
    is_causal: bool

    def layers(self, length: int) -> tuple[list[Layer], str]:
        """The tensors of every layer at up to ``length`` tokens, and what was read."""
        ...


class Gaussian:
    """No model: independent Gaussian q, k, v; "layers" are the standard deviations of q and k, 0.5, 1 and 2."""

    scales = (0.5, 1.0, 2.0)
    context: int | None = None
    extension = ""
    is_causal = False

    def __init__(self, heads: int = 4, head_dim: int = 64, seed: int = 0) -> None:
        self.heads, self.head_dim, self.seed = heads, head_dim, seed
        self.title = f"Gaussian q and k of standard deviation 0.5, 1 and 2; v of 1 ({heads} heads of width {head_dim})"

    def layers(self, length: int) -> tuple[list[Layer], str]:
        """One layer per standard deviation."""
        generator = torch.Generator().manual_seed(self.seed)
        layers = []
        for scale in self.scales:
            q, k, v = torch.randn(3, 1, self.heads, length, self.head_dim, generator=generator)
            layers.append(Layer(f"sd {scale}", scale * q, scale * k, v, False))
        return layers, f"{length} random tokens"


class HuggingFace:
    """An encoder or decoder from a folder or from the hub, reading a corpus with its own tokenizer.

    Args:
        name: The folder, or the name on the hub.
        corpus: What it reads.
        longest: Tokens that it shall read: where it has fewer positions, longer texts are read by a copy of it whose
            positions are extended, if they can be.
    """

    def __init__(self, name: str, corpus: Corpus, longest: int = 0) -> None:
        self.name, self.corpus = name, corpus
        self.model = loading.load(name, head="none").float()
        try:
            self.tokenizer = loading.tokenizer(name)
        except InputError as error:
            raise InputError(f"{error}, or take the model gaussian, which reads nothing") from error
        if self.model.config.is_encoder_decoder:
            self.model = self.model.get_encoder()
        self.own_context = self.context = context(self.model.config, self.tokenizer)
        self.extended, self.extension = self.model, ""
        layers, _ = self.layers(min(8, self.context or 8))
        self.heads, self.head_dim = layers[0].q.shape[1], layers[0].q.shape[3]
        self.is_causal = layers[0].is_causal
        count, kind = len(layers), "decoder" if self.is_causal else "encoder"
        self.title = (
            f"{type(self.model).__name__} {_short(name)} ({kind}, {count} layers, {self.heads} heads of width "
            f"{self.head_dim}) reading {corpus.name}"
        )
        if self.context is not None and self.context < longest:
            self._extend(longest)

    def _extend(self, longest: int) -> None:
        """Make a copy that reads ``longest`` tokens; ``extension`` says how, or why there is none."""
        model = copy.deepcopy(self.model)
        try:
            done = extend(model, longest)
        except (Unsupported, ValueError) as error:
            self.extension = f"nothing longer was read: {first_line(error)}"
        else:
            self.context, self.extended = longest, model
            self.extension = f"{done.kind} positions extended from {done.before:,} tokens ({done.method}), untrained"

    @torch.no_grad()
    def layers(self, length: int) -> tuple[list[Layer], str]:
        """Run the model once, with its own attention or what was swapped in, and keep what every layer attends with.

        Raises:
            InputError: The model fails at this length, or its attention is more than q, k and v.
        """
        ids, read = self.corpus.tokens(self.tokenizer, length)
        beyond = self.own_context is not None and ids.shape[1] > self.own_context
        model = self.extended if beyond else self.model
        swapped = any(isinstance(part, Bound) for part in model.modules())
        try:
            layers = bound_layers(reading(model, ids)) if swapped else _exact(model, ids)
        except InputError:
            raise
        except Exception as error:  # a model's own complaint, in its own type
            reason = first_line(error)
            raise InputError(f"{self.name}: fails on {ids.shape[1]} tokens: {reason}") from error
        if not layers:
            raise InputError(f"{self.name}: {type(self.model).__name__} does not let its attention be replaced")
        return layers, f"{read}, {self.extension}" if beyond else read


def _exact(model: Any, ids: Tensor) -> list[Layer]:
    """What the layers of a model that was not swapped attend with."""
    layers: list[Layer] = []
    previous = model.config._attn_implementation
    try:
        _register(layers)
        model.set_attn_implementation(_NAME)
        model(input_ids=ids)
    finally:
        model.set_attn_implementation(previous)
    return layers


def bound_layers(calls: list[Call]) -> list[Layer]:
    """What mechanisms in a model were called with.

    Raises:
        InputError: A mask of its own, or what is added to its scores, is part of a call.
    """
    for call in calls:
        if "attn_mask" in call.keywords:
            raise InputError(f"{call.layer} changes its scores by attn_mask: q, k and v alone do not say how")
    return [Layer(f"layer {i}", c.q, c.k, c.v, bool(c.keywords.get("is_causal"))) for i, c in enumerate(calls)]


def _register(layers: list[Layer]) -> None:
    """Name an attention that computes exactly what the model asks for and appends its inputs to ``layers``."""
    import transformers

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **extra: Any,
    ) -> tuple[Tensor, None]:
        _refuse(module, key.shape[-2], attention_mask, extra)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
        factor = (scaling or query.shape[-1] ** -0.5) * math.sqrt(query.shape[-1])
        layers.append(Layer(f"layer {len(layers)}", query * factor, key, value, causal))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    def mask(*sizes: Any, attention_mask: Tensor | None = None, **rest: Any) -> Tensor | None:
        return None if attention_mask is None or bool(attention_mask.all()) else attention_mask

    transformers.AttentionInterface.register(_NAME, attend)
    transformers.AttentionMaskInterface.register(_NAME, mask)


def _refuse(module: Any, keys: int, attention_mask: Tensor | None, extra: dict[str, Any]) -> None:
    """Refuse layers whose scores are more than scaled dot products: q, k and v alone would not define them."""
    window = extra.get("sliding_window")
    if window is not None and window < keys:
        raise InputError(f"{type(module).__name__} sees {window} tokens only: give --lengths up to {window}")
    added = [name for name in ("position_bias", "softcap", "s_aux") if extra.get(name) is not None]
    if attention_mask is not None:
        added.append("attention_mask")
    if added:
        raise InputError(f"{type(module).__name__} changes its scores by {added[0]}: q, k and v alone do not say how")


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
