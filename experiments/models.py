"""Small decoders and encoders made of any mechanism: pre-norm blocks, positions, a head, generation, saving."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention import Unsupported, __version__, catalogue, files
from fast_attention.nn.feedforward import ChunkedFeedForward
from fast_attention.nn.reversible import Reversible, ReversibleSequence
from fast_attention.nn.token_mixer import TokenMixer
from fast_attention.value import Value, at_least

Positions = Literal["auto", "learned", "sinusoidal", "rotary", "none"]
FORMAT = "fast-attention model 1"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
MODELS = Path(__file__).parent / "data"  # with protein-mini, a trained encoder


@dataclass(frozen=True, repr=False)
class ModelConfig(Value):
    """The settings of a model, plain values that are saved as ``config.json``.

    Args:
        vocab_size: Kinds of tokens.
        mechanism: The expression of one mechanism for all layers, or of several that the layers take in turn.
        width: Width of a token, all heads together.
        layers: Number of blocks.
        heads: Heads of a block; must divide ``width``.
        hidden: Width inside the feed-forward layers; 0 for ``4 * width``.
        max_len: Longest sequence for learned positions and for mechanisms with ``traits.needs_max_len``.
        positions: ``"learned"``, ``"sinusoidal"``, ``"rotary"`` (mechanisms with ``traits.rotary``) or ``"none"``.
            ``"auto"`` becomes rotary if every layer and the heads' width allow it, and learned otherwise.
        causal: A decoder, whose outputs see the past only; False for an encoder.
        head: ``"tokens"`` predicts a token at each position, ``"classes"`` one class for the sequence.
        classes: Number of classes.
        dropout: Probability of dropping a number behind each sublayer while training.
        reversible: Reversible blocks, whose activations are computed again in the backward pass.
        chunks: Chunks of the feed-forward layers (``ChunkedFeedForward``).
        tied: Whether the head for tokens shares the embedding's weights.
        reads: What the tokens are: ``"bytes"`` of text, ``"residues"`` of proteins, or "" for a task's own numbers.
        conv: Tokens that a ``CausalConvolution`` before queries, keys and values sees: 4, say; 0 for none.
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
    head: Literal["tokens", "classes"] = "tokens"
    classes: int = 0
    dropout: float = 0.0
    reversible: bool = False
    chunks: int = 1
    tied: bool = True
    reads: Literal["", "bytes", "residues"] = ""
    conv: int = 0

    def __post_init__(self) -> None:
        names = [self.mechanism] if not isinstance(self.mechanism, list | tuple) else list(self.mechanism)
        if not names:
            raise ValueError("ModelConfig(mechanism=()): name at least one mechanism")
        expressions = tuple(repr(catalogue.parse(name)) for name in names)
        object.__setattr__(self, "mechanism", expressions[0] if len(expressions) == 1 else expressions)
        for setting in ("vocab_size", "width", "layers", "heads", "max_len", "chunks"):
            at_least(self, setting, getattr(self, setting), 1)
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
            rotary = all(catalogue.parse(name).traits.rotary for name in self.mechanisms)
            even = self.width // self.heads % 2 == 0
            object.__setattr__(self, "positions", "rotary" if rotary and even else "learned")

    @property
    def mechanisms(self) -> list[str]:
        """The mechanism of every layer."""
        names = [self.mechanism] if isinstance(self.mechanism, str) else list(self.mechanism)
        return [names[i % len(names)] for i in range(self.layers)]

    @property
    def longest(self) -> int | None:
        """The longest sequence that the model reads; None: any."""
        bounded = any(catalogue.parse(name).traits.needs_max_len for name in self.mechanisms)
        return self.max_len if bounded or self.positions == "learned" else None


def sinusoids(length: int, width: int, start: int = 0, device: torch.device | None = None) -> Tensor:
    """Sines of the even and cosines of the odd channels (arXiv 1706.03762, section 3.5), from position ``start`` on."""
    exact = torch.device("cpu") if device is not None and device.type == "mps" else device  # which knows no float64
    fractions = torch.arange(0, width, 2, device=exact, dtype=torch.float64) / width
    angles = (torch.arange(length, device=exact) + start)[:, None] * torch.exp(-fractions * math.log(10_000.0))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[:, :width]


class PositionTable(nn.Module):
    """Learned or sinusoidal positions, added to the tokens.

    Args:
        kind: ``"learned"`` (drawn with deviation 0.02) or ``"sinusoidal"`` (any length).
        width: Width of the tokens.
        max_len: Longest sequence of the learned table.
    """

    def __init__(self, kind: Positions, width: int, max_len: int) -> None:
        super().__init__()
        self.kind, self.max_len = kind, max_len
        self.table = nn.Parameter(torch.randn(max_len, width) * 0.02) if kind == "learned" else None

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """Tokens (B, L, E) with their positions from ``start`` on."""
        length = x.shape[-2]
        if self.table is None:
            return x + sinusoids(length, x.shape[-1], start, x.device).to(x)
        if start + length > self.max_len:
            raise ValueError(f"the model has learned positions for {self.max_len} tokens and got {start + length}")
        return x + self.table[start : start + length]


class CausalConvolution(nn.Module):
    """A short depthwise convolution in front of queries, keys and values: ``x_t + sum_i weight_i x_(t - i)``, i < size.

    Linear attention and other constant states cannot single out the token before; Based (arXiv 2402.18668) and Mamba
    (arXiv 2312.00752) give it to them so, with ``size`` 4. The weights start at zero: the tokens as they are.

    Args:
        width: Width E of the tokens; each channel has its own weights.
        size: Tokens that one output sees: its own and ``size - 1`` earlier ones.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, width))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, L, E) to tokens (B, L, E); where ``key_mask`` (B, L) is False a token counts as zeros."""
        return self.decode(x if key_mask is None else x.masked_fill(~key_mask[..., None], 0.0), None)[0]

    def decode(self, x: Tensor, recent: Tensor | None) -> tuple[Tensor, Tensor]:
        """New tokens (B, N, E), and the last inputs (B, size - 1, E), which the next call takes as ``recent``."""
        length, before = x.shape[-2], len(self.weight) - 1
        recent = x.new_zeros(*x.shape[:-2], before, x.shape[-1]) if recent is None else recent
        joined = torch.cat([recent, x], -2)
        with torch.autocast(x.device.type, enabled=False):  # sums of 16-bit tokens are taken in float32
            wide = joined.float() if x.dtype in (torch.float16, torch.bfloat16) else joined
            out = wide[..., before:, :]
            for i, factor in enumerate(self.weight):
                out = out + factor * wide[..., before - i : before - i + length, :]
        return out.to(x.dtype), joined[..., length:, :].clone()  # a slice would keep a whole prompt in memory


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
        return out, (recent, inner)


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


class Model(nn.Module):
    """A transformer whose token mixing is any mechanism, layer by layer.

    Args:
        config: The sizes and settings.

    Raises:
        Unsupported: ``causal`` or ``rotary`` with a mechanism whose traits deny it.
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

    @property
    def mixers(self) -> list[TokenMixer]:
        """The token mixing of every layer."""
        return [module for module in self.modules() if isinstance(module, TokenMixer)]

    @property
    def streams(self) -> bool:
        """Whether every layer can decode from a state."""
        return all(mixer.mechanism.traits.memory for mixer in self.mixers)

    def hidden(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The vectors (B, L, E) of tokens (B, L) after the last block and norm."""
        x = self.embedding(tokens)
        x = x if self.places is None else self.places(x)
        if isinstance(self.blocks, ReversibleSequence):
            x = self.blocks(x, is_causal=self.config.causal, key_mask=key_mask)
        else:
            for block in self.blocks:
                x = block(x, is_causal=self.config.causal, key_mask=key_mask)
        return self.norm(x)

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Logits: of the next or masked token at each position (B, L, vocabulary), or of the classes (B, classes).

        Args:
            tokens: Whole numbers (B, L) below ``vocab_size``.
            key_mask: Boolean (B, L), True = a token, False = padding.
        """
        x = self.hidden(tokens, key_mask)
        if self.config.head == "classes" and key_mask is not None:
            visible = key_mask[..., None]
            x = x.masked_fill(~visible, 0.0).sum(-2) / visible.sum(-2).clamp(min=1)
        elif self.config.head == "classes":
            x = x.mean(-2)
        return self.out(x)

    def decode(self, tokens: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
        """Logits (B, N, V) after each of N new tokens (B, N), and the state; any split of a sequence gives the same.

        Raises:
            Unsupported: A layer's mechanism cannot stream, or the model is an encoder.
        """
        if not self.config.causal:
            raise Unsupported("an encoder's outputs see later tokens: only a model with causal=True decodes")
        start = 0 if state is None else int(state.length)
        x = self.embedding(tokens)
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
        return self.out(self.norm(x)), ModelState(torch.tensor(start + tokens.shape[-1]), tuple(states))


# Generation


def choose(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Choose one token (B,) for each row of logits (B, V).

    Args:
        logits: Of the next token.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Only the k likeliest tokens; 0 for all.
        top_p: Only the likeliest tokens that together have this probability.
        generator: For the draw.
    """
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k:
        threshold = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if top_p < 1.0:
        ranked, order = logits.sort(-1, descending=True)
        probabilities = ranked.softmax(-1)
        excluded = probabilities.cumsum(-1) - probabilities >= top_p
        excluded[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(excluded).scatter(-1, order, excluded), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[..., 0]


@torch.no_grad()
def stream(model: Model, prompts: Sequence[Sequence[int]], *, seed: int = 0, **how: Any) -> Iterator[list[int | None]]:
    """Yield new tokens without end, one per prompt at a time; None for a prompt that is still being read.

    Prompts of unequal lengths are one batch without padding: where a longer prompt has tokens left, these are read
    instead of chosen ones. A mechanism that cannot stream reads the whole sequence again for every token.

    Args:
        model: A decoder in evaluation mode.
        prompts: Lists of tokens, of any lengths of at least one.
        seed: For the draws.
        how: Arguments of ``choose``: ``temperature``, ``top_k``, ``top_p``.
    """
    if not model.config.causal or model.config.head != "tokens":
        raise ValueError("generation needs a decoder: ModelConfig(causal=True, head='tokens')")
    if not prompts or not all(prompts):
        raise ValueError("generation needs prompts of at least one token each")
    device = model.embedding.weight.device
    generator, position, state = torch.Generator(device).manual_seed(seed), len(min(prompts, key=len)), None
    past = new = torch.tensor([list(prompt[:position]) for prompt in prompts], device=device)
    while True:
        if model.streams:
            logits, state = model.decode(new, state)
        else:
            logits = model(past)
        chosen = choose(logits[:, -1], generator=generator, **how).tolist()
        reading = [position < len(prompt) for prompt in prompts]
        yield [None if more else token for token, more in zip(chosen, reading, strict=True)]
        tokens = [p[position] if more else token for p, token, more in zip(prompts, chosen, reading, strict=True)]
        new = torch.tensor(tokens, device=device)[:, None]
        past, position = torch.cat([past, new], -1), position + 1


def generate(
    model: Model, prompts: Sequence[Sequence[int]], new_tokens: int = 64, *, stop: int | None = None, seed: int = 0,
    **how: Any,
) -> list[list[int]]:  # fmt: skip
    """The continuation of each prompt by at most ``new_tokens`` tokens: the likeliest, unless ``temperature`` is given.

    Args:
        model: A decoder in evaluation mode.
        prompts: Lists of tokens.
        new_tokens: Tokens to add to each.
        stop: A token that ends a sequence (and is its last).
        seed: For the draws.
        how: Arguments of ``choose``: ``temperature``, ``top_k``, ``top_p``.
    """
    results: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, prompts, seed=seed, **{"temperature": 0.0, **how}):
        for result, token in zip(results, tokens, strict=True):
            if token is not None and len(result) < new_tokens and result[-1:] != [stop]:
                result.append(token)
        if all(len(result) == new_tokens or result[-1:] == [stop] for result in results):
            break
    return results


# Saving


def save(model: Model, folder: str | os.PathLike[str]) -> None:
    """Write ``config.json``, with the mechanisms that the layers run now, and ``model.safetensors``.

    A process that is killed meanwhile leaves the old model or the new one. The files' hashes stand in ``config.json``:
    safetensors reads flipped bits without an error, and a changed setting makes another model.
    """
    from safetensors.torch import save_file

    names = tuple(repr(mixer.mechanism) for mixer in model.mixers)
    config = model.config if list(names) == model.config.mechanisms else replace(model.config, mechanism=names)
    tensors = {name: x.contiguous() for name, x in model.state_dict().items()}
    tied = config.tied and config.head == "tokens"
    if tied and not torch.equal(tensors.pop("out.weight"), tensors["embedding.weight"]):
        raise ValueError("model.out.weight is no longer model.embedding.weight, as ModelConfig(tied=True) has it")
    settings: dict[str, Any] = {"format": FORMAT, "version": __version__, **asdict(config)}
    with files.atomic_group(Path(folder) / CONFIG) as partial:
        weights = partial.with_name(WEIGHTS)
        save_file(tensors, weights)
        settings["sha256"] = {CONFIG: _digest(settings), WEIGHTS: files.sha256(weights)}
        partial.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def load(folder: str | os.PathLike[str], device: torch.device | str = "cpu") -> Model:
    """The model that ``save`` wrote, in evaluation mode, equal to the bit and in its dtypes, random features too.

    Args:
        folder: Its folder, or the name of one in ``experiments/data``: ``"protein-mini"``.
        device: Where its weights go.

    Raises:
        FileNotFoundError: The folder holds no model.
        ValueError: Its files do not belong together or are damaged.
    """
    from safetensors.torch import load_file

    path = Path(folder) if Path(folder).exists() else MODELS / folder
    files.settle(path / CONFIG)
    if not (path / CONFIG).exists():
        raise FileNotFoundError(f"{os.fspath(folder)} holds no model: {CONFIG} is missing")
    try:
        settings = files.decoded((path / CONFIG).read_text(encoding="utf-8"))
        files.readable(settings, FORMAT, os.fspath(folder))
        digests = settings.pop("sha256")
        if _digest(settings) != digests[CONFIG]:
            raise ValueError(f"{CONFIG} is not what was written")
        files.verify(path / WEIGHTS, digests[WEIGHTS])
        tensors = load_file(path / WEIGHTS)
        config = ModelConfig(**{name: x for name, x in settings.items() if name not in ("format", "version")})
        if config.tied and config.head == "tokens":
            tensors["out.weight"] = tensors["embedding.weight"]
        with torch.random.fork_rng(devices=[]):
            model = Model(config)
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            x.data = x.data.to(tensors[name].dtype)
        model.load_state_dict(tensors)
    except files.Newer:
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(folder)} holds no sound model: {error}") from error
    return model.to(device).eval()


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
