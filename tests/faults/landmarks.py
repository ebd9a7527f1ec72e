"""Faults seeded into ``mechanisms/landmarks/``."""

from tests.faults.fault import LAW, ORACLE, Fault

FAULTS = [
    Fault("padding counts among the tokens of a landmark", "mechanisms/landmarks/means.py", "member = member & key_mask[..., None, :]",
          "pass", ORACLE + "Nystrom"),
    Fault("segments are laid over the padded length", "mechanisms/landmarks/means.py", "key_mask.cumsum(-1) - 1, key_mask.sum(-1, keepdim=True).clamp_min(1)",
          "rank, torch.full_like(key_mask[..., :1], length, dtype=torch.long)", LAW + "'shorter and Nystrom'"),
    Fault("the norm is that of the whole batch", "mechanisms/landmarks/nystrom.py", "weights.sum(-2).amax(-1), 1.0)[..., None, None]",
          "weights.sum(-2).amax(), 1.0)", LAW + "'batch and Nystrom'"),
    Fault("few visible tokens are estimated", "mechanisms/landmarks/nystrom.py", "[..., None, None] <= 1", "[..., None, None] <= 0",
          "tests/landmarks/test_nystrom.py -k exactly"),
    Fault("draws are weighed as if there were one proposal", "mechanisms/landmarks/lara.py", "proposal, log_alpha = _log_sum(proposals, proposed), 0.0", "proposal, log_alpha = 0.0 * _log_sum(proposals, proposed), 0.0",
          ORACLE + "'LARA and query_weight'"),
    Fault("what a query prefers keeps its mean", "mechanisms/landmarks/lara.py", "    return t - t.sum(-1, keepdim=True)", "    return t - 0.0 * t.sum(-1, keepdim=True)",
          ORACLE + "'LARA and query_weight'"),
    Fault("masked queries are preferred too", "mechanisms/landmarks/lara.py", "t = (logits - visible.logsumexp", "t = (logits - logits.logsumexp",
          ORACLE + "'LARA and query_weight'"),
    Fault("landmarks that stand for nobody propose", "mechanisms/landmarks/lara.py", "None if count is None else (count > 0)[..., None, :]", "None",
          ORACLE + "'LARA and query_weight'"),
    Fault("agents are pooled from keys", "mechanisms/landmarks/agent.py", "segment_means(q, number", "segment_means(k, number",
          ORACLE + "Agent"),
    Fault("agents that stand for nobody are attended to", "mechanisms/landmarks/agent.py", "None if count is None else count > 0", "None",
          LAW + "'shorter and Agent'"),
    Fault("a block's scale is that of its largest logit", "mechanisms/landmarks/slots.py", "first = torch.maximum(before.log_scale, logits.detach()[..., 0, :])",
          "first = after.log_scale", "tests/landmarks/test_abc.py -k far_larger"),
    Fault("what was written before a block counts in full", "mechanisms/landmarks/slots.py", "slots * earlier @ values", "slots @ values",
          "tests/landmarks/test_abc.py -k all_pairs"),
    Fault("masked tokens are written into slots", "mechanisms/landmarks/slots.py", "logits if key_mask is None else logits.masked_fill(~key_mask[..., None], float(\"-inf\"))",
          "logits", ORACLE + "ABC"),
    Fault("in traced code a slot forgets the blocks before", "mechanisms/landmarks/slots.py", "total[..., :-1, :], log_scales[..., :-1, :]", "total[..., 1:, :], log_scales[..., 1:, :]",
          "tests/landmarks/test_abc.py -k at_once"),
]  # fmt: skip
