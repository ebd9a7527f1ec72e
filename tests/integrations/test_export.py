"""Exported programs and ONNX files: equal to eager at other lengths than the traced one, refused where denied."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fast_attention import (
    Attention,
    Mixer,
    MultiheadAttention,
    TokenMixer,
    Unsupported,
    catalogue,
    exporting,
    swap,
)
from fast_attention.engine import scan
from fast_attention.lab import command_line
from fast_attention.lab.commands import TOLERANCE
from fast_attention.lab.export import opened
from fast_attention.lab.refusals import install
from tests.cases import DISTINCT, bind, qkv, some_keys, uncached

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

TRACED, LONGEST = 23, 130
OTHERS = (1, 5, 37, 64, 65, 128, 130)  # blocks of the defaults are of 64 and 128 tokens
CLOSE = 2e-5  # of the largest output


@pytest.fixture(autouse=True, scope="module")
def _quicker() -> Iterator[None]:
    """Tracing without torch's cache, and ONNX's operators, which torch collects anew for every file, collected once."""
    patch = pytest.MonkeyPatch()
    patch.setattr(exporting, "program", uncached()(exporting.program))
    with contextlib.suppress(ImportError, AttributeError):  # torch's own affair
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
    yield
    patch.undo()


class Called(nn.Module):
    """A bound mechanism with its inputs by name and its direction fixed."""

    def __init__(self, mechanism: Any, is_causal: bool) -> None:
        super().__init__()
        self.bound, self.is_causal = bind(mechanism, max_len=LONGEST, dtype=torch.float32), is_causal
        self.eval()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.bound(q, k, v, is_causal=self.is_causal, key_mask=key_mask)

    def given(self, length: int, batch: int, *, hidden: bool) -> dict[str, Tensor]:
        inputs = dict(zip("qkv", qkv(length, batch=batch, dtype=torch.float32, scale=0.5), strict=True))
        mask = some_keys(batch, length) if hidden else torch.ones(batch, length, dtype=torch.bool)
        if hidden and batch > 1:
            grid = self.bound.mechanism.traits.positions == "grid"  # which refuses padding in front
            mask[0, int(grid) : length // 3] = False  # of a causal mechanism the first queries see nothing
        if hidden and batch > 2:
            mask[1] = False
        return {**inputs, "key_mask": mask} if self.bound.mechanism.traits.padding else inputs

    def open_sizes(self, inputs: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
        batch, length = Dim("batch", min=1, max=64), Dim("length", min=2, max=LONGEST)
        return {name: {0: batch, 1 if name == "key_mask" else x.ndim - 2: length} for name, x in inputs.items()}


class Mixed(Called):
    """The same for whole tokens."""

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.bound(x, is_causal=self.is_causal, key_mask=key_mask)

    def given(self, length: int, batch: int, *, hidden: bool) -> dict[str, Tensor]:
        found = super().given(length, batch, hidden=hidden)
        found["x"] = torch.randn(batch, length, 16)
        return {name: found[name] for name in ("x", "key_mask") if name in found}


def close(mechanism: Any, length: int) -> float:
    """ONNX Runtime's Fourier transform of a length that is no power of two loses digits with every token."""
    exact = type(mechanism).__name__ != "FNet" or length & (length - 1) == 0
    return CLOSE if exact else 1e-6 * length


def called(mechanism: Any, is_causal: bool) -> Called:
    return (Mixed if isinstance(mechanism, Mixer) else Called)(mechanism, is_causal)


def granted() -> list[Any]:
    """Every mechanism in the last of its directions, and settings that take other paths.

    The other directions are exported by the contract, without ONNX.
    """
    fewer = {"LSH": "LSH(num_hashes=2)", "AFTLocal": "AFTLocal(window=3)", "AFTConv": "AFTConv(kernel_size=3)"}
    # rounds and taps are alike, and each takes time to trace
    chosen = [catalogue.parse(fewer.get(name, name)) for name in catalogue.names()]
    chosen += [
        catalogue.parse(text)
        for text in ("Linformer(rank=8, projection=MeanPool())", "LSH(num_hashes=1, layout='sorted')")
    ]
    pairs = [(m, m.traits.modes[-1]) for m in chosen if m.traits.export]
    return [pytest.param(m, is_causal, id=f"{m!r}{', causal' * is_causal}") for m, is_causal in pairs]


def operators(program: ExportedProgram) -> set[tuple[str, str]]:
    """What a program calls, each with the families of the tensors it takes: what ONNX has an operator for."""
    found = set()
    for node in program.graph.nodes:
        if node.op == "call_function":
            name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
            tensors = [x.meta["val"] for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor)]
            found.add((name, " ".join(dict.fromkeys(family(x) for x in tensors))))
    return found


def family(x: Tensor) -> str:
    """What operators tell apart in tensors."""
    if x.dtype == torch.bool:
        return "bool"
    return "float" if x.is_floating_point() else "complex" if x.is_complex() else "int"


def written_by() -> dict[tuple[str, str], str]:
    """The operators of all programs, each with one that has it and is written as ONNX; of this release of torch."""
    if not torch.__version__.startswith("2.13."):
        return {}
    with (Path(__file__).parent / "onnx_operators.csv").open(newline="", encoding="utf-8") as file:
        return {(row["operator"], row["families"]): row["program"] for row in csv.DictReader(file)}


WRITTEN_BY = written_by()


@pytest.mark.parametrize(("mechanism", "is_causal"), granted())
def test_programs_agree_at_other_lengths(
    mechanism: Any, is_causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch, and by ONNX Runtime unless others that are written as ONNX have all of a program's operators."""
    module, name = called(mechanism, is_causal), f"{mechanism!r}{', causal' * is_causal}"
    example = module.given(TRACED, 3, hidden=True)
    program = exporting.program(module, example, module.open_sizes(example))
    own = {operator for operator, by in WRITTEN_BY.items() if by == name}
    assert own <= operators(program), "tests/integrations/onnx_operators.csv names operators that it has no more"
    run = program.module()
    ways: dict[str, Callable[[Any], Tensor]] = {"torch": lambda inputs: run(**inputs)}
    if own or operators(program) - WRITTEN_BY.keys():
        monkeypatch.setattr(exporting, "program", lambda *given: program)  # or it is traced again
        exporting.onnx(module, example, tmp_path / "model.onnx", module.open_sizes(example))
        assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
        session = exporting.load(tmp_path / "model.onnx")
        ways["ONNX Runtime"] = lambda inputs: session(inputs)[0]
    for i, length in enumerate(OTHERS):
        for hidden in [False] + [True] * mechanism.traits.padding:
            inputs = module.given(length, 1 + i % 3, hidden=hidden)
            with torch.no_grad():
                wanted = module(**inputs)
                off = {way: exporting.difference(wanted, found(inputs)) for way, found in ways.items()}
            assert max(off.values()) <= close(mechanism, length), f"{length} tokens, {hidden=}: {off}"


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_running_maxima_need_no_operator_of_their_own(kind: torch.dtype) -> None:
    """In blocks of 64, and blocks of those, and what is left of them; of numbers that are all below zero."""

    class Running(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scan.cummax(x)

    sizes = {"x": {0: Dim("length", min=2, max=1 << 20)}}
    made = exporting.program(Running(), {"x": torch.zeros(9, 3, dtype=kind)}, sizes).module()
    assert not [node for node in made.graph.nodes if "cummax" in str(node.target)]
    for length in (2, 63, 64, 65, 1000, 4097, 70_000):
        x = (-10_000 * torch.rand(length, 3)).sub(1).to(kind)
        assert torch.equal(made(x=x), x.cummax(0).values), length


DENIED = [m for m in DISTINCT if not m.traits.export]
REASONS = [*{(type(m), m.distance): m for m in DENIED}.values()]  # one of each path that torch cannot trace


def test_both_ways_are_tested() -> None:
    assert DENIED
    assert all(catalogue.default(name).traits.export for name in catalogue.names()), "docs/guides/export.md says so"


@pytest.mark.parametrize("mechanism", DENIED, ids=repr)
def test_what_is_denied_is_refused_before_torch_is_asked(
    mechanism: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = called(mechanism, True)
    example = module.given(TRACED, 2, hidden=True)
    if mechanism in REASONS:  # the denial is true: torch cannot leave the length open
        with pytest.raises(Exception, match=r"\w"):
            torch.export.export(module, (), example, dynamic_shapes=module.open_sizes(example))
    monkeypatch.setattr(torch.export, "export", lambda *args, **settings: pytest.fail("torch was asked"))
    for write in (exporting.onnx, exporting.save):
        said = re.escape(repr(mechanism)) + r" does not support export.*traits\.export is False.*What would work: \w+"
        with pytest.raises(Unsupported, match=said):
            write(module, example, tmp_path / "model", module.open_sizes(example))
    assert not list(tmp_path.iterdir())


def test_weights_may_lie_beside_the_file(tmp_path: Path) -> None:
    """Under the name that the file knows, and both are replaced together."""
    torch.manual_seed(0)
    module = nn.Linear(32, 32)
    path, sizes = tmp_path / "model.onnx", {"input": {0: Dim("rows", min=1, max=99)}}
    for _ in range(2):
        nn.init.normal_(module.weight)
        inputs = {"input": torch.randn(5, 32)}
        exporting.onnx(module, inputs, path, sizes, external_data=True)
        assert sorted(part.name for part in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
        assert exporting.difference(module(**inputs).detach(), exporting.load(path)(inputs)[0]) < CLOSE


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs, path = nn.Linear(3, 3), {"input": torch.ones(2, 3)}, tmp_path / "there" / "model.onnx"
    exporting.onnx(module, inputs, path, {})
    before = path.read_bytes()

    def broken(self: Any, destination: Any, **settings: Any) -> None:
        Path(destination).write_bytes(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", broken)
    with pytest.raises(OSError, match="no space left"):
        exporting.onnx(module, inputs, path, {})
    assert [part.name for part in path.parent.iterdir()] == ["model.onnx"]
    assert path.read_bytes() == before


def test_names_and_open_sizes_stand_in_the_file(tmp_path: Path) -> None:
    module, path = called(catalogue.parse("LinearAttention"), False), tmp_path / "model.onnx"
    example = module.given(TRACED, 2, hidden=True)
    exporting.onnx(module, example, path, module.open_sizes(example), opset=20)
    model = onnx.load(path)
    assert [part.name for part in model.graph.input] == ["q", "k", "v", "key_mask"]
    assert [part.name for part in model.graph.output] == ["output"]
    assert {part.version for part in model.opset_import if part.domain == ""} == {20}
    q = model.graph.input[0].type.tensor_type.shape.dim
    assert [size.dim_param != "" for size in q] == [True, False, True, False]
    assert [size.dim_value for size in q][1::2] == [2, 8]


def test_what_torch_cannot_trace_is_said_in_one_line(tmp_path: Path) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if bool(x.sum() > 0) else x

    with pytest.raises(Unsupported, match=r"torch\.export cannot trace Asks") as caught:
        exporting.onnx(Asks(), {"x": torch.ones(3)}, tmp_path / "model.onnx", {"x": {0: Dim("n", min=2, max=9)}})
    assert "\n" not in str(caught.value)

    class Lacks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cummax(-1).values

    with pytest.raises(Unsupported, match=r"Lacks cannot be written as ONNX.*cummax"):
        exporting.onnx(Lacks(), {"x": torch.ones(3)}, tmp_path / "model.onnx", {"x": {0: Dim("n", min=2, max=9)}})
    assert not list(tmp_path.iterdir())


def test_difference() -> None:
    a = torch.tensor([1.0, -4.0])
    assert exporting.difference(a, a) == 0
    assert exporting.difference(a, torch.tensor([1.0, -3.0])) == 0.25
    assert exporting.difference(a, torch.tensor([1.0, float("nan")])) == float("inf")
    assert exporting.difference(a, a[:1]) == float("inf")
    assert exporting.difference(torch.zeros(2), torch.tensor([0.0, 0.5])) == 0.5


def test_torchs_own_encoder_layer(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    layer.self_attn = MultiheadAttention(32, 4, batch_first=True, mechanism="Local(window=3)")
    layer.eval()

    def given(batch: int, length: int) -> dict[str, Tensor]:
        padding = torch.zeros(batch, length, dtype=torch.bool)
        padding[0, length - 2 :] = True
        return {"src": torch.randn(batch, length, 32), "src_key_padding_mask": padding}

    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=3, max=512)}
    exporting.onnx(layer, given(2, 12), tmp_path / "model.onnx", dict.fromkeys(given(2, 12), sizes))
    run = exporting.load(tmp_path / "model.onnx")
    for length in (3, 40, 300):
        inputs = given(3, length)
        with torch.no_grad():
            assert exporting.difference(layer(**inputs), run(inputs)[0]) < CLOSE


# --- whole models -----------------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


SHORT: dict[str, dict[str, int]] = {  # exporting takes its time layer by layer
    "GPT2": {"n_layer": 1},
    "Bart": {"encoder_layers": 1, "decoder_layers": 1},
    "ModernBert": {"num_hidden_layers": 2},
}


def folder(kind: str, mechanism: str, path: Path, **settings: Any) -> Any:
    from tests.integrations.test_swap import build

    model = build(kind, **{**SHORT.get(kind, {"num_hidden_layers": 1}), **settings}).eval()
    assert swap(model, mechanism).replaced
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [
        ("ModernBert", "Softmax"),
        ("GPT2", "FavorPlus(num_features=16)"),
        ("Llama", "Local(window=(5, 0))"),
        ("Bert", "Local(window=2, dilation=3)"),
        ("Vit", "LinearAttention"),
        ("Bart", "LinearAttention"),
    ],
)
def test_hugging_face_models(kind: str, mechanism: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(kind, mechanism, tmp_path)
    assert command_line.run(["export", str(tmp_path), "--onnx"]) == 0
    assert "model.onnx: reads" in told(capsys)
    run = exporting.load(tmp_path / "model.onnx")
    if kind == "Vit":
        inputs = {"pixel_values": torch.randn(5, 3, 16, 16)}
    else:
        inputs = {"input_ids": torch.randint(5, 99, (2, 71))}
        inputs["attention_mask"] = (torch.arange(71) >= torch.tensor([[0], [9]])).long()  # padded at the left
        if kind == "Bart":
            inputs["decoder_input_ids"] = torch.randint(5, 99, (2, 11))
    with torch.no_grad():
        wanted = model(**inputs)[0]
    assert exporting.difference(wanted, run(inputs)[0]) < TOLERANCE


def test_a_program_of_torch_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder("Esm", "LinearAttention", tmp_path)
    assert command_line.run(["export", str(tmp_path), "--out", str(tmp_path / "out.pt2")]) == 0
    said = told(capsys)
    assert "difference" in said
    assert "300" not in said.split()  # its positions end at 128
    inputs = {"input_ids": torch.randint(5, 99, (2, 51))}
    inputs["attention_mask"] = (torch.arange(51) < torch.tensor([[51], [40]])).long()
    with torch.no_grad():
        wanted = model(**inputs)[0]
    assert exporting.difference(wanted, exporting.load(tmp_path / "out.pt2")(inputs)[0]) < TOLERANCE


def test_a_model_of_fewer_tokens_than_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --length the example is as long as the model takes."""
    folder("Bert", "LinearAttention", tmp_path, max_position_embeddings=9)
    assert command_line.run(["export", str(tmp_path)]) == 0
    assert "model.pt2: reads" in told(capsys)


def test_sequences_packed_in_one_row_are_refused(tmp_path: Path) -> None:
    model = opened(folder("Llama", "LinearAttention", tmp_path)).module
    sizes = {"input_ids": {1: Dim("length", min=2, max=64)}}
    with pytest.raises(Unsupported, match="pass attention_mask"):
        exporting.program(model, {"input_ids": torch.randint(5, 99, (2, 9))}, sizes)


def test_a_file_that_disagrees_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder("Bert", "LinearAttention", tmp_path / "model")
    load = exporting.load

    def off(path: Any) -> Any:
        run = load(path)
        return lambda inputs: tuple(x + (x.shape[0] == 3) for x in run(inputs))  # wrong for batches of three

    monkeypatch.setattr(exporting, "load", off)
    assert command_line.run(["export", str(tmp_path / "model")]) == 1
    out, err = capsys.readouterr()
    assert "difference" in out
    assert "model.pt2 was not written" in err
    assert sorted(part.name for part in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder("Bert", "LinearAttention", tmp_path / "good")
    folder("Bert", "Manhattan(normalize='l1')", tmp_path / "denied")
    folder("Bert", "LinearAttention", tmp_path / "single", max_position_embeddings=1)
    (tmp_path / "none").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"model_type": "no such"}))
    good = str(tmp_path / "good")
    for arguments, words in (
        ([str(tmp_path / "denied"), "--onnx"], "traits.export is False"),
        ([str(tmp_path / "denied")], "traits.export is False"),
        ([str(tmp_path / "none")], "config.json"),
        ([str(tmp_path / "other")], "no such"),
        ([good, "--out", str(tmp_path / "a.onnx")], "give --onnx"),
        ([good, "--onnx", "--out", str(tmp_path / "a.pt2")], "ends in .onnx"),
        ([good, "--opset", "20"], "give --onnx"),
        ([good, "--length", "129"], "at most 128 tokens"),
        ([good, "--length", "1"], "--length"),
        ([str(tmp_path / "single")], "takes 1 tokens at most: no length can be left open"),
    ):
        assert command_line.run(["export", *arguments]) == 2, arguments
        out, err = capsys.readouterr()
        assert words in err, (arguments, err)
        assert len(err.strip().splitlines()) == 1, err
        assert not out
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert command_line.run(["export", good, "--onnx"]) == 2
    assert install("onnx") in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".onnx", ".pt2", ".part")]


def test_every_attention_and_mixer_is_tried() -> None:
    kinds = {type(parameter.values[0]).__name__ for parameter in granted()}
    assert {*WRITTEN_BY.values()} <= {parameter.id for parameter in granted()}
    assert kinds == {name for name in catalogue.names() if catalogue.default(name).traits.export}
    assert {Attention, Mixer} == {Attention if isinstance(p.values[0], Attention) else Mixer for p in granted()}


def example(rows: int, length: int, **others: Any) -> dict[str, Any]:
    return {"x": torch.randn(rows, length, 16), **others}


BATCH, LENGTH, FROM_8 = Dim("batch", min=1, max=64), Dim("length", min=2, max=32), Dim("length", min=8, max=512)
OPEN = {"x": {0: BATCH, 1: LENGTH}}
ALIKE = {"query": {1: LENGTH}, "key": {1: LENGTH}, "value": {1: LENGTH}}
CROSS = {"query": {1: LENGTH}, "key": {1: Dim("keys", max=9)}, "value": {1: Dim("values", max=9)}}
PAIR = {name: torch.randn(2, length, 16) for name, length in (("query", 5), ("key", 7), ("value", 7))}
UNFIT = {
    "one text": (example(1, 24), OPEN, "x has size 1 along 'batch', which is open: give an example of 2 or more"),
    "no text": (example(0, 24), OPEN, "x has size 0 along 'batch', which is open: give an example of 2 or more"),
    "one token": (example(2, 1), OPEN, "x has size 1 along 'length', which is open: give an example of 2 or more"),
    "no token": (example(2, 0), OPEN, "x has size 0 along 'length', which is open: give an example of 2 or more"),
    "by itself": (example(1, 24), {"x": {0: Dim.AUTO}}, "x has size 1 along 'axis 0', which is open: give an"),
    "too few": (example(2, 5), {"x": {1: FROM_8}}, "x has size 5 along 'length', which is open from 8 to 512: give"),
    "too many": (example(2, 33), OPEN, "x has size 33 along 'length', which is open from 2 to 32: give an example"),
    "no axis": (example(2, 24), {"x": {3: BATCH}}, "open_sizes names axis 3 of x, whose shape is (2, 24, 16)"),
    "no tensor": ({"x": [1]}, OPEN, "x must be a torch.Tensor; got list"),
    "longer than the model": (example(2, 40), {"x": {1: FROM_8}}, "at most max_len=32 tokens and got 40"),
    "beyond the model": (example(2, 24), {"x": {1: FROM_8}}, "What would work: length = Dim('length', min=8, max=32)"),
    "always the same": (example(2, 24), {"x": {2: Dim("width", max=64)}}, "(16). What would work: width = 16"),
    "another input": (
        example(2, 24, y=torch.ones(2)),
        OPEN,
        "does not take its example: TypeError: TokenMixer",
    ),
    "another dtype": ({"x": torch.ones(2, 24, 16).long()}, OPEN, "x is torch.int64: give float32"),
    "one name for two": (
        PAIR,
        ALIKE,
        "key has size 7 along 'length' and query has 5: give",
    ),
    "two names for one": (PAIR, CROSS, "must always be equal"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_example_that_does_not_fit_is_told_in_one_line(case: str, tmp_path: Path) -> None:
    """Of the size that is to stay open, in the caller's words, not cut off in the middle of a word."""
    given, sizes, words = UNFIT[case]
    module: Any = TokenMixer(16, 2, "Linformer(rank=4)", max_len=32)
    if "query" in given:
        module = MultiheadAttention(16, 2, batch_first=True)
    with pytest.raises((ValueError, TypeError, Unsupported), match=re.escape(words)) as refused:
        exporting.save(module.eval(), given, tmp_path / "model.pt2", sizes)
    message = str(refused.value)
    assert "\n" not in message
    assert "error above" not in message
    assert len(message) < 600
    assert not list(tmp_path.iterdir())


def test_equal_sizes_of_an_example_stay_apart() -> None:
    module = TokenMixer(16, 2, "Local(window=4)").eval()
    exported = exporting.program(module, example(16, 16), OPEN)
    for rows, length in ((1, 16), (3, 2), (16, 31)):
        x = example(rows, length)
        torch.testing.assert_close(exported.module()(**x), module(**x))


def test_open_sizes_of_no_input_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="open_sizes names y, and the inputs are x"):
        exporting.program(nn.Linear(4, 4), {"x": torch.randn(3, 4)}, {"y": {0: Dim("length")}})
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        exporting.load(tmp_path / "model.pt2")
