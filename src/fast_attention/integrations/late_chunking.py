"""Late chunking: one vector for each chunk of a long document, of tokens that were read with what stands around them.

Günther et al. 2024 (arXiv 2409.04701): the model reads the document first, and the vectors of its tokens are averaged
chunk by chunk after that. A chunk that is encoded alone knows nothing of its neighbours.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import operator
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from fast_attention.expressions import in_words
from fast_attention.integrations.modules import evaluating
from fast_attention.integrations.swapping import pretrained
from fast_attention.nn.positions import first_position
from fast_attention.refusals import is_module

OVERLAP = 4  # neighbouring windows share at least one part in so many of their tokens
TOKENS_AT_ONCE = 8192  # of a batch of windows, which bounds the memory
NO_LIMIT = 10**9  # transformers writes 10**30 where a tokenizer knows no limit
EXCERPT = 60  # characters of a chunk that a printed table shows
DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # names that SentenceTransformer.encode_document looks up


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk of a document: its place in the text, and its vector.

    Args:
        text: ``document[start:end]``.
        start, end: Characters of the document.
        tokens: Numbers of its tokens, counted in the document without special tokens.
        vector: (width,).
    """

    text: str
    start: int
    end: int
    tokens: range
    vector: Tensor = field(repr=False)


@dataclass(frozen=True, eq=False, repr=False)
class LateChunks(Sequence[Chunk]):
    """The result of ``late_chunks``: an immutable sequence of chunks. Print it for a table.

    Args:
        chunks: In the order of the text.
        vectors: (chunks, width), one row for each chunk.
    """

    chunks: tuple[Chunk, ...]
    vectors: Tensor

    def __len__(self) -> int:
        return len(self.chunks)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> LateChunks: ...
    def __getitem__(self, index: int | slice) -> Chunk | LateChunks:
        if isinstance(index, slice):
            return LateChunks(self.chunks[index], self.vectors[index])
        return self.chunks[index]

    def __repr__(self) -> str:
        return f"<{len(self)} chunks, vectors {tuple(self.vectors.shape)}>"

    def __str__(self) -> str:
        rows = [("chunk", "characters", "tokens", "text")]
        for number, chunk in enumerate(self):
            tokens = f"{chunk.tokens.start} to {chunk.tokens.stop}"
            excerpt = textwrap.shorten(chunk.text, EXCERPT, placeholder=" ...")
            rows.append((str(number), f"{chunk.start} to {chunk.end}", tokens, excerpt))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"vectors: {len(self)} of width {self.vectors.shape[-1]}"])


def late_chunks(
    model: nn.Module,
    document: str,
    chunk: int | Sequence[tuple[int, int]] = 256,
    *,
    tokenizer: Any = None,
    prompt: str | None = None,
) -> LateChunks:
    """Embed a long document in one call: a vector for each chunk, of tokens that saw what stands around the chunk.

    The model reads the whole document, in overlapping windows where it is longer than the model reads at once. Then the
    vectors of tokens are averaged for each chunk (late chunking, arXiv 2409.04701). A token takes its vector from the
    window in which it lies farthest from a cut. Special tokens, as [CLS], stand in every window and in no average, so
    that the one chunk of a short text is near what ``encode`` gives, and not equal to it. No gradients; dropout is off.

    Args:
        model: A ``SentenceTransformer`` that pools by the mean, or a Hugging Face model; swapped and extended ones too.
        document: The text.
        chunk: Tokens of a chunk; or spans ``(start, end)`` in characters of the text, from left to right. A token
            belongs to the span that holds its middle. Tokens outside of all spans are read and not averaged.
        tokenizer: The fast tokenizer of a Hugging Face model. A ``SentenceTransformer`` has its own.
        prompt: A text in front of every window, which belongs to no chunk. By default what ``encode_document`` of a
            ``SentenceTransformer`` puts there.

    Returns:
        The chunks: ``chunks.vectors`` is one tensor, ``chunks[0].start`` and ``.end`` are a chunk's place. What stands
        behind the pooling of a ``SentenceTransformer`` (``Dense``, ``Normalize``) is applied to each vector.

    Raises:
        TypeError: ``model`` is neither, or an argument is of another type.
        ValueError: The document has no tokens; a chunk has more tokens than the model reads at once; spans overlap, are
            out of order, are empty or leave the text; the tokenizer is slow; or the model pools by other than the mean.
    """
    if not isinstance(document, str):
        raise TypeError(
            f"document must be a text; got {in_words(document)}; for several: [late_chunks(model, each) ...]"
        )
    encoder = _encoder(model, tokenizer)
    prompt = encoder.prompt if prompt is None else prompt
    encoding = _tokenized(encoder.tokenizer, prompt, document)
    longest = _longest(model, encoder.tokenizer)
    around = len(encoding.prefix) + len(encoding.suffix)
    if longest <= around:
        raise ValueError(f"prompt and special tokens are {around} tokens, and the model reads {longest} at once")
    if isinstance(chunk, Sequence) and not isinstance(chunk, str):
        places = _given(chunk, document, encoding.offsets, longest)
    else:
        places = _counted(chunk, encoding.offsets, longest)
    with torch.no_grad(), evaluating(model):
        tokens = _read(encoder.tokens, encoding, longest - around, next(model.parameters()).device)
        vectors = encoder.finish(torch.stack([tokens[each.start : each.stop].mean(0) for *_, each in places]))
    chunks = (Chunk(document[p[0] : p[1]], *p, vector) for p, vector in zip(places, vectors, strict=True))
    return LateChunks(tuple(chunks), vectors)


# Models ---------------------------------------------------------------------------------------------------------------


class _Encoder(NamedTuple):
    """Reads tokens, and makes a chunk's vector of their mean."""

    tokenizer: Any
    prompt: str
    tokens: Callable[[dict[str, Tensor]], Tensor]  # numbers of tokens (rows, tokens) -> vectors (rows, tokens, width)
    finish: Callable[[Tensor], Tensor]  # means (chunks, width) -> vectors


def _encoder(model: nn.Module, tokenizer: Any) -> _Encoder:
    is_module("model", model)
    kinds = {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(model).__mro__}
    if "sentence_transformers.SentenceTransformer" in kinds:
        if tokenizer is not None:
            raise TypeError("tokenizer= is for Hugging Face models: a SentenceTransformer has its own")
        return _of_sentence_transformer(model)
    if "" not in pretrained(model):
        raise TypeError(f"model must be a SentenceTransformer or a Hugging Face model; got {type(model).__name__}")
    if tokenizer is None:
        raise TypeError(f"{type(model).__name__} comes without its tokenizer: give tokenizer=AutoTokenizer...")
    inner: Any = model.base_model
    if "decoder_input_ids" in inspect.signature(type(inner).forward).parameters:
        raise ValueError(f"{type(model).__name__} is an encoder with a decoder: give model.get_encoder()")

    def tokens(batch: dict[str, Tensor]) -> Tensor:
        hidden = getattr(inner(**batch), "last_hidden_state", None)
        if hidden is None or hidden.shape[:2] != batch["input_ids"].shape:
            raise ValueError(f"{type(model).__name__} does not return last_hidden_state with a vector for each token")
        return hidden

    return _Encoder(tokenizer, "", tokens, lambda means: means)


def _of_sentence_transformer(model: Any) -> _Encoder:
    kinds = [type(module).__name__ for module in model]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ValueError(
            f"the SentenceTransformer holds {', '.join(kinds)}: its modules must begin with Transformer and Pooling; "
            "otherwise give the Hugging Face model in it, with tokenizer="
        )
    transformer, pooling, *others = model
    if (mode := pooling.pooling_mode) != "mean":
        raise ValueError(
            f"the SentenceTransformer pools by {mode!r}, and a chunk's vector is the mean of its tokens: give a model "
            "with pooling_mode='mean', or the Hugging Face model in it, with tokenizer="
        )

    def finish(means: Tensor) -> Tensor:
        features = {"sentence_embedding": means}
        for module in others:
            features = module(features)
        return features["sentence_embedding"][:, : model.truncate_dim]

    names = [*DOCUMENT_PROMPTS, model.default_prompt_name]
    prompt = next((model.prompts[name] for name in names if name in model.prompts), "")
    return _Encoder(model.tokenizer, prompt, lambda batch: transformer(batch)["token_embeddings"], finish)


def _longest(model: nn.Module, tokenizer: Any) -> int:
    """Tokens that a model reads at once, special ones too: what its tokenizer says, but no more than its positions."""
    (inner,) = pretrained(model).values()
    known = [tokenizer.model_max_length, getattr(model, "max_seq_length", None)]
    positions = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        known.append(positions - first_position(inner))
    return min((each for each in known if each is not None), default=NO_LIMIT)


# Tokens and windows ---------------------------------------------------------------------------------------------------


class _Encoding(NamedTuple):
    """A document's tokens with the special ones around them, and where each stands in the text."""

    inputs: dict[str, Tensor]  # what the tokenizer gives the model: (tokens,) with special tokens and the prompt
    prefix: range  # special tokens and the prompt
    suffix: range  # special tokens
    offsets: list[tuple[int, int]]  # of the document's own tokens: first character, and that behind the last


def _tokenized(tokenizer: Any, prompt: str, document: str) -> _Encoding:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer: {type(tokenizer).__name__} does not say where its tokens stand in the text: give a fast one "
            "(AutoTokenizer.from_pretrained(name), or PreTrainedTokenizerFast)"
        )
    encoding = tokenizer(prompt + document, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    special, offsets = encoding["special_tokens_mask"], encoding["offset_mapping"]
    count = len(special)
    first = next((i for i in range(count) if not special[i] and offsets[i][1] > len(prompt)), count)
    last = count - next((i for i, each in enumerate(reversed(special)) if not each), count)
    if first >= last:
        raise ValueError(f"the document has no tokens: {document[:EXCERPT]!r}")
    inputs = {name: torch.tensor(encoding[name]) for name in ("input_ids", "token_type_ids") if name in encoding}
    places = [(max(start - len(prompt), 0), end - len(prompt)) for start, end in offsets[first:last]]
    return _Encoding(inputs, range(first), range(last, count), places)


def windows(count: int, content: int) -> list[tuple[range, range]]:
    """Windows over a document: the tokens that each reads, and those of them whose vectors are taken from it.

    All windows are equally wide and equally far apart. A token belongs to the window whose middle is nearest.

    Args:
        count: Tokens of the document.
        content: Tokens of a window.
    """
    width = min(count, content)
    steps = -(-(count - width) // (content - content // OVERLAP))
    starts = [round(i * (count - width) / max(steps, 1)) for i in range(steps + 1)]
    borders = [(left + width + right + 1) // 2 for left, right in itertools.pairwise(starts)]
    taken = itertools.pairwise([0, *borders, count])
    return [(range(start, start + width), range(*each)) for start, each in zip(starts, taken, strict=True)]


def _read(
    read: Callable[[dict[str, Tensor]], Tensor], encoding: _Encoding, content: int, device: torch.device
) -> Tensor:
    """The vectors (tokens, width) of the document's own tokens."""
    first, found = len(encoding.prefix), []
    all_windows = windows(len(encoding.offsets), content)
    index = torch.tensor([[*encoding.prefix, *(first + i for i in seen), *encoding.suffix] for seen, _ in all_windows])
    size = max(TOKENS_AT_ONCE // index.shape[1], 1)
    for begin in range(0, len(all_windows), size):
        rows = index[begin : begin + size]
        batch = {name: values[rows].to(device) for name, values in encoding.inputs.items()}
        hidden = read({**batch, "attention_mask": torch.ones_like(batch["input_ids"])})
        for row, (seen, taken) in zip(hidden, all_windows[begin : begin + size], strict=True):
            shift = first - seen.start
            found.append(row[taken.start + shift : taken.stop + shift])
    return torch.cat(found)


# Chunks ---------------------------------------------------------------------------------------------------------------


Place = tuple[int, int, range]  # first character, that behind the last, numbers of tokens


def _counted(chunk: Any, offsets: list[tuple[int, int]], longest: int) -> list[Place]:
    """Chunks of so many tokens; the last one has the rest."""
    if not isinstance(chunk, Integral) or isinstance(chunk, bool):
        raise TypeError(f"chunk must be a number of tokens or a list of spans (start, end); got {in_words(chunk)}")
    if (size := int(chunk)) < 1:
        raise ValueError(f"chunk={size}: give at least 1 token")
    if size > longest:
        raise ValueError(f"chunk={size}: the model reads {longest:,} tokens at once; give fewer, or extend(model, ...)")
    ranges = [range(len(offsets))[first : first + size] for first in range(0, len(offsets), size)]
    return [(offsets[each[0]][0], offsets[each[-1]][1], each) for each in ranges]


def _given(spans: Sequence[Any], document: str, offsets: list[tuple[int, int]], longest: int) -> list[Place]:
    """Chunks at the spans of characters, each with the tokens whose middles it holds."""
    if not spans:
        raise ValueError("chunk=[]: give at least one span (start, end)")
    middles = [*itertools.accumulate((start + end for start, end in offsets), max)]  # doubled, to stay whole
    places: list[Place] = []
    for number, span in enumerate(spans):
        said = f"chunk[{number}]={span!r}"
        try:
            start, end = map(operator.index, span)
        except (TypeError, ValueError):
            raise TypeError(f"{said}: give two whole numbers, (start, end) in characters of the document") from None
        if start >= end:
            raise ValueError(f"{said} is empty: its end must be above its start")
        if start < 0 or end > len(document):
            raise ValueError(f"{said} leaves the text, which has {len(document):,} characters: 0 <= start, end <= that")
        if places and start < places[-1][0]:
            raise ValueError(f"{said} is out of order: it begins before chunk[{number - 1}]; sort the spans")
        if places and start < places[-1][1]:
            raise ValueError(
                f"{said} overlaps chunk[{number - 1}], which ends at {places[-1][1]}: begin there or later"
            )
        tokens = range(bisect.bisect_left(middles, 2 * start), bisect.bisect_left(middles, 2 * end))
        if not tokens:
            raise ValueError(f"{said} is empty: no token has its middle in {document[start:end][:EXCERPT]!r}; widen it")
        if len(tokens) > longest:
            raise ValueError(
                f"{said} has {len(tokens):,} tokens, and the model reads {longest:,} at once: cut it, or "
                "extend(model, ...)"
            )
        places.append((start, end, tokens))
    return places
