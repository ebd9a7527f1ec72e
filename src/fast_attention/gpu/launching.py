"""Calls the kernels of chunk sums: grids, strides and the memory of results.

Tensors are (B, H, n, width) with any strides but the last, which is 1; states (B, H, D E + D) in float32, sums of
products first, or (B, H, D E + 2 D) with the logarithms of what both are divided by. Rows of projections are
(H, D, width), their bias (H, D). A key mask is (B, H, n) in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fast_attention.gpu import gradients, maps, reading, steps, sums
from fast_attention.gpu.calls import chunks_of, launch, outputs_like, power, strides
from fast_attention.gpu.configurations import STEP, Configuration, Sizes, configuration, exponential
from fast_attention.gpu.decays import Decays

PROGRAM = 1024  # numbers of a state that a program adds up from chunk to chunk
CHANNELS = 64  # features at most
Tokens = tuple[Any, ...]  # queries, keys, values, the mask, gradients of outputs
Read = tuple[Tensor, ...]  # outputs, and what is kept of a forward pass


class Sums:
    """States of D features, their sums from chunk to chunk and their gradients: shared by families of kernels.

    ``scaled``: states end with logarithms of what sums are divided by. ``begins`` (chunks,): which chunks are the first
    of a packed sequence.
    """

    features: int
    scaled: bool
    begins: Tensor | None

    def running(
        self, states: Tensor, first: Tensor | None, E: int, *, totals: Tensor | None = None, backwards: bool = False
    ) -> Tensor:
        """Make each chunk's sums those of ``first`` and the chunks before (behind) it; the sums of all."""
        batch, heads, count, numbers = states.shape
        last, (D, E) = states.new_empty((batch, heads, numbers)), (self.features, E) if self.scaled else (numbers, 1)
        columns = min(CHANNELS if self.scaled else PROGRAM, max(1, PROGRAM // power(E)))
        launch(
            sums.running_sums, batch * heads * -(-D // columns), states, first, last, totals, self.begins, D, E, count,
            SCALED=self.scaled, REVERSED=backwards, BD=columns, BE=power(E),
            num_warps=min(4, max(1, columns * power(E) // 256)),
        )  # fmt: skip
        return last

    def over_scales(self, gradient: Tensor, state: Tensor) -> Tensor:
        """The gradient of a state's sums as a state of its own: over the inverse of their scales."""
        D = self.features
        return torch.cat([gradient[..., :-D], -state[..., -D:]], -1) if self.scaled else gradient.contiguous()

    def at_scales(self, gradient: Tensor, state: Tensor) -> Tensor:
        """The gradient of sums at their scales, from a state of sums over queries; scales have none."""
        D = self.features
        if not self.scaled:
            return gradient
        factors = (gradient[..., -D:] + state[..., -D:]).exp()
        return self.times(gradient, factors)

    def of_all(self, gradient: Tensor, state: Tensor) -> Tensor:
        """``at_scales`` for a state that all queries read."""
        return self.at_scales(gradient, state)

    def times(self, gradient: Tensor, factors: Tensor) -> Tensor:
        """A state of sums over queries times ``factors`` of every feature; scales have no gradient."""
        D = self.features
        products = gradient[..., : -2 * D].unflatten(-1, (D, -1)) * factors[..., None]
        return torch.cat([products.flatten(-2), gradient[..., -2 * D : -D] * factors, torch.zeros_like(factors)], -1)


@dataclass(eq=False)
class Launch(Sums):
    """Arguments that all calls of one computation share.

    ``offset`` is that of a map, or what tokens are multiplied by that ``rows`` of queries and of keys project;
    ``trained``: gradients of rows are wanted.
    """

    code: int
    offset: float
    features: int
    sizes: Sizes
    dtype: torch.dtype
    eps: float = 0.0
    normalized: bool = True
    log_decay: Tensor | None = None
    rows: tuple[Tensor | None, Tensor | None] = (None, None)
    bias: Tensor | None = None
    begins: Tensor | None = None
    trained: bool = False

    @classmethod
    def elementwise(
        cls, x: Tensor, values: int, log_decay: Tensor | None = None, *, code: int, offset: float, eps: float = 0.0,
        normalized: bool = True,
    ) -> Launch:  # fmt: skip
        """For tokens ``x`` that are mapped by map number ``code``; float32 keeps float32's digits."""
        row = configuration(x.shape[-1], values, exact=x.dtype == torch.float32)
        return cls(code, offset, x.shape[-1], Sizes(row, row), x.dtype, eps, normalized, log_decay)

    @classmethod
    def exponential(
        cls, x: Tensor, values: int, rows: Tensor, bias: Tensor | None, key_rows: Tensor | None = None,
        begins: Tensor | None = None,
    ) -> Launch:  # fmt: skip
        """For tokens ``x`` that ``rows`` project, keys by others if there are any."""
        key_rows = rows if key_rows is None else key_rows
        sizes, trained = exponential(x.shape[-1], exact=x.dtype == torch.float32), rows.requires_grad
        return cls(
            maps.EXPONENTIAL, x.shape[-1] ** -0.25, rows.shape[-2], sizes, x.dtype, rows=(rows, key_rows),
            bias=None if bias is None else bias.contiguous(), begins=begins, trained=trained or key_rows.requires_grad,
        )  # fmt: skip

    @property
    def precision(self) -> str:
        """How products are made: float32 keeps its digits."""
        return "tf32x3" if self.dtype == torch.float32 else "tf32"

    @property
    def scaled(self) -> bool:  # type: ignore[override]
        """Whether features are exponentials."""
        return self.code == maps.EXPONENTIAL

    @cached_property
    def decays(self) -> Decays | None:
        """Tables of how sums fade."""
        return None if self.log_decay is None else Decays.of(self.log_decay, self.sizes.forward.chunk)

    @cached_property
    def parts(self) -> tuple[Tensor | None, Tensor | None]:
        """Rows for products with tokens: those of sixteen bits as two such numbers, behind each other."""
        queries, keys = self.rows
        parts = self._parts(keys)
        return parts if queries is keys else self._parts(queries), parts

    def _parts(self, rows: Tensor | None) -> Tensor | None:
        if rows is None or self.dtype == torch.float32:
            return None if rows is None else rows.contiguous()
        high = rows.to(self.dtype)
        return torch.stack([high, (rows - high).to(self.dtype)])

    def scan(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None, *, keep: bool
    ) -> tuple[Read, Read]:
        """Outputs and the state after all keys; what the backward pass needs."""
        states, last = self.sums(k, v, mask, first)
        out, *saved = self.outputs(q, k, v, mask, states, is_causal=True, keep=keep)
        return (out, last), (*saved, states)

    def sums(
        self, x: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None, read: tuple[Tensor | None, ...] = (), *,
        backwards: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The sums before every chunk of keys and over all keys, ``first`` included.

        ``backwards`` those of queries behind every chunk, and ``v`` gradients of outputs; ``read``: one over their
        denominators, the gradients of these, and the logarithms over which exponentials are.
        """
        (batch, heads, length, width), E, D = x.shape, v.shape[-1], self.features
        count, sizes, decays = chunks_of(length, self.sizes.forward.chunk), self.sizes.forward, self.decays
        states = x.new_empty((batch, heads, count, D * (E + 1 + self.scaled)), dtype=torch.float32)
        launch(
            sums.chunk_sums, batch * heads * count * -(-D // sizes.columns) * -(-E // sizes.values), x, v,
            self.parts[not backwards], self.bias, mask,
            None if decays is None else decays.since if backwards else decays.until, *(read or (None, None, None)),
            states, heads, length, D, width, E, count, self._low, self.offset, *strides(x, 3), *strides(v, 3),
            *strides(mask, 2), **self._options(sizes, width),
        )  # fmt: skip
        totals = None if decays is None else decays.totals
        return states, self.running(states, first, E, totals=totals, backwards=backwards)

    def outputs(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, states: Tensor, *, is_causal: bool,
        keep: bool,
    ) -> Read:  # fmt: skip
        """Outputs, one over their denominators, and if ``keep`` what rounding took of outputs.

        Of exponentials the logarithms over which they are follow. Noncausal, ``states`` are sums over all keys.
        """
        E = self._values(states)
        out, rest = outputs_like(q, E, keep=keep)
        factors, *shifts = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(1 + self.scaled))
        self._run(
            reading.outputs, q, -(-E // self.sizes.forward.values), (q, k, v, mask), states, out,
            rest if rest.ndim > 1 else None, factors, *(shifts or [None]), CAUSAL=is_causal,
            NORMALIZED=self.normalized, eps=self.eps,
        )  # fmt: skip
        return out, factors, rest, *shifts

    def of_queries(
        self, tokens: Tokens, read: Read, after: Tensor | None, *, is_causal: bool
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """Gradients of queries, of what logarithms they read, of denominators; sums behind chunks and over all."""
        (q, *_, grad), (out, factors, rest, *shifts, states) = tokens, read
        batch, heads, length, E = grad.shape
        weights, rows = torch.zeros_like(factors), 32
        if self.normalized:
            launch(
                sums.row_products, batch * heads * -(-length // rows), out, rest if rest.ndim > 1 else None, grad,
                factors, weights, heads, length, E, *strides(grad, 3), BT=rows, BE=self.sizes.forward.values,
                num_warps=4,
            )  # fmt: skip
        kept = factors, weights, *(shifts or [None])
        later_sums, whole = self.sums(q, grad, None, after, kept, backwards=True)
        dq, of_logs = self._of_tokens(gradients.of_queries, q, tokens, states, grad, *kept, CAUSAL=is_causal)
        return dq, of_logs, weights, later_sums, whole

    def of_keys(
        self, tokens: Tokens, read: Read | None, weights: Tensor | None, later_sums: Tensor, *, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of keys, values and what logarithms keys give; noncausal, only ``later_sums`` is of queries."""
        (_, k, v, _, grad), (factors, _, *shifts) = tokens, (None, None) if read is None else read[1:-1]
        shift, dv = shifts[0] if shifts else None, v.new_empty(v.shape)
        dk, of_logs = self._of_tokens(
            gradients.of_keys, k, tokens, later_sums, grad, factors, weights, shift, CAUSAL=is_causal
        )
        parts = -(-v.shape[-1] // self.sizes.backward.values)
        self._run(gradients.of_values, k, parts, tokens, later_sums, grad, factors, shift, dv, CAUSAL=is_causal)
        return dk, dv, of_logs

    def _of_tokens(
        self, kernel: Any, x: Tensor, tokens: Tokens, states: Tensor, *given: Tensor | None, CAUSAL: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of queries or of keys, and of logarithms, where they are wanted."""
        (batch, heads, length, _), D, of_logs = x.shape, self.features, None
        out, parts = x.new_empty(x.shape), 1 if self.scaled else -(-D // self.sizes.backward.columns)
        if self.trained or self.log_decay is not None:  # of every token's features, or of its columns by each program
            shape = (length, D) if self.trained else (parts, length)
            of_logs = x.new_empty((batch, heads, *shape), dtype=torch.float32)
        self._run(kernel, x, parts, tokens, states, *given, out, of_logs, CAUSAL=CAUSAL)
        return out, of_logs

    def _run(
        self, kernel: Any, x: Tensor, parts: int, tokens: Tokens, states: Tensor, *given: Tensor | None, CAUSAL: bool,
        **named: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel over blocks of tokens ``x``, so many programs a block; ``tokens`` as long as it reads."""
        q, k, v, mask, *grads = tokens
        sizes = self.sizes.backward if grads else self.sizes.forward
        (batch, heads, length, width), decays, tables = x.shape, self.decays, (None, None)
        if decays is not None:
            gives = kernel in (gradients.of_keys, gradients.of_values)
            tables = decays.until if gives else decays.since, decays.logs
        launch(
            kernel, batch * heads * -(-length // sizes.block) * parts, q, k, v, *self.parts, self.bias, mask, *tables,
            states, *given, heads, length if q is None else q.shape[2], 0 if k is None else k.shape[2], self.features,
            width, self._values(states), states.shape[2] if CAUSAL else 1, self._low, self.offset, *strides(q, 3),
            *strides(k, 3), *strides(v, 3), *strides(mask, 2), *(n for x in grads for n in strides(x, 3)),
            CAUSAL=CAUSAL, **named, **self._options(sizes, width),
        )  # fmt: skip

    def of_weights(
        self, q: Tensor | None, k: Tensor | None, of_queries: Tensor | None, of_keys: Tensor | None,
        ends: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Gradients of rows, or of logarithms of decays; ``ends``: the last state and its gradient."""
        if self.scaled:
            rows = [self._of_rows(*given) for given in ((of_queries, q), (of_keys, k))]
            return rows[q is None], None, rows[1], None
        if of_queries is None or of_keys is None or ends is None:
            return (None,)
        assert self.log_decay is not None
        totals = of_queries.sum(-2, dtype=torch.float64) - of_keys.sum(-2, dtype=torch.float64)
        totals[..., -1] += (ends[0].double() * ends[1]).sum(-1)  # what the sums of all decays from the first token get
        return (totals.flip(-1).cumsum(-1).flip(-1).to(self.log_decay.dtype),)

    def _of_rows(self, logs: Tensor | None, x: Tensor | None) -> Tensor | None:
        if logs is None or x is None:
            return None
        return torch.einsum("bhnd,bhnw->hdw", logs, x.float() * self.offset)

    def step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
        """The output of one token behind a state, and the state after it."""
        (batch, heads, _, width), E = q.shape, v.shape[-1]
        out, following = v.new_empty((batch, heads, 1, E), dtype=q.dtype), state.new_empty(state.shape)
        decay = None if self.log_decay is None else self.log_decay.exp().contiguous()
        rows = (None if x is None else x.contiguous() for x in self.rows)
        launch(
            steps.step, batch * heads * -(-E // STEP), q, k, v, *rows, self.bias, mask, decay, state, out, following,
            heads, self.features, width, E, self.offset, self.eps, *strides(q, 2), *strides(k, 2), *strides(v, 2),
            *strides(mask, 2), MAP=self.code, NORMALIZED=self.normalized, BD=STEP,
            BW=power(width) if self.scaled else STEP, BE=STEP, num_warps=4,
        )  # fmt: skip
        return out, following

    def _values(self, states: Tensor) -> int:
        """E of states."""
        return states.shape[-1] // self.features - 1 - self.scaled

    @property
    def _low(self) -> int:
        """How far behind rows, or logarithms of decays, lies what rounding took of them."""
        if self.decays is not None:
            return self.decays.logs[0].numel()
        return 0 if self.parts[1] is None else self.parts[1].numel() // 2

    def _options(self, sizes: Configuration, width: int) -> dict[str, Any]:
        """Constants of a kernel over tiles."""
        chunk, block, columns, values, warps, stages = sizes
        return {
            "MAP": self.code, "PRECISION": self.precision, "CHUNK": chunk, "BT": block, "BD": columns,
            "BW": max(16, power(width)) if self.scaled else 16, "BE": values, "num_warps": warps, "num_stages": stages,
        }  # fmt: skip
