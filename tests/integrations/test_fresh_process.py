"""Whatever is promised of a swapped model's files holds in a process of its own, to which nothing was told before."""

from __future__ import annotations

import importlib
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fast_attention import Bound, LinearAttention, Shape, decoding, extend, swap
from tests.fresh import NEEDED, ROOT, TORCH, told
from tests.integrations.test_swap import build, inputs
from tests.integrations.test_swap_saving import AUTO, BIASED, DRAWN
from tests.integrations.test_swap_saving_parts import siglip

transformers = pytest.importorskip("transformers")
pytestmark = NEEDED

SAME = """
seen = torch.load("seen.pt")
found = model(**seen["given"]) if isinstance(seen["given"], dict) else model(*seen["given"])
found = found if isinstance(found, torch.Tensor) else found["logits"] if "logits" in found else found[0]
held = globals().get("whole", model).state_dict()
# Equal to the bit; of outputs last digits have differed, in a worker of a long suite.
assert not [name for name, x in seen["state"].items() if not torch.equal(held[name], x)]
torch.testing.assert_close(found, seen["out"], rtol=1e-5, atol=2e-6)
"""
MODEL = "model = transformers.{}.from_pretrained('.').eval()" + SAME
LOADED = "import fast_attention.integrations\n" + MODEL
OURS = "from fast_attention import from_pretrained\nmodel = from_pretrained('.').eval()" + SAME
REFUSED = """
import sys
assert transformers.AutoTokenizer.from_pretrained(".")
for load in (
    transformers.AutoModel.from_pretrained, transformers.BertModel.from_pretrained,
    transformers.AutoModelForMaskedLM.from_pretrained, transformers.BertForSequenceClassification.from_pretrained,
    lambda folder: transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder)),
    lambda folder: transformers.pipeline("fill-mask", model=folder),
):
    try:
        load(".")
    except ValueError as error:
        assert 'attn_implementation="fast_attention"' in str(error), error
    else:
        raise SystemExit(f"{load} ran exact attention")
assert "fast_attention.integrations" not in sys.modules
"""
KERNEL = ROOT / "examples" / "your_own_kernel.py"


class Check(NamedTuple):
    """What is written into a folder, and what a process of its own does with it."""

    write: Callable[[Path], Any]
    code: str


def seen(model: Any, folder: Path, given: Any) -> Any:
    """The model; what it computes of some inputs is written beside its files."""
    with torch.no_grad():
        found = model(**given) if isinstance(given, dict) else model(*given)
    found = found if isinstance(found, torch.Tensor) else found["logits"] if "logits" in found else found[0]
    torch.save({"given": given, "out": found, "state": model.state_dict()}, folder / "seen.pt")
    return model


def swapped(name: str, mechanism: str = DRAWN, **settings: Any) -> Any:
    torch.manual_seed(3)
    swap(model := build(name), mechanism, **settings)
    return model


def saved(
    name: str, mechanism: str = DRAWN, longer: int = 0, how: dict[str, Any] | None = None, **settings: Any
) -> Any:
    def write(folder: Path) -> None:
        model = build(name)
        if longer:
            extend(model, longer)
        swap(model, mechanism, **settings)
        padded = "right" if settings.get("skip_padding") else ""
        seen(model, folder, inputs(model, longer or 21, padded=padded)).save_pretrained(folder, **how or {})

    return write


def pooling_head(folder: Path) -> None:
    swap(model := siglip(), "Linformer(rank=4)", max_len=32)
    seen(model, folder, {"pixel_values": torch.ones(2, 3, 32, 32)}).save_pretrained(folder)


def pickled(folder: Path) -> None:
    model = seen(swapped("Bert", skip_padding=True), folder, inputs(build("Bert"), padded="right"))
    (folder / "model.pickle").write_bytes(pickle.dumps(model))
    torch.save(model, folder / "model.pt")


def states_of_a_model(folder: Path) -> None:
    model = seen(swapped("Bert"), folder, inputs(build("Bert")))
    torch.save(model.state_dict(), folder / "weights.pt")


def of_torch() -> nn.Module:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    return model.eval()


def torchs_own(folder: Path) -> None:
    swap(model := of_torch(), "Linformer(rank=4)", max_len=32)
    seen(model, folder, (torch.randn(2, 9, 16),))
    torch.save(model.state_dict(), folder / "weights.pt")
    torch.save(model, folder / "model.pt")


def state_of_decoding(folder: Path) -> None:
    torch.manual_seed(0)
    bound, tokens = Bound("FavorPlus(num_features=8)", Shape(2, 8)), torch.randn(3, 1, 2, 5, 8)
    _, state = bound.decode(*tokens[..., :4, :])
    decoding.save(state, folder / "state.pt")
    q, k, v = tokens[..., 4:, :]
    wanted, _ = bound.decode(q, k, v, state)
    torch.save({"weights": bound.state_dict(), "tokens": tokens[..., 4:, :], "wanted": wanted}, folder / "seen.pt")


def users_kernel(folder: Path) -> None:
    shutil.copy(KERNEL, folder)
    sys.path.insert(0, str(folder))
    try:
        kernels = importlib.import_module(KERNEL.stem)
    finally:
        sys.path.remove(str(folder))
    swap(model := build("Bert"), LinearAttention(feature_map=kernels.SquaredRelu(power=3)))
    seen(model, folder, inputs(model)).save_pretrained(folder)


def config_alone(folder: Path) -> None:
    (folder / "config.pickle").write_bytes(pickle.dumps(swapped("Bert").config))
    swapped("Bert").save_pretrained(folder)


def masked(folder: Path) -> None:
    """Weights of every class that reads it, none of which would be missed."""
    model = transformers.BertForMaskedLM(build("Bert").config)
    swap(model, "LinearAttention")
    model.save_pretrained(folder)
    transformers.ByT5Tokenizer().save_pretrained(folder)


def adapters(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    swapped("Bert").save_pretrained(folder / "base")
    base = transformers.AutoModel.from_pretrained(folder / "base")
    settings = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's packages among themselves
        model = peft.get_peft_model(base, settings).eval()
    seen(model, folder, inputs(base)).save_pretrained(folder)


CHECKS = {
    **{f"{kind} of {name}": Check(saved(name, "Local(window=3)" if name in BIASED else DRAWN), LOADED.format(kind))
       for name, kind in AUTO.items()},
    "fast_attention.from_pretrained": Check(saved("GPT2"), OURS),
    "by the class": Check(saved("Bert"), LOADED.format("BertModel")),
    "shards and a variant": Check(
        saved("Bert", how={"max_shard_size": "30KB", "variant": "x"}),
        LOADED.format("AutoModel").replace("'.'", "'.', variant='x'"),
    ),
    "short inputs exact": Check(saved("Bert", exact_up_to=8), LOADED.format("AutoModel")),
    "padding skipped": Check(saved("Bert", skip_padding=True), LOADED.format("AutoModel")),
    "extended": Check(saved("Bert", longer=200), LOADED.format("AutoModel")),
    "a pooling head": Check(pooling_head, LOADED.format("AutoModel")),
    "a user's kernel": Check(users_kernel, f"import {KERNEL.stem}\n" + LOADED.format("AutoModel")),
    "a pipeline": Check(
        saved("Bert"),
        "import fast_attention.integrations\ntokenizer = transformers.ByT5Tokenizer()\n"
        "model = transformers.pipeline('feature-extraction', model='.', tokenizer=tokenizer).model" + SAME,
    ),
    "PEFT": Check(
        adapters,
        "import fast_attention.integrations, peft\n"
        "model = peft.PeftModel.from_pretrained(transformers.AutoModel.from_pretrained('base'), '.').eval()" + SAME,
    ),
    "pickled": Check(pickled, "import pickle\nmodel = pickle.load(open('model.pickle', 'rb'))" + SAME),
    "pickled by torch": Check(pickled, "model = torch.load('model.pt', weights_only=False)" + SAME),
    "pickled and called by forward": Check(
        pickled,
        "import pickle\nwhole = pickle.load(open('model.pickle', 'rb'))\nmodel = whole.forward" + SAME
        + "from fast_attention import swap_back\nassert swap_back(whole)\nassert 'forward' not in vars(whole)",
    ),
    "pickled and saved": Check(
        pickled,
        "import pickle\npickle.load(open('model.pickle', 'rb')).save_pretrained('again')\n"
        "model = transformers.AutoModel.from_pretrained('again')" + SAME,
    ),
    "a state_dict": Check(
        states_of_a_model,
        "from fast_attention import swap\nfrom tests.integrations.test_swap import build\n"
        f"swap(model := build('Bert'), {DRAWN!r})\n"
        "model.load_state_dict(torch.load('weights.pt'))" + SAME,
    ),
    "torch's layers by a state_dict": Check(
        torchs_own,
        "from fast_attention import swap\nfrom tests.integrations.test_fresh_process import of_torch\n"
        "swap(model := of_torch(), 'Linformer(rank=4)', max_len=32)\n"
        "model.load_state_dict(torch.load('weights.pt'))" + SAME,
    ),
    "torch's layers pickled": Check(torchs_own, "model = torch.load('model.pt', weights_only=False)" + SAME),
    "a state of decoding": Check(
        state_of_decoding,
        "from fast_attention import Bound, Shape, decoding\nseen = torch.load('seen.pt')\n"
        "bound = Bound('FavorPlus(num_features=8)', Shape(2, 8))\nbound.load_state_dict(seen['weights'])\n"
        "found, _ = bound.decode(*seen['tokens'], decoding.load('state.pt'))\n"
        "assert torch.equal(found, seen['wanted'])",
    ),
    "a config": Check(
        config_alone,
        "import pickle\nimport fast_attention.integrations\n"
        "for config in (pickle.load(open('config.pickle', 'rb')), transformers.AutoConfig.from_pretrained('.')):\n"
        "    model = transformers.AutoModel.from_config(config).eval()\n"
        "    assert model(torch.ones(1, 5).long())[0].isfinite().all()\n"
        "    assert model.config._attn_implementation == 'sdpa'",
    ),
    "nothing imported": Check(masked, REFUSED),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each check; empty where nothing did."""
    asked = []
    for i, (name, check) in enumerate(CHECKS.items()):
        check.write(folder := tmp_path_factory.mktemp(f"check{i}"))
        asked.append((name, str(folder), check.code))
    return told(asked)


@pytest.mark.parametrize("name", CHECKS)
def test_a_process_that_knows_nothing(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes.get(name, "no answer") == ""


def test_what_is_imported_before_transformers(tmp_path: Path) -> None:
    """The integrations make swapped models known to it as soon as it is there; the package alone does not."""
    load = "from fast_attention import swap\nimport transformers\n" + MODEL.format("AutoModel")
    asked = []
    for name, write, code in (
        ("the integrations", saved("Bert"), load),
        ("the package alone", masked, "import fast_attention, transformers" + REFUSED),
    ):
        (folder := tmp_path / name).mkdir()
        write(folder)
        asked.append((name, str(folder), code))
    assert told(asked, TORCH) == {"the integrations": "", "the package alone": ""}
