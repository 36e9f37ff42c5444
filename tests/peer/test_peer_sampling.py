# SPDX-License-Identifier: Apache-2.0
"""Sampling beside FlashInfer's: the same signatures, rows and sets; tokens of one distribution.

Random numbers are used otherwise, so the same seed gives other tokens. All but the tests marked
``flashinfer_topk`` need its module ``sampling`` alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import pytest
import torch

import precast
from precast import logits_processor, sampling

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

FUNCTIONS = [
    "softmax",
    "sampling_from_logits",
    "sampling_from_probs",
    "top_k_sampling_from_probs",
    "top_p_sampling_from_probs",
    "min_p_sampling_from_probs",
    "top_k_top_p_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_renorm_probs",
    "top_p_renorm_probs",
    "top_k_mask_logits",
    "chain_speculative_sampling",
]
JOINT = {"filter_apply_order": "joint"}


def theirs(name: str) -> Any:
    return getattr(importlib.import_module("flashinfer.sampling"), name)


def probs(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return (2 * torch.randn(rows, size, device="cuda", generator=generator)).softmax(1)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_stand_where_theirs_do(name: str) -> None:
    mine = inspect.signature(getattr(sampling, name)).parameters
    other = inspect.signature(theirs(name)).parameters
    assert [*mine] == [*other]
    for parameter, described in mine.items():
        assert described.default == other[parameter].default, parameter
        assert described.kind == other[parameter].kind, parameter


@pytest.mark.parametrize("name", ["top_k_renorm_prob", "top_p_renorm_prob"])
def test_other_names(name: str) -> None:
    assert callable(theirs(name))
    assert callable(getattr(sampling, name))


MODULES = ["compiler", "fusion_rules", "legalization", "op", "operators", "pipeline", "processors"]


@pytest.mark.parametrize("name", ["", *MODULES, "types", "validators"])
def test_what_users_import_of_the_pipes_is_there(name: str) -> None:
    place = f"logits_processor.{name}".rstrip(".")
    mine = importlib.import_module(f"precast.{place}")
    other = importlib.import_module(f"flashinfer.{place}")
    public = {
        word
        for word, value in vars(other).items()
        if not word.startswith("_")
        and str(getattr(value, "__module__", "")).startswith(f"flashinfer.{place}")
    }
    assert public
    assert sorted(word for word in public if not hasattr(mine, word)) == []


# -- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, 128256])
def test_softmax(size: int, generator: torch.Generator) -> None:
    x = 3 * torch.randn(40, size, device="cuda", generator=generator)
    for temperature in (None, 0.7, torch.rand(40, device="cuda", generator=generator) + 0.3):
        got, want = precast.softmax(x, temperature), theirs("softmax")(x, temperature)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("size", [1000, 128256])
@pytest.mark.parametrize(
    ("name", "value"), [("top_k_renorm_probs", 50), ("top_p_renorm_probs", 0.7)]
)
def test_renormalised_rows(name: str, value: Any, size: int, generator: torch.Generator) -> None:
    p = probs(40, size, generator)
    for many in (value, torch.full((40,), value, device="cuda")):
        many = many.int() if isinstance(value, int) and many is not value else many
        got, want = getattr(precast, name)(p, many), theirs(name)(p, many)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        # Their threshold is searched for until a share is near enough.
        assert ((got > 0) == (want > 0)).double().mean() > 0.999
        both = (got > 0) & (want > 0)
        torch.testing.assert_close(got[both], want[both], rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_logits(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Rows without equal elements; of those at the threshold ours keep all."""
    size = 3000
    order = torch.rand(40, size, device="cuda", generator=generator).argsort(dim=1)
    steps = torch.arange(size, device="cuda") - size / 2
    if dtype == torch.float32:
        x = steps[order]
    else:  # As many numbers that differ, by their bits.
        x = (torch.arange(size, device="cuda") + 0x3000).to(torch.int16).view(dtype)[order]
    ks = torch.randint(1, size, (40,), device="cuda", generator=generator).int()
    for k in (1, 50, 2000, ks):
        got, want = precast.top_k_mask_logits(x, k), theirs("top_k_mask_logits")(x, k)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_a_pipe_of_processors(generator: torch.Generator) -> None:
    x = 3 * torch.randn(40, 5000, device="cuda", generator=generator)
    found = []
    for place in (logits_processor, importlib.import_module("flashinfer.logits_processor")):
        steps = [place.Temperature(), place.Softmax(), place.TopK()]  # type: ignore[attr-defined]
        pipe = place.LogitsPipe(steps)  # type: ignore[attr-defined]
        found.append(pipe(x, temperature=0.8, top_k=40))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)


# -- tokens ---------------------------------------------------------------------------------------


def fit(mine: torch.Tensor, other: torch.Tensor, size: int) -> float:
    """How likely two samples of one distribution differ as much, by chi-square."""
    found = [torch.bincount(x.long(), minlength=size).double() for x in (mine, other)]
    total = found[0] + found[1]
    enough = total > 20
    assert enough.sum() > 3, "too few tokens to tell anything"
    statistic = ((found[0] - found[1])[enough] ** 2 / total[enough]).sum()
    freedom = enough.double().sum() - 1
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


#: With what is given besides rows, and with indices by which theirs draw without their top-k.
DRAWS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("sampling_from_probs", (), {}),
    ("sampling_from_logits", (), {}),
    ("top_k_sampling_from_probs", (30,), {}),
    ("top_p_sampling_from_probs", (0.8,), {}),
    ("min_p_sampling_from_probs", (0.002,), {}),  # More leaves too few tokens of some rows.
    ("top_k_top_p_sampling_from_probs", (60, 0.8), {}),
    ("top_k_top_p_sampling_from_probs", (60, 0.8), JOINT),
    ("top_k_top_p_sampling_from_logits", (60, 0.8), {}),
    ("top_k_top_p_sampling_from_logits", (60, 0.8), JOINT),
]


@pytest.mark.parametrize(("name", "filters", "more"), DRAWS)
def test_both_draw_from_one_distribution(
    name: str, filters: tuple[Any, ...], more: dict[str, Any], generator: torch.Generator
) -> None:
    count, size = 1 << 18, 200
    row = probs(1, size, generator).sqrt()  # so flat that filters leave many tokens
    row = (row / row.sum()).log() if "logits" in name else row / row.sum()
    indices = torch.zeros(count, dtype=torch.int32, device="cuda")
    tokens = [
        function(row, *filters, indices=indices, **more)
        for function in (getattr(precast, name), theirs(name))
    ]
    assert tokens[0].dtype == tokens[1].dtype == torch.int32
    assert fit(*tokens, size) > 1e-6


@pytest.mark.parametrize("name", [name for name, _, more in DRAWS if "probs" in name and not more])
def test_what_is_returned_beside_the_tokens(name: str, generator: torch.Generator) -> None:
    filters = next(filters for known, filters, _ in DRAWS if known == name)
    p = probs(20, 500, generator)
    results = [
        function(p, *filters, seed=3, offset=4, return_valid=True)
        for function in (getattr(precast, name), theirs(name))
    ]
    for mine, other in zip(*results, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
    assert results[0][1].all()
    assert results[1][1].all()


def test_seeds_are_taken_as_theirs(generator: torch.Generator) -> None:
    """Numbers and tensors of one or of each row; what theirs reject, ours do."""
    p = probs(20, 500, generator)
    one, many = torch.tensor([7], device="cuda"), torch.arange(20, device="cuda")
    wrong = [(one, 3), (3, one), (one.int(), one), (many[:3], many), (one[None], one)]
    for function in (precast.sampling_from_probs, theirs("sampling_from_probs")):
        for seed, offset in ((7, 4), (one, one), (many, many), (many, one)):
            tokens = function(p, seed=seed, offset=offset)
            assert torch.equal(function(p, seed=seed, offset=offset), tokens)
        for seed, offset in wrong:
            with pytest.raises(ValueError, match=r"seed|offset"):
                function(p, seed=seed, offset=offset)


def test_speculative_sampling_of_what_is_certain(generator: torch.Generator) -> None:
    """Distributions of one token each leave nothing to chance: all results are the same."""
    batch, count, size = 64, 4, 50

    def certain(*tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.stack(tokens, dim=1), size).float()

    drafted = [
        torch.randint(0, size, (batch,), device="cuda", generator=generator) for _ in range(count)
    ]
    wanted = [
        torch.where(torch.rand(batch, device="cuda", generator=generator) < 0.7, token, 0)
        for token in drafted
    ]
    target = certain(*wanted, drafted[0])
    ids = torch.stack(drafted, dim=1).int()
    start = torch.arange(batch, device="cuda", dtype=torch.int32)
    results = []
    for function in (precast.chain_speculative_sampling, theirs("chain_speculative_sampling")):
        counters = start.clone(), start.clone() * 2
        results.append(function(certain(*drafted), ids, target, *counters))
        assert results[-1][1] is counters[0]
        assert results[-1][2] is counters[1]
    for mine, other in zip(*results, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    assert 0 < int((results[0][0] == -1).sum()) < batch * count


@pytest.mark.flashinfer_topk
@pytest.mark.parametrize("name", ["probs", "logits"])
def test_both_draw_from_one_distribution_by_their_top_k(
    name: str, generator: torch.Generator
) -> None:
    """Without indices, by a number, and of a large vocabulary, theirs select the k first."""
    size, function = 65536, f"top_k_top_p_sampling_from_{name}"
    row = probs(1, size, generator)
    rows = (row.log() if name == "logits" else row).expand(1 << 12, -1).contiguous()
    tokens = [
        torch.cat([call(rows, 40, 0.8) for _ in range(16)])
        for call in (getattr(precast, function), theirs(function))
    ]
    assert fit(*tokens, size) > 1e-6
