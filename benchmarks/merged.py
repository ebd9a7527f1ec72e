"""One record of several studies of the same task, model and budget, each run once.

``python -m benchmarks.merged out/study records/A.json records/B.json`` writes ``out/study/study.json``, which
``benchmarks/keep.py`` keeps and which ``python -m experiments.study --resume --out out/study`` goes on from, with more
mechanisms or seeds. Of a run that several have, the first one's is taken. Studies may have stopped early (what they
hold are whole runs) and count minutes by different clocks; ``meta["parts"]`` says which study holds what.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.study import Result, Study
from fast_attention.lab.records import checksum, plain
from fast_attention.lab.refusals import InputError

SAME = ("task", "data", "model", "metric", "equal", "hardware", "threads", "torch", "fast_attention")
CLOCK = re.compile(r"clock='\w+', ")


def merged(paths: Sequence[Path]) -> Study:
    """The studies in these files as one.

    Raises:
        InputError: They are not of the same task, data, model, budget or machine.
    """
    studies = [Study.read(path) for path in paths]
    base = studies[0].meta
    for path, study in zip(paths, studies, strict=True):
        other = [key for key in SAME if study.meta[key] != base[key]]
        other += ["training"] if CLOCK.sub("", study.meta["training"]) != CLOCK.sub("", base["training"]) else []
        if other:
            raise InputError(f"{path} is another study than {paths[0]}: {', '.join(other)} differ")
    runs: dict[tuple[str, int], Result] = {}
    for study in studies:
        for result in study.results:
            runs.setdefault((result.mechanism, result.seed), result)
    names = tuple(dict.fromkeys(name for name, _ in runs))
    parts = [part for path, study in zip(paths, studies, strict=True) for part in _parts(path, study)]
    meta = {**base, "status": "complete", "mechanisms": list(names), "seeds": 1 + max(seed for _, seed in runs)}
    ordered = sorted(runs.values(), key=lambda run: (run.seed, names.index(run.mechanism)))
    return Study({**meta, "parts": parts}, ordered)


def _parts(path: Path, study: Study) -> list[dict[str, object]]:
    """What a study was made of: itself, or what an earlier merging says, with what came since."""
    told = ("command", "started", "finished", "commit", "training", "note")
    own = {key: study.meta[key] for key in told if key in study.meta}
    before = list(study.meta.get("parts", []))
    runs = {f"{run.mechanism} seed {run.seed}" for run in study.results}
    runs -= {run for part in before for run in part["runs"]}
    digest = {"name": path.name, "sha256": checksum(plain(study.parts()))}
    return [*before, *([{**digest, **own, "runs": sorted(runs)}] if runs else [])]


if __name__ == "__main__":
    try:
        record = merged([Path(name) for name in sys.argv[2:]])
    except InputError as problem:
        sys.exit(f"benchmarks: {problem}")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    record.save(folder / Study.data)
    print(f"{folder / Study.data}: {len(record.results)} runs of {len(record.meta['mechanisms'])} mechanisms")
