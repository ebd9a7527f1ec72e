"""Associative retrieval (Schlag et al. 2021): keys with values, a query for one of them, one layer."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fast_attention.feature_maps.feature_map import Features, Logs
from fast_attention.lab.measure import state_bytes
from fast_attention.mechanism import Shape
from fast_attention.mechanisms.linear.kernelised import Kernelised
from fast_attention.nn.bound import Bound

BATCH, RATE = 32, 1e-3
EVERY, SEQUENCES, QUERIES = 100, 20, 200  # steps between evaluations; of each the sequences, and their queries at most
SIZES = (20, 60, 100, 200, 400)
LEARNT, PATIENCE = 1e-3, 10  # a loss that ends the training; evaluations in a row that may bring nothing new


@dataclass(frozen=True)
class Contender:
    """A mechanism as it is trained here.

    Args:
        label: In tables and pictures.
        mechanism: Its expression.
        width: Of queries and keys.
        redrawn: Whether its random features are drawn anew in every pass.
        channels: Whether values and outputs are projected, since it mixes channel by channel, each as wide as the keys.
        sizes: How many associations a sequence has.
    """

    label: str
    mechanism: str
    width: int = 64
    redrawn: bool = False
    channels: bool = False
    sizes: tuple[int, ...] = SIZES


class Batch(NamedTuple):
    """Keys and values (B, S), each a permutation, and the positions (B,) of what is asked for.

    One row of keys and values serves where all queries are about the same sequence.
    """

    keys: Tensor
    values: Tensor
    asked: Tensor

    @classmethod
    def drawn(cls, size: int, generator: torch.Generator) -> Batch:
        """Sequences of ``size`` associations with a query each."""
        keys, values = (torch.rand(BATCH, size, generator=generator).argsort(-1) for _ in range(2))
        return cls(keys, values, torch.randint(size, (BATCH,), generator=generator))

    @classmethod
    def one_sequence(cls, size: int, generator: torch.Generator) -> Batch:
        """A sequence with a query for each of its keys, or for some of many."""
        keys, values = (torch.rand(1, size, generator=generator).argsort(-1) for _ in range(2))
        return cls(keys, values, torch.randperm(size, generator=generator)[:QUERIES])


class Retrieval(nn.Module):
    """Embedded keys beside one-hot values are projected to keys, an embedded key to the query; one head attends.

    Values are the one-hot vectors themselves and nothing is projected behind attention, so that the output is the
    row of attention weights, sorted by value: ``forward`` returns it by position, and what it should have been.
    """

    def __init__(self, contender: Contender, size: int) -> None:
        super().__init__()
        self.contender, self.size, width = contender, size, contender.width
        embedding = int(2 * size * 1.1)
        self.embedding = nn.Parameter(torch.randn(size, embedding))
        self.key, self.query = nn.Linear(size + embedding, width), nn.Linear(embedding, width)
        self.bound = Bound(contender.mechanism, Shape(1, width, size + 1))
        self.kernelised = isinstance(self.bound.mechanism, Kernelised)
        for layer in (self.key, self.query):
            if self.kernelised:
                nn.init.uniform_(layer.weight, -(width**-0.5), width**-0.5)
            else:
                nn.init.xavier_uniform_(layer.weight)
        if contender.channels:
            self.value, self.out = nn.Linear(size + embedding, width), nn.Linear(width, size)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Predictions (B, S) and the numbers (B,) of what they should hold a one at."""
        if self.contender.redrawn:
            self.bound.redraw()
        asked = batch.keys.expand(len(batch.asked), -1).gather(1, batch.asked[:, None])
        q = self.query(F.embedding(asked, self.embedding))[:, None]  # (B, 1, 1, width)
        k = self._tokens(self.key, batch)[:, None]  # (B or 1, 1, S, width)
        if self.contender.channels:
            targets = batch.values.expand(len(batch.asked), -1).gather(1, batch.asked[:, None])[:, 0]
            return self._by_channel(q, k, batch), targets
        return self._weights(q, k)[:, 0, 0], batch.asked

    def _tokens(self, layer: nn.Linear, batch: Batch) -> Tensor:
        """The layer of one-hot values beside embedded keys, whose products are looked up."""
        of_values, of_keys = layer.weight.split([self.size, layer.in_features - self.size], 1)
        keys = self.embedding @ of_keys.mT + layer.bias
        return F.embedding(batch.values, of_values.mT) + F.embedding(batch.keys, keys)

    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        """The attention weights: of a kernelised mechanism from its features, else what it makes of one-hot values."""
        if self.kernelised:
            return kernel_weights(self.bound.mechanism, self.bound.w, q, k)
        k = k.expand(len(q), -1, -1, -1)
        return self.bound(q, k, torch.eye(self.size).expand(len(q), 1, -1, -1))

    def _by_channel(self, q: Tensor, k: Tensor, batch: Batch) -> Tensor:
        """The query token stands behind the others, as its own key, with a value of zeros."""
        many, v = len(q), self._tokens(self.value, batch)[:, None]
        k, v = (x.expand(many, -1, -1, -1) for x in (k, v))
        k, v = torch.cat([k, q], -2), torch.cat([v, torch.zeros_like(q)], -2)
        queries = torch.cat([torch.zeros_like(k[..., :-1, :]), q], -2)
        return self.out(self.bound(queries, k, v)[:, 0, -1])

    def state_numbers(self) -> int:
        """Numbers of the state that decoding keeps of all associations."""
        values = self.contender.width if self.contender.channels else self.size
        q, k = torch.randn(2, 1, 1, self.size, self.contender.width)
        with torch.no_grad():
            return state_bytes(self.bound.decode(q, k, torch.randn(1, 1, self.size, values))[1]) // 4


def kernel_weights(mechanism: Kernelised[Any], w: Any, q: Tensor, k: Tensor) -> Tensor:
    """``phi(q_i) . phi(k_j)`` over their sum over j: rows (..., L, S) of a kernelised mechanism's attention matrix."""
    queries, keys = (phi(x) for phi, x in zip(mechanism.maps(w), (q, k), strict=True))
    if isinstance(queries, Logs):
        assert isinstance(keys, Logs)
        most = keys.logs.detach().amax(-2, keepdim=True)  # of each feature: no exponent is above zero
        exponents = queries.logs + most
        products = (exponents - exponents.detach().amax(-1, keepdim=True)).exp() @ (keys.logs - most).exp().mT
        return products / products.sum(-1, keepdim=True)
    assert isinstance(keys, Features)
    assert keys.log_scale is None
    products = queries.values @ keys.values.mT
    return products / (products.sum(-1, keepdim=True) + 1e-6)


def loss_of(predictions: Tensor, targets: Tensor) -> Tensor:
    """Half the squared distance to the one-hot target, the mean over the batch; 0.5 where nothing is predicted."""
    right = predictions.gather(1, targets[:, None])[:, 0]
    return (0.5 * (predictions.square().sum(-1) - 2 * right + 1)).mean()


@torch.no_grad()
def evaluated(model: Retrieval, generator: torch.Generator) -> tuple[float, float]:
    """Loss, and share of queries whose highest output is the right one, over some sequences."""
    losses, right, count = 0.0, 0, 0
    for _ in range(SEQUENCES):
        predictions, targets = model(Batch.one_sequence(model.size, generator))
        losses += loss_of(predictions, targets).item()
        right, count = right + int((predictions.argmax(-1) == targets).sum()), count + len(targets)
    return losses / SEQUENCES, right / count


def trained(contender: Contender, size: int, seed: int, seconds: float) -> dict[str, Any]:
    """Train until it is learnt, until nothing more is, or for so much processor time; the best evaluation."""
    torch.manual_seed(seed)
    model, generator = Retrieval(contender, size), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], RATE, fused=True)
    best, recall, idle, step, stopped, began = math.inf, 0.0, 0, 0, "", time.process_time()
    while not stopped:
        step += 1
        loss = loss_of(*model(Batch.drawn(size, generator)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        late = time.process_time() - began > seconds
        if step % EVERY and not late:
            continue
        value, share = evaluated(model, generator)
        idle = 0 if value < best else idle + 1
        if value < best:
            best, recall = value, share
        if best <= LEARNT or idle > PATIENCE or late:
            stopped = "learnt" if best <= LEARNT else "time" if late else "no progress"
    spent = round(time.process_time() - began, 2)
    return {
        "loss": best, "recall": recall, "steps": step, "seconds": spent, "stopped": stopped,
        "state": model.state_numbers(),
    }  # fmt: skip
