"""Lets a pretrained Hugging Face model read longer inputs: more positions, made from those that it learned."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.integrations import fresh
from fast_attention.integrations.modules import replace_module
from fast_attention.integrations.swapping import pretrained
from fast_attention.mechanism import Unsupported
from fast_attention.nn.bound import Bound
from fast_attention.refusals import is_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TABLES, ROTARY = ("copy", "interpolate"), ("yarn", "ntk", "linear")


@dataclass(frozen=True)
class Extension:
    """The result of ``extend``. Print it.

    Args:
        kind: Positions that the model has: learned, sinusoidal or rotary.
        method: How they were extended.
        before: Tokens that the model read before.
        positions: Tokens that it reads now.
        changed: The modules that were changed.
    """

    kind: str
    method: str
    before: int
    positions: int
    changed: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.kind} positions, {self.method}: from {self.before:,} to {self.positions:,} tokens "
            f"({', '.join(self.changed)})"
        )


def extend(
    model: nn.Module,
    positions: int,
    *,
    method: Literal["auto", "copy", "interpolate", "yarn", "ntk", "linear"] = "auto",
    tokenizer: Any = None,
) -> Extension:
    """Let a pretrained Hugging Face model read inputs of ``positions`` tokens, in place, by more positions.

    Learned positions are copied again and again (Longformer, arXiv 2004.05150): inputs that the model could read before
    give the same outputs, to the bit. Rotary ones are scaled by transformers' own ``rope_parameters``. Nothing is
    trained: measure what the model makes of long inputs; training on them helps. ``save_pretrained`` and
    ``from_pretrained`` keep the extension.

    Args:
        model: The model, or a module that holds one, such as a ``SentenceTransformer``.
        positions: The longest input in tokens.
        method: For learned positions ``"copy"``, or ``"interpolate"`` between neighbours; for rotary ones ``"yarn"``
            (arXiv 2309.00071), ``"ntk"`` (a larger base) or ``"linear"`` (arXiv 2306.15595); ``"auto"``: the first.
        tokenizer: Its ``model_max_length`` is set too; a ``SentenceTransformer``'s is found.

    Returns:
        What was done: print it.

    Raises:
        Unsupported: The positions reach any length already (T5's, ALiBi), are scaled already, or are of no known kind;
            transformers does not take the method for this model (Phi-3 takes ``"ntk"`` only); or a swapped mechanism's
            weights are for fewer tokens. The model is unchanged.
        ValueError: The model reads ``positions`` tokens already, or ``method`` is for another kind of positions.
    """
    is_module("model", model)
    parts = pretrained(model)
    if len(parts) != 1:
        number = f"{len(parts)} Hugging Face models: extend each" if parts else "no Hugging Face model"
        raise Unsupported(f"{type(model).__name__} holds {number}")
    inner = next(iter(parts.values()))
    for name, layer in inner.named_modules():
        if isinstance(layer, Bound) and layer.mechanism.traits.needs_max_len and layer.shape.max_len < positions:
            raise Unsupported(
                f"{name} runs {layer.mechanism!r}, whose weights are for {layer.shape.max_len} tokens: "
                "swap_back(model), extend, then swap again"
            )
    text = inner.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise Unsupported(_no_positions(inner))
    if (rotary := _rotary_modules(inner)) and getattr(text, "rope_parameters", None):
        extension = _extend_rotary(inner, positions, method, rotary, longest)
    else:
        extension = _extend_tables(inner, positions, method, longest)
    for part in model.modules():
        if isinstance(getattr(part, "max_seq_length", None), int):
            part.max_seq_length = positions  # type: ignore[assignment]
    for reader in (tokenizer, *(getattr(part, "tokenizer", None) for part in model.modules())):
        if reader is not None and getattr(reader, "model_max_length", None) is not None:
            reader.model_max_length = positions
    return extension


def _no_positions(model: PreTrainedModel) -> str:
    """The reason why a model without a number of positions cannot be extended."""
    kind, known = type(model).__name__, ""
    if any("relative_attention_bias" in name for name, _ in model.named_parameters()):
        known = "relative positions (a bias by distance)"
    elif any("build_alibi_tensor" in dir(part) or "build_mpt_alibi_tensor" in dir(part) for part in model.modules()):
        known = "ALiBi positions (a slope by distance)"
    elif _rotary_modules(model):
        known = "rotary positions by a formula of its own"
    if known:
        return f"{kind} has {known}, which reach any length: there is nothing to extend"
    return (
        f"{kind}: its config names no max_position_embeddings, so that no positions are known which could be extended; "
        "tables of learned positions and rotary positions can be"
    )


def _checked_method(method: str, known: tuple[str, ...], kind: str) -> str:
    if method == "auto":
        return known[0]
    if method not in known:
        raise ValueError(f"method={method!r} is not for {kind} positions, which take {' or '.join(known)}")
    return method


def _check_longer(positions: int, before: int) -> None:
    if type(positions) is not int:
        raise ValueError(f"positions={positions!r}: give a whole number of tokens")
    if positions <= before:
        raise ValueError(f"positions={positions}: the model reads {before} tokens already; give a larger number")


# Rotary positions -----------------------------------------------------------------------------------------------------


def _rotary_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules of rotary positions that are computed from the text's config, by name; not those of images."""
    kind = type(model.config.get_text_config())
    return {
        name: module
        for name, module in model.named_modules()
        if "rope_type" in vars(module) and isinstance(vars(module).get("config"), kind)
    }


def _extend_rotary(
    model: PreTrainedModel, positions: int, method: str, rotary: dict[str, nn.Module], before: int
) -> Extension:
    """Scale rotary positions by the config's ``rope_parameters``; layers with a window keep theirs."""
    method = _checked_method(method, ROTARY, "rotary")
    _check_longer(positions, before)
    text = copy.deepcopy(model.config.get_text_config())
    objection, scaled = _objection(text), copy.deepcopy(text.rope_parameters)
    parts = {"": scaled}  # the settings that reach the whole text: one, or one for each kind of layers but windows
    if "rope_theta" not in scaled and "rope_type" not in scaled:
        parts = {
            f" of {kind}": part for kind, part in scaled.items()
            if isinstance(part, dict) and "sliding" not in kind and "local" not in kind
        }  # fmt: skip
    for name, part in parts.items():
        if part.get("rope_type", "default") != "default":
            raise Unsupported(
                f"{type(model).__name__}: its rotary positions are scaled already (rope_type {part['rope_type']!r}"
                f"{name}); extend the model as it was before that"
            )
        part.update(_scaling(text, part, method, positions / before, before))
    settings = {"rope_parameters": scaled, "max_position_embeddings": positions}
    if getattr(text, "head_dim", 0) is None:  # which transformers' YaRN multiplies
        settings["head_dim"] = text.hidden_size // text.num_attention_heads
    try:
        text.update(copy.deepcopy(settings))
        if (refusal := _objection(text)) not in ("", objection):
            raise ValueError(refusal)
        scaled_modules: dict[str, Any] = {
            name: type(part)(config=text).to(next(part.buffers()).device).train(part.training)
            for name, part in rotary.items()
        }
    except Exception as error:
        raise Unsupported(
            f"{type(model).__name__}: transformers does not take method={method!r} for it ({error}). What may work: "
            + " or ".join(f"method={other!r}" for other in ROTARY if other != method)
        ) from error
    fresh.own_configs(model)
    text = model.config.get_text_config()
    text.update(settings)
    for name, module in scaled_modules.items():
        module.config = text
        replace_module(model, name, module)
    return Extension("rotary", method, before, positions, tuple(rotary))


def _objection(config: Any) -> str:
    """The message by which a config refuses to be saved; empty where it has none."""
    try:
        getattr(config, "validate", lambda: None)()
    except Exception as error:  # of transformers' own kinds
        return str(error.__cause__ or error)
    return ""


def _scaling(text: Any, part: dict[str, Any], method: str, factor: float, before: int) -> dict[str, Any]:
    if method == "linear":  # Chen et al. 2023, arXiv 2306.15595
        return {"rope_type": "linear", "factor": factor}
    if method == "yarn":  # Peng et al. 2023, arXiv 2309.00071
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": before}
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = int(width * part.get("partial_rotary_factor", 1.0))
    if width < 4:
        raise ValueError(
            f"method='ntk' changes the rates between pairs, and {width} rotary channels are one: take 'yarn'"
        )
    return {"rope_theta": part["rope_theta"] * factor ** (width / (width - 2))}  # the same paper, section 3.1


# Tables of positions --------------------------------------------------------------------------------------------------


def _extend_tables(model: PreTrainedModel, positions: int, method: str, longest: int) -> Extension:
    """Lengthen every table with a row for each position, and whatever else depends on their number."""
    tables = _tables(model, _copied_model(model, longest + 1))
    first = next(iter(tables.values()))
    # Rows in front that are no positions: up to the padding's (RoBERTa), or those beyond the config's (OPT, BART).
    special = (0 if first.padding_idx is None else first.padding_idx + 1) + first.num_embeddings - longest
    before = first.num_embeddings - special
    _check_longer(positions, before)
    continued = {name: _sinusoids(table.weight, positions + special) for name, table in tables.items()}
    formula = all(weight is not None for weight in continued.values())
    method = "by their formula" if formula else _checked_method(method, TABLES, "learned")
    longer_model = _copied_model(model, longest + positions - before)
    buffers, weights = _buffers(model, longer_model), {}
    for name, table in tables.items():
        old, continuation = table.weight, continued[name]
        if continuation is None:
            continuation = _continued(old.detach(), positions + special, special, method)
        weights[name] = nn.Parameter(continuation, requires_grad=old.requires_grad)
    fresh.own_configs(model)
    model.config.get_text_config().max_position_embeddings = longest + positions - before
    for name, weight in weights.items():
        tables[name].weight = weight
    for (name, attribute), value in buffers.items():
        setattr(model.get_submodule(name), attribute, value)
    _copy_sizes(model, longer_model)
    return Extension("sinusoidal" if formula else "learned", method, before, positions, tuple(tables))


def _copied_model(model: PreTrainedModel, longest: int) -> PreTrainedModel:
    """A copy of the model without memory, for another number of positions."""
    config = copy.deepcopy(model.config)
    config.get_text_config().max_position_embeddings = longest
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return type(model)(config)


def _tables(model: PreTrainedModel, longer: PreTrainedModel) -> dict[str, nn.Embedding]:
    """The tables that have a row more in a model of one more position."""
    longer_weights = dict(longer.named_parameters())
    tables = {}
    for name, weight in model.named_parameters():
        if name not in longer_weights or weight.shape == longer_weights[name].shape:
            continue
        parent, _, attribute = name.rpartition(".")
        table = model.get_submodule(parent)
        if attribute != "weight" or not isinstance(table, nn.Embedding) or len(longer_weights[name]) != len(weight) + 1:
            raise Unsupported(
                f"{type(model).__name__}: {name} depends on the number of positions, and is no table with a row for "
                "each; it can neither be copied nor interpolated"
            )
        tables[parent] = table
    if not tables:
        raise Unsupported(_no_positions(model))
    return tables


def _continued(table: Tensor, rows: int, special: int, method: str) -> Tensor:
    """A table of more rows: the learned ones repeated, or interpolated over all of them."""
    front, learned = table[:special], table[special:]
    if method == "copy":  # Longformer, arXiv 2004.05150, section 5
        times = -(-(rows - special) // len(learned))
        return torch.cat([front, learned.repeat(times, 1)])[:rows]
    between = F.interpolate(learned.double().T[None], rows - special, mode="linear", align_corners=True)[0].T
    return torch.cat([front, between.to(table.dtype)])


def _sinusoids(table: Tensor, rows: int) -> Tensor | None:
    """More rows of a table of sines and then cosines (Vaswani et al. 2017), None where it holds something else."""
    if table.requires_grad:
        return None
    width = table.shape[1]
    rates = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=table.device) / width)
    angles = torch.arange(rows, dtype=torch.float64, device=table.device)[:, None] * rates
    values = torch.cat([angles.sin(), angles.cos()[:, : width // 2]], -1).to(table.dtype)
    return values if torch.allclose(values[: len(table)], table, atol=1e-5) else None


def _buffers(model: PreTrainedModel, longer: PreTrainedModel) -> dict[tuple[str, str], Tensor]:
    """Buffers whose size is the number of positions, as a model of more positions has them."""
    longer_buffers, buffers = dict(longer.named_buffers()), {}
    for name, old in model.named_buffers():
        if name not in longer_buffers or old.shape == longer_buffers[name].shape:
            continue
        parent, _, attribute = name.rpartition(".")
        module = longer.get_submodule(parent)
        module.to_empty(device=old.device, recurse=False)
        longer._init_weights(module)
        value = getattr(module, attribute).to(old.dtype)
        if not torch.equal(value[tuple(slice(size) for size in old.shape)], old):
            raise Unsupported(f"{type(model).__name__}: no rule is known for its buffer {name} beyond {old.shape}")
        buffers[parent, attribute] = value
    return buffers


def _copy_sizes(model: PreTrainedModel, longer: PreTrainedModel) -> None:
    """Copy the modules' numbers of positions (``num_embeddings`` and the like) from a longer model."""
    modules = dict(model.named_modules())
    for name, module in longer.named_modules():
        for key, value in vars(module).items():
            if name in modules and type(value) is int and type(vars(modules[name]).get(key)) is int:
                setattr(modules[name], key, value)
