"""Faults seeded into sequences over many processes."""

from tests.faults.fault import Fault

STRATEGIES = "tests/parallel/test_parallel.py -k 'one_process and 2'"
PACKED = "tests/parallel/test_packed.py -k one_process"
AGREEING = "tests/parallel/test_agreeing.py"
FAULTS = [
    Fault("the prefix of states includes the own shard", "parallel/states.py",
          "before = _total(call.mechanism, states[: call.shards.rank])",
          "before = _total(call.mechanism, states[: call.shards.rank + 1])", STRATEGIES),
    Fault("queries that see all keys read earlier states only", "parallel/states.py",
          "_total(call.mechanism, states), key_mask", "_total(call.mechanism, states[: call.shards.rank + 1]), key_mask",
          STRATEGIES),
    Fault("the gradient of gathered states is not summed", "parallel/collectives.py",
          "parts.view(grad.shape).sum(0), None", "parts.view(grad.shape)[0], None", STRATEGIES),
    Fault("a state is declared for one process too many", "parallel/states.py", "(call.shards.world - 1) * row.numel()",
          "call.shards.world * row.numel()", STRATEGIES),
    Fault("decayed keys on both sides are one state", "mechanisms/linear/decayed.py", "        return is_causal\n",
          "        return True\n", STRATEGIES),
    Fault("a prompt's next part begins without the state before", "parallel/states.py", "[state, *states[: call",
          "[*states[: call", "tests/parallel/test_modules.py -k 'many and 2'"),
    Fault("a window fetches one token too few", "mechanisms/sparse/local.py", "return first - self.sides[0], end",
          "return first - self.sides[0] + 1, end", STRATEGIES),
    Fault("the gradient of what neighbours sent is dropped", "parallel/windows.py", "near_k, near_v, *mask = fetched.split",
          "near_k, near_v, *mask = fetched.detach().split", STRATEGIES),
    Fault("whether neighbours' keys are visible is not looked at", "parallel/windows.py", "detach() > 0.5",
          "detach() > -0.5", STRATEGIES),
    Fault("every process takes the first heads of the weights", "parallel/heads.py", "shards.rank * share, share)\n    if not",
          "0, share)\n    if not", STRATEGIES),
    Fault("every process's first head has the first slope or dilation", "parallel/heads.py",
          "return value.of_heads(first, share, heads)", "return value.of_heads(0, share, heads)", STRATEGIES),
    Fault("a packed sequence over a border ends there", "parallel/attending.py", "is_over_a_border]\n        if",
          "is_over_a_border or True]\n        if", PACKED),
    Fault("different weights on processes are taken", "parallel/agreeing.py", "repr(_checksum(call.w))", "''", AGREEING),
    Fault("processes of different order are taken", "parallel/agreeing.py", "repr(call.is_causal)", "''", AGREEING),
    Fault("a process without gradients skips the backward pass", "parallel/agreeing.py", "if wants and not x.requires_grad",
          "if False", AGREEING),
    Fault("tables are as long as one process's tokens", "functional.py", "if spread and mechanism.traits.bounded:",
          "if False:", "tests/parallel/test_agreeing.py -k longest"),
    Fault("rotary positions begin anew on every process", "nn/positions.py",
          "torch.arange(shards.start, shards.start + shards.queries", "torch.arange(0, shards.queries",
          "tests/parallel/test_modules.py -k 'rotary and 2'"),
    Fault("positions of a shard begin at zero", "parallel/spreading.py", "torch.arange(start, start + length",
          "torch.arange(0, length", "tests/parallel/test_hugging_face.py -k Bert"),
    Fault("a token's own Manhattan term is that of a masked one", "mechanisms/log_manhattan/manhattan.py",
          "l, *_, diagonal, _ = self._terms(k, v, key_mask)",
          "l, *_, diagonal, _ = self._terms(k, 0.0 * v, key_mask)", "tests/conformance/test_contract.py -k Manhattan"),
]  # fmt: skip
