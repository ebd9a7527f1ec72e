"""Agent attention (Han et al. 2023): a few agents, pooled from the queries, attend for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from fast_attention.engine import dispatch
from fast_attention.engine.blocks import smaller
from fast_attention.engine.precision import in_float32
from fast_attention.mechanism import Attention, Traits
from fast_attention.mechanisms.dense.softmax import softmax_attention
from fast_attention.mechanisms.landmarks.means import segment_means
from fast_attention.value import at_least


@in_float32
def agent_attention(
    q: Float[Tensor, "*batch length width"],
    k: Float[Tensor, "*batch length width"],
    v: Float[Tensor, "*batch length values"],
    *,
    num_agents: int = 64,
    key_mask: Bool[Tensor, "*#batch2 length"] | None = None,
) -> Float[Tensor, "*batch length values"]:
    """``softmax(Q A^T / sqrt(d)) softmax(A K^T / sqrt(d)) V`` (arXiv 2312.08874), without biases.

    The agents A are ``segment_means`` of the visible queries; fewer visible tokens than ``num_agents`` are one agent
    each. Time O(n m d), memory O(n m).
    """
    dispatch.record("torch's fused kernel to agents and back", "as many at any length", agents=num_agents)
    (agents,), count = segment_means(q, number=smaller(num_agents, q.shape[-2]), key_mask=key_mask)
    values = softmax_attention(agents, k, v, key_mask=key_mask)
    return softmax_attention(q, agents, values, key_mask=None if count is None else count > 0)


@dataclass(frozen=True, repr=False)
class Agent(Attention[tuple[()], tuple[()]]):
    """Agents, means of neighbouring queries, attend to all tokens, and every query to the agents.

    It is no estimate of softmax: a model learns with it, or is trained on from exact attention. Every agent depends on
    later tokens, so that it cannot be causal; and it is for self-attention, since a ``key_mask`` says of queries too
    which are padding and belong to no agent. The paper's biases and depthwise convolution, which are for the rows and
    columns of images, are not in it.

    Args:
        num_agents: Segments of neighbouring queries, each with one agent.
    """

    num_agents: int = 64

    traits = Traits(
        paper="Han et al. 2023, arXiv 2312.08874",
        formula="softmax(q A^T / sqrt(d)) softmax(A k^T / sqrt(d)) v, A the means of segments of q",
        cost="n r d",
        order=1.0,
        padding=True,
        rotary=True,
    )

    def __post_init__(self) -> None:
        at_least(self, "num_agents", self.num_agents, 1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, w: tuple[()], *, is_causal: bool, key_mask: Tensor | None
    ) -> Tensor:
        """``agent_attention`` with this number of agents."""
        return agent_attention(q, k, v, num_agents=self.num_agents, key_mask=key_mask)
