"""Swaps the attention of ``nn.Transformer`` and of every model with an ``nn.MultiheadAttention`` in it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from fast_attention import catalogue
from fast_attention.engine.tracing import traced
from fast_attention.integrations.modules import names_in, replace_module, swapped_in, take_over
from fast_attention.integrations.report import counts_from_the_query, crossing_refusal, dropout_note
from fast_attention.mechanism import Mechanism, Unsupported
from fast_attention.nn.multihead import MultiheadAttention

OURS = MultiheadAttention
PARAMETERS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")
ARGUMENTS = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal",
)  # fmt: skip
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
KIND = "nn.MultiheadAttention"  # what the record of a saved layer calls its module


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an ``nn.MultiheadAttention``."""
    return isinstance(module, nn.MultiheadAttention)


def sizes(module: nn.MultiheadAttention) -> tuple[int, int, str]:
    """Heads, the width of one, and what the module runs."""
    return module.num_heads, module.embed_dim // module.num_heads, "Softmax()" if _is_plain(module) else "its own"


def unsupported_reason(
    model: nn.Module, name: str, module: nn.MultiheadAttention, mechanism: Mechanism[Any, Any]
) -> str:
    """The reason why a mechanism cannot serve a layer; empty if it can."""
    traits = mechanism.traits
    if type(module) is not nn.MultiheadAttention:
        return "its class was made from nn.MultiheadAttention and may compute something else"
    if not _is_plain(module):
        return "its parameters are made of others in front of every call (weight_norm, say)"
    prefix, _, attribute = name.rpartition(".")
    parent = model.get_submodule(prefix)
    decodes, crosses = isinstance(parent, nn.TransformerDecoderLayer), _crosses(parent, attribute)
    if crosses and (reason := crossing_refusal(mechanism)):
        return reason
    if decodes and not crosses and not traits.causal:
        return f"a decoder's own attention is causal, and {mechanism!r} is not (traits.causal)"
    if not decodes and not traits.bidirectional:
        return f"the layer may be called without causal order, and {mechanism!r} is causal only (traits.bidirectional)"
    if (module.bias_k is not None or module.add_zero_attn) and not traits.cross:
        return f"the layer appends keys of its own, which {mechanism!r} cannot take (traits.cross)"
    return ""


def replacement(
    name: str, module: Any, mechanism: Mechanism[Any, Any], max_len: int
) -> tuple[MultiheadAttention, list[str]]:
    """The module that runs a mechanism in place of torch's, with its parameters, and remarks for the report."""
    weight = module.out_proj.weight
    new = MultiheadAttention(
        module.embed_dim, module.num_heads, module.dropout if mechanism.traits.mask else 0.0,
        module.in_proj_bias is not None, module.bias_k is not None, module.add_zero_attn, module.kdim, module.vdim,
        module.batch_first, weight.device, weight.dtype, mechanism=mechanism, max_len=max_len,
    )  # fmt: skip
    take_over(new, module)
    new.attention.train(module.training)
    new.register_forward_pre_hook(partial(_check_call, name, counts_from_the_query(mechanism)), with_kwargs=True)
    remarks = [dropout_note(module.dropout)] if module.dropout and not mechanism.traits.mask else []
    remarks += ["its hooks are not called before it is swapped back"] if any(getattr(module, x) for x in HOOKS) else []
    return new, remarks


def records(model: nn.Module) -> dict[str, Any]:
    """Records of the layers that were swapped, by name, for ``restore``."""
    return {
        names[0]: {
            "module": KIND,
            "mechanism": repr(module.attention.mechanism),
            "max_len": max(module.attention.shape.max_len - module.appended, 0),
        }
        for module, names in swapped_in(model, OURS).items()
    }


def restore(model: nn.Module, layers: dict[str, Any]) -> None:
    """Put recorded mechanisms, by name, into a model whose weights are about to be loaded.

    Raises:
        ValueError: There is no ``nn.MultiheadAttention`` of such a name.
    """
    by_name = {name: names for names in names_in(model, _is_plain).values() for name in names}
    for name, record in layers.items():
        if name not in by_name or record["module"] != KIND:
            raise ValueError(f"{type(model).__name__} has no {record['module']} called {name}, as config.json says")
        mechanism = catalogue.parse(record["mechanism"])
        new, _ = replacement(name, model.get_submodule(name), mechanism, record["max_len"])
        for each in by_name[name]:
            replace_module(model, each, new)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is torch's own, with its parameters, and computes what torch's code says."""
    if type(module) is not nn.MultiheadAttention:
        return False
    return all(name in module._parameters or getattr(module, name) is None for name in PARAMETERS)


def _crosses(parent: nn.Module, attribute: str) -> bool:
    """Whether a layer is known to attend to another sequence: torch's decoders, those like them, pooling queries."""
    beside_own = attribute == "multihead_attn" and "self_attn" in parent._modules
    return beside_own or attribute.startswith("cross_att") or type(parent).__name__.endswith("PoolingHead")


def _check_call(name: str, sees_near: bool, module: MultiheadAttention, args: Any, kwargs: Any) -> None:
    """Raise where a swapped layer gets ``is_causal=True`` without a mask: torch's raises too, or sees all keys.

    Raise also where it ``sees_near`` keys and they are of another sequence than its queries.
    """
    given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
    if given.get("is_causal") and given.get("attn_mask") is None:
        raise ValueError(
            f"{name}: is_causal=True is a hint about a mask, as torch's own layers take it, and there is no mask. What "
            "would work: the causal mask too, nn.Transformer.generate_square_subsequent_mask(length)"
        )
    query, key = given.get("query"), given.get("key")
    if not sees_near or query is None or key is None or query is key or query.is_nested:
        return
    layouts = [] if traced() else [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr()) for x in (query, key)]
    if layouts and layouts[0] == layouts[1]:  # two views of the same numbers
        return
    raise Unsupported(
        f"{name}, swapped for {module.attention.mechanism!r}, was called with another tensor as key than as query: "
        "such a mechanism sees the keys near the query's own place, and there is none in another sequence. What would "
        "work: patterns of names that leave this layer as it is or give it Softmax(); where it is one sequence, one "
        "tensor as query and key"
    )
