"""
Reversible layers and the memory of training
============================================

Shows that activations of reversible blocks take the same memory at any depth, what grows still, and the cost in time.

Training keeps what each layer computed until its gradient has been taken. A reversible block (`Gomez et al. 2017
<https://arxiv.org/abs/1707.04585>`_) can compute its inputs from its outputs, so that only the last outputs are kept,
and every block runs once more on the way back.
"""

# %%
# Blocks of linear attention, 128 wide, read 1,024 tokens. ``ReversibleSequence`` takes ``Reversible(f, g)`` blocks of
# any two modules; here f is a norm and attention, and g a norm and a feed-forward layer.
import matplotlib.pyplot as plt
import torch
from torch import nn

from fast_attention import TokenMixer
from fast_attention.clock import in_turns
from fast_attention.counting import peak_bytes
from fast_attention.nn.feedforward import ChunkedFeedForward
from fast_attention.nn.reversible import Reversible, ReversibleSequence

torch.manual_seed(0)
width, depths = 128, (1, 2, 4, 8, 16)
tokens = torch.randn(1, 1024, width)


class Attention(nn.Module):
    """A norm and attention, called as ``Reversible`` calls its first half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), TokenMixer(width, 4, "LinearAttention()")

    def forward(self, x: torch.Tensor, **options: object) -> torch.Tensor:
        """The residual of tokens (B, L, E)."""
        return self.mixer(self.norm(x), **options)


class Ordinary(nn.Module):
    """The same two halves with residuals around them, whose activations are kept."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (B, L, E) to tokens."""
        x = x + self.f(x)
        return x + self.g(x)


def halves() -> tuple[nn.Module, nn.Module]:
    """A new block's two halves."""
    return Attention(), nn.Sequential(nn.LayerNorm(width), ChunkedFeedForward(width))


# %%
# A training step is a forward and a backward pass. ``peak_bytes`` counts the tensors that are alive at once beyond
# what was there before. Weights and their gradients exist already, but a reversible model hands its new gradients
# over only when the backward pass is done: until then they are held a second time. The dotted line leaves these out.
def cost(depth: int, reversible: bool) -> tuple[float, float, float]:
    """MiB at the peak of a training step, MiB of the weights of all blocks, and milliseconds."""
    if reversible:
        model: nn.Module = ReversibleSequence(Reversible(*halves()) for _ in range(depth))
    else:
        model = nn.Sequential(*(Ordinary(*halves()) for _ in range(depth)))

    def step() -> None:
        model(tokens).square().mean().backward()

    step()  # the first one makes the gradients of the weights
    taken = min(in_turns({"step": step}, tokens.device, rounds=3)["step"])
    weights = sum(weight.nbytes for weight in model.parameters())
    return peak_bytes(step) / 2**20, weights / 2**20, 1e3 * taken


costs = {"ordinary blocks": [cost(depth, False) for depth in depths]}
costs["reversible blocks"] = [cost(depth, True) for depth in depths]
for name, each in costs.items():
    for depth, (mib, _, ms) in zip(depths, each, strict=True):
        print(f"{depth:2d} {name}: {mib:6.1f} MiB, {ms:4.0f} ms")

# %%
# The memory of ordinary blocks grows by all that a block computes. That of reversible ones grows by the gradients of
# a block's weights, and their activations not at all. A step takes longer, since every block runs forward once more.
# The outputs of the two models differ: there are two streams of tokens, so a trained model cannot be made reversible.
plt.style.use(["tableau-colorblind10", {"font.size": 12, "axes.grid": True, "grid.alpha": 0.4}])
figure, (memory, times) = plt.subplots(2, 1, figsize=(7, 6.6), sharex=True, layout="constrained")
figure.suptitle("A training step by depth, ordinary and reversible blocks")
for (name, each), marker in zip(costs.items(), "os", strict=True):
    memory.plot(depths, [mib for mib, _, _ in each], marker=marker, label=name)
    times.plot(depths, [ms for _, _, ms in each], marker=marker, label=name)
without = [mib - weights for mib, weights, _ in costs["reversible blocks"]]
memory.plot(depths, without, ":", color="C1", label="the same without new gradients of weights")
memory.set_ylabel("new memory at the peak (MiB)")
times.set_ylabel("time of a step (ms)")
times.set_xlabel("depth (blocks)")
times.set_xticks(depths)
for axes in (memory, times):
    axes.set_ylim(0)
    axes.legend()
plt.show()
