"""Small encoders and decoders made of any mechanism: pre-norm blocks, positions, and a head for tokens or classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import catalogue
from fast_attention.mechanism import Unsupported
from fast_attention.nn.convolution import CausalConvolution, ConvolutionState
from fast_attention.nn.feedforward import ChunkedFeedForward
from fast_attention.nn.positions import Positions, PositionTable
from fast_attention.nn.reversible import Reversible, ReversibleSequence
from fast_attention.nn.token_mixer import TokenMixer
from fast_attention.nn.tying import TiedHead
from fast_attention.parallel.collectives import all_gather
from fast_attention.parallel.spreading import Spread
from fast_attention.value import Value, at_least, one_of

Head = Literal["tokens", "classes"]
Reads = Literal["", "bytes", "residues"]


@dataclass(frozen=True, repr=False)
class ModelConfig(Value):
    """The settings of a model, plain values that are saved as ``config.json``.

    Args:
        vocab_size: Kinds of tokens.
        mechanism: The repr of one mechanism for all layers, or of one for each layer, repeated as often as needed.
        width: Width of a token, all heads together.
        layers: Number of blocks.
        heads: Heads per block; must divide ``width``.
        hidden: Width inside the feed-forward layers; 0 for ``4 * width``.
        max_len: Longest sequence for learned positions and for mechanisms with ``traits.bounded``.
        positions: ``"learned"``, ``"sinusoidal"``, ``"rotary"`` (mechanisms with ``traits.rotary``) or ``"none"``;
            ``"auto"`` becomes rotary where every layer and the heads' width allow it, and learned elsewhere.
        causal: A decoder, whose outputs see the past only, rather than an encoder.
        head: ``"tokens"`` predicts a token at each position, ``"classes"`` one class for the sequence.
        classes: Number of classes.
        dropout: Probability of dropping a number behind each sublayer while training.
        reversible: Reversible blocks, whose activations are computed again in the backward pass.
        chunks: Chunks of the feed-forward layers (``ChunkedFeedForward``).
        tied: Whether the head for tokens shares the embedding's weights.
        reads: What the tokens are: ``"bytes"`` of text, ``"residues"`` of proteins, or "" for a task's own numbers.
        conv: Tokens that a decoder's ``CausalConvolution`` sees before queries, keys and values: 4, say; 0 for none.
    """

    vocab_size: int
    mechanism: str | tuple[str, ...] = "Softmax()"
    width: int = 128
    layers: int = 2
    heads: int = 4
    hidden: int = 0
    max_len: int = 512
    positions: Positions = "auto"
    causal: bool = False
    head: Head = "tokens"
    classes: int = 0
    dropout: float = 0.0
    reversible: bool = False
    chunks: int = 1
    tied: bool = True
    reads: Reads = ""
    conv: int = 0

    def __post_init__(self) -> None:
        names = [self.mechanism] if not isinstance(self.mechanism, list | tuple) else list(self.mechanism)
        if not names:
            raise ValueError("ModelConfig(mechanism=()): name at least one mechanism")
        expressions = tuple(repr(catalogue.parse(name)) for name in names)
        object.__setattr__(self, "mechanism", expressions[0] if len(expressions) == 1 else expressions)
        for setting in ("vocab_size", "width", "layers", "heads", "max_len", "chunks"):
            at_least(self, setting, getattr(self, setting), 1)
        one_of(self, "positions", self.positions, Positions)
        one_of(self, "head", self.head, Head)
        one_of(self, "reads", self.reads, Reads)
        at_least(self, "conv", self.conv, 0)
        if self.conv and not self.causal:
            raise ValueError(f"ModelConfig(conv={self.conv}): the convolution is causal, for decoders: set causal=True")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"ModelConfig(dropout={self.dropout!r}): dropout must be at least 0 and below 1")
        if self.head == "classes" and self.classes < 2:
            raise ValueError(f"head='classes' needs classes of at least 2; got {self.classes}")
        if self.positions == "auto":
            rotates = all(catalogue.parse(name).traits.rotary for name in self.mechanisms)
            even = self.width // self.heads % 2 == 0
            object.__setattr__(self, "positions", "rotary" if rotates and even else "learned")

    @property
    def mechanisms(self) -> list[str]:
        """The mechanism of every layer."""
        names = [self.mechanism] if isinstance(self.mechanism, str) else list(self.mechanism)
        return [names[i % len(names)] for i in range(self.layers)]

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model reads; None: any."""
        bounded = any(catalogue.parse(name).traits.bounded for name in self.mechanisms)
        return self.max_len if bounded or self.positions == "learned" else None


class Mixing(nn.Module):
    """The first half of a block: norm, a convolution where there is one, token mixing, dropout."""

    def __init__(self, config: ModelConfig, mechanism: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.conv = CausalConvolution(config.width, config.conv) if config.conv else None
        self.mixer = TokenMixer(
            config.width, config.heads, mechanism, max_len=config.max_len, rotary=config.positions == "rotary"
        )
        self.dropout = config.dropout

    def forward(self, x: Tensor, *, is_causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
        """The residual (B, L, E) of tokens (B, L, E)."""
        x = self.norm(x)
        x = x if self.conv is None else self.conv(x, key_mask=key_mask)
        out = self.mixer(x, is_causal=is_causal, key_mask=key_mask)
        return F.dropout(out, self.dropout, self.training)

    def decode(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The residual of new tokens (B, N, E), and the state after them."""
        x = self.norm(x)
        if self.conv is None:
            return self.mixer.decode(x, state)
        recent, inner = (None, None) if state is None else state
        x, recent = self.conv.decode(x, recent)
        out, inner = self.mixer.decode(x, inner)
        return out, ConvolutionState(recent, inner)


class Widening(nn.Module):
    """The second half of a block: norm, feed-forward layer, dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.feed = ChunkedFeedForward(config.width, config.hidden or None, chunks=config.chunks)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """The residual (B, L, E) of tokens (B, L, E)."""
        return F.dropout(self.feed(self.norm(x)), self.dropout, self.training)


class Block(nn.Module):
    """A pre-norm transformer block: ``x + mixing(x)``, then ``x + widening(x)``."""

    def __init__(self, f: Mixing, g: Widening) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: Tensor, *, is_causal: bool, key_mask: Tensor | None) -> Tensor:
        """Tokens (B, L, E) to tokens."""
        x = x + self.f(x, is_causal=is_causal, key_mask=key_mask)
        return x + self.g(x)


class ModelState(NamedTuple):
    """A decoder's state: how many tokens it has read, and the state of each layer."""

    length: Tensor
    layers: tuple[Any, ...]


class Model(Spread, TiedHead):
    """A transformer whose token mixing is any mechanism, layer by layer.

    Args:
        config: The sizes and settings.

    Raises:
        Unsupported: ``causal`` or ``rotary`` with a mechanism whose traits deny it.
        ValueError: Settings do not go together.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        has_table = config.positions in ("learned", "sinusoidal")
        self.places = PositionTable(config.positions, config.width, config.max_len) if has_table else None
        halves = [(Mixing(config, name), Widening(config)) for name in config.mechanisms]
        for mixing, _ in halves:
            mechanism = mixing.mixer.mechanism
            if trait := mechanism.traits.denying(config.causal):
                raise mechanism.refuse("a causal model" if config.causal else "a model that is not causal", trait)
        if config.reversible:
            self.blocks: Any = ReversibleSequence(Reversible(*pair) for pair in halves)
        else:
            self.blocks = nn.ModuleList(Block(*pair) for pair in halves)
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.vocab_size if config.head == "tokens" else config.classes)
        self._initialise()
        if config.tied and config.head == "tokens":
            self.out.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Draw small normal weights, smaller where residuals add up; the mechanisms' own weights stay as drawn."""
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and ".attention" not in name:
                nn.init.normal_(module.weight, std=residual_std if name.endswith(("out_proj", "narrow")) else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def hidden(
        self, tokens: Int[Tensor, "batch length"], key_mask: Bool[Tensor, "batch length"] | None = None
    ) -> Float[Tensor, "batch length width"]:
        """The tokens' vectors after the last block and norm; over processes (``parallelize``) those of local tokens."""
        x = self.embedding(tokens)
        if self.places is not None:
            shards = self.shards_of(None, x)
            x = self.places(x, 0 if shards is None else shards.start)
        if isinstance(self.blocks, ReversibleSequence):
            x = self.blocks(x, is_causal=self.config.causal, key_mask=key_mask)
        else:
            for block in self.blocks:
                x = block(x, is_causal=self.config.causal, key_mask=key_mask)
        return self.norm(x)

    def forward(
        self, tokens: Int[Tensor, "batch length"], key_mask: Bool[Tensor, "batch length"] | None = None
    ) -> Float[Tensor, "..."]:
        """Logits: of the next or masked token at each position (B, L, vocabulary), or of the classes (B, classes).

        Args:
            tokens: Whole numbers (B, L) below ``vocab_size``.
            key_mask: Boolean (B, L), True = a token, False = padding.
        """
        x = self.hidden(tokens, key_mask)
        if self.config.head == "classes":
            x = _mean(x, key_mask, self.group_of(None))
        return self.out(x)

    def decode(
        self, tokens: Int[Tensor, "batch new"], state: ModelState | None = None
    ) -> tuple[Float[Tensor, "batch new vocab"], ModelState]:
        """Logits after each of one or more new tokens, and the state; any split of a sequence gives the same logits.

        Over processes (``parallelize``) the new tokens are those of all, and each gets the state after them: a prompt
        is read by many, and one goes on alone after ``parallelize(model, None)``.

        Raises:
            Unsupported: A layer's mechanism cannot stream, or the model is an encoder.
        """
        if not self.config.causal:
            raise Unsupported("an encoder's outputs see later tokens: only a model with causal=True decodes")
        start = 0 if state is None else int(state.length)
        x = self.embedding(tokens)
        shards = self.shards_of(None, x)
        end = start + (tokens.shape[-1] if shards is None else shards.length)
        start += 0 if shards is None else shards.start
        x = x if self.places is None else self.places(x, start)
        blocks: Any = self.blocks.blocks if isinstance(self.blocks, ReversibleSequence) else self.blocks
        other_stream, states = x, []
        for i, block in enumerate(blocks):
            source = other_stream if self.config.reversible else x
            mixed, layer_state = block.f.decode(source, None if state is None else state.layers[i])
            states.append(layer_state)
            x = x + mixed
            if self.config.reversible:
                other_stream = other_stream + block.g(x)
            else:
                x = x + block.g(x)
        x = (x + other_stream) / 2 if self.config.reversible else x
        return self.out(self.norm(x)), ModelState(torch.tensor(end), tuple(states))

    @property
    def streams(self) -> bool:
        """Whether every layer can decode from a state."""
        return all(module.mechanism.traits.memory for module in self.modules() if isinstance(module, TokenMixer))

    def present_config(self) -> ModelConfig:
        """The settings, with the mechanisms that the layers run now, as where others were put in."""
        names = tuple(repr(module.mechanism) for module in self.modules() if isinstance(module, TokenMixer))
        if list(names) == self.config.mechanisms:
            return self.config
        return replace(self.config, mechanism=names if len({*names}) > 1 else names[0])


def _mean(x: Tensor, key_mask: Tensor | None, group: Any) -> Tensor:
    """The mean of the visible tokens, those of other processes too."""
    if group is None and key_mask is None:
        return x.mean(-2)
    visible = torch.ones_like(x[..., :1], dtype=torch.bool) if key_mask is None else key_mask[..., None]
    total, count = x.masked_fill(~visible, 0.0).sum(-2), visible.sum(-2)
    if group is not None:
        total = all_gather(total, group).sum(0)
        count = all_gather(count, group).sum(0)
    return total / count.clamp(min=1)
