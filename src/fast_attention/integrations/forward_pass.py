"""The forward pass of a swapped Hugging Face model: ``output_attentions=True``, packed rows and extra tensors work.

Some models pass such arguments to their attention function and others do not, so that they are noted where the model
is called, or a model inside it: by ``model(...)`` and by ``model.forward(...)``, which passes hooks by. Encoders may
skip padding: the tokens of a padded batch are computed in one packed row, and its outputs are padded again.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedModel

from fast_attention.engine.tracing import traced
from fast_attention.integrations import calls, report, visible
from fast_attention.integrations import saving as saving  # a model that was pickled saves its mechanisms
from fast_attention.integrations.exact import attention as attention  # and finds its functions
from fast_attention.integrations.fresh import SKIPS
from fast_attention.integrations.modules import evaluating
from fast_attention.integrations.visible import Visibility
from fast_attention.mechanism import Unsupported
from fast_attention.nn.positions import first_position

ENTERED = "_fast_attention_entered"  # where a swapped model, and each one inside it, says that its calls are noted
MECHANISMS, EXACT = "mechanisms", "exact"  # what it says: by which kind of swap
TEXTS = (3, 9, 1, 5)  # tokens of the texts on which a model is tried
LEAST, PER_TEXT = 32, 3  # tokens of padding that a batch, and each text in it, must have for it to pay
NEEDED = ("input_ids", "attention_mask", "position_ids")


class Forward(partial[Any]):
    """A model's ``forward`` that notes what the call was given.

    Its code is its own: ``torch.compile`` keeps what it compiled by code, and up to eight forms of each.

    Args:
        model: The model, or a model inside it.
        inner: The ``forward`` that another library had put into the model; None: that of its class.
    """

    def __new__(cls, model: PreTrainedModel, inner: Any = None) -> Forward:
        """The forward pass of a model, with code of its own."""
        run = FunctionType(_noted.__code__.replace(), _noted.__globals__, "forward")
        names = tuple(inspect.signature(_own(model, inner)).parameters)  # of arguments that have no keyword
        return super().__new__(cls, run, model, inner, names)

    def __reduce__(self) -> Any:
        """How a copied or pickled model gets its own."""
        return type(self), self.args[:2]

    @property
    def inner(self) -> Any:
        """The forward pass that this one replaced."""
        return self.args[1]

    @property
    def __signature__(self) -> inspect.Signature:  # which trainers and ``generate`` read
        return inspect.signature(_own(*self.args[:2]))

    def replicate(self) -> Any:
        """A copy of the model for ``nn.DataParallel``, whose forward pass is its own."""
        model = self.args[0]
        replica: Any = type(model)._replicate_for_data_parallel(model)
        replica.forward = Forward(replica, self.inner)
        return replica


def _own(model: PreTrainedModel, inner: Any) -> Any:
    """The forward pass of a model without ours around it."""
    return partial(type(model).forward, model) if inner is None else inner


def _noted(model: Any, inner: Any, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Run ``inner``, or the class's forward pass, with the call on the thread's stack."""
    own = _own(model, inner)
    if args and args[0] is model:  # as accelerate calls what it has unwrapped
        args = args[1:]
    if ENTERED not in model.__dict__:  # swapped back, and another library's forward is around this one
        return own(*args, **kwargs)
    is_exact = model.__dict__[ENTERED] == EXACT
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    argument = given.get("output_attentions")
    shown = model.config.output_attentions if argument is None else argument
    mask, around = kwargs.get("attention_mask"), [call.module for call in calls.active()]
    call = calls.begin(
        model, shown=bool(shown), position_ids=given.get("position_ids"),
        packed={} if is_exact else visible.borders_in(given), arguments=frozenset(given),
    )  # fmt: skip
    try:
        if isinstance(mask, Visibility) and not any(part is model for other in around for part in other.modules()):
            # which generate made: a model takes tensors, and a part of it what its model made for it
            kwargs = {**kwargs, "attention_mask": mask.dense()}
        row = flattened(model, given) if SKIPS in model.__dict__ else None
        if row is None:
            return own(*args, **kwargs)
        arguments, is_token = row
        call.packed = visible.borders_in(arguments)
        return padded(model, own(**arguments), is_token)
    finally:
        calls.end(model)


def enter_calls(model: PreTrainedModel, kind: str = MECHANISMS) -> None:
    """Let a swapped model, and every model inside it, note what its calls are given."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            untyped: Any = part
            untyped.forward = Forward(part, part.__dict__.get("forward"))
            untyped._replicate_for_data_parallel = untyped.forward.replicate
            part.__dict__[ENTERED] = kind


def leave_calls(model: nn.Module) -> None:
    """Undo ``enter_calls``."""
    for part in model.modules():
        if part.__dict__.pop(ENTERED, False):
            forward = part.__dict__.get("forward")
            if isinstance(forward, Forward):
                part.__dict__.pop("forward")
                part.__dict__.update({} if forward.inner is None else {"forward": forward.inner})
            part.__dict__.pop("_replicate_for_data_parallel")


# Padding --------------------------------------------------------------------------------------------------------------


def set_skipping(model: PreTrainedModel, skips: bool) -> None:
    """Let a swapped model skip padding, or let it not."""
    model.base_model.__dict__.pop(SKIPS, None)
    model.base_model.__dict__.update({SKIPS: True} if skips else {})


def try_skipping(model: PreTrainedModel) -> None:
    """Let a swapped model skip padding, if it then gives what it gives for each text alone.

    Raises:
        Unsupported: It has causal layers, takes no positions or no mask of tokens, or gives something else.
    """
    base: Any = model.base_model
    name = type(base).__name__
    needed = NEEDED[:-1] if _counts_distances(base) else NEEDED
    if missing := [each for each in needed if each not in _names(base)]:
        raise Unsupported(f"skip_padding=True needs a model that takes {', '.join(NEEDED)}; {name} lacks {missing[0]}")
    if not can_skip(model):
        raise Unsupported(
            f"skip_padding=True is for encoders and {name} is causal, whose cache is laid out as its rows are. What "
            "would work: rows packed by transformers' DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
        )
    vocabulary = base.config.get_text_config().vocab_size
    ids = torch.arange(sum(TEXTS), device=base.device) % max(vocabulary - 4, 1) + min(4, vocabulary - 1)
    texts = [x[None] for x in ids.split(TEXTS)]
    padding = getattr(base.config, "pad_token_id", None) or 0
    batch = nn.utils.rnn.pad_sequence([*ids.split(TEXTS)], batch_first=True, padding_value=padding)
    lengths = torch.tensor(TEXTS, device=base.device)
    mask = (torch.arange(max(TEXTS), device=base.device) < lengths[:, None]).long()
    with torch.no_grad(), evaluating(model):
        alone = [report.tensors(base(text)) for text in texts]
        set_skipping(model, True)
        try:
            with calls.forced():
                outputs = report.tensors(base(batch, attention_mask=mask))
        except BaseException:
            set_skipping(model, False)
            raise
    pairs = [(x[0], out[i, : x.shape[1]]) for i, each in enumerate(alone) for x, out in zip(each, outputs, strict=True)]
    off = report.largest_difference(*map(list, zip(*pairs, strict=True)))
    if not off <= torch.finfo(base.dtype).eps ** 0.5:
        set_skipping(model, False)
        raise Unsupported(
            f"skip_padding=True: {name} gives other outputs for packed texts than for each alone (off by {off:.1%}), "
            "for something in it depends on the row. What would work: padded batches"
        )


def can_skip(model: PreTrainedModel) -> bool:
    """Whether a model reads texts, and every token all of its text: only then can padding be skipped."""
    takes_ids = model.main_input_name == "input_ids" and "decoder_input_ids" not in _names(model.base_model)
    return takes_ids and not any(getattr(part, "is_causal", False) for part in model.modules())


def pays(is_token: Bool[Tensor, "batch length"]) -> bool:
    """Whether a batch without its padding takes less time: every text costs a call of attention in each layer."""
    texts, size = len(is_token), is_token.numel()
    return size - int(is_token.sum()) >= LEAST + PER_TEXT * texts


def flattened(model: Any, given: dict[str, Any]) -> tuple[dict[str, Any], Tensor] | None:
    """The arguments of a call, of one row without the padding, and where tokens are; None where it stays as it is.

    That is where nothing is padded, attention matrices or tuples are asked for, code is traced, or an exact model gains
    nothing by it.
    """
    if traced():
        return None
    arguments = {**given}
    mask = arguments.pop("attention_mask", None)
    shown, as_object = (
        getattr(model.config, name) if arguments.get(name) is None else arguments[name]
        for name in ("output_attentions", "return_dict")
    )
    if shown or not as_object or not isinstance(mask, Tensor) or mask.ndim != 2 or "cu_seq_lens_q" in arguments:
        return None
    if "use_cache" in _names(model):  # of what sees later tokens too, a cache is of no use
        if arguments.get("use_cache"):
            return None
        arguments["use_cache"] = False
    is_token = mask.bool()
    if bool(is_token.all()) or not bool(is_token.any()):
        return None
    if model.__dict__[ENTERED] == EXACT and not calls.runs_ours(pays(is_token)):
        return None
    if arguments.get("position_ids") is None and "position_ids" in _names(model):
        arguments["position_ids"] = _positions(model, arguments.get("input_ids"), is_token)
    if "token_type_ids" in _names(model) and arguments.get("token_type_ids") is None:
        arguments["token_type_ids"] = torch.zeros_like(is_token, dtype=torch.long)
    for name, x in arguments.items():
        if name == "position_ids" and x.shape != is_token.shape:
            x = x.expand(is_token.shape)
        if isinstance(x, Tensor) and x.shape[:2] == is_token.shape:
            arguments[name] = x[is_token][None]
    borders = torch.nn.functional.pad(is_token.sum(-1).cumsum(-1), (1, 0)).int()
    return {**arguments, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders}, is_token


def padded(model: Any, output: Any, is_token: Bool[Tensor, "batch length"]) -> Any:
    """The model's output with the texts in rows again: zeros where there was padding, pooled from each text."""

    def rows(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(rows, x))
        padded_rows = x.new_zeros(*is_token.shape, *x.shape[2:])
        padded_rows[is_token] = x[0]
        return padded_rows

    outputs = {name: rows(output[name]) for name in ("last_hidden_state", "hidden_states") if name in output}
    if "pooler_output" in output:
        pooled, pooler = outputs["last_hidden_state"], model.pooler
        is_linear = isinstance(pooler, nn.Linear)
        outputs["pooler_output"] = model.pooler_activation(pooler(pooled[:, 0])) if is_linear else pooler(pooled)
    if others := [name for name in output if name not in outputs]:
        raise Unsupported(f"skip_padding=True: {type(model).__name__} also returns {', '.join(others)}")
    return type(output)(**outputs)


def _counts_distances(model: Any) -> bool:
    """Whether a model's positions are distances within a text, as T5's, and no numbers of columns."""
    return any(getattr(part, "relative_attention_bias", None) is not None for part in model.modules())


def _names(model: Any) -> tuple[str, ...]:
    """The arguments of a model's forward."""
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


def _positions(model: Any, ids: Tensor | None, is_token: Tensor) -> Tensor:
    """The positions that the model gives to a padded batch: its columns, or tokens counted from a first number on."""
    if first := first_position(model):
        visible = is_token if ids is None else ids != first - 1
        return visible.cumsum(-1) * visible + first - 1
    return torch.arange(is_token.shape[1], device=is_token.device).expand(is_token.shape)
