"""Speed of one source tree against another, in one process and in turns: a change must not make a mechanism slower.

``python benchmarks/gates.py OLD`` takes a folder that holds another ``src/fast_attention``, or a git revision. Every
default setting and a few more run forward and in training (forward and backward), and each is a row: milliseconds of a
call in both trees, and their ratio, above 1 where the new tree is slower. It ends with exit code 1 if the geometric
mean of all ratios is above 1.03 or any of them above 1.08. On a busy machine use ``--threads 1``, which takes processor
time instead of wall time.
"""

from __future__ import annotations

import gc
import io
import math
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.arguments import Arguments
from fast_attention.lab.records import sealed

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = (  # settings beside the defaults
    "AFTLocal(window=128)", "Manhattan(distance='l1')", "Manhattan(distance='laplacian')",
    "Hybrid(near=BlockLocal(), far=LearnedFeatures(num_features=32))",
)  # fmt: skip
LENGTHS = (256, 1024, 4096, 16384)
HEADS, WIDTH = 8, 64
MEAN_GATE, WORST_GATE = 1.03, 1.08
SHORTEST = 0.004  # seconds: shorter calls are repeated within a sample
CONFIRMATIONS = 2  # how often a ratio above the gate is measured again before it counts
FREE = 0.4  # of the free memory may be taken


@dataclass(frozen=True)
class Tree:
    """A version of the source, imported under a name of its own."""

    name: str
    commit: str

    def module(self, name: str) -> Any:
        return import_module(f"{self.name}.{name}")


@dataclass
class Row:
    """A pass of one mechanism at one length in both trees; ``note`` says why there are no times."""

    mechanism: str
    is_causal: bool
    length: int
    training: bool
    old_ms: float | None = None
    new_ms: float | None = None
    ratio: float | None = None
    rounds: int = 0
    note: str = ""


@dataclass
class Budget:
    """How long it measures; what has been seen foretells what a longer sequence costs."""

    seconds: float  # of one call, at most
    patience: float  # seconds of rounds for each row, beyond the fewest rounds
    rounds: int = 5
    known: dict[tuple[str, bool, bool], tuple[int, float, int]] = field(default_factory=dict)

    def refusal(self, row: Row, order: float) -> str:
        """Why a row is left out, or nothing: by the time and memory of the length before."""
        length, seconds, size = self.known.get((row.mechanism, row.is_causal, row.training), (row.length, 0.0, 0))
        growth = (row.length / length) ** max(order, 1.0)
        if seconds * growth > self.seconds:
            return f"about {seconds * growth:.0f} s a call"
        return f"about {size * growth / 2**30:.0f} GiB" if size * growth > FREE * free_memory() else ""


def load(tree: Path, name: str, folder: Path, commit: str = "") -> Tree:
    """Import ``tree/src/fast_attention`` as a package called ``name``, from a copy that speaks of itself by that name.

    So two versions live side by side: modules that are imported late, operators that torch registers by name.
    """
    source = tree / "src" / "fast_attention"
    if not source.is_dir():
        sys.exit(f"benchmarks: {tree} holds no src/fast_attention")
    for path in (path for kind in ("*.py", "*.csv") for path in source.rglob(kind)):
        target = folder / name / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(re.sub(r"\bfast_attention\b", name, path.read_text(encoding="utf-8")), encoding="utf-8")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    import_module(name)
    return Tree(name, commit or described(tree))


def described(tree: Path) -> str:
    """The commit of a checkout, with ``+`` where files were changed."""
    ask = ["git", "--no-optional-locks", "-C", str(tree), "describe", "--always", "--dirty=+", "--abbrev=12"]
    found = subprocess.run(ask, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def unpacked(revision: str, folder: Path) -> tuple[Path, str]:
    """The source as a git revision has it, in ``folder``, and the revision's commit."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short=12", f"{revision}^{{commit}}"], capture_output=True, text=True)
    if commit.returncode:
        sys.exit(f"benchmarks: {revision} is neither a folder nor a git revision")
    archive = subprocess.run([*git, "archive", revision, "src/fast_attention"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder, commit.stdout.strip()


def rows(new: Tree, lengths: Iterable[int], only: list[str] | None) -> Iterator[tuple[Row, float]]:
    """All rows, and the exponent of the mechanism's time; ``only`` keeps some mechanisms, by name or expression."""
    catalogue = new.module("catalogue")
    for mechanism in [*map(catalogue.default, catalogue.names()), *map(catalogue.parse, VARIANTS)]:
        if only and not {repr(mechanism), type(mechanism).__name__} & {*only}:
            continue
        for is_causal in mechanism.traits.modes:
            for length in sorted(lengths):
                for training in (False, True):
                    yield Row(repr(mechanism), is_causal, length, training), mechanism.traits.complexity_exponent


def call(tree: Tree, row: Row) -> Callable[[], Any]:
    """The pass that a row is about, with the same weights and inputs in every tree."""
    package: Any = import_module(tree.name)
    mechanism = package.catalogue.parse(row.mechanism)
    torch.manual_seed(0)
    bound = package.Bound(mechanism, package.Shape(HEADS, WIDTH, row.length))
    shape = (1, row.length, HEADS * WIDTH) if isinstance(mechanism, package.Mixer) else (1, HEADS, row.length, WIDTH)
    many = 1 if isinstance(mechanism, package.Mixer) else 3
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator).requires_grad_(row.training) for _ in range(many)]

    def forward() -> Any:
        with torch.no_grad():
            return bound(*inputs, is_causal=row.is_causal)

    def training() -> Any:
        out = bound(*inputs, is_causal=row.is_causal)
        return torch.autograd.grad(out, [*inputs, *bound.parameters()], torch.ones_like(out), allow_unused=True)

    return training if row.training else forward


def measure(old: Tree, new: Tree, row: Row, order: float, budget: Budget) -> None:
    """Fill a row; what seems slower than the gate is measured afresh with more rounds, which then count."""
    row.note = budget.refusal(row, order)
    if row.note:
        return
    try:
        before = call(old, row)
    except (ValueError, TypeError) as error:
        row.note = f"not in the old tree: {str(error).splitlines()[0][:60]}"
        return
    after = call(new, row)
    size = new.module("counting").peak_bytes(after)
    before()
    estimate = max(seconds(after, 1), seconds(before, 1))
    budget.known[row.mechanism, row.is_causal, row.training] = (row.length, estimate, size)
    if estimate > budget.seconds:
        row.note = f"{estimate:.0f} s a call"
        return
    rounds = budget.rounds
    for _ in range(1 + CONFIRMATIONS):
        in_turns(row, before, after, estimate, rounds, budget.patience * rounds / budget.rounds)
        if row.ratio is not None and row.ratio <= WORST_GATE:
            return
        rounds *= 3


def in_turns(
    row: Row, before: Callable[[], Any], after: Callable[[], Any], estimate: float, rounds: int, patience: float
) -> None:
    """Pairs of samples, each tree first in every other pair: ``rounds`` of them, three if time is short."""
    repeats, began = max(1, min(200, round(SHORTEST / max(estimate, 1e-7)))), time.perf_counter()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < rounds and (len(pairs) < 3 or time.perf_counter() - began < patience):
        if len(pairs) % 2:
            late, early = seconds(after, repeats), seconds(before, repeats)
        else:
            early, late = seconds(before, repeats), seconds(after, repeats)
        pairs.append((early, late))
    row.old_ms, row.new_ms = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    row.ratio, row.rounds = statistics.median(late / early for early, late in pairs), row.rounds + len(pairs)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Of one call: processor time where there is one thread, which other programs disturb less than wall time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(repeats):
        run()
    return (clock() - start) / repeats


def free_memory() -> float:
    try:
        found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        found = None
    return 1024 * int(found[1]) if found else 4 * 2**30


def run(old: Tree, new: Tree, asked: Iterable[tuple[Row, float]], budget: Budget) -> list[Row]:
    """All rows, measured, under a progress bar."""
    planned = [*asked]
    if not planned:
        sys.exit("benchmarks: no default setting is called that")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(planned))
        for row, order in planned:
            passes = "training" if row.training else "forward"
            progress.update(task, advance=1, description=f"{title(row)}, {row.length:,} tokens, {passes}")
            measure(old, new, row, order, budget)
            gc.collect()
    return [row for row, _ in planned]


def title(row: Row) -> str:
    return row.mechanism + (", causal" if row.is_causal else "")


def summary(found: list[Row]) -> dict[str, Any]:
    """The geometric mean, the worst ratio, how many are above the gate, and whether all that passes."""
    ratios = [row.ratio for row in found if row.ratio is not None]
    mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan
    worst = max(ratios, default=math.nan)
    return {
        "geometric_mean": mean, "worst": worst, "above": sum(ratio > WORST_GATE for ratio in ratios),
        "measured": len(ratios), "passed": mean <= MEAN_GATE and worst <= WORST_GATE,
    }  # fmt: skip


def show(found: list[Row], console: Console) -> None:
    table = Table("setting", "tokens", "pass", box=None)
    for name in ("old ms", "new ms", "ratio"):
        table.add_column(name, justify="right")
    for row in found:
        cells = [title(row), f"{row.length:,}", "training" if row.training else "forward"]
        if row.ratio is None:
            table.add_row(*cells, "", "", f"left out: {row.note}")
        else:
            style = "bold red" if row.ratio > WORST_GATE else ""
            table.add_row(*cells, f"{row.old_ms:.3f}", f"{row.new_ms:.3f}", f"{row.ratio:.3f}", style=style)
    console.print(table)
    held = summary(found)
    console.print(
        f"{held['measured']} of {len(found)} measured: geometric mean {held['geometric_mean']:.3f} (gate {MEAN_GATE}), "
        f"worst {held['worst']:.3f} (gate {WORST_GATE}), {held['above']} above; "
        f"{'passed' if held['passed'] else 'NOT PASSED'}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("old", metavar="OLD", help="A folder with another src/fast_attention, or a git revision.")
    parser.add_argument("--new", type=Path, default=ROOT, help="Another new tree than this one.")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="Tokens.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="Mechanisms, by name or expression.")
    parser.add_argument("--threads", type=int, help="Of torch.")
    parser.add_argument("--budget", type=float, default=5.0, help="Seconds: what takes longer a call is left out.")
    parser.add_argument("--patience", type=float, default=2.0, help="Seconds of rounds for each row.")
    parser.add_argument("--out", type=Path, help="Where to write the record.")
    asked = parser.parse_args(arguments)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as held:
        folder, commit, tree = Path(held), "", Path(asked.old)
        if not tree.is_dir():
            tree, commit = unpacked(asked.old, folder / "revision")
        old, new = load(tree, "fast_attention_old", folder, commit), load(asked.new, "fast_attention_new", folder)
        found = run(old, new, rows(new, asked.lengths, asked.only), Budget(asked.budget, asked.patience))
    show(found, Console())
    if asked.out:
        meta = {
            "date": time.strftime("%Y-%m-%d"), "old": old.commit, "new": new.commit, "torch": torch.__version__,
            "threads": torch.get_num_threads(), **summary(found),
        }  # fmt: skip
        asked.out.write_text(sealed("gates", {"meta": meta, "rows": found}, indent=None) + "\n", encoding="utf-8")
    return 0 if summary(found)["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
