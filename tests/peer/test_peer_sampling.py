# SPDX-License-Identifier: Apache-2.0
"""Sampling beside FlashInfer's: the same signatures, rows and sets; tokens of one distribution.

Random numbers are used otherwise, so the same seed gives other tokens.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch

import precast
from precast import sampling, topk

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


def theirs(name: str) -> Any:
    import flashinfer

    return getattr(flashinfer.sampling, name)


@pytest.mark.parametrize("name", ["top_k", "top_k_ragged_transform", "top_k_page_table_transform"])
def test_arguments_of_top_k_stand_where_theirs_do(name: str) -> None:
    import flashinfer.topk

    mine = inspect.signature(getattr(topk, name)).parameters
    other = inspect.signature(getattr(flashinfer.topk, name)).parameters
    assert [(p.name, p.kind) for p in mine.values()] == [(p.name, p.kind) for p in other.values()]


def probs(rows: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return (2 * torch.randn(rows, size, device="cuda", generator=generator)).softmax(1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_stand_where_theirs_do(name: str) -> None:
    mine = inspect.signature(getattr(sampling, name)).parameters
    other = inspect.signature(theirs(name)).parameters
    assert [*mine] == [*other]
    for parameter, described in mine.items():
        assert described.default == other[parameter].default, parameter


@pytest.mark.parametrize("size", [1000, 128256])
def test_rows(size: int, generator: torch.Generator) -> None:
    x = 3 * torch.randn(40, size, device="cuda", generator=generator)
    for temperature in (None, 0.7, torch.rand(40, device="cuda", generator=generator) + 0.3):
        got, want = precast.softmax(x, temperature), theirs("softmax")(x, temperature)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
    p = probs(40, size, generator)
    got, want = precast.top_p_renorm_probs(p, 0.7), theirs("top_p_renorm_probs")(p, 0.7)
    # Their threshold is searched for until a share is near enough.
    assert ((got > 0) == (want > 0)).double().mean() > 0.999
    both = (got > 0) & (want > 0)
    torch.testing.assert_close(got[both], want[both], rtol=2e-3, atol=1e-7)


def test_both_draw_from_one_distribution(generator: torch.Generator) -> None:
    """Counts of two samples of one distribution, by chi-square."""
    count, size = 1 << 18, 200
    row = probs(1, size, generator)
    indices = torch.zeros(count, dtype=torch.int32, device="cuda")
    for name, more in (
        ("sampling_from_probs", ()),
        ("top_p_sampling_from_probs", (0.8,)),
        ("min_p_sampling_from_probs", (0.05,)),
    ):
        found = [
            torch.bincount(function(row, *more, indices=indices).long(), minlength=size).double()
            for function in (getattr(precast, name), theirs(name))
        ]
        total = found[0] + found[1]
        enough = total > 20
        statistic = ((found[0] - found[1])[enough] ** 2 / total[enough]).sum()
        freedom = enough.double().sum() - 1
        assert torch.special.gammaincc(freedom / 2, statistic / 2) > 1e-6, name
