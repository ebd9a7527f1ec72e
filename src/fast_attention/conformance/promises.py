"""Laws about what one of our mechanisms declares: its traits are tested both ways."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from fast_attention.conformance.finding import Breaches, all_moved, claims, law, moved, rounding
from fast_attention.conformance.independence import padding_masks
from fast_attention.conformance.under_test import AttentionUnderTest, Case, law_of_calls, of, with_gradients
from fast_attention.counting import counted, exponent
from fast_attention.mechanism import Attention, Unsupported

SHORT, LONG = 1024, 4096


OURS = "not one of this library's mechanisms"


def _masks(case: Case, *hidden: tuple[int, slice]) -> list[Tensor | None]:
    """No key mask, and one that hides these tokens of a sequence each, if the attention takes one."""
    mask = torch.ones(2, case.length, dtype=torch.bool, device=case.inputs[0].device)
    for sequence, tokens in hidden:
        mask[sequence, tokens] = False
    return [None, mask] if case.subject.padding else [None]


@law_of_calls("decode in any split = one pass", causal=True)
def decoding(case: Case) -> Breaches:
    """Decoding in any split gives what one pass gives, of sequences padded in front too."""
    claims(case.promises is not None and case.promises.memory is not None, "does not stream")
    between = _masks(case, (1, slice(2, 7)), (1, slice(-3, None)))
    masks = [*between, *_masks(case, (0, slice(4)), (1, slice(11)))[1:]]
    for which, key_mask in zip(("unmasked", "with a key mask", "padded in front"), masks, strict=False):
        one_pass = case.call(*case.inputs, mask=key_mask)
        for sizes in ([case.length], [1] * case.length, [5, 1, 11, case.length - 17], [case.length - 1, 1]):
            state, outputs, start = None, [], 0
            for size in sizes:
                new = slice(start, start + size)
                visible = None if key_mask is None else key_mask[:, new]
                out, state = case.module.decode(*(x[:, :, new] for x in case.inputs), state, key_mask=visible)
                outputs.append(out)
                start += size
            yield moved(torch.cat(outputs, -2), one_pass), f"split {sizes[:4]}, {which}"


@law_of_calls("the last queries = the last rows", causal=True)
def few(case: Case) -> Breaches:
    """A causal call with the last queries alone gives the last rows of the whole call."""
    claims(case.promises is not None and case.promises.cross, "as many queries as keys")
    q, k, v = case.inputs
    for key_mask in _masks(case, (0, slice(4)), (1, slice(11)), (1, slice(-3, None))):
        whole = case.call(q, k, v, mask=key_mask)
        for queries in (1, 2, 5, case.length // 2, case.length - 1):
            out = case.call(q[..., -queries:, :], k, v, mask=key_mask)
            yield moved(out, whole[..., -queries:, :]), f"{queries} queries, {'un' * (key_mask is None)}masked"


@law_of_calls("packed sequences = one call for each")
def packed(case: Case) -> Breaches:
    """Sequences in one row give the outputs and gradients of one call for each, and none moves another by a bit."""
    claims(case.promises is not None, OURS)
    lengths = (9, 4, 9, 1, case.length - 23)

    def in_one_row(*rows: Tensor) -> Tensor:
        return case.module(*rows, is_causal=case.is_causal, lengths=lengths)

    def per_sequence(*rows: Tensor) -> Tensor:
        return torch.cat([case.call(*part) for part in zip(*(x.split(lengths, -2) for x in rows), strict=True)], -2)

    packed, separate = (with_gradients(call, case.inputs, case.module) for call in (in_one_row, per_sequence))
    yield all_moved(packed, separate), ""
    changed = (torch.cat([x[..., :9, :], -x[..., 9:13, :], x[..., 13:, :]], -2) for x in case.inputs)
    outs = (in_one_row(*changed), packed[0])
    if moved(*(torch.cat([out[..., :9, :], out[..., 13:, :]], -2) for out in outs)):
        yield float("inf"), "a neighbour moved"


@law_of_calls("padding may hold anything", rounding(torch.float32), dtype=torch.float32)
def poisoned(case: Case) -> Breaches:
    """Masked keys and values of NaN, infinity or 3e38 move no output, gradient or state; masked queries move no other
    token's output."""
    claims(case.promises is not None, OURS)
    claims(case.subject.padding, "takes no key mask")
    inputs, mask = case.inputs, padding_masks(case.length, case.inputs[0].device)
    masked = ~mask.view(2, *[1] * (inputs[0].ndim - 3), case.length, 1)

    def outputs_of(value: float) -> tuple[Tensor, ...]:
        """Outputs, gradients of inputs and weights and, where the mechanism streams, two decoding steps; ``value``
        stands at the masked tokens of keys and values, or of x."""
        filled = [x if len(inputs) == 3 and i == 0 else x.masked_fill(masked, value) for i, x in enumerate(inputs)]
        outputs = with_gradients(lambda *x: case.call(*x, mask=mask), filled, case.module)
        state = None
        for new in (slice(0, 9), slice(9, None)) if case.promises.memory is not None and case.is_causal else ():
            decoded, state = case.module.decode(*(x[:, :, new] for x in filled), state, key_mask=mask[:, new])
            outputs += (decoded,)
        return outputs

    before = outputs_of(0.0)
    for value in (float("nan"), float("inf"), 3e38, -3e38):
        at = f"masked tokens hold {value:g}"
        yield all_moved(outputs_of(value), before), at
        queries_too = [x.masked_fill(masked, value) for x in inputs]
        yield moved(*(case.call(*x, mask=mask).movedim(-2, 1)[mask] for x in (queries_too, inputs))), at


@law_of_calls("torch.func: jvp, jacfwd, vmap")
def transforms(case: Case) -> Breaches:
    """Forward-mode derivatives agree with gradients, also under ``jacfwd``; ``vmap`` over the batch is the batch."""
    claims(case.promises is not None, OURS)
    inputs = case.inputs
    with warnings.catch_warnings():  # of what torch imports, and of operations that it maps one by one
        warnings.filterwarnings("ignore", message=".torch.jit|There is a performance drop")
        out, tangent, *_ = torch.func.jvp(case.call, inputs, inputs)
        grad_out = out.detach().cos()
        gradients = torch.func.vjp(case.call, *inputs)[1](grad_out)
        backwards = torch.stack([(x * g).sum() for x, g in zip(inputs, gradients, strict=True)]).sum()
        mismatch = ((tangent * grad_out).sum() - backwards) / grad_out.square().sum()
        yield moved(out + mismatch, out), "jvp"
        scaled = torch.func.jacfwd(lambda factor: case.call(*(factor * x for x in inputs)))
        yield moved(scaled(inputs[0].new_ones(())), tangent), "jacfwd"
        yield moved(torch.vmap(case.call)(*inputs), out), "vmap"


@law_of_calls("states combine")
def combining(case: Case) -> Breaches:
    """States of constant size combine associatively; a combined state decodes on, or is read, as if it had seen all."""
    claims(case.promises is not None and case.promises.memory == "constant", "no state of constant size")
    mechanism: Any = case.subject.mechanism
    q, k, v = case.inputs

    def state(start: int, stop: int, key_mask: Tensor | None = None) -> Any:
        visible = None if key_mask is None else key_mask[:, start:stop]
        return mechanism.summarise(k[:, :, start:stop], v[:, :, start:stop], case.module.w, key_mask=visible)

    if case.is_causal:
        a, b, c = state(0, 9), state(9, 20), state(20, 30)
        left, one_pass = mechanism.combine(mechanism.combine(a, b), c), case.call(q, k, v)[:, :, 30:]
        for whole in (left, mechanism.combine(a, mechanism.combine(b, c))):
            yield moved(case.module.decode(q[:, :, 30:], k[:, :, 30:], v[:, :, 30:], whole)[0], one_pass), "decoded"
        if tuple(t.shape for t in a.content) != tuple(t.shape for t in left.content):
            yield float("inf"), "the state grows"
        return
    for key_mask in _masks(case, (1, slice(2, 7)), (1, slice(-3, None))):
        state_of_all = mechanism.combine(state(0, 9, key_mask), state(9, case.length, key_mask))
        with suppress(Unsupported):  # not every state can be read without causal order
            out = mechanism.read(q, k, v, case.module.w, state_of_all, key_mask=key_mask)
            yield moved(out, case.call(q, k, v, mask=key_mask)), "read"


@law_of_calls("declared order", 0.3)
def order(case: Case) -> Breaches:
    """Counted operations and peak memory grow with the declared power of n."""
    claims(case.promises is not None, "no declared order")
    declared, mechanism = case.promises.complexity_exponent, cast(Any, case.subject.mechanism)
    # of one head: sums of several may stay in memory of the core's own, up to a length
    costs = [_costs(of(mechanism, max_len=n, width=16, heads=1), n, case) for n in (SHORT, LONG)]
    for kind, small, large in zip(("operations", "peak memory"), *costs, strict=True):
        grown = exponent(small, large, LONG / SHORT)
        yield grown - declared, f"{kind} grow as n^{grown:.2f}; declared {declared:g}"


@torch.no_grad()
def _costs(subject: AttentionUnderTest, n: int, case: Case) -> tuple[int, int]:
    module = subject.built(dtype=torch.float32, device=case.device)
    inputs = tuple(x.float() for x in subject.draw(n, batch=1, device=case.device))
    return counted(lambda: subject.call(module, inputs, case.is_causal, None), case.device)


@law("refusals refuse by name", 0.0)
def refusals(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """Check that all that the traits deny is refused by name, and that the message names what would work."""
    mechanism: Any = subject.mechanism
    claims(mechanism is not None, "no declared traits")
    module, length = subject.built(device=device), 6
    inputs, traits, name = subject.draw(length, device=device), mechanism.traits, type(mechanism).__name__
    mask = torch.ones(2, length, dtype=torch.bool, device=inputs[0].device)
    attempts: dict[str, Any] = {}
    if not traits.causal:
        attempts["causal"] = lambda: module(*inputs, is_causal=True)
    if not traits.bidirectional:
        attempts["bidirectional"] = lambda: module(*inputs)
    if not traits.padding:
        attempts["padding"] = lambda: module(*inputs, is_causal=traits.modes[0], key_mask=mask)
    if traits.positions == "grid":
        late = torch.arange(length, device=inputs[0].device) > 0
        attempts["positions"] = lambda: module(*inputs, is_causal=traits.modes[0], key_mask=late.expand(2, -1))
    if isinstance(mechanism, Attention):
        (q, k, v), least = inputs, traits.modes[0]
        if not traits.cross:
            attempts["cross"] = lambda: module(q[:, :, :4], k, v)
        if not traits.mask:
            attempts["mask"] = lambda: module(q, k, v, is_causal=least, attn_mask=mask[0].expand(length, length))
        if traits.memory is None:
            attempts["memory"] = lambda: module.decode(q, k, v)
    failed = [trait for trait, attempt in attempts.items() if not _refused(attempt, name, trait)]
    yield float(len(failed)), f"accepted: {', '.join(failed)}"


def _refused(attempt: Any, name: str, trait: str) -> bool:
    try:
        attempt()
    except Unsupported as error:
        return name in str(error) and f"traits.{trait}" in str(error)
    return False


@law_of_calls("torch.export, dynamic length")
def exported(case: Case) -> Breaches:
    """torch.export with a dynamic length gives a program that is right at other lengths."""
    claims(case.promises is not None, OURS)
    claims(case.promises.export, "denied by its traits")
    inputs, keywords = case.draw(48), {"is_causal": case.is_causal}
    sizes = tuple({x.ndim - 2: torch.export.Dim("length", min=2, max=128)} for x in inputs)
    exported = torch.export.export(case.module, inputs, keywords, dynamic_shapes={"inputs": sizes, "is_causal": None})
    program = exported.module()
    for other in (5, 48, 97):
        inputs = case.draw(other)
        yield moved(program(*inputs, **keywords), case.call(*inputs)), f"{other} tokens"
