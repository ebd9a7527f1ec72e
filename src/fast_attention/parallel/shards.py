"""Shards of one sequence over processes, and a call over them: ``Shards``, ``Call`` and ``Strategy``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fast_attention.decoding import State
from fast_attention.parallel import collectives


@dataclass(frozen=True, eq=False)
class Shards:
    """The shards of one sequence over the processes of a group, in the order of ranks.

    Args:
        group: The ``ProcessGroup``.
        rank: This process's number in it.
        queries: Number of queries on each process.
        keys: Number of keys on each process; those of ``queries`` but for cross attention.
    """

    group: Any
    rank: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def world(self) -> int:
        """The number of processes."""
        return len(self.queries)

    @property
    def length(self) -> int:
        """The number of queries of all processes."""
        return sum(self.queries)

    @property
    def num_keys(self) -> int:
        """The number of keys of all processes."""
        return sum(self.keys)

    @property
    def start(self) -> int:
        """The position of this process's first query."""
        return sum(self.queries[: self.rank])

    def borders(self, keys: bool = True) -> list[tuple[int, int]]:
        """The position of every process's first token and the one behind its last."""
        return list(pairwise([0, *accumulate(self.keys if keys else self.queries)]))

    @property
    def is_over_a_border(self) -> bool:
        """Whether several processes hold some of it, and there are keys to see."""
        return any(self.keys) and len({i for sizes in (self.queries, self.keys) for i, n in enumerate(sizes) if n}) > 1


def shards(group: Any, length: int, keys: int | None = None, device: torch.device | str = "cpu") -> Shards:
    """Agree on the lengths of one sequence's shards: every process of the group calls this with its own.

    A module of many layers asks once and hands the answer on as ``group=``, so that no layer has to ask again.

    Args:
        group: The ``ProcessGroup`` that holds the sequence.
        length: Tokens of this process.
        keys: Its keys where there are others than queries.
        device: Where the numbers are exchanged: that of the tokens.
    """
    group = member_of(group)
    numbers = torch.tensor([length, length if keys is None else keys], device=device)
    rows = collectives.all_gather(numbers, group).tolist()
    return Shards(group, dist.get_rank(group), tuple(row[0] for row in rows), tuple(row[1] for row in rows))


def member_of(group: Any) -> Any:
    """The ``ProcessGroup``, if this process is in it.

    Raises:
        ValueError: It is not, or what was given is no group.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in the group: only those that hold some of the sequence make the call")
    kind = type(group).__name__
    raise ValueError(f"group is a ProcessGroup, as torch.distributed.group.WORLD or mesh.get_group() is; got {kind}")


def local(x: Tensor, sizes: tuple[int, ...], rank: int, axis: int = -2) -> Tensor:
    """The part of a whole tensor that one process holds."""
    return x.narrow(axis, sum(sizes[:rank]), sizes[rank])


class Call(NamedTuple):
    """One call as every process knows it. ``key_mask`` is None on all processes or on none."""

    mechanism: Any
    w: Any
    shards: Shards
    is_causal: bool
    key_mask: Tensor | None = None  # boolean (..., S), this process's keys

    @property
    def masked(self) -> bool:
        """Whether there is a mask."""
        return self.key_mask is not None


@dataclass(frozen=True)
class Strategy:
    """A way to spread attention over processes.

    Both functions give outputs of this process's queries, ``decode`` also the state after the tokens of all processes.
    The backward pass sends as many bytes as the forward pass, of gradients.
    """

    name: str
    collectives: str  # what is sent, in words
    attend: Callable[[Call, Tensor, Tensor, Tensor], Tensor]  # raises ``Unsupported`` on all processes alike
    decode: Callable[[Call, Tensor, Tensor, Tensor, State | None], tuple[Tensor, State]]
