# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in reference mode against float64, tables of addresses, and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_support import accepted, draw

import precast
from precast._ops.moe import _lora
from precast.fused_moe import bgmv_moe, bgmv_moe_expand, fill_w_ptr

pytestmark = pytest.mark.usefixtures("reference_mode")

INCLUDE = Path(precast.__file__).parents[2] / "include" / "precast" / "moe"


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ["tokens", "experts", "random"])
def test_both_products(order: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    for tokens, topk, rank, sizes in ((1, 8, 8, (24,)), (9, 4, 16, (33, 33)), (40, 2, 24, (8,))):
        call = draw(*(tokens, topk, 64, sizes, rank, dtype, generator), order=order)
        y = torch.zeros(len(sizes), tokens * topk, rank, dtype=dtype)
        call.shrink(y)
        eps = torch.finfo(dtype).eps
        assert ((y.double() - call.shrunk()).abs() <= eps * call.shrunk().abs() + 1e-5).all()
        out = torch.zeros(tokens, sum(sizes))
        call.expand(out, y)
        assert torch.allclose(out.double(), call.expanded(y), atol=1e-4)
        each = torch.full((tokens * topk, sum(sizes)), 7.0)
        call.expand(each, y, finalize=False)
        exists = call.chosen()[0]
        assert (each[~exists] == 7).all()
        want = call.expanded(y, finalize=False)[exists]
        assert torch.allclose(each[exists].double(), want, atol=1e-4)
        assert torch.equal(call.run(), out.to(dtype))


def test_sums_are_added_to_what_is_there(generator: torch.Generator) -> None:
    call = draw(8, 2, 32, (16,), 8, torch.float16, generator)
    assert accepted(call)
    y = torch.ones(1, 16, 8).half()
    call.shrink(y)
    assert torch.allclose(y.double(), 1 + call.shrunk(), atol=1e-2)
    out = torch.ones(8, 16)
    call.expand(out, y)
    assert torch.allclose(out.double(), 1 + call.expanded(y), atol=1e-3)
    x = torch.ones(16, 32).half()
    y.zero_()
    call.shrink(y, x)
    assert torch.allclose(y.double(), call.shrunk(x), atol=1e-2)


def test_slices_of_different_shapes(generator: torch.Generator) -> None:
    one = draw(6, 2, 32, (16,), 8, torch.bfloat16, generator)
    other = draw(6, 2, 32, (24,), 16, torch.bfloat16, generator, adapters=4)
    want = [one.run()]
    for a, b in ((other.a[0], other.b[0]), (one.a[0], one.b[0])):
        one.a, one.b = [a], [b]
        want.append(one.run())
    one.a, one.b = [*one.a, other.a[0], *one.a], [*one.b, other.b[0], *one.b]
    assert torch.equal(one.run(), torch.cat(want, dim=1))


def test_more_columns_and_adapters_that_do_not_exist(generator: torch.Generator) -> None:
    call = draw(6, 2, 32, (16, 8), 8, torch.bfloat16, generator)
    out = call.run(output_dim=30)
    assert torch.equal(out[:, :24], call.run())
    assert (out[:, 24:] == 0).all()
    call.loras[:] = 3
    assert (call.run() == 0).all()


def test_tables(generator: torch.Generator) -> None:
    weights = torch.zeros(2, 6, 8, 16).half()[:, 1:5]
    table = torch.full((2, 5), -7, dtype=torch.int64)
    assert fill_w_ptr(table, weights, 4, 1) == 6 * 8 * 16
    assert table[0].tolist() == [-7] * 5
    addresses = [weights[0, e].data_ptr() for e in range(4)]
    assert table[1].tolist() == [*addresses, -7]
    for change, words in (
        ({"w_ptr": table.int()}, r"w_ptr must be int64 \[slices, experts\], got torch.int32"),
        ({"weights": weights[0]}, "weights must have 4 dimensions"),
        ({"weights": weights.mT}, "weights must have contiguous matrices"),
        ({"num_experts": 5}, "num_experts must be from 0 to 4, got 5"),
        ({"slice_id": 2}, "slice_id must be from 0 to 1, got 2"),
        ({"slice_id": -1}, "slice_id must be from 0 to 1, got -1"),
    ):
        given: dict[str, Any] = {
            "w_ptr": table,
            "weights": weights,
            "num_experts": 4,
            "slice_id": 1,
        }
        with pytest.raises(ValueError, match=f"fill_w_ptr: {words}"):
            fill_w_ptr(**{**given, **change})
    assert table[1].tolist() == [*addresses, -7]


def test_what_is_refused(generator: torch.Generator) -> None:
    call = draw(5, 2, 64, (24,), 8, torch.bfloat16, generator)
    a, b = call.a[0], call.b[0]
    good: dict[str, Any] = {
        "x": call.x,
        "lora_a_weights": [a],
        "lora_b_weights": [b],
        "sorted_token_ids": call.tokens,
        "expert_ids": call.experts,
        "lora_indices": call.loras,
        "topk_weights": call.weights,
        "num_experts": 5,
    }
    for change, words in (
        ({"x": call.x[0]}, r"x must have 2 dimensions, got shape \[64\]"),
        ({"x": call.x[:4]}, "x must have a row for each of the 5 tokens, got shape"),
        ({"lora_a_weights": []}, "lora_a_weights and lora_b_weights must have as many tensors, at"),
        ({"lora_a_weights": [a[0]]}, r"lora_a_weights\[0\] must have 4 dimensions, got shape"),
        ({"lora_a_weights": [a.half()]}, "lora_a_weights must be bfloat16, got float16"),
        ({"lora_a_weights": [a[..., :56]]}, r"lora_a_weights must have shape \[3, 5, 8, 64\], got"),
        ({"lora_b_weights": [b[:2]]}, r"lora_b_weights must have shape \[3, 5, 24, 8\], got"),
        (
            {"lora_b_weights": [b.mT.contiguous().mT]},
            "lora_b_weights must have contiguous matrices",
        ),
        (
            {"lora_a_weights": [a[:, :, :4]], "lora_b_weights": [b[..., :4]]},
            "lora_a_weights must have (contiguous matrices|a rank that is a multiple of 8)",
        ),
        ({"num_experts": 6}, r"num_experts must be from 0 to the 5 experts of lora_a_weights\[0\]"),
        ({"output_dim": 23}, "output_dim must be at least 24, the columns of lora_b_weights, got"),
        ({"topk_weights": call.weights.double()}, "topk_weights must be float32, got"),
        ({"expert_ids": call.experts[1:]}, r"expert_ids must have shape \[10\], got \[9\]"),
        (
            {"lora_a_weights": [a, a.half()], "lora_b_weights": [b, b]},
            r"lora_a_weights\[1\] must be torch.bfloat16, got torch.float16",
        ),
        (
            {"lora_a_weights": [a, a[:2]], "lora_b_weights": [b, b]},
            r"lora_b_weights\[1\] must have shape \[2, 5, columns, 8\], got",
        ),
        (
            {"lora_a_weights": [a, a[..., :32]], "lora_b_weights": [b, b]},
            r"lora_a_weights\[1\] must have shape \[adapters, experts, rank, 64\], got",
        ),
    ):
        with pytest.raises(ValueError, match=f"^bgmv_moe: {words}"):
            bgmv_moe(**{**good, **change})


def test_lists_are_lists(generator: torch.Generator) -> None:
    call = draw(5, 2, 64, (24,), 8, torch.bfloat16, generator)
    function: Any = bgmv_moe
    for a, name in ((None, "NoneType"), ([None], "list"), ("x", "str"), (5, "int")):
        words = (
            f"bgmv_moe: lora_a_weights must be a list of tensors, one for each slice, got {name}"
        )
        with pytest.raises(TypeError, match=words):
            function(call.x, a, call.b, *call.pairs, call.weights, 5)


def test_slices_of_wrong_sizes_write_nothing(generator: torch.Generator) -> None:
    call = draw(5, 2, 64, (16, 16), 8, torch.bfloat16, generator)
    table, stride = call.tables(call.b)
    y, x = torch.zeros(5, 32), torch.ones(2, 10, 8).bfloat16()
    given = call.tokens, call.experts, call.weights, call.loras, call.starts()
    for sizes, words in (
        ([16, 33], "output_slices must be from 1 to the 32 columns of y, got 33"),
        ([16], "output_slices must have 2 elements, one for each slice, got 1"),
    ):
        with pytest.raises(ValueError, match=f"bgmv_moe_expand: {words}"):
            bgmv_moe_expand(y, x, table, *given, sizes, stride)
    assert (y == 0).all()


def test_limits_are_those_of_the_kernel() -> None:
    text = "".join(path.read_text() for path in INCLUDE.glob("*.cuh"))
    for name, value in (
        ("kTokenPairsRow", _lora.TOKEN_PAIRS_ROW),
        ("kLoraVector", _lora.VECTOR),
    ):
        assert re.search(rf"constexpr int {name} = {value};", text), name
    binding = INCLUDE.parents[2] / "csrc" / "moe" / "bgmv_moe_binding.cc"
    assert f"kMaxLoraRank = {_lora.MAX_RANK};" in binding.read_text()
