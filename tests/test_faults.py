"""The suite can fail: faults seeded into a copy of the source are all found by the tests named beside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


class Fault(NamedTuple):
    """``old`` becomes ``new`` in a source file; ``tests`` (pytest arguments) must then fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


ORACLE, LAW = "tests/test_oracles.py -k ", "tests/test_contract.py -k "
FAULTS = [
    Fault(
        "causal edge shifted by one", "ops/masks.py", "[None, :] <= rows", "[None, :] <= rows + 1",
        "tests/test_softmax_relu.py -k compiles",
    ),
    Fault(
        "a fully masked row keeps its weights", "ops/masks.py",
        ".softmax(-1).masked_fill(~mask, 0.0)", ".softmax(-1)", LAW + "nothing",
    ),
    Fault("masked rows are kept",
          "ops/masks.py", "return values if key_mask is None else", "return values if True else",
          LAW + "'padding and Linformer'"),
    Fault("sums stay in half precision", "ops/precision.py", "return value.float() if", "return value if",
          LAW + "'precision and (LinearAttention or AFTSimple)'"),
    Fault("the gate lets non-causal mechanisms through", "mechanism.py", "if is_causal and not traits.causal:",
          "if False:", LAW + "'refusals and Linformer'"),
    Fault("a refusal names no mechanism", "mechanism.py", 'f"{self!r} does not support', 'f"it does not support',
          LAW + "'refusals and Linformer'"),
    Fault("redraw leaves the old draws", "nn/bound.py", "self.get_buffer(name).copy_(fresh)", "pass",
          LAW + "'weights_are and FavorPlus'"),
    Fault("the diagonal is lost in linear attention", "ops/linear/linear.py", ".masked_fill(_later(chunk, q), 0.0), None",
          ".masked_fill(_later(chunk, q) | torch.eye(chunk, dtype=torch.bool), 0.0), None",
          ORACLE + "LinearAttention"),
    Fault("a chunk sees one token of the future",
          "ops/linear/linear.py", "device=like.device).triu(1)", "device=like.device).triu(2)",
          LAW + "'future and LinearAttention'"),
    Fault("a block forgets the blocks before it", "ops/linear/linear_causal.py", "    carry.add(*own)", "    pass",
          "tests/test_linear_fast.py"),
    Fault("the gradient of the state is not carried back", "ops/linear/linear_causal.py", "    later.add(*own)", "    pass",
          "tests/test_linear_fast.py"),
    Fault("a block's edge is shifted in the backward pass", "ops/linear/linear_causal.py", "out=weights).tril_()",
          "out=weights).tril_(1)", "tests/test_linear_fast.py"),
    Fault("a chunk's own keys are in the sums before it", "ops/linear/linear_causal.py",
          "torch.add(places[i - 1], parts[i - 1]", "torch.add(places[i - 1], parts[i]", "tests/test_linear_fast.py"),
    Fault("the denominator's gradient has the wrong sign", "ops/linear/linear_blocks.py", "keepdim=True)).neg_()",
          "keepdim=True))", "tests/test_linear_fast.py"),
    Fault("masked keys stay in the blocks", "ops/linear/linear_blocks.py",
          "phi.fill(block, part, room(\"scratch\", *block.shape))\n    if hidden is not None:",
          "phi.fill(block, part, room(\"scratch\", *block.shape))\n    if False:", "tests/test_linear_fast.py"),
    Fault("short causal calls align to the top left", "ops/linear/linear_short.py",
          "pairs.tril_(keys.shape[1] - length)", "pairs.tril_()", "tests/test_linear_fast.py"),
    Fault("short calls forget the denominator's gradient", "ops/linear/linear_short.py",
          "torch.baddbmm(down, up, values.mT, beta=-1)", "torch.bmm(up, values.mT)", "tests/test_linear_fast.py"),
    Fault("the map in place is not the map above zero", "ops/maps/features.py",
          "torch.add(x, 1.0, out=scratch), exp(x, out)", "torch.add(x, 0.5, out=scratch), exp(x, out)",
          "tests/test_linear_fast.py"),
    Fault("sums over many blocks keep the last one only", "ops/linear/linear_whole.py",
          "part.copy_(total.add_(part))", "total.add_(part)", "tests/test_linear_fast.py"),
    Fault("the past is not rescaled to the running maximum", "ops/linear/linear.py",
          "return pairs, (past[..., None] - running).exp()", "return pairs, torch.ones_like(running)",
          "tests/test_favor.py"),
    Fault("states combine without rescaling", "ops/linear/linear.py",
          "a, b = (earlier.top - top).exp()[..., None], (later.top - top).exp()[..., None]",
          "a, b = torch.ones_like(top)[..., None], torch.ones_like(top)[..., None]", LAW + "'combine and FavorPlus'"),
    Fault("masked keys take part in the maximum", "ops/linear/linear.py", "keys.log_scale.masked_fill(~key_mask, FLOOR)",
          "keys.log_scale", "tests/test_linear.py"),
    Fault("the sign fix of the orthogonal draws is gone", "ops/maps/random_features.py",
          "Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]", "Q = Q * 1.0", "tests/test_favor.py"),
    Fault("half the squared norm is forgotten", "ops/maps/random_features.py", "half = x.square().sum(-1) / 2\n    top",
          "half = x.square().sum(-1)\n    top", ORACLE + "FavorPlus"),
    Fault("the window is one key short", "ops/windows/banded.py", "distance >= -left", "distance > -left", ORACLE + "Local"),
    Fault("decoding forgets the oldest key of the window", "mechanisms/local.py", "return out, _last(near, left)",
          "return out, _last(near, left - 1)", LAW + "'decode and Local'"),
    Fault("decayed sums do not decay between blocks", "ops/decay.py",
          "join(inside + spread(_fading(before_level, level), x.shape[-1]) * before, length)",
          "join(inside + before, length)", "tests/test_aft.py -k scans"),
    Fault("the running maximum sees the whole block", "ops/scan.py", "return x.cummax(-2).values",
          "return x.amax(-2, keepdim=True).expand_as(x)", "tests/test_aft.py"),
    Fault("the sorted form forgets what lies above", "ops/differences/sorted_passes.py", ".sub_(count[..., -1:] / 2)",
          "", ORACLE + "Manhattan"),
    Fault("the slope of the sorted form takes the values' part alone", "ops/differences/sorted_passes.py",
          "slope.addcmul_(xo, other)", "slope", "tests/test_stretches.py -k sorted"),
    Fault("prefix sums of blocks do not add up", "ops/scan.py", "combine(later, carried[..., None, :], out=later)",
          "pass", "tests/test_stretches.py -k prefix"),
    Fault("stretches forget what came before", "ops/stretches.py", "edge.add_(before)", "edge.add_(0.0)",
          "tests/test_stretches.py -k plain"),
    Fault("log attention's backward pass carries nothing over", "ops/differences/additive_passes.py",
          "total.carry_(sent, backwards=True)", "accumulate_(sent, backwards=True)",
          "tests/test_stretches.py -k plain"),
    Fault("log attention's backward pass sums anew in every stretch", "ops/differences/additive_passes.py",
          "sums[..., :1, :] += rows[..., place : place + 1, : sums.shape[-1]]", "pass",
          "tests/test_stretches.py -k plain"),
    Fault("Manhattan's values forget the tokens' own l", "ops/differences/difference_passes.py",
          "dv[..., now, :].sub_(sent[..., width:])", "pass", "tests/test_stretches.py -k plain"),
    Fault("relu's tiles see one key ahead", "ops/scores/rectified.py", "scores.tril_(rows.start + ahead - start)",
          "scores.tril_(rows.start + ahead - start + 1)", "tests/test_stretches.py -k relu"),
    Fault("relu's norm has no gradient", "ops/scores/rectified.py", "slopes.sub_(shift)", "pass",
          "tests/test_stretches.py -k relu"),
    Fault("pools merge without rescaling", "ops/pools/pool.py", "(pool.top - top).exp()", "torch.ones_like(top)",
          LAW + "'combine and AFTSimple'"),
    Fault("sinkhorn's causal sorting sees its own block", "ops/scores/transport.py", "(place < place[:, None])",
          "(place <= place[:, None])", LAW + "'future and Sinkhorn'"),
    Fault("sinkhorn's summary holds the whole block", "ops/scores/transport.py", ".cumsum(-2) + keys[..., 0, :]",
          ".cumsum(-2) + keys.sum(-2)", LAW + "'future and Sinkhorn'"),
    Fault("gMLP mixes the future",
          "mechanisms/gmlp.py", "lower(W, gate) + b[:, None] if is_causal else", "W @ gate + b[:, None] if is_causal else", LAW + "'future and GMLP'"),
    Fault("FNet mirrors the wrong way",
          "mechanisms/fnet.py", ".flip(-2, -1).roll(1, -2)", ".flip(-1)", ORACLE + "FNet"),
    Fault("a block of queries sees one key of the future", "ops/scores/rows.py", "torch.bool).triu(1)", "torch.bool).triu(2)",
          "tests/test_synthesizer.py -k blocks_of_queries"),
    Fault("blocks see into holes", "ops/scores/rows.py", "None if len(places) == end - first else ~seen", "None",
          "tests/test_synthesizer.py -k blocks_of_queries"),
    Fault("the mean slope of a row stays in its gradient", "ops/scores/rows.py", "slope.sub_(mean[b, h, rows])", "pass",
          "tests/test_synthesizer.py -k blocks_of_queries"),
    Fault("a table's gradient is written where nobody looked", "ops/scores/rows.py",
          "into.R[b, h, rows, keys.stop :] = 0.0", "into.R[b, h, rows, keys.stop :] = 1.0",
          "tests/test_synthesizer.py -k blocks_of_queries"),
    Fault("a mixture forgets a table's share", "ops/scores/scores.py", "R, share = (part.R, own) if",
          "R, share = (part.R, None) if", ORACLE + "MixtureSynthesizer"),
    Fault("FNet mirrors the rows of a long sequence one off", "mechanisms/fnet.py",
          "y[1:, half:] = rows[1:, 1:rest].flip(-2, -1)", "y[1:, half:] = rows[:-1, 1:rest].flip(-2, -1)",
          "tests/test_mixers.py -k long"),
    Fault("a triangle's gradient keeps the other half", "ops/scores/triangular.py", "dW[i:j, i:j].tril_()", "pass",
          "tests/test_mixers.py -k triangle"),
    Fault("later rows of a triangle are forgotten", "ops/scores/triangular.py",
          "d[i:j].addmm_(W[j:, i:j].mT, slope[j:])", "pass", "tests/test_mixers.py -k triangle"),
    Fault("a second sequence overwrites the gradient of the first", "ops/scores/triangular.py",
          "beta=float(b > 0)", "beta=0.0", "tests/test_mixers.py -k triangle"),
    Fault("a key counts once per round", "ops/hashing/hash_blocks.py", "r if rules.distinct else 0", "0", ORACLE + "LSH"),
    Fault("chunks are counted along the whole sequence",
          "ops/hashing/hash_blocks.py", "ranked=rules.ranked, across", "ranked=False, across", LAW + "'future and LSH'"),
    Fault("the first block sees an empty sorted one", "ops/scores/sorted_blocks.py", "if first == 0:", "if first < 0:",
          "tests/test_sinkhorn.py -k gradients"),
    Fault("a tile's first block sees an empty sorted one", "ops/scores/sorted_tiles.py", "first + start == 0:",
          "first + start < 0:", "tests/test_sinkhorn.py"),
    Fault("tiles overwrite what earlier blocks got", "ops/scores/sorted_tiles.py", "beta=0.0 if last else 1.0", "beta=0.0",
          "tests/test_sinkhorn.py -k tiles"),
    Fault("a permutation's gradient is the keys' alone", "ops/scores/sorted_tiles.py", "own, last=last, beta=1.0",
          "own, last=last, beta=0.0", "tests/test_sinkhorn.py -k tiles"),
    Fault("balancing by factors leaves out the rows", "ops/scores/transport.py", "rows = 1 / (S @ columns.mT)",
          "rows = 1 / (S @ torch.ones_like(columns).mT)", "tests/test_sinkhorn.py -k factors"),
    Fault("a masked key shows in second derivatives", "ops/scores/fused.py", 'mask > float("-inf")',
          'mask >= float("-inf")', "tests/test_sinkhorn.py -k masks_stay"),
    Fault("the largest score is not taken off", "ops/hashing/hash_blocks.py", "if shift is not None:", "if shift is False:",
          "tests/test_hash_attention.py"),
    Fault("empty slots count in the gradient", "ops/hashing/hash_attention.py", ".mul_(chunks.valid[pairs.mine][..., None])",
          "", "tests/test_hash_attention.py"),
    Fault("the neighbouring chunk is the next", "ops/hashing/hash_blocks.py", "theirs = mine - 1", "theirs = mine",
          "tests/test_hash_attention.py"),
    Fault("a key's length keeps its gradient", "ops/hashing/hash_attention.py", "dk.sub_(along * lanes.k)", "dk",
          "tests/test_hash_attention.py"),
    Fault("a block drawn twice counts twice", "ops/windows/gathered_tiles.py",
          "fresh = (table >= 0) & ~", "fresh = (table >= 0) | ~", ORACLE + "BigBird"),
    Fault("a block after the stretches is left out", "ops/windows/banded_tiles.py", "range(whole + each * number, count)",
          "range(whole + each * number + 1, count)", "tests/test_tiles.py"),
    Fault("a tile at the edge forgets how much was cut off", "ops/windows/banded_tiles.py",
          "Tile(first + up, seen.shape[0], low + left",
          "Tile(first + up, seen.shape[0], low", "tests/test_tiles.py"),
    Fault("gradients of keys lose the scale", "ops/windows/tiles.py",
          "torch.baddbmm(dk, dS.mT, q, beta=0, alpha=scale, out=dk)",
          "torch.baddbmm(dk, dS.mT, q, beta=0, out=dk)", "tests/test_tiles.py"),
    Fault("hidden keys keep their weights", "ops/windows/tiles.py",
          "scores if hidden is None else scores.masked_fill_(hidden, 0.0)",
          "scores", "tests/test_tiles.py"),
    Fault("a causal block sees its own future", "ops/windows/gathered_tiles.py",
          "dtype=torch.bool).triu(1)",
          "dtype=torch.bool).triu(2)", "tests/test_tiles.py"),
    Fault("the last block of keys has no end", "ops/windows/gathered_tiles.py",
          "hidden[:, end, self.length % self.size :] = True",
          "pass", "tests/test_tiles.py"),
    Fault("key padding is not turned round", "nn/torch_masks.py", "return Seen(is_causal, ~padding_mask, attn_mask)",
          "return Seen(is_causal, padding_mask, attn_mask)", "tests/test_multihead.py"),
    Fault("dropout is drawn anew in the backward pass", "nn/reversible.py", "torch.set_rng_state(self.cpu)", "pass",
          "tests/test_reversible.py"),
    Fault("FAVOR's sums are not brought into a larger key's unit", "ops/favor/favor_whole.py",
          'fading = (unit - higher).exp_()[..., None]', 'fading = torch.ones_like(unit)[..., None]',
          "tests/test_favor_fast.py"),
    Fault("FAVOR's chunk sees one token of the future", "ops/favor/favor_causal.py",
          'b.shape[1])).tril_()', 'b.shape[1])).tril_(1)', "tests/test_favor_fast.py"),
    Fault("FAVOR's chunks go by one unit however steep", "ops/favor/favor_causal.py",
          'SLACK = 20.0', 'SLACK = 2000.0', "tests/test_favor_fast.py"),
    Fault("FAVOR's way back forgets the later chunks' units", "ops/favor/favor_causal.py",
          'back.fade((here.leaves - unit).exp_())', 'back.fade(torch.ones_like(unit))', "tests/test_favor_fast.py"),
    Fault("FAVOR's way back carries nothing from chunk to chunk", "ops/favor/favor_causal.py",
          'back.add(queries, dn, dd)', 'None', "tests/test_favor_fast.py"),
    Fault("FAVOR's keys have no gradient from their norms", "ops/favor/favor_blocks.py",
          'product.sum(-1)[..., None], value=self.sign', 'product.sum(-1)[..., None], value=0 * self.sign',
          "tests/test_favor_fast.py"),
    Fault("FAVOR's masked keys keep their features", "ops/favor/favor_blocks.py",
          'half = half.masked_fill(~mask, float("-inf"))', 'half = half.masked_fill(~mask, 0.0)',
          "tests/test_favor_fast.py"),
    Fault("a segment of AFT-simple forgets to rescale its past", "ops/pools/prefix_pool.py",
          "carry = sums.sum_up(carry * torch.cat([(old - top).exp()] * 2, -1))", "carry = sums.sum_up(carry)",
          "tests/test_aft_paths.py -k test_simple"),
    Fault("AFT-simple's gradient forgets what later segments owe", "ops/pools/prefix_pool.py",
          "owed = owing.sum_up(owed, backwards=True)", "owed = owing.sum_up(0 * owed, backwards=True)",
          "tests/test_aft_paths.py -k test_simple"),
    Fault("AFT-full's causal diagonal is lost", "ops/pools/bias_products.py", "weights[:, now.start :].tril_()",
          "weights[:, now.start :].tril_(-1)", "tests/test_aft_paths.py -k test_full"),
    Fault("AFT's far blocks are counted from one block too near", "ops/pools/window_blocks.py",
          "total[:, reach + 1 :] += sums[:, :count]", "total[:, reach + 1 :] += sums[:, 1 : count + 1]",
          "tests/test_aft_paths.py -k test_windows"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_seeded_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.gz"))
    path = tmp_path / "src" / "fast_attention" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.old!r} stands {text.count(fault.old)} times in {fault.file}"
    path.write_text(text.replace(fault.old, fault.new))
    arguments = [part.strip("'") for part in fault.tests.split(" ", 2)]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["OMP_NUM_THREADS"] = "1"
    environment.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, f"not found by {fault.tests}:\n{run.stdout[-2000:]}{run.stderr[-500:]}"
