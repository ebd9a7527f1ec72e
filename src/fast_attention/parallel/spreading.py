"""Modules that may hold one shard of a sequence: ``Spread`` is their base, ``parallelize`` sets their processes."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fast_attention import cache_argument
from fast_attention.mechanism import Mixer, Unsupported
from fast_attention.parallel.attending import strategy
from fast_attention.parallel.shards import Shards, member_of, shards
from fast_attention.parallel.strategies import Windowed
from fast_attention.refusals import is_module

Model = TypeVar("Model", bound=nn.Module)


class Members:
    """A module's process group, which copies share and which cannot be pickled.

    Args:
        group: The ``ProcessGroup``.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> Members:
        return self

    def __reduce__(self) -> Any:
        raise Unsupported(
            "a parallelized model holds its processes and cannot be pickled. What would work: model.state_dict(), that "
            "of one process, or parallelize(model, None) first"
        )


class Spread:
    """Mixed into modules that take ``group=``; ``parallelize`` sets what they take where none is given."""

    members: Members | None = None

    def group_of(self, group: Any) -> Any:
        """The process group of a call: the one given, or the module's."""
        return self.members.group if group is None and self.members is not None else group

    def shards_of(self, group: Any, x: Tensor) -> Shards | None:
        """Shards of tokens (..., L, E) of a call; None in one process."""
        group = self.group_of(group)
        if group is None or isinstance(group, Shards):
            return group
        return shards(group, x.shape[-2], device=x.device)


def parallelize(model: Model, mesh: Any) -> Model:
    """Let every layer of a model attend over the sequence that all processes of a mesh hold, each some of its tokens.

    The model then takes local tokens and gives local outputs. It is changed in place; its ``state_dict`` stays what it
    was. Weights must be equal on all processes, and gradients are each process's share of them: their sum is the whole,
    as of DDP and FSDP over the same processes, which average them, times the number of processes.

    Args:
        model: Modules of ``fast_attention.nn``, or a model that ``swap`` changed.
        mesh: A ``DeviceMesh`` of one dimension (of more: pick one, ``mesh["sequence"]``), a ``ProcessGroup``, or None
            for one process again.

    Returns:
        The model.

    Raises:
        Unsupported: A layer's attention is not ours, and would see the tokens of its own process alone; or a layer
            mixes whole tokens.
        ValueError: The mesh has several dimensions, no layer can be spread, or processes hold different weights.
    """
    is_module("model", model)
    group = mesh
    if isinstance(mesh, dist.device_mesh.DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"the mesh has dimensions {mesh.mesh_dim_names}: give one, such as mesh['sequence']")
        group = mesh.get_group()
    layers = [module for module in model.modules() if isinstance(module, Spread)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer that can be spread: swap its attention first, or use layers of "
            "fast_attention.nn"
        )
    if group is not None:
        member_of(group)
        _refuse_others(model)
        for layer in layers:
            if isinstance(mixer := getattr(layer, "mechanism", None), Mixer):
                strategy(mixer, is_causal=False)  # raises
        _compare(model, group)
    for layer in layers:
        layer.members = None if group is None else Members(group)
    if not isinstance(model, Spread):
        _set_positions(model, group)
    return model


def _refuse_others(model: nn.Module) -> None:
    """Raise ``Unsupported`` for attention that would see the tokens of its own process alone, in silence."""
    for name, module in model.named_modules():
        inside = list(module.modules())
        is_innermost = not any(type(each).__name__.endswith("Attention") for each in inside[1:])
        is_attention = type(module).__name__.endswith("Attention") and is_innermost
        if is_attention and not any(isinstance(each, Spread) for each in inside):
            raise Unsupported(
                f"{name}, a {type(module).__name__}, is no attention of ours and would see this process's tokens only. "
                "What would work: swap(model, mechanism) for all layers, Softmax() for exact attention"
            )


def _refuse_window(model: nn.Module, length: int) -> None:
    """Raise ``Unsupported`` where a model's windows are told from the length, and a shard's length tells otherwise."""
    config = getattr(model, "config", None)
    windows = [getattr(config, name, None) for name in ("sliding_window", "local_attention")]
    reach = min((each // 2 for each in windows if isinstance(each, int)), default=length)
    for layer in model.modules():
        mechanism = getattr(layer, "mechanism", None) if isinstance(layer, Spread) else None
        if mechanism is not None and reach < length and not _is_within(mechanism, reach):
            raise Unsupported(
                f"{type(model).__name__} has layers with a window, and {mechanism!r} over several processes would not "
                f"keep it in {length} tokens. What would work: Local(window={reach}), or one process"
            )


def _is_within(mechanism: Any, reach: int) -> bool:
    """Whether no query sees a key more than ``reach`` positions away; blocks repeat within so many positions."""
    if not isinstance(mechanism, Windowed):
        return False
    spans = [(i, *mechanism.key_range(i, i + 1)) for i in range(reach + 1)]
    return all(i - low <= reach and high - 1 - i <= reach for i, low, high in spans)


def _compare(model: nn.Module, group: Any) -> None:
    """Raise on all processes unless all hold equal parameters and buffers."""
    tensors = {name: x for name, x in [*model.named_parameters(), *model.named_buffers()] if not x.is_meta}
    sums = [repr(x.detach().double().sum().item()) for x in tensors.values()]  # in words, for NaN is unlike itself
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, list(zip(tensors, sums, strict=True)), group=group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            pairs = zip(everyone[0], other, strict=False)
            name = next((a[0] for a, b in pairs if a != b), "their number")
            raise ValueError(
                f"processes 0 and {rank} hold different weights ({name}): draw them once and send them to all, or seed "
                "alike before the model is made"
            )


_HOOK = "_fast_attention_positions"


def _set_positions(model: nn.Module, group: Any) -> None:
    """Let a model of transformers count ``position_ids`` from the shard's first token on, and keep no cache."""
    earlier = model.__dict__.pop(_HOOK, None)
    if earlier is not None:
        earlier.remove()
    parameters = inspect.signature(model.forward).parameters
    if group is None or not {"position_ids", "input_ids"} & set(parameters):
        return

    def count_on(_: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
        if keywords.get("use_cache") or cache_argument.given(keywords) is not None:
            raise Unsupported(
                f"{type(model).__name__} over several processes keeps no cache. What would work: use_cache=False; or "
                "generation in one process, after parallelize(model, None)"
            )
        if "use_cache" in parameters:
            keywords["use_cache"] = False
        tokens = args[0] if args else keywords.get("input_ids")
        tokens = keywords["inputs_embeds"][..., 0] if tokens is None else tokens
        length = tokens.shape[-1]
        everyone = shards(group, length, device=tokens.device)
        _refuse_window(model, everyone.length)
        if "position_ids" in parameters and keywords.get("position_ids") is None:
            start = everyone.start
            keywords["position_ids"] = torch.arange(start, start + length, device=tokens.device)[None]
        return args, keywords

    model.__dict__[_HOOK] = model.register_forward_pre_hook(count_on, with_kwargs=True)
