# SPDX-License-Identifier: Apache-2.0
"""mono_moe in reference mode: float64, layouts, limits of the kernels, errors."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_few_support import draw_mono, two_launches
from moe_support import draw

from precast import fused_moe
from precast._ops.moe import _few_tokens, cutlass_fused_moe, mono_moe

__all__ = ["two_launches"]
pytestmark = pytest.mark.usefixtures("reference_mode")

ROOT = Path(__file__).parents[3]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(41)


def test_constants_are_those_of_the_kernels() -> None:
    text = (ROOT / "include/precast/moe/few_tokens.cuh").read_text()
    constants = {
        name: eval(value) for name, value in re.findall(r"constexpr int (k\w+) = ([\d *]+);", text)
    }
    assert constants["kFewTokens"] == _few_tokens.MAX_TOKENS
    assert constants["kMaxFewPairs"] == _few_tokens.MAX_PAIRS
    assert constants["kMaxFewExperts"] == _few_tokens.MAX_EXPERTS
    assert constants["kMaxFewShared"] == _few_tokens.MAX_SHARED
    assert constants["kMaxRoutedTopK"] == mono_moe.MAX_TOPK
    assert constants["kMaxRoutedExperts"] == mono_moe.MAX_EXPERTS


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_numbers(renormalize: bool, scoring_func: str, generator: torch.Generator) -> None:
    for dtype, tokens, top_k in ((torch.bfloat16, 8, 3), (torch.float16, 1, 8)):
        options = {"scoring_func": scoring_func, "renormalize": renormalize}
        call = draw_mono(tokens, top_k, 16, 256, 128, generator, dtype, **options)
        got = call.run()
        call.check(got)
        x, logits, weight, *rest = call.operands
        weight = fused_moe.interleave_for_tma_wgmma_up(weight)
        again = fused_moe.mono_moe(x, logits, weight, *rest, **call.options, interleave_up=False)
        assert torch.equal(again, got)


def test_equal_logits_and_those_that_are_not_finite(generator: torch.Generator) -> None:
    call = draw_mono(4, 2, 16, 128, 128, generator)
    call.logits[0] = 1.0
    call.logits[1] = float("nan")
    call.logits[2, 3:] = float("inf")
    call.logits[3, :15] = float("-inf")
    call.check(call.run())
    assert call.experts.selected.tolist()[:2] == [[0, 1], [0, 1]]


@pytest.mark.usefixtures("two_launches")
def test_few_tokens_of_the_fused_op_are_the_same(generator: torch.Generator) -> None:
    for mode in ("half", "blocks"):
        call = draw(8, 3, 6, 256, 128, generator, mode=mode, ep_size=2, ep_rank=1)
        got = call.run()
        call.check(got)
        assert torch.equal(got, call.run(profile_ids=(-1, -1)))


@pytest.mark.parametrize("mode", ["half", "blocks"])
def test_the_table_says_which_calls_take_two_launches(
    mode: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    class Recorder:
        def launch(self, *args: Any) -> None:
            taken.append("few")

    monkeypatch.setattr(cutlass_fused_moe, "FEW_TOKENS", Recorder())
    call = draw(3, 2, 4, 128, 128, generator, mode=mode)
    item = call.fc1.element_size()
    # Six slots, but only four experts.
    size = 4 * 3 * 128 * 128 * item
    for most, options, want in (
        (size - 1, {}, 0),
        (size, {}, 1),
        (1 << 62, {"profile_ids": (-1, -1)}, 0),
    ):
        taken.clear()
        monkeypatch.setitem(_few_tokens.FASTER_UP_TO_BYTES, (item, False), most)
        call.run(**options)
        assert len(taken) == want


def test_calls_that_took_less_time_in_two_launches() -> None:
    """Layers and tokens as they were measured."""
    for layer, on, fewer, more in (
        ((8, 256, 2048, 512, 1), (False,), (1, 2), (3, 4, 6, 8)),
        ((8, 128, 2048, 768, 1), (False,), (1,), (2, 3, 4, 6, 8)),
        ((1, 32, 7168, 2048, 1), (False,), (1,), (8,)),
        ((8, 256, 2048, 512, 1), (True,), (1, 2, 3, 4, 6, 8), ()),
        ((1, 32, 7168, 2048, 1), (True,), (1, 2, 4), (8,)),
        ((1, 16, 2048, 768, 1), (True,), (1, 8), ()),
        ((8, 128, 2048, 768, 1), (True,), (1, 2, 4, 8), ()),
        ((8, 128, 2048, 768, 2), (False, True), (1, 2), (4, 6)),
        ((1, 16, 2048, 768, 2), (False, True), (1, 8), ()),
        ((2, 8, 4096, 14336, 2), (False, True), (), (1,)),
    ):
        for tokens, on_hopper in itertools.product((*fewer, *more), on):
            is_faster = _few_tokens.is_faster(tokens, *layer, on_hopper=on_hopper)
            assert is_faster == (tokens in fewer), (layer, tokens, on_hopper)


def test_scratch_memory(generator: torch.Generator) -> None:
    call = draw_mono(8, 8, 16, 128, 512, generator)
    scratch = fused_moe.alloc_scratchpad(torch.device("cpu"))
    assert scratch.dtype is torch.uint8
    assert len(scratch) == fused_moe.get_scratchpad_size_bytes()
    assert (scratch == 0).all()
    out = torch.empty(8, 128, dtype=torch.bfloat16)
    assert call.run(out=out, scratchpad=scratch) is out
    assert torch.equal(out, call.run())


def test_no_tokens(generator: torch.Generator) -> None:
    assert draw_mono(0, 2, 16, 128, 128, generator).run().shape == (0, 128)


def test_errors(generator: torch.Generator) -> None:
    call = draw_mono(4, 4, 16, 256, 128, generator)
    good: list[Any] = list(call.operands)
    nine = draw_mono(9, 4, 16, 256, 128, generator).operands
    odd = draw_mono(4, 4, 12, 256, 128, generator).operands
    for change, words in (
        (dict(enumerate(nine)), "at most 8 tokens, got 9"),
        (dict(enumerate(odd)), "a multiple of 8 experts, at most 256, got 12"),
        ({0: good[0].float()}, "activations_in must be"),
        ({1: good[1][:3]}, r"router_logits must have shape \[4, 16\]"),
        ({2: good[2][:, :128]}, r"expert_weights_up must have shape \[16, 256, 256\]"),
        ({3: good[3][:, :1]}, "expert_scales_up must have shape"),
        ({5: good[5].double()}, "expert_scales_down must be"),
        ({6: 9}, r"top_k must be in \[1, 8\], got 9"),
        ({6: 0}, r"top_k must be in \[1, 8\], got 0"),
    ):
        given = [change.get(i, argument) for i, argument in enumerate(good)]
        with pytest.raises(ValueError, match=words):
            fused_moe.mono_moe(*given)
    for options, words in (
        ({"scoring_func": "tanh"}, "scoring_func must be 'sigmoid' or 'softmax', got 'tanh'"),
        ({"scratchpad": torch.empty(64, dtype=torch.uint8)}, "at least 8192 bytes"),
        ({"out": good[0]}, "out must not overlap activations_in's memory"),
    ):
        with pytest.raises(ValueError, match=words):
            fused_moe.mono_moe(*good, **options)


def test_errors_of_interleaving() -> None:
    for shape in ((256, 128), (2, 192, 8)):
        with pytest.raises(ValueError, match=r"w_fp8 must have shape \[experts, 2 inter, hidden\]"):
            fused_moe.interleave_for_tma_wgmma_up(torch.empty(shape))


def test_which_sizes_take_two_launches() -> None:
    fits = _few_tokens.fits
    assert fits(8, 8, 256, 2048, 512, 1)
    assert fits(8, 8, 128, 2048, 768, 1)
    assert fits(6, 8, 128, 2048, 768, 2)
    for sizes in (
        (9, 1, 8, 128, 128, 1),
        (8, 17, 8, 128, 128, 1),
        (1, 1, 1025, 128, 128, 1),
        (1, 1, 8, 192, 128, 1),
        (1, 1, 8, 128, 64, 1),
        (1, 1, 8, 9344, 128, 1),
        (8, 8, 128, 2048, 768, 2),
    ):
        assert not fits(*sizes)
