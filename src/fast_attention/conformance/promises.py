"""Laws about what one of our mechanisms declares: its traits are tested both ways."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fast_attention.conformance.finding import Finding, judged, law, moved, rounding, unclaimed
from fast_attention.conformance.independence import padding_masks
from fast_attention.conformance.under_test import AttentionUnderTest
from fast_attention.counting import count_operations, exponent, peak_bytes
from fast_attention.mechanism import Attention, Mixer, Shape, Unsupported
from fast_attention.nn.bound import Bound

SHORT, LONG = 1024, 4096


@law("decode in any split = one pass")
def decoding(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Decoding in any split gives what one pass gives, of sequences padded in front too."""
    mechanism = subject.mechanism
    if mechanism is None or mechanism.traits.memory is None:
        return unclaimed("does not stream")
    module, length = subject.built(device=device), subject.length
    q, k, v = subject.draw(length, device=device)
    mask, worst, at = torch.ones(2, length, dtype=torch.bool, device=q.device), 0.0, ""
    mask[1, 2:7] = mask[1, -3:] = False
    front = torch.ones_like(mask)
    front[0, :4] = front[1, :11] = False
    for key_mask in (None, mask, front) if subject.padding else (None,):
        one_pass = subject.call(module, (q, k, v), True, key_mask)
        for sizes in ([length], [1] * length, [5, 1, 11, length - 17], [length - 1, 1]):
            state, outputs, start = None, [], 0
            for size in sizes:
                new = slice(start, start + size)
                visible = None if key_mask is None else key_mask[:, new]
                out, state = module.decode(q[:, :, new], k[:, :, new], v[:, :, new], state, key_mask=visible)
                outputs.append(out)
                start += size
            size = moved(torch.cat(outputs, -2), one_pass)
            if size > worst:
                which = (
                    "padded in front" if key_mask is front else "with a key mask" if key_mask is mask else "unmasked"
                )
                worst, at = size, f"split {sizes[:4]}, {which}"
    return judged(worst, rounding(subject.dtype), at)


@law("the last queries = the last rows")
def few(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """A causal call with the last queries alone gives the last rows of the whole call."""
    mechanism = subject.mechanism
    if mechanism is None or not (subject.causal and mechanism.traits.cross):
        return unclaimed("as many queries as keys")
    module, length = subject.built(device=device), subject.length
    q, k, v = subject.draw(length, device=device)
    mask, worst, at = torch.ones(2, length, dtype=torch.bool, device=q.device), 0.0, ""
    mask[0, :4] = mask[1, :11] = mask[1, -3:] = False
    for key_mask in (None, mask) if subject.padding else (None,):
        whole = subject.call(module, (q, k, v), True, key_mask)
        for queries in (1, 2, 5, length // 2, length - 1):
            out = subject.call(module, (q[..., -queries:, :], k, v), True, key_mask)
            size = moved(out, whole[..., -queries:, :])
            if size > worst:
                worst, at = size, f"{queries} of {length}, {'un' * (key_mask is None)}masked"
    return judged(worst, rounding(subject.dtype), at)


@law("packed sequences = one call for each")
def packed(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Sequences in one row give the outputs and gradients of one call for each, and none moves another by a bit."""
    if subject.mechanism is None:
        return unclaimed("not one of this library's mechanisms")
    module, length = subject.built(device=device), subject.length
    lengths, inputs = (9, 4, 9, 1, length - 23), subject.draw(length, device=device)
    worst, at = 0.0, ""
    for is_causal in subject.modes:

        def in_one_row(*rows: Tensor, is_causal: bool = is_causal) -> Tensor:
            return module(*rows, is_causal=is_causal, lengths=lengths)

        def per_sequence(*rows: Tensor, is_causal: bool = is_causal) -> Tensor:
            parts = zip(*(x.split(lengths, -2) for x in rows), strict=True)
            return torch.cat([subject.call(module, part, is_causal, None) for part in parts], -2)

        both = [_with_gradients(function, inputs, module) for function in (in_one_row, per_sequence)]
        changed = tuple(torch.cat([x[..., :9, :], -x[..., 9:13, :], x[..., 13:, :]], -2) for x in inputs)
        before, after = both[0][0], in_one_row(*changed)
        others = moved(*(torch.cat([out[..., :9, :], out[..., 13:, :]], -2) for out in (after, before)))
        sizes = [*(moved(x, y) for x, y in zip(*both, strict=True)), float("inf") if others else 0.0]
        if max(sizes) > worst:
            worst, at = max(sizes), f"is_causal={is_causal}" + (", a neighbour moved" if others else "")
    return judged(worst, rounding(subject.dtype), at)


def _with_gradients(function: Any, inputs: tuple[Tensor, ...], module: nn.Module) -> tuple[Tensor, ...]:
    """Outputs, and gradients of inputs and weights."""
    leaves = [*(x.clone().requires_grad_() for x in inputs), *module.parameters()]
    out = function(*leaves[: len(inputs)])
    return out, *torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True, materialize_grads=True)


@law("padding may hold anything")
def poisoned(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Masked keys and values of NaN, infinity or 3e38 move no output, gradient or state; masked queries move no other
    token's output."""
    if subject.mechanism is None or not subject.padding:
        return unclaimed("takes no key mask" if subject.mechanism is not None else "not one of ours")
    module, length = subject.built(device=device, dtype=torch.float32), subject.length
    inputs = tuple(x.float() for x in subject.draw(length, device=device))
    mask, worst, at = padding_masks(length, inputs[0].device), 0.0, ""
    masked = ~mask.view(2, *[1] * (inputs[0].ndim - 3), length, 1)
    for is_causal in subject.modes:
        before = _outputs_and_gradients(subject, module, _filled(inputs, masked, 0.0), is_causal, mask)
        for value in (float("nan"), float("inf"), 3e38, -3e38):
            after = _outputs_and_gradients(subject, module, _filled(inputs, masked, value), is_causal, mask)
            queries_too = tuple(x.masked_fill(masked, value) for x in inputs)
            rows = (subject.call(module, x, is_causal, mask).movedim(-2, 1)[mask] for x in (queries_too, inputs))
            sizes = [moved(x, y) for x, y in (*zip(after, before, strict=True), rows)]
            if max(sizes) > worst:
                worst, at = max(sizes), f"masked tokens hold {value:g}, is_causal={is_causal}"
    return judged(worst, rounding(torch.float32), at)


def _filled(inputs: tuple[Tensor, ...], masked: Tensor, value: float) -> tuple[Tensor, ...]:
    """The inputs with ``value`` at the masked tokens of keys and values, or of x."""
    has_queries = len(inputs) == 3
    return tuple(x if has_queries and i == 0 else x.masked_fill(masked, value) for i, x in enumerate(inputs))


def _outputs_and_gradients(
    subject: AttentionUnderTest, module: Any, inputs: tuple[Tensor, ...], is_causal: bool, mask: Tensor
) -> tuple[Tensor, ...]:
    """Outputs, gradients of inputs and weights and, where the mechanism streams, outputs of two decoding steps."""
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    out = subject.call(module, leaves, is_causal, mask)
    leaves_and_weights = [*leaves, *module.parameters()]
    grads = torch.autograd.grad(out.sin().sum(), leaves_and_weights, allow_unused=True, materialize_grads=True)
    outputs, state, memory = [], None, subject.mechanism is not None and subject.mechanism.traits.memory
    for new in (slice(0, 9), slice(9, None)) if memory and is_causal else ():
        decoded, state = module.decode(*(x[:, :, new] for x in inputs), state, key_mask=mask[:, new])
        outputs.append(decoded)
    return (out, *grads, *outputs)


@law("torch.func: jvp, jacfwd, vmap")
def transforms(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Forward-mode derivatives agree with gradients, also under ``jacfwd``; ``vmap`` over the batch is the batch."""
    if subject.mechanism is None:
        return unclaimed("not one of this library's mechanisms")
    module, inputs, worst, at = subject.built(device=device), subject.draw(subject.length, device=device), 0.0, ""
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
            sizes = {
                "jvp": moved(out + mismatch, out),
                "jacfwd": moved(torch.func.jacfwd(scaled)(inputs[0].new_ones(())), tangent),
                "vmap": moved(torch.vmap(call)(*inputs), out),
            }
        at, worst = max([(at, worst), *sizes.items()], key=lambda pair: pair[1])
    return judged(worst, rounding(subject.dtype), at)


@law("states combine")
def combining(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """States of constant size combine associatively; a combined state decodes on, or is read, as if it had seen all."""
    mechanism = subject.mechanism
    if not isinstance(mechanism, Attention) or mechanism.traits.memory != "constant":
        return unclaimed("no state of constant size")
    module = subject.built(device=device)
    q, k, v = subject.draw(subject.length, device=device)
    chunks = [slice(0, 9), slice(9, 20), slice(20, 30)]
    a, b, c = (mechanism.summarise(k[:, :, chunk], v[:, :, chunk], module.w) for chunk in chunks)
    left = mechanism.combine(mechanism.combine(a, b), c)
    right = mechanism.combine(a, mechanism.combine(b, c))
    rest = slice(30, subject.length)
    outs = [module.decode(q[:, :, rest], k[:, :, rest], v[:, :, rest], state)[0] for state in (left, right)]
    one_pass = subject.call(module, (q, k, v), True, None)[:, :, rest]
    if tuple(t.shape for t in a.held) != tuple(t.shape for t in left.held):
        return judged(float("inf"), 0.0, "the state grows")
    size = max(moved(out, one_pass) for out in outs)
    return judged(max(size, _reading(subject, mechanism, device)), rounding(subject.dtype))


def _reading(subject: AttentionUnderTest, mechanism: Attention[Any, Any], device: str) -> float:
    """How far noncausal outputs move if they are read from the state of two chunks; 0.0 where there are none."""
    module, q, k, v = subject.built(device=device), *subject.draw(subject.length, device=device)
    mask, worst = torch.ones(2, subject.length, dtype=torch.bool, device=q.device), 0.0
    mask[1, 2:7] = mask[1, -3:] = False
    for key_mask in ((None, mask) if subject.padding else (None,)) if subject.bidirectional else ():
        parts = [slice(0, 9), slice(9, subject.length)]
        masks = [None if key_mask is None else key_mask[:, part] for part in parts]
        whole = subject.call(module, (q, k, v), False, key_mask)
        a, b = (
            mechanism.summarise(k[:, :, part], v[:, :, part], module.w, key_mask=visible)
            for part, visible in zip(parts, masks, strict=True)
        )
        try:
            read = mechanism.read(q, k, v, module.w, mechanism.combine(a, b), key_mask=key_mask)
        except Unsupported:
            return worst
        worst = max(worst, moved(read, whole))
    return worst


@law("declared order")
def order(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """Counted operations and peak memory grow with the declared power of n."""
    mechanism = subject.mechanism
    if mechanism is None:
        return unclaimed("no declared order")
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
    mechanism = subject.mechanism
    if mechanism is None:
        return unclaimed("no declared traits")
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
def exported(subject: AttentionUnderTest, device: str = "cpu") -> Finding:
    """torch.export with a dynamic length gives a program that is right at other lengths."""
    mechanism = subject.mechanism
    if mechanism is None or not mechanism.traits.export:
        return unclaimed("denied by its traits" if mechanism is not None else "not one of ours")
    worst, axis = 0.0, 1 if isinstance(mechanism, Mixer) else 2
    for is_causal in subject.modes:
        module = _Fixed(subject.built(device=device), is_causal).eval()
        length = torch.export.Dim("length", min=2, max=128)
        inputs = subject.draw(48, device=device)
        try:
            sizes = (tuple({axis: length} for _ in inputs),)
            program = torch.export.export(module, inputs, dynamic_shapes=sizes).module()
            for other in (5, 48, 97):
                inputs = subject.draw(other, device=device)
                worst = max(worst, moved(program(*inputs), module(*inputs)))
        except Exception as error:
            return Finding("broken", float("inf"), 0.0, str(error).strip().splitlines()[0][:200])
    return judged(worst, rounding(subject.dtype))
