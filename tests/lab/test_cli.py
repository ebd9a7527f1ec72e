"""The command line: what a stranger types, one clear line for what cannot be had, and nothing half written."""

from __future__ import annotations

import errno
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer

from fast_attention import __version__, catalogue, cli, files
from fast_attention.lab import command_line, commands, inputs, measure, refusals
from fast_attention.lab.commands import COMMANDS
from fast_attention.value import SEEDS

GAUSSIAN = ["--model", "gaussian", "--mechanisms", "FNet", "--lengths", "8", "--no-backward", "--budget", "5"]
COMPARE = ["compare", *GAUSSIAN, "--threads", "1"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command_line.run([*arguments])
    out, err = capsys.readouterr()
    return code, out, err


BAD = {
    "unknown mechanism": (["compare", "--mechanisms", "FavorPlos"], "Did you mean FavorPlus"),
    "unknown setting": (["compare", "--mechanisms", "FavorPlus(features_=3)"], "has no setting"),
    "wrong setting": (["compare", "--mechanisms", "FavorPlus(num_features=0)"], "num_features must be"),
    "wrong type": (["compare", "--mechanisms", "FavorPlus(num_features='many')"], "num_features"),
    "not a mechanism": (["compare", "--mechanisms", "import os"], "is not a mechanism"),
    "nested": (["compare", "--mechanisms", "(" * 100_000], "no mechanism is written in so many"),
    "length 0": (["compare", "--lengths", "0"], "--lengths 0"),
    "device": (["compare", "--device", "abacus"], "there is: cpu"),
    "device without numbers": (["compare", "--device", "meta"], "there is: cpu"),
    "dtype": (["compare", "--dtype", "float8"], "choose one of float32"),
    "threads": (["compare", "--threads", str(10**12)], f"--threads {10**12}"),
    "seed": (["compare", "--seed", str(10**30)], "--seed"),
    "missing text": (["compare", "--text", "nowhere.txt"], "nowhere.txt: No such file"),
    "named pipe": (["compare", "--text", "pipe"], "pipe: a named pipe"),
    "gaussian reads nothing": (["compare", "--model", "gaussian", "--text", "a"], "reads nothing"),
    "broken model": (["compare", "--model", "."], "holds no config.json"),
    "out is a file": (["compare", "--model", "gaussian", "--out", "file"], "--out file: file is no folder"),
    "out is a dead link": (["compare", "--model", "gaussian", "--out", "link"], "link to nowhere, which is not there"),
    "out is no text": (["compare", "--model", "gaussian", "--out", "caf\udce9"], "--out 'caf\\udce9': the name is not"),
    "out is in a file": (["compare", "--model", "gaussian", "--out", "file/a"], "--out file/a"),
    "shapes of many digits": (["advise", "2x" + "9" * 5000], "both at least 1 and below 10^9, such as 8x64"),
    "no name in list": (["list", "a b:c"], "'a b:c' is not a mechanism"),
    "half a call in list": (["list", "Local("], "'Local(' is not a mechanism"),
    "printed name in check": (["check", "FAVOR+"], "Performer: FavorPlus()"),
    "no shapes": (["advise", "0x64"], "HEADSxWIDTH"),
    "no model, but shapes": (["advise", "."], "heads and their width, such as 8x64"),
    "shapes read nothing": (["advise", "8x64", "--text", "a"], "reads nothing"),
    "a file of weights": (["advise", __file__], "is a file; give a folder of transformers"),
    "budget": (["advise", "2x8", "--budget", "-1"], "--budget"),
    "export to a folder": (["export", "nowhere", "--out", "folder.pt2"], "--out folder.pt2: a folder has that name"),
    "unknown option": (["compare", "--lenghts", "3"], "(see fast-attention compare --help)"),
    "an option twice": (["advise", "2x4", "--length", "4", "--length=5"], "'--length': it is given twice, 4 and 5"),
    "both of two flags": (["compare", "--causal", "--no-causal"], "given twice, --causal and --no-causal"),
    "two mechanisms": (["convert", "nowhere", "--mechanism", "Local, FNet"], "Local() and FNet() are 2: give one"),
    "no mechanism": (["convert", "nowhere", "--mechanism", "()"], "'()' is not a mechanism"),
    "a key twice": (["check", "twice"], "config.json cannot be loaded: 'layers' stands twice in an object, as 1 and 2"),
    "unknown command": (["compere"], "Did you mean 'compare'"),
    "unknown in list": (["list", "FavorPlos"], "Did you mean FavorPlus"),
    "unknown in check": (["check", "FavorPlos"], "Did you mean FavorPlus"),
    "no mechanism here": (["check", "Performer"], "Performer: FavorPlus()"),
    "swapped into an attention": (["check", "Softmax", "--mechanism", "FNet"], "swapped into a model, and Softmax is"),
    "no factory": (["check", "nowhere:attention"], "No module named 'nowhere'"),
    "exit": (["check", "builtins:exit"], "is no factory"),
    "no attention": (["check", "builtins:int"], "no module and no function"),
    "no arguments": (["check", "torch.nn:Linear"], "in_features"),
    "module to import": (["list", "--import", "no_such_module"], "no_such_module: ModuleNotFoundError: No module"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(measure, "useful_threads", lambda: 1)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "folder.pt2").mkdir()
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "config.json").write_text('{"layers": 1, "layers": 2}')
    os.mkfifo(tmp_path / "pipe")
    arguments, words = BAD[case]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("fast-attention: ")
    assert err.count("\n") == 1, err
    assert len(err) < 3000
    assert words in err
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.pt2", "link", "pipe", "twice"}


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 1, "not enough memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate"), 1, "memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"), 1, "20.00 GiB"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), 1, "is the disk full"),
        (ValueError("I/O error: No space left on device (os error 28)"), 1, "No space left"),  # safetensors'
        (OSError(errno.EIO, "Input/output error", "/x"), 1, "/x: Input/output error"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), 2, "/x: No such file"),
        (BrokenPipeError(), 1, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_every_failure_has_its_code(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr(catalogue, "names", broken)
    found, _, err = run(capsys, "list")
    assert found == code
    assert words in err
    assert err.count("\n") == bool(words)
    assert refusals.refusal(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None, "a fault of ours"


@pytest.mark.parametrize("last", [False, True])
def test_a_full_disk_is_one_line_and_nothing_is_half_written(
    last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first write on, or at the page of a second comparison: what stood before stays."""
    if last:
        assert run(capsys, *COMPARE, "--out", str(tmp_path))[0] == 0
    before, sync = {path.name: path.read_bytes() for path in tmp_path.iterdir()}, files.sync

    def full(path: Path) -> None:
        if not last or "report.html" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(files, "sync", full)
    code, _, err = run(capsys, *COMPARE, "--out", str(tmp_path))
    assert code == 1
    assert "No space left on device" in err
    assert err.count("\n") == 1
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert after.get("report.html") == before.get("report.html")
    assert (after.get("records.json") != before.get("records.json")) == last


def test_list_names_every_mechanism_and_tells_all_about_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert all(name in out for name in catalogue.names())
    found = json.loads(run(capsys, "list", "--json")[1])
    assert [each["name"] for each in found] == catalogue.names()
    assert found[0]["settings"].keys() == {"scale", "bias", "sinks"}
    for name in catalogue.names():
        code, out, _ = run(capsys, "list", name)
        traits = catalogue.default(name).traits
        assert code == 0
        exponent = f"complexity_exponent={traits.complexity_exponent}"
        for words in (traits.formula, traits.paper, traits.cost, "settings:", "cannot:", exponent):
            assert words in out
    code, out, _ = run(capsys, "list", "Performer")
    assert out.startswith("Performer: FavorPlus()")
    assert catalogue.default("FavorPlus").traits.formula in out
    assert "error:    exact attention\n" in run(capsys, "list", "Softmax")[1]


def test_check_tells_kept_from_broken_in_any_module(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaky.py").write_text(
        "def attention():\n"
        "    def attend(q, k, v, is_causal=False):\n"
        "        return (q @ k.mT).softmax(-1) @ v\n"
        "    return attend\n"
    )
    code, out, _ = run(capsys, "check", "leaky:attention", "--json")
    assert code == 1
    findings = {finding["law"]: finding["status"] for finding in json.loads(out)}
    assert findings["the future never moves the past"] == "broken"
    assert findings["any length"] == "kept"
    (tmp_path / "listed.py").write_text(
        "from fast_attention import LinearAttention\n\n\nclass Listed(LinearAttention):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert "--import MODULE" in run(capsys, "list", "Listed()")[2]
    code, out, err = run(capsys, "list", "Listed()", "--import", "listed")
    assert (code, err) == (0, "")
    assert "Listed()" in out


def test_options_agree_with_what_torch_and_values_take() -> None:
    assert commands.SEED == SEEDS - 1
    assert all(str(inputs.dtype(name)) == f"torch.{name}" for name in refusals.DTYPES)
    assert inputs.numbers("--keep-layers", "0, 12") == [0, 12]
    with pytest.raises(inputs.InputError, match="--keep-layers ²,0: write numbers"):
        inputs.numbers("--keep-layers", "²,0")


def test_an_extra_is_installed_by_what_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """This package is on no index: a command that names it would find another's, or nothing."""
    command = refusals.install("hf")
    assert re.fullmatch(r"pip install ('?[a-z-]+[>=.\d]+'? ?)+", command)
    assert "transformers>=5" in command
    assert "fast-attention" not in command
    monkeypatch.setattr(metadata, "requires", lambda name: None)
    assert refusals.install("hf") == "pip install '.[hf]' in a clone of fast-attention"


def test_an_encoding_that_lacks_a_character_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    monkeypatch.setattr(command_line, "run", lambda _: print("0.5 \xb1 0.1") or 0)
    with pytest.raises(SystemExit) as stop:
        cli.main(["list"])
    assert (stop.value.code, output.getvalue()) == (0, b"0.5 ? 0.1\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_all_that_a_command_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option by its name, or the one that its declaration gives. No example ends in an ellipsis."""
    code, out, _ = run(capsys, name, "-h")
    assert code == 0
    for parameter, each in inspect.signature(COMMANDS[name], eval_str=True).parameters.items():
        declared = each.annotation.__metadata__[0]
        if isinstance(declared, typer.models.OptionInfo):
            given = [x for x in (declared.default, *(declared.param_decls or ())) if str(x).startswith("--")]
            named = given[0].split("/") if given else [f"--{parameter.replace('_', '-')}"]
            assert all(word in out for word in named), named
    assert "\u2026" not in out


# What needs a process of its own is asked in few: torch takes seconds, typer and rich a tenth of one.
LIGHT = """
import contextlib, io, json, os, sys
from fast_attention.cli import main
for line in sys.argv[1:]:
    if line.startswith("fast-attention"):
        os.environ |= {"_FAST_ATTENTION_COMPLETE": "complete_bash", "COMP_WORDS": line}
        os.environ["COMP_CWORD"] = str(line.count(" "))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            main([] if line.startswith("fast-attention") else line.split())
        except SystemExit as end:
            code = end.code
    tops = {name.split(".")[0] for name in sys.modules}
    heavy = sorted(tops & {"torch", "numpy", "matplotlib", "transformers"})
    print(json.dumps([code, said.getvalue(), heavy]))
"""


def light(*lines: str) -> list[Any]:
    done = subprocess.run([sys.executable, "-c", LIGHT, *lines], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_needs_no_torch_does_not_import_it() -> None:
    """Help, the version, what is wrong, and completion in a shell. The imports are looked at, not the clock."""
    wrong = ["compere", "compare --lenghts 512", "compare --lengths many", "check", "train copy -h"]
    helps = ["--help", "-h", *(f"{name} --help" for name in COMMANDS)]
    shells = ["fast-attention ", "fast-attention advise x --le", "fast-attention compare --"]
    found = dict(zip((*wrong, *helps, "--version", *shells), light(*wrong, *helps, "--version", *shells), strict=True))
    assert all(heavy == [] for _, _, heavy in found.values()), found
    assert {found[line][0] for line in wrong} == {2}
    assert found["--version"][:2] == [0, f"fast-attention {__version__}\n"]
    assert all(found[line][0] == 0 and "--help" in found[line][1] for line in helps)
    shown = re.findall(r"^│ (\w+) ", found["--help"][1].split("Commands")[1], re.M)
    assert shown == [*COMMANDS] == ["list", "advise", "compare", "check", "convert", "export"]
    assert {*found[shells[0]][1].split()} == {*COMMANDS}
    assert found[shells[1]][1].split() == ["--length"]
    assert {"--mechanisms", "--lengths", "--out"} <= {*found[shells[2]][1].split()}


BLOCKED = """
import contextlib, io, sys
for words in sys.argv[1:]:
    missing, *arguments = words.split()
    for name in [name for name in sys.modules if name.split(".")[0] in ("fast_attention", missing)]:
        del sys.modules[name]
    sys.modules[missing] = None
    from fast_attention.cli import main
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main(arguments)
    print(said.getvalue(), end="")
    del sys.modules[missing]
"""


def test_a_missing_extra_is_one_line() -> None:
    missing = ["typer list", "rich list", "matplotlib compare"]
    done = subprocess.run([sys.executable, "-c", BLOCKED, *missing], capture_output=True, text=True, check=True)
    names = [words.split()[0] for words in missing]
    install = refusals.install("lab")
    assert done.stdout.splitlines() == [f"fast-attention: the command line needs {name}: {install}" for name in names]


RUN = [sys.executable, "-m", "fast_attention"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_outputs_that_take_nothing_are_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*RUN, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("No space left on device\n")
    assert done.stderr.count("\n") == 1
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*RUN, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
    words = f"{sys.executable} -m fast_attention --version <&- >&-"
    done = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Started in the background, the tests themselves may ignore SIGINT, and children inherit that.
HEED = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HEED, sys.executable, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_while_libraries_are_imported() -> None:
    code = "import sys\nfrom fast_attention.cli import main\nprint('here', flush=True)\nmain(['list'])"
    process = started("-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_ctrl_c_leaves_a_valid_partial_report(tmp_path: Path) -> None:
    words = ["compare", "--model", "gaussian", "--threads", "1", "--lengths", "16", "8192", "--budget", "300"]
    process = started("-m", "fast_attention", *words, "--mechanisms", "LinearAttention", "--out", str(tmp_path))
    records, deadline = tmp_path / "records.json", time.monotonic() + 120
    while time.monotonic() < deadline and not (records.exists() and '"status": "measured"' in records.read_text()):
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert json.loads(records.read_text())["meta"]["status"] == "interrupted"
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")
