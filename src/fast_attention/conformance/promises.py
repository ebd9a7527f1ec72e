"""Laws about what one of our mechanisms declares: its traits are tested both ways."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.conformance.finding import Breaches, Finding, all_moved, claims, judged, law, moved, rounding
from fast_attention.conformance.independence import padding_masks
from fast_attention.conformance.under_test import AttentionUnderTest, with_gradients
from fast_attention.counting import count_operations, exponent, peak_bytes
from fast_attention.mechanism import Attention, Mixer, Shape, Unsupported
from fast_attention.nn.bound import Bound

SHORT, LONG = 1024, 4096


OURS = "not one of this library's mechanisms"


@law("decode in any split = one pass")
def decoding(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """Decoding in any split gives what one pass gives, of sequences padded in front too."""
    mechanism = subject.mechanism
    claims(mechanism is not None and mechanism.traits.memory is not None, "does not stream")
    module, length = subject.built(device=device), subject.length
    q, k, v = subject.draw(length, device=device)
    mask = torch.ones(2, length, dtype=torch.bool, device=q.device)
    front = torch.ones_like(mask)
    mask[1, 2:7] = mask[1, -3:] = front[0, :4] = front[1, :11] = False
    masks = {"unmasked": None} | ({"with a key mask": mask, "padded in front": front} if subject.padding else {})
    for which, key_mask in masks.items():
        one_pass = subject.call(module, (q, k, v), True, key_mask)
        for sizes in ([length], [1] * length, [5, 1, 11, length - 17], [length - 1, 1]):
            state, outputs, start = None, [], 0
            for size in sizes:
                new = slice(start, start + size)
                visible = None if key_mask is None else key_mask[:, new]
                out, state = module.decode(q[:, :, new], k[:, :, new], v[:, :, new], state, key_mask=visible)
                outputs.append(out)
                start += size
            yield moved(torch.cat(outputs, -2), one_pass), f"split {sizes[:4]}, {which}"


@law("the last queries = the last rows")
def few(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """A causal call with the last queries alone gives the last rows of the whole call."""
    mechanism = subject.mechanism
    claims(mechanism is not None and subject.causal and mechanism.traits.cross, "as many queries as keys")
    module, length = subject.built(device=device), subject.length
    q, k, v = subject.draw(length, device=device)
    mask = torch.ones(2, length, dtype=torch.bool, device=q.device)
    mask[0, :4] = mask[1, :11] = mask[1, -3:] = False
    for key_mask in (None, mask) if subject.padding else (None,):
        whole = subject.call(module, (q, k, v), True, key_mask)
        for queries in (1, 2, 5, length // 2, length - 1):
            out = subject.call(module, (q[..., -queries:, :], k, v), True, key_mask)
            yield moved(out, whole[..., -queries:, :]), f"{queries} of {length}, {'un' * (key_mask is None)}masked"


@law("packed sequences = one call for each")
def packed(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """Sequences in one row give the outputs and gradients of one call for each, and none moves another by a bit."""
    claims(subject.mechanism is not None, OURS)
    module, length = subject.built(device=device), subject.length
    lengths, inputs = (9, 4, 9, 1, length - 23), subject.draw(length, device=device)
    for is_causal in subject.modes:

        def in_one_row(*rows: Tensor, is_causal: bool = is_causal) -> Tensor:
            return module(*rows, is_causal=is_causal, lengths=lengths)

        def per_sequence(*rows: Tensor, is_causal: bool = is_causal) -> Tensor:
            parts = zip(*(x.split(lengths, -2) for x in rows), strict=True)
            return torch.cat([subject.call(module, part, is_causal, None) for part in parts], -2)

        packed, separate = (with_gradients(call, inputs, module) for call in (in_one_row, per_sequence))
        yield all_moved(packed, separate), f"{is_causal=}"
        changed = tuple(torch.cat([x[..., :9, :], -x[..., 9:13, :], x[..., 13:, :]], -2) for x in inputs)
        outs = (in_one_row(*changed), packed[0])
        if moved(*(torch.cat([out[..., :9, :], out[..., 13:, :]], -2) for out in outs)):
            yield float("inf"), f"{is_causal=}, a neighbour moved"


@law("padding may hold anything", rounding(torch.float32))
def poisoned(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """Masked keys and values of NaN, infinity or 3e38 move no output, gradient or state; masked queries move no other
    token's output."""
    claims(subject.mechanism is not None, "not one of ours")
    claims(subject.padding, "takes no key mask")
    module, length = subject.built(device=device, dtype=torch.float32), subject.length
    inputs = tuple(x.float() for x in subject.draw(length, device=device))
    mask = padding_masks(length, inputs[0].device)
    masked = ~mask.view(2, *[1] * (inputs[0].ndim - 3), length, 1)
    streams = subject.mechanism is not None and subject.mechanism.traits.memory is not None

    def fill(value: float) -> tuple[Tensor, ...]:
        """The inputs with ``value`` at the masked tokens of keys and values, or of x."""
        has_queries = len(inputs) == 3
        return tuple(x if has_queries and i == 0 else x.masked_fill(masked, value) for i, x in enumerate(inputs))

    def outputs_of(filled: tuple[Tensor, ...], is_causal: bool) -> tuple[Tensor, ...]:
        """Outputs, gradients of inputs and weights and, where the mechanism streams, two decoding steps."""
        outputs = with_gradients(lambda *x: subject.call(module, x, is_causal, mask), filled, module)
        state = None
        for new in (slice(0, 9), slice(9, None)) if streams and is_causal else ():
            decoded, state = module.decode(*(x[:, :, new] for x in filled), state, key_mask=mask[:, new])
            outputs += (decoded,)
        return outputs

    for is_causal in subject.modes:
        before = outputs_of(fill(0.0), is_causal)
        for value in (float("nan"), float("inf"), 3e38, -3e38):
            at = f"masked tokens hold {value:g}, {is_causal=}"
            yield all_moved(outputs_of(fill(value), is_causal), before), at
            queries_too = tuple(x.masked_fill(masked, value) for x in inputs)
            rows = (subject.call(module, x, is_causal, mask).movedim(-2, 1)[mask] for x in (queries_too, inputs))
            yield moved(*rows), at


@law("torch.func: jvp, jacfwd, vmap")
def transforms(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """Forward-mode derivatives agree with gradients, also under ``jacfwd``; ``vmap`` over the batch is the batch."""
    claims(subject.mechanism is not None, OURS)
    module, inputs = subject.built(device=device), subject.draw(subject.length, device=device)
    for is_causal in subject.modes:

        def call(*arguments: Tensor, is_causal: bool = is_causal) -> Tensor:
            return subject.call(module, arguments, is_causal, None)

        def scaled(factor: Tensor, call: Any = call) -> Tensor:
            return call(*(factor * x for x in inputs))

        with warnings.catch_warnings():  # of what torch imports, and of operations that it maps one by one
            warnings.filterwarnings("ignore", message=".torch.jit|There is a performance drop")
            out, tangent, *_ = torch.func.jvp(call, inputs, inputs)
            grad_out = out.detach().cos()
            gradients = torch.func.vjp(call, *inputs)[1](grad_out)
            backwards = torch.stack([(x * g).sum() for x, g in zip(inputs, gradients, strict=True)]).sum()
            mismatch = ((tangent * grad_out).sum() - backwards) / grad_out.square().sum()
            yield moved(out + mismatch, out), "jvp"
            yield moved(torch.func.jacfwd(scaled)(inputs[0].new_ones(())), tangent), "jacfwd"
            yield moved(torch.vmap(call)(*inputs), out), "vmap"


@law("states combine")
def combining(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """States of constant size combine associatively; a combined state decodes on, or is read, as if it had seen all."""
    mechanism: Any = subject.mechanism
    claims(isinstance(mechanism, Attention) and mechanism.traits.memory == "constant", "no state of constant size")
    module, length = subject.built(device=device), subject.length
    q, k, v = subject.draw(length, device=device)

    def state(start: int, stop: int, key_mask: Tensor | None = None) -> Any:
        visible = None if key_mask is None else key_mask[:, start:stop]
        return mechanism.summarise(k[:, :, start:stop], v[:, :, start:stop], module.w, key_mask=visible)

    a, b, c = state(0, 9), state(9, 20), state(20, 30)
    one_pass = subject.call(module, (q, k, v), True, None)[:, :, 30:]
    left = mechanism.combine(mechanism.combine(a, b), c)
    for whole in (left, mechanism.combine(a, mechanism.combine(b, c))):
        yield moved(module.decode(q[:, :, 30:], k[:, :, 30:], v[:, :, 30:], whole)[0], one_pass), "decoded"
    if tuple(t.shape for t in a.content) != tuple(t.shape for t in left.content):
        yield float("inf"), "the state grows"
    mask = torch.ones(2, length, dtype=torch.bool, device=q.device)
    mask[1, 2:7] = mask[1, -3:] = False
    for key_mask in ((None, mask) if subject.padding else (None,)) if subject.bidirectional else ():
        state_of_all = mechanism.combine(state(0, 9, key_mask), state(9, length, key_mask))
        with suppress(Unsupported):  # not every state can be read without causal order
            out = mechanism.read(q, k, v, module.w, state_of_all, key_mask=key_mask)
            yield moved(out, subject.call(module, (q, k, v), False, key_mask)), "read"


@law("declared order")
def order(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Counted operations and peak memory grow with the declared power of n."""
    mechanism: Any = subject.mechanism
    claims(mechanism is not None, "no declared order")
    worst, at, declared = -9.0, "", mechanism.traits.complexity_exponent
    for is_causal in subject.modes:
        costs = [_costs(mechanism, n, is_causal, device) for n in (SHORT, LONG)]
        for kind, small, large in zip(("operations", "peak memory"), *costs, strict=True):
            grown = exponent(small, large, LONG / SHORT)
            if grown - declared > worst:
                worst = grown - declared
                at = f"{kind} grow as n^{grown:.2f}, is_causal={is_causal}; declared {declared:g}"
    return judged(worst, 0.3, at)


def _costs(mechanism: Any, n: int, is_causal: bool, device: str) -> tuple[int, int]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        bound = Bound(mechanism, Shape(1, 16, n)).to(device)
        x = [torch.randn(1, 1, n, 16, device=device) for _ in range(3)]
    inputs = x if isinstance(mechanism, Attention) else [x[0][0]]

    def run() -> Tensor:
        return bound(*inputs, is_causal=is_causal)

    with torch.no_grad():
        return count_operations(run), peak_bytes(run, device)


@law("refusals refuse by name")
def refusals(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
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
    return judged(len(failed), 0, "accepted: " + ", ".join(failed) if failed else f"{len(attempts)} refusals")


def _refused(attempt: Any, name: str, trait: str) -> bool:
    try:
        attempt()
    except Unsupported as error:
        return name in str(error) and f"traits.{trait}" in str(error)
    return False


class _Fixed(nn.Module):
    """A module for torch.export, with ``is_causal`` fixed."""

    def __init__(self, module: nn.Module, is_causal: bool) -> None:
        super().__init__()
        self.module, self.is_causal = module, is_causal

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs, is_causal=self.is_causal)


@law("torch.export, dynamic length")
def exported(subject: AttentionUnderTest, device: str = "cpu") -> Breaches:
    """torch.export with a dynamic length gives a program that is right at other lengths."""
    mechanism = subject.mechanism
    claims(mechanism is not None, "not one of ours")
    claims(mechanism is None or mechanism.traits.export, "denied by its traits")
    axis = 1 if isinstance(mechanism, Mixer) else 2
    for is_causal in subject.modes:
        module = _Fixed(subject.built(device=device), is_causal).eval()
        inputs = subject.draw(48, device=device)
        sizes = (tuple({axis: torch.export.Dim("length", min=2, max=128)} for _ in inputs),)
        program = torch.export.export(module, inputs, dynamic_shapes=sizes).module()
        for other in (5, 48, 97):
            inputs = subject.draw(other, device=device)
            yield moved(program(*inputs), module(*inputs)), f"{other} tokens, {is_causal=}"
