"""Arguments of the command line: whatever is typed, an exit code and at most a line, never a traceback."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st

from fast_attention.lab import command_line
from tests.fuzz.kit import fuzz

MEASURE = "--mechanisms FNet --lengths 4 --no-backward --budget 1 --threads 1"
CHEAP = {
    "compare": ["compare", "--model", "gaussian", *MEASURE.split()],
    "advise": ["advise", "2x4", "--length", "4", "--mechanisms", "FNet", "--seconds", "1", "--threads", "1"],
    "list": ["list"],
    "check": ["check", "nowhere"],
    "export": ["export", "nowhere"],
    "convert": ["convert", "nowhere", "--mechanism", "FNet"],
}
OPTIONS = """
--mechanism --mechanisms --model --lengths --length --dtype --device --causal --no-causal --backward --no-backward
--budget --error --json --batch --training --seconds --seed --threads --resume --restart --keep-layers --share --train
--teacher --positions --exact-up-to --batch-size --minutes --steps --lr --precision --opset --tolerance --onnx --help
--version --import --text --held-out --out -- -x
"""
VALUES = """0 1 -1 2 3.5 1e400 -inf nan 1000000000000000000000000000000 9999999999999 True None é \\ ' " 1,2 0,0 5,5 2x4
0x4 FNet FNet( FNet() Softmax(scale=0) Softmax(scale='a') Local(window=-1) Performer lambda [] {} ../.. /dev/null
nowhere float16 bfloat16 complex64 cpu cuda cuda:9 meta rotary learned gaussian 1.0 0.5 --"""


VALUE = st.sampled_from([*VALUES.split(), "", " ", "a\0b", "\n"]) | st.text(max_size=5)
WORDS = st.lists(st.tuples(st.sampled_from(OPTIONS.split()), VALUE, st.booleans()), max_size=3)


@fuzz("arguments of commands", examples=10, command=st.sampled_from(sorted(CHEAP)), words=WORDS)
def test_arguments_end_in_an_exit_code(command: str, words: list[tuple[str, str, bool]]) -> None:
    given = [*CHEAP[command]]
    out, err = io.StringIO(), io.StringIO()
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if command in ("compare", "convert"):
            given += ["--out", str(Path(folder) / "out")]
        for option, value, has in words:
            given += [option, value] if has else [option]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = command_line.run(given)
            except SystemExit as end:
                code = end.code
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)
    assert code in (0, 1, 2), (given, code)
    if code == 2:
        said = [line for line in err.getvalue().splitlines() if line.strip()]
        assert said, given
        assert said[-1].startswith("fast-attention: "), given
    assert "Traceback" not in err.getvalue()
