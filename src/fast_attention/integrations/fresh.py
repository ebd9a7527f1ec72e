"""Gives a model that is built from a swapped model's config attention of its own: the mechanisms stay where they are.

``BertModel(swapped.config)``, ``AutoModel.from_config`` and copies of such a config make ordinary models, of new
weights. A swapped model's config says what it named before the swap; a model built from it gets a copy that names that.
It is imported while transformers imports its models: what needs those is imported in functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fast_attention.integrations.modules import NAME

BEFORE = "_fast_attention_before"  # where each config of a swapped model keeps what it named before
SWAPPED = "_fast_attention_swapped"  # where a swapped model, of either kind, keeps the name that it had before
SKIPS = "_fast_attention_skips_padding"  # where a base model that skips padding says how
# Models that were built from configs that name our attention: the configs given, and the copies
RENEWED: WeakKeyDictionary[nn.Module, list[tuple[Any, Any]]] = WeakKeyDictionary()


def configs(model: nn.Module) -> list[Any]:
    """The configs that a model and its modules hold, and those inside them, each once."""
    from transformers.configuration_utils import PreTrainedConfig

    direct = [x for module in model.modules() for x in vars(module).values() if isinstance(x, PreTrainedConfig)]
    return [*{id(config): config for each in direct for config in _nested(each)}.values()]


def _nested(config: Any) -> Iterator[Any]:
    """A config and those of a model's parts inside it."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _nested(part)


def own_configs(model: nn.Module) -> list[tuple[Any, Any]]:
    """Give a model and its modules copies of their configs, which other models may share; each with its copy.

    Configs inside the model's stay inside its copy, and modules that shared one share its copy.
    """
    untyped: Any = model
    copies: dict[int, Any] = {}
    copy.deepcopy(untyped.config, copies)
    by_id = {id(config): config for config in configs(model)}
    for module in model.modules():  # a part that was given a copy by itself shares the whole's
        for given, copied in RENEWED.get(module, ()):
            if id(given) in copies:
                copies[id(copied)] = copies[id(given)]
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if id(value) in by_id and id(value) in copies:
                setattr(module, name, copies[id(value)])
    return [(config, copies[key]) for key, config in by_id.items() if key in copies]


def guard() -> None:
    """Have ``renewed`` called when a model has been built, and ``checked`` before."""
    from transformers.modeling_utils import PreTrainedModel

    build, finish = PreTrainedModel.__init__, PreTrainedModel.post_init

    @wraps(build)
    def construct(self: Any, config: Any, *args: Any, **settings: Any) -> None:
        checked(self, config)
        build(self, config, *args, **settings)

    @wraps(finish)
    def post_init(self: Any) -> None:
        finish(self)
        renewed(self)

    PreTrainedModel.__init__ = construct  # type: ignore[method-assign]
    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]


def checked(model: Any, config: Any) -> None:
    """Raise ``ValueError`` where a model is asked for our attention by name, of which no mechanism is known."""
    if getattr(config, "_attn_implementation", None) != NAME:
        getattr(config, "__dict__", {}).pop(BEFORE, None)  # made of a dictionary that a swapped model's config gave
        return
    from fast_attention.integrations import attention as attention  # transformers then knows the name

    record = getattr(config, "quantization_config", None)
    method = record.get("quant_method") if isinstance(record, dict) else getattr(record, "quant_method", None)
    if method == NAME:  # it was read from a swapped model's folder
        for part in _nested(config):
            vars(part).update({BEFORE: None} if part._attn_implementation == NAME else {})
    if BEFORE not in vars(config):
        raise ValueError(
            f"attn_implementation={NAME!r} names no mechanism. What would work: the {type(model).__name__} without it, "
            "and then fast_attention.swap(model, 'Local(window=64)'), say"
        )


def renewed(model: Any) -> None:
    """Let a model that was built from a swapped model's config name, in configs of its own, what that named before."""
    if model.config._attn_implementation != NAME:
        return
    for config in _nested(model.config):
        if BEFORE in vars(config):  # a model of models has written into it what its parts name now
            config._attn_implementation_internal = NAME
    RENEWED[model] = own_configs(model)
    for config in configs(model):
        former = vars(config).pop(BEFORE, None)
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = former or model.get_correct_attn_implementation(None)
    is_loading = any(p.is_meta for p in model.parameters())
    if not is_loading:
        vars(model.config).pop("quantization_config", None)  # which names the mechanisms of other weights
