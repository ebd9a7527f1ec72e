"""Swaps the attention of ``nn.Transformer`` and of every model with an ``nn.MultiheadAttention`` in it."""

from __future__ import annotations

from typing import Any

from torch import nn

from fast_attention.integrations.modules import exchange, replace_module
from fast_attention.integrations.report import UNNAMED, Layer, dropout_note, no_queries
from fast_attention.mechanism import Attention, Mechanism
from fast_attention.nn.multihead import MultiheadAttention

DROPOUT = "_dropout_before_swap"  # marks a module that ``swap`` made, with the dropout of torch's
_CROSS_ATTENTION = (nn.TransformerDecoderLayer, "multihead_attn")  # where torch's layers attend to another sequence


def swap(model: nn.Module, wanted: Any, max_len: int | None) -> tuple[Layer, ...]:
    """Replace every ``nn.MultiheadAttention`` that ``wanted`` names; weights are shared, names stay.

    Raises:
        Unsupported: No layer can be swapped.
    """

    def plan(name: str, module: nn.MultiheadAttention, mechanism: Any) -> tuple[Layer, MultiheadAttention | None]:
        return _plan(name, module, mechanism, model, max_len)

    return exchange(model, wanted, lambda module: type(module) is nn.MultiheadAttention, plan)


def swap_back(model: nn.Module) -> bool:
    """Undo ``swap``: put torch's modules back, with the present weights; whether there were any to undo."""
    swapped = [(name, module) for name, module in model.named_modules() if DROPOUT in module.__dict__]
    for name, module in swapped:
        assert isinstance(module, MultiheadAttention)
        dropout = module.__dict__[DROPOUT]
        bias, bias_kv, weight = module.in_proj_bias is not None, module.bias_k is not None, module.out_proj.weight
        old = nn.MultiheadAttention(
            module.embed_dim, module.num_heads, dropout, bias, bias_kv, module.add_zero_attn, module.kdim, module.vdim,
            module.batch_first, weight.device, weight.dtype,
        )  # fmt: skip
        _share(module, old)
        replace_module(model, name, old.train(module.training))
    return bool(swapped)


def _plan(
    name: str, module: nn.MultiheadAttention, mechanism: Mechanism[Any, Any] | None, model: nn.Module,
    max_len: int | None,
) -> tuple[Layer, MultiheadAttention | None]:  # fmt: skip
    """The report of a layer, and its new module; None where it stays."""
    head_dim = module.embed_dim // module.num_heads
    reason = UNNAMED if mechanism is None else _obstacle(name, module, mechanism, model)
    kind = type(module).__name__
    if mechanism is None or reason:
        return Layer(name, kind, module.num_heads, head_dim, False, "Softmax()", reason, replaced=False), None
    weight = module.out_proj.weight
    new = MultiheadAttention(
        module.embed_dim, module.num_heads, module.dropout if mechanism.traits.mask else 0.0,
        module.in_proj_bias is not None, module.bias_k is not None, module.add_zero_attn, module.kdim, module.vdim,
        module.batch_first, weight.device, weight.dtype, mechanism=mechanism, max_len=max_len or 0,
    )  # fmt: skip
    _share(module, new)
    new.train(module.training)
    setattr(new, DROPOUT, module.dropout)
    note = dropout_note(module.dropout) if module.dropout and not mechanism.traits.mask else ""
    learned = sum(p.numel() for p in new.attention.parameters())
    return Layer(name, kind, module.num_heads, head_dim, False, repr(mechanism), note, True, learned), new


def _obstacle(name: str, module: nn.MultiheadAttention, mechanism: Mechanism[Any, Any], model: nn.Module) -> str:
    """The reason why a mechanism cannot serve a layer; empty if it can."""
    traits = mechanism.traits
    if not isinstance(mechanism, Attention):
        return no_queries(mechanism)
    parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
    kind, attribute = _CROSS_ATTENTION
    crosses = isinstance(parent, kind) and name.rpartition(".")[2] == attribute
    if crosses and not traits.cross:
        return f"the layer attends to another sequence, and {mechanism!r} cannot (traits.cross)"
    if isinstance(parent, kind) and not crosses and not traits.causal:
        return f"a decoder's own attention is causal, and {mechanism!r} is not (traits.causal)"
    if not isinstance(parent, kind) and not traits.bidirectional:
        return f"the layer may be called without causal order, and {mechanism!r} is causal only (traits.bidirectional)"
    if (module.bias_k is not None or module.add_zero_attn) and not traits.cross:
        return f"the layer appends keys of its own, which {mechanism!r} cannot take (traits.cross)"
    return ""


def _share(old: nn.Module, new: nn.Module) -> None:
    """Let ``new`` use the parameters of ``old``: nothing is copied, and an optimiser keeps them."""
    names = "in_proj_weight q_proj_weight k_proj_weight v_proj_weight in_proj_bias bias_k bias_v"
    for name in names.split():
        setattr(new, name, getattr(old, name))
    new.out_proj = old.out_proj
