"""The pure functions as the public calls them: one shape of key mask, the same checks as a mechanism's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from fast_attention import Bound, FavorPlus, Shape, attention, functional
from fast_attention.feature_maps.features import Relu
from tests.cases import qkv

WEIGHTS = {
    "aft_full": lambda: (torch.randn(9, 9),),
    "aft_local": lambda: (torch.randn(2, 9, 5),),
    "bigbird_attention": lambda: _of("BigBird"),
    "decayed_linear_attention": lambda: (-torch.rand(2, 9),),
    "favor_attention": lambda: _of("Favor"),
    "favor_plus_attention": lambda: _of("FavorPlus"),
    "generalised_attention": lambda: _of("FavorPlus"),
    "favor_plus_plus_attention": lambda: _of("FavorPlusPlus"),
    "lsh_attention": lambda: _of("LSH(num_buckets=2, bucket_size=4)"),
    "sinkhorn_attention": lambda: _of("Sinkhorn(block_size=4)"),
    "sortcut_attention": lambda: _of("SortCut(block_size=4)"),
    "convolved_attention": lambda: (torch.randn(2, 2), torch.randn(2, 2)),
    "linformer_attention": lambda: (torch.randn(2, 4, 9), torch.randn(2, 4, 9)),
    "wkv_attention": lambda: (torch.rand(2, 8), torch.randn(2, 8)),
    "gated_mlp": lambda: (_of("GMLP", whole=True),),
    "token_mlp": lambda: (_of("MLPMixer", whole=True),),
    "fourier_mix": lambda: (),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sinkhorn_attention": {"block_size": 4},
    "sortcut_attention": {"block_size": 4, "budget": 2},
    "lsh_attention": {"num_buckets": 2, "bucket_size": 4},
    "bigbird_attention": {"block_size": 2},
    "pooled_attention": {"rank": 3},
    "generalised_attention": {"kernel": Relu()},
}
TENSORS = ("q", "k", "v", "x")
NAMES = [
    name for name, f in vars(functional).items()
    if inspect.isfunction(f) and f.__module__ != "fast_attention.functional"
    and {"v", "x"} & set(inspect.signature(f).parameters) and name != "synthesizer_attention"
]  # fmt: skip
MASKED = [name for name in NAMES if "key_mask" in inspect.signature(vars(functional)[name]).parameters]


def _of(name: str, *, whole: bool = False) -> Any:
    bound = Bound(name, Shape(2, 8, 9))
    return bound.w if whole else tuple(bound.w)


def _called(name: str, length: int = 9, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """The function, and what to call it with."""
    torch.manual_seed(0)
    function = vars(functional)[name]
    names = list(inspect.signature(function).parameters)
    q, k, v = qkv(9, dtype=torch.float32)
    given = {"q": q, "k": k, "v": v, "x": torch.randn(2, 9, 16)}
    taken = {key: given[key][..., :length, :] for key in names if key in given}
    rest = [key for key in names if key not in taken]
    weights = dict(zip(rest, WEIGHTS.get(name, tuple)(), strict=False))
    return function, {**taken, **weights, **SETTINGS.get(name, {}), **changes}


def test_all_are_here() -> None:
    assert len(NAMES) > 25, NAMES


@pytest.mark.parametrize("name", MASKED)
def test_a_key_mask_has_one_flag_per_key_and_no_head_axis(name: str) -> None:
    """As ``attention``'s; with as many sequences as heads, (B, 1, S) would mask heads."""
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 5:] = mask[1, 2] = False
    function, given = _called(name, key_mask=mask)
    out = function(**given)
    alone = {key: x[1:] if key in TENSORS else x for key, x in given.items()}
    torch.testing.assert_close(function(**{**alone, "key_mask": mask[1:]}), out[1:], rtol=1e-4, atol=1e-5)
    for wrong in (mask[:, None], mask[:, :8], mask.expand(2, 2, 9)):
        with pytest.raises(ValueError, match="one flag per key, no head axis"):
            function(**{**given, "key_mask": wrong})
    with pytest.raises(ValueError, match="must be boolean"):
        function(**{**given, "key_mask": mask.float()})
    hidden = ~(mask[..., None] if "x" in given else mask[:, None, :, None])
    poisoned = {key: given[key].masked_fill(hidden, float("nan")) for key in given if key in ("k", "v", "x")}
    assert torch.equal(function(**{**given, **poisoned}), out)


@pytest.mark.parametrize("name", NAMES)
def test_whole_numbers_and_other_arrays_are_refused(name: str) -> None:
    function, given = _called(name)
    first = next(key for key in given if key in TENSORS)
    with pytest.raises(ValueError, match=rf"{first} is torch.int64: give float32"):
        function(**{**given, first: given[first].long()})
    with pytest.raises(TypeError, match=rf"{first} must be a torch.Tensor; got ndarray"):
        function(**{**given, first: given[first].numpy()})


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("linear_attention", {"eps": float("nan")}, "eps must be at least 0.0"),
        ("bigbird_attention", {"window_blocks": 2}, "window_blocks must be odd"),
        ("relu_attention", {"power": 3}, "power must be one of 1, 2"),
        ("laplacian_manhattan", {"temperature": 0.0}, "temperature must be at least"),
        ("softmax_attention", {"dropout": 2}, "dropout is a probability"),
        ("softmax_attention", {"attn_mask": torch.ones(9, 9).long()}, "attn_mask must be boolean"),
        ("aft_local", {"strict": "no"}, "strict must be True or False; got 'no'"),
        ("aft_full", {"is_causal": 1}, "is_causal must be True or False; got 1"),
    ],
)
def test_settings_are_those_of_the_mechanism(name: str, settings: dict[str, Any], said: str) -> None:
    function, given = _called(name)
    with pytest.raises((TypeError, ValueError), match=said):
        function(**{**given, **settings})


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "k" in inspect.signature(vars(functional)[name]).parameters]
)
def test_every_key_has_its_value(name: str) -> None:
    """torch's fused kernel, given fewer values than keys, reads memory behind the last one."""
    function, given = _called(name)
    with pytest.raises(ValueError, match="k has 9 tokens and v has 5: every key needs its value"):
        function(**{**given, "v": given["v"][..., :5, :]})
    with pytest.raises(ValueError, match=r"must be \(..., tokens, width\); got shape \(8,\)"):
        function(**{**given, "v": given["v"][0, 0, 0]})


def test_sizes_of_pure_functions_are_said_in_words() -> None:
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match="q has width 8 and k has width 4: they must be equal"):
        functional.linear_attention(x, x[..., :4], x)
    with pytest.raises(ValueError, match="the taps, must be odd"):
        functional.aft_local(x, x, x, torch.randn(2, 9, 4))
    with pytest.raises(ValueError, match="key_mask has shape"):
        functional.optimal_damping(x, x, key_mask=torch.ones(1, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"w is a Bound: give what FavorPlus\(\).weights\(Shape\(...\)\) returned"):
        FavorPlus()(x, x, x, Bound("FavorPlus", Shape(2, 8)))  # type: ignore[arg-type]


def test_a_plain_function_is_a_feature_map_here_too() -> None:
    function, given = _called("linear_attention")
    assert torch.equal(function(**given, feature_map=torch.relu), function(**given, feature_map=Relu()))


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_give_no_rows(name: str) -> None:
    function, given = _called(name, length=0)
    out = function(**given)
    assert out.shape[-2] == 0
    assert out.shape[:-2] == given["x" if "x" in given else "v"].shape[:-2]


@pytest.mark.slow
def test_they_compile() -> None:
    q, k, v = qkv(9)
    mask = torch.arange(9) < torch.tensor([[5], [9]])
    functions = [functional.linear_attention, functional.aft_simple, functional.log_attention]
    if torch.__version__ < "2.12":  # whose Dynamo builds no frozen dataclass with a default that is an object
        functions.pop()
    for function in functions:
        made = torch.compile(function, fullgraph=True, backend="eager")
        torch.testing.assert_close(made(q, k, v, key_mask=mask), function(q, k, v, key_mask=mask))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mechanism", ["Softmax", "FavorPlus", "Local"])
@pytest.mark.parametrize("enable_gqa", [False, True])
def test_what_is_no_dense_tensor_of_heads_is_refused_in_words(mechanism: str, enable_gqa: bool) -> None:
    x = torch.randn(1, 2, 5, 8)
    nested = torch.nested.nested_tensor([x[0], x[0, :, :3]])
    jagged = torch.nested.nested_tensor([x[0, 0], x[0, 0, :3]], layout=torch.jagged)
    for bad, error, said in (
        (x[0, 0], ValueError, r"must be \(..., heads, tokens, width\); got shape \(5, 8\)"),
        (x[0, 0, 0], ValueError, r"got shape \(8,\)"),
        ([1.0], TypeError, r"must be a torch.Tensor; got list"),
        (nested, ValueError, "is a nested tensor: give a dense one, padded"),
        (jagged, ValueError, "is a nested tensor: give a dense one, padded"),
        (x.to_sparse(), ValueError, "is a sparse tensor: give a dense one"),
    ):
        with pytest.raises(error, match=said):
            attention(bad, bad, bad, mechanism, enable_gqa=enable_gqa)
    with pytest.raises(TypeError, match=r"k must be a torch.Tensor; got list"):
        attention(x, [1.0], x, mechanism, enable_gqa=enable_gqa)  # type: ignore[arg-type]


@pytest.mark.parametrize("mechanism", ["Softmax", "Local(window=2)", "BlockLocal(block_size=4)", "Hybrid()"])
def test_the_reference_can_be_differentiated_twice(mechanism: str) -> None:
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in qkv(11))

    def twice(impl: Any) -> torch.Tensor:
        torch.manual_seed(1)
        out = attention(q, k, v, mechanism, impl=impl)
        (once,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(once.square().sum(), k)[0]

    torch.testing.assert_close(twice("reference"), twice("auto"))
