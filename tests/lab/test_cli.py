"""The command line: what a stranger types, and one clear line for what cannot be had."""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from fast_attention import __version__, catalogue, extras
from fast_attention.cli import main
from fast_attention.lab import inputs, options
from fast_attention.lab.command_line import COMMANDS, _repeat, load
from fast_attention.value import SEEDS

GAUSSIAN = ["compare", "--model", "gaussian", "--lengths", "16", "32", "--threads", "1", "--budget", "20"]
TWO = ["--mechanisms", "LinearAttention", "FavorPlus(num_features=16)"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out, err


BAD = {
    "unknown mechanism": (["compare", "--mechanisms", "FavorPlos"], "Did you mean FavorPlus"),
    "unknown setting": (["compare", "--mechanisms", "FavorPlus(features_=3)"], "has no setting"),
    "wrong setting": (["compare", "--mechanisms", "FavorPlus(num_features=0)"], "num_features must be"),
    "wrong type": (["compare", "--mechanisms", "FavorPlus(num_features='many')"], "num_features"),
    "not a mechanism": (["compare", "--mechanisms", "import os"], "is not a mechanism"),
    "length 0": (["compare", "--lengths", "0"], "--lengths 0"),
    "length words": (["compare", "--lengths", "128", "many"], "--lengths"),
    "device": (["compare", "--device", "abacus"], "there is: cpu"),
    "dtype": (["compare", "--dtype", "float8"], "choose one of float32"),
    "head": (["compare", "--head", "two"], "LAYER,HEAD"),
    "no such head": ([*GAUSSIAN, *TWO, "--head", "3,0"], "layers go from 0 to 2"),
    "missing text": (["compare", "--text", "nowhere.txt"], "nowhere.txt: No such file"),
    "missing fasta": (["compare", "--fasta", "nowhere.fasta"], "nowhere.fasta: No such file"),
    "text and fasta": (["compare", "--text", "a", "--fasta", "b"], "not both"),
    "gaussian reads nothing": (["compare", "--model", "gaussian", "--text", "a"], "reads nothing"),
    "broken model": (["compare", "--model", "."], "holds no config.json"),
    "out is a file": (["compare", "--model", "gaussian", "--out", "file"], "--out file: file is no folder"),
    "out is a dead link": (
        ["compare", "--model", "gaussian", "--out", "link"],
        "link is a link to nowhere, which is not",
    ),
    "out is no text": (["compare", "--model", "gaussian", "--out", "caf\udce9"], "--out 'caf\\udce9': the name is not"),
    "out is in a file": (["compare", "--model", "gaussian", "--out", "file/a"], "--out file/a"),
    "export to a folder": (["export", "nowhere", "--out", "folder.pt2"], "--out folder.pt2: a folder has that name"),
    "unknown option": (["compare", "--lenghts", "3"], "No such option"),
    "unknown command": (["compere"], "No such command"),
    "unknown in list": (["list", "FavorPlos"], "Did you mean FavorPlus"),
    "unknown in check": (["check", "FavorPlos"], "Did you mean FavorPlus"),
    "no factory": (["check", "nowhere:attention"], "No module named 'nowhere'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "folder.pt2").mkdir()
    arguments, said = BAD[case]
    code, out, err = run(capsys, *arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, err
    assert out == ""
    assert len(lines) == 1, err
    assert lines[0].startswith("fast-attention: ")
    assert said in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.pt2", "link"]


def test_a_broken_fasta_file_is_told_with_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">one\nMKV\nM4V\n")
    code, _, err = run(capsys, "compare", "--fasta", str(tmp_path / "a.fasta"), "--out", str(tmp_path / "out"))
    assert code == 2
    assert err == f"fast-attention: {tmp_path / 'a.fasta'}, line 3: '4' in column 2 is not a residue letter\n"


def test_compare_prints_a_table_and_leaves_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, *GAUSSIAN, *TWO, "--out", str(tmp_path))
    assert code == 0
    assert "exact attention" in out
    assert "FavorPlus(num_features=16)" in out
    assert "another function" in out
    assert str(tmp_path / "report.html") in err
    held = json.loads((tmp_path / "records.json").read_text())
    assert held["meta"]["status"] == "complete"
    assert held["meta"]["threads"] == 1
    assert {row["status"] for row in held["rows"]} == {"measured"}
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--json", "--no-backward", "--causal", "--dtype", "bfloat16", "--head", "1,2"]
    code, out, _ = run(capsys, *GAUSSIAN, *TWO, *options, "--out", str(tmp_path))
    assert code == 0
    held = json.loads(out)
    assert held["meta"]["causal"] is True
    assert held["meta"]["dtype"] == "bfloat16"
    assert len(held["rows"]) == 2 * 3
    assert all(row["training_ms"] is None for row in held["rows"])
    assert "layer 1" not in (tmp_path / "report.html").read_text()
    assert "sd 1.0, head 2" in (tmp_path / "report.html").read_text()


def test_sigint_leaves_a_valid_partial_report(tmp_path: Path) -> None:
    # Started in the background, the tests themselves may ignore SIGINT, and children inherit that.
    heed = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", heed, sys.executable, "-m", "fast_attention.cli", "compare"]
    command += [
        "--model",
        "gaussian",
        "--threads",
        "1",
        "--lengths",
        "16",
        "8192",
        "--budget",
        "300",
        *TWO,
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    records, deadline = tmp_path / "records.json", time.monotonic() + 120
    while time.monotonic() < deadline and not (records.exists() and '"status": "measured"' in records.read_text()):
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "exact attention" in out
    held = json.loads(records.read_text())
    assert held["meta"]["status"] == "interrupted"
    assert {row["length"] for row in held["rows"] if row["status"] == "measured"} >= {16}
    page = (tmp_path / "report.html").read_text()
    assert "This comparison was interrupted" in page
    assert page.endswith("</html>\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.json", "report.html"]


def test_list_names_every_mechanism(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert all(name in out for name in catalogue.names())
    code, out, _ = run(capsys, "list", "--json")
    held = json.loads(out)
    assert [each["name"] for each in held] == catalogue.names()
    assert {each["name"]: each["settings"] for each in held}["Softmax"] == {"scale": None, "bias": None, "sinks": False}


@pytest.mark.parametrize("name", catalogue.names())
def test_list_tells_all_about_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", name)
    traits = catalogue.default(name).traits
    assert code == 0
    for words in (traits.formula, traits.paper, traits.cost, "settings:", "cannot:", f"order={traits.order}"):
        assert words in out


def test_expressions_name_classes_of_a_module_that_is_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "listed_of_a_user.py").write_text(
        "from fast_attention import LinearAttention\n\n\nclass Listed(LinearAttention):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    assert "--import MODULE" in run(capsys, "list", "Listed()")[2]
    code, out, err = run(capsys, "list", "Listed()", "--import", "listed_of_a_user")
    assert (code, err) == (0, "")
    assert "Listed()" in out


def test_list_answers_names_people_know(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "Performer")
    assert code == 0
    assert out.startswith("Performer: FavorPlus()")
    assert catalogue.default("FavorPlus").traits.formula in out
    code, _, err = run(capsys, "check", "Performer")
    assert code == 2
    assert "Performer: FavorPlus()" in err


def test_check_tells_kept_from_broken(
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
    code, out, _ = run(capsys, "check", "leaky:attention")
    assert code == 1
    assert "broken" in out


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fast_attention", "list", "RetNet"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.startswith("RetNet: DecayedLinearAttention(")
    command[-2:] = ["lst"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 2
    assert "Traceback" not in told.stderr


def test_help_is_for_strangers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in ("compare", "bench", "list", "check"))
    code, out, _ = run(capsys, "compare", "--help")
    assert code == 0
    assert all(option in out for option in ("--model", "--fasta", "--lengths", "--seed", "--out", "--json"))


LIGHT = """
import contextlib, io, sys
from fast_attention.cli import main
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            main(line.split())
        except SystemExit as end:
            code = end.code
    words = said.getvalue()
    tops = {name.split(".")[0] for name in sys.modules}
    print(code, "--" in words or words.strip(), *sorted(tops & {"torch", "numpy", "matplotlib", "transformers"}))
"""


def test_what_needs_no_torch_does_not_import_it() -> None:
    """Torch alone takes seconds; typer and rich take a tenth of one. The imports are looked at, not the clock."""
    wrong = ["trian", "compare --lenghts 512", "bench --repeats", "train --steps many", "check"]
    asked = ["--help", "-h", "--version", *wrong, *(f"{name} --help" for name in COMMANDS), "train copy -h"]
    done = subprocess.run([sys.executable, "-c", LIGHT, *asked], capture_output=True, text=True, check=True)
    said = dict(zip(asked, done.stdout.splitlines(), strict=True))
    assert said.pop("--version") == f"0 fast-attention {__version__}"
    assert {said.pop(line).strip() for line in wrong} == {"2"}
    assert {*said.values()} == {"0 True"}, said


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_all_that_a_command_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its file is read without libraries then: what it takes must be the same."""
    command = COMMANDS[name]
    read = options.taken(f"fast_attention.lab.{command.module}", command.function)
    wanted = load(command)
    assert inspect.signature(read) == inspect.signature(wanted)
    assert read.__doc__ == wanted.__doc__
    code, out, _ = run(capsys, name, "-h")
    assert code == 0
    assert all(parameter.lower() in out.lower() for parameter in ("--help", *_positional(wanted))), out


def _positional(function: Any) -> list[str]:
    hints = get_type_hints(function, include_extras=True)
    metas = {name: get_args(hint)[1] for name, hint in hints.items() if name != "return"}
    return [meta.metavar or name for name, meta in metas.items() if type(meta).__name__ == "ArgumentInfo"]


def test_help_as_an_option_s_value_is_no_call_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "generate", "nobody/nothing/here", "--prompt", "-h")
    assert code == 2
    assert "no such folder" in err


def test_options_agree_with_what_torch_and_values_take() -> None:
    assert options.SEED == SEEDS - 1
    assert all(str(inputs.dtype(name)) == f"torch.{name}" for name in options.DTYPES)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_they_say(name: str) -> None:
    assert inspect.cleandoc(load(COMMANDS[name]).__doc__ or "").split("\n")[0] == COMMANDS[name].words


def test_a_star_import_takes_no_modules() -> None:
    code = (
        "from torch import nn\nfrom fast_attention import *\nprint(nn.__name__, attention.__name__, FNet().__class__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("torch.nn attention <class 'fast_attention.mechanisms.mixers.fnet.FNet'>")


def test_options_that_take_many_values() -> None:
    given = ["compare", "--lengths", "1", "2", "--seed", "3", "--mechanisms", "A", "B(x=1)", "--lengths", "4"]
    assert _repeat(given) == [
        "compare", "--lengths", "1", "--lengths", "2", "--seed", "3", "--mechanisms", "A", "--mechanisms", "B(x=1)",
        "--lengths", "4",
    ]  # fmt: skip


def test_importing_the_library_needs_no_extra() -> None:
    code = (
        "import sys, fast_attention, fast_attention.data, fast_attention.cli; fast_attention.attention\n"
        "print([m for m in ('typer', 'rich', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["typer", "rich", "matplotlib"])
def test_a_missing_extra_is_one_line(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom fast_attention.cli import main; main(['list'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"needs {missing}: {extras.install('lab')}" in done.stderr


def test_an_extra_is_installed_by_what_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """This package is on no index: a command that names it would find another's, or nothing."""
    command = extras.install("hf")
    assert re.fullmatch(r"pip install ('?[a-z-]+[>=.\d]+'? ?)+", command)
    assert "transformers>=5" in command
    assert "fast-attention" not in command
    monkeypatch.setattr(metadata, "requires", lambda name: None)
    assert extras.install("hf") == "pip install '.[hf]' in a clone of fast-attention"


def test_missing_transformers_names_its_extra(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    code = "import sys; sys.modules['transformers'] = None\nfrom fast_attention.cli import main; main(sys.argv[1:])"
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-c", code, "compare", "--out", str(tmp_path), "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"fast-attention: loading a model needs transformers: {extras.install('hf')}\n"
