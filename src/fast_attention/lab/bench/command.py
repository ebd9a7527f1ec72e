"""``fast-attention bench``: times mechanisms beside exact attention and published packages."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_attention.lab import options
from fast_attention.lab.options import at_work

if TYPE_CHECKING or at_work():
    import torch

    from fast_attention.lab import inputs, progress
    from fast_attention.lab.bench import competitors, figures, page, run
    from fast_attention.lab.bench import processes as spreading
    from fast_attention.lab.bench.record import Benchmark
    from fast_attention.lab.bench.run import Plan
    from fast_attention.lab.inputs import InputError
    from fast_attention.lab.measure import Setting
    from fast_attention.lab.surroundings import begun
    from fast_attention.lab.tables import present, say, show


def bench_command(
    mechanisms: options.Mechanisms = None,
    lengths: Annotated[list[int] | None, typer.Option(help="Sequence lengths. Default: 64 to 4096.")] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="One direction only. Default: both.")
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
    batch: options.Batch = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    backward: options.Backward = True,
    memory_lengths: Annotated[
        list[int] | None,
        typer.Option(help="Lengths whose memory is measured in fresh processes. Default: from 1024 on; 0: none."),
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Also time single tokens up to position 65,536.")] = False,
    vs_peers: Annotated[bool, typer.Option("--vs-peers", help="Run published packages beside ours.")] = False,
    peers_to: Annotated[int | None, typer.Option(min=1, help="Longest sequence for peers. Default: all.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Spread each sequence over so many processes of this machine; what they send.")
    ] = 1,
    budget: options.Seconds = 900,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for bench.html and bench.json.")] = Path("out/bench"),
    resume: options.Resume = False,
    restart: options.Restart = False,
    as_json: options.AsJson = False,
) -> int:
    """Time, memory and percent of the machine's limits, beside exact attention and published packages.

    [dim]fast-attention bench --mechanisms LinearAttention "Local(window=64)" --lengths 512 4096[/dim]
    """
    inputs.threads(threads or torch.get_num_threads())
    where, kind = inputs.device(device), inputs.dtype(dtype)
    chosen = inputs.mechanisms(mechanisms) if mechanisms else competitors.default_mechanisms()
    sizes = inputs.lengths(lengths or list(competitors.LENGTHS))
    memory_sizes = [n for n in sizes if n >= run.SHORTEST_MEMORY] if memory_lengths is None else _some(memory_lengths)
    setting = Setting(heads, head_dim, where, kind, False, backward, seed, batch)
    if processes > 1:
        return _over_processes(processes, chosen, sizes, replace(setting, is_causal=bool(causal)), out, as_json, dtype)
    direction: Any = {None: "both", True: "causal", False: "bidirectional"}[causal]
    peers = competitors.load_peers() if vs_peers else []
    count = torch.get_num_threads()
    plan = Plan(chosen, peers, sizes, memory_sizes, setting, direction, budget, count, decode, peers_to)
    if not plan.competitors:
        raise InputError("--causal: none of these mechanisms is causal")
    meta = _meta(plan, dtype)
    with inputs.alone(out):
        path = out / Benchmark.data
        inputs.results([path], out, "a benchmark", resume=resume, restart=restart)
        record = Benchmark.resume(path, meta) if resume else Benchmark(meta)
        status = _carry_out(plan, record, out)
    present(record, out, as_json, page.table(record), "", *page.remarks(record))
    wrong = any(row.check == "wrong" for row in record.rows)
    return 130 if status == "interrupted" else int(wrong)


def _over_processes(
    world: int, chosen: list[Any], sizes: list[int], setting: Setting, out: Path, as_json: bool, dtype: str
) -> int:
    """``--processes``: one direction, forward."""
    if setting.device.type != "cpu":
        raise InputError("--processes: the processes are joined by gloo, on the CPU; give --device cpu")
    meta = begun(
        setting.device, processes=world, causal=setting.is_causal, lengths=sizes, heads=setting.heads,
        head_dim=setting.head_dim, batch=setting.batch, dtype=dtype, seed=setting.seed,
    )  # fmt: skip
    with inputs.alone(out):
        record = spreading.SpreadRecord(meta, spreading.measure(world, chosen, sizes, setting))
        record.meta["status"] = "complete"
        path = spreading.leave(record, out)
    if as_json:
        print(record.to_json())
    else:
        show(spreading.table(record))
    say(f"\nRecord: {path.resolve()}")
    return 0


def _some(lengths: list[int]) -> list[int]:
    return [] if lengths == [0] else inputs.lengths(lengths, "--memory-lengths")


def _carry_out(plan: Plan, record: Benchmark, out: Path) -> str:
    """Run under a progress bar; Ctrl-C and SIGTERM end it early with what there is."""
    began = time.perf_counter()
    with progress.counted(plan.steps) as watch:
        watched = replace(plan, watch=watch, save=lambda: record.save(out / record.data))
        status = progress.until_stopped(lambda: run.bench(watched, record))
    record.meta["seconds"] = round(record.meta.get("seconds", 0.0) + time.perf_counter() - began, 1)
    run.finish(plan, record, status)
    record.summary = figures.summarise(record)
    record.leave(out, page.html)
    return status


def _meta(plan: Plan, dtype: str) -> dict[str, Any]:
    setting = plan.setting
    return begun(
        setting.device,
        heads=setting.heads,
        head_dim=setting.head_dim,
        batch=setting.batch,
        lengths=plan.lengths,
        direction=plan.direction,
        backward=setting.backward,
        dtype=dtype,
        seed=setting.seed,
        budget=plan.budget,
        memory="growth of resident memory in a fresh process per pass, beyond weights and inputs",
    )
