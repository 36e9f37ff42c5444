# SPDX-License-Identifier: Apache-2.0
"""The first steps of a mixture of experts alone: the order of rows, copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_calls import Buffer, same_bits
from moe_support import E4M3, random_selection

from precast import fused_moe

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16"])


class Order:
    """One sort in guarded buffers."""

    def __init__(self, selected: torch.Tensor, experts: int, first: int = 0) -> None:
        self.selected, self.experts, self.first = selected, experts, first
        chunks = max(-(-selected.numel() // 4096), 1)
        self.buffers = (
            Buffer(experts + 1, dtype=torch.int32),
            Buffer(*selected.shape, dtype=torch.int32),
            Buffer(selected.numel(), dtype=torch.int32),
            Buffer(chunks, experts, dtype=torch.int32),
        )

    def run(self, **options: Any) -> None:
        views = [buffer.view for buffer in self.buffers]
        fused_moe.moe_sort(self.selected, self.experts, self.first, *views, **options)

    def check(self) -> None:
        want = fused_moe.moe_sort_reference(self.selected, self.experts, self.first)
        offsets, rows, experts, _ = (buffer.view for buffer in self.buffers)
        assert torch.equal(offsets, want[0])
        assert torch.equal(rows, want[1])
        count = int(want[0][-1])
        assert torch.equal(experts[:count], want[2][:count])
        assert (experts[count:].contiguous().view(torch.uint8) == 0xA5).all()
        for buffer in self.buffers:
            buffer.check()


@pytest.mark.parametrize("experts", [1, 2, 31, 32, 33, 60, 128, 256, 511, 512, 513, 1000, 1024])
def test_the_order(experts: int, generator: torch.Generator) -> None:
    for tokens, slots in (
        (0, 4),
        (1, 1),
        (1, 10),
        (64, 8),
        (103, 5),
        (512, 8),
        (513, 8),
        (3000, 7),
    ):
        for skew in (0.0, 2.0):
            selected = random_selection(tokens, slots, experts, generator, skew)
            call = Order(selected, experts)
            call.run()
            call.check()


def test_the_order_of_many_tokens(generator: torch.Generator) -> None:
    for tokens, slots, experts in ((16384, 10, 256), (65536, 8, 128), (20000, 1, 1024)):
        call = Order(random_selection(tokens, slots, experts, generator, 0.7), experts)
        call.run()
        call.check()


def test_the_order_of_one_rank(generator: torch.Generator) -> None:
    for tokens in (37, 5000):
        selected = random_selection(tokens, 6, 60, generator, 1.0)
        selected[::5, 2] = torch.tensor(-(2**31), dtype=torch.int32)
        selected[1::5, 2] = 2**31 - 1
        for rank in range(4):
            call = Order(selected, 15, 15 * rank)
            call.run(enable_pdl=False)
            call.check()
    everyone = torch.full((9000, 2), 7, dtype=torch.int32, device=DEVICE)
    for first in (0, 7, 8):
        call = Order(everyone, 8, first)
        call.run()
        call.check()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, E4M3, torch.int8, torch.float64], ids=str
)
def test_copies(dtype: torch.dtype, generator: torch.Generator) -> None:
    vector = 16 // dtype.itemsize
    for tokens, slots, columns in ((1, 1, vector), (33, 10, 5 * vector), (300, 8, 2048)):
        drawn = torch.randint(
            0,
            256,
            (tokens, (columns + vector) * dtype.itemsize),
            generator=generator,
            device=DEVICE,
            dtype=torch.uint8,
        )
        x = drawn.view(dtype)[:, :columns]
        order = torch.randperm(tokens * slots, generator=generator, device=DEVICE).int()
        rows = order.view(tokens, slots)
        rows[::3, 0] = -1
        rows[1::3, slots - 1] = tokens * slots
        out = Buffer(tokens * slots, columns, dtype=dtype)
        assert fused_moe.moe_permute(x, rows, out.view) is out.view
        want = out.view.clone()
        want.view(torch.uint8).fill_(0xA5)
        named = (rows >= 0) & (rows < tokens * slots)
        token = torch.arange(tokens, device=DEVICE)[:, None].expand_as(rows)[named]
        source = x.contiguous().view(torch.uint8)
        want.view(torch.uint8)[rows[named].long()] = source[token]
        same_bits(out.view, want)
        out.check()


@dtypes
def test_quantised_copies(dtype: torch.dtype, generator: torch.Generator) -> None:
    for tokens, slots, columns in ((1, 1, 128), (33, 10, 384), (129, 8, 2048), (3, 20, 128)):
        x = torch.randn(tokens, columns, generator=generator, device=DEVICE) * 3
        x[0, :128] = 0
        x = x.to(dtype)
        rows = torch.randperm(tokens * slots, generator=generator, device=DEVICE).int()
        rows = rows.view(tokens, slots)
        want = fused_moe.moe_permute_quant_reference(x, rows)
        got = fused_moe.moe_permute_quant(x, rows)
        same_bits(got[0], want[0])
        # By a copy: a single column counts as contiguous at any stride.
        same_bits(torch.empty_like(want[1]).copy_(got[1]), want[1])
        by_rows = Buffer(tokens * slots, columns // 128, dtype=torch.float32)
        fused_moe.moe_permute_quant(x, rows, out_scale=by_rows.view, enable_pdl=False)
        same_bits(by_rows.view, want[1])
        by_rows.check()
        x[-1, -1] = torch.nan
        codes, scales = fused_moe.moe_permute_quant(x, rows)
        last = rows[-1].long()
        assert scales[last, -1].isnan().all()
        assert codes[last, -128:].float().isnan().all()
        assert scales.isnan().sum() == slots


def test_scaled_columns(generator: torch.Generator) -> None:
    for rows, columns in ((1, 8), (33, 384), (129, 2048), (0, 16)):
        x = (torch.randn(rows, columns, generator=generator, device=DEVICE) * 200).bfloat16()
        by = (torch.rand(columns, generator=generator, device=DEVICE) * 3).bfloat16()
        if rows:
            x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0**-9], device=DEVICE)
        for scale in (by, None):
            want = fused_moe.moe_scale_columns_reference(x, scale)
            same_bits(fused_moe.moe_scale_columns(x, scale), want)
            out = Buffer(rows, columns, dtype=torch.bfloat16)
            for end in (0, rows // 2, rows, rows + 5):
                ends = torch.tensor([7, 0, end], dtype=torch.int32, device=DEVICE)
                out.view.fill_(3)
                fused_moe.moe_scale_columns(x, scale, ends, out.view, enable_pdl=bool(end % 2))
                same_bits(out.view[:end], want[:end])
                assert (out.view[end:] == 3).all()
                out.check()
            inside = Buffer(rows, columns, dtype=torch.bfloat16)
            inside.view.copy_(x)
            fused_moe.moe_scale_columns(inside.view, scale, out=inside.view)
            same_bits(inside.view, want)
            inside.check()


def test_errors(generator: torch.Generator) -> None:
    selected = random_selection(9, 2, 4, generator)
    rows = torch.arange(18, dtype=torch.int32, device=DEVICE).view(9, 2)
    x = torch.randn(9, 128, generator=generator, device=DEVICE).bfloat16()
    wide = torch.randn(18, 128, generator=generator, device=DEVICE).bfloat16()
    of = torch.zeros(18, dtype=torch.int32, device=DEVICE)
    calls: list[tuple[Any, tuple[Any, ...], str]] = [
        (fused_moe.moe_sort, (selected.long(), 4), "token_selected_experts must be int32"),
        (fused_moe.moe_sort, (selected.cpu(), 4), "token_selected_experts must be a CUDA tensor"),
        (fused_moe.moe_sort, (selected, 1025), "expert_offsets must have 1 to 1025 elements"),
        (fused_moe.moe_sort, (selected, 4, -1), "first_expert must be from 0 to"),
        (fused_moe.moe_sort, (selected, 4, 0, of), r"expert_offsets must have shape \[5\]"),
        (fused_moe.moe_permute, (x[:, :100], rows), "input must have a multiple of 8 columns"),
        (fused_moe.moe_permute, (x, rows.long()), "permuted_rows must be int32"),
        (fused_moe.moe_permute, (x, rows[:3]), r"permuted_rows must have shape \[9, 2\]"),
        (fused_moe.moe_permute, (x, rows, wide.half()), "out must be bfloat16, got float16"),
        (fused_moe.moe_permute_quant, (x[:, :64], rows), "input must have a multiple of 128"),
        (fused_moe.moe_scale_columns, (x.half(),), "input must be bfloat16, got float16"),
        (fused_moe.moe_scale_columns, (x[:, :100],), "input must have a multiple of 8 columns"),
        (fused_moe.moe_scale_columns, (x, x[0, :64]), r"scale must have shape \[128\]"),
        (fused_moe.moe_scale_columns, (x, None, rows), r"expert_offsets must have shape \[experts"),
        (fused_moe.moe_scale_columns, (x, None, None, wide), "out must have input's shape"),
        (fused_moe.moe_scale_columns, (wide[:9], None, None, wide[1:10]), "out must be input"),
    ]
    for function, arguments, words in calls:
        with pytest.raises(ValueError, match=words):
            function(*arguments)
