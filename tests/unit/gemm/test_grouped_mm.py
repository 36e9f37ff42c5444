# SPDX-License-Identifier: Apache-2.0
"""Products of groups and segments of rows in reference mode: numbers, layouts, errors, graphs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from test_mm_bf16 import whole

from precast import gemm
from precast.shim import look_up

pytestmark = pytest.mark.usefixtures("reference_mode")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STARTS = [3, 10, 10, 30]
GROUPS, ROWS, COLUMNS, DEPTH = 3, 32, 40, 64


def operands(dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    a, b = whole(generator, ROWS, DEPTH), whole(generator, GROUPS, COLUMNS, DEPTH)
    return a.to(dtype), b.to(dtype)


def check(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, which: list[int], rest: Any) -> None:
    """Rows of each group are those of its weight, and the others are `rest`."""
    groups = list(pairwise(STARTS))
    for weight, (begin, end) in zip(which, groups, strict=True):
        want = a[begin:end].double() @ b[weight].double().T
        assert torch.equal(out[begin:end], want.to(out.dtype))
    assert (out[:3] == rest).all() and (out[30:] == rest).all()


def ints(*numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("operand", [BF16, F16])
def test_groups(operand: torch.dtype, dtype: torch.dtype) -> None:
    a, b = operands(operand)
    a[:3] = torch.nan
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=dtype)
    assert gemm.grouped_mm_bf16(a, b, ints(*STARTS), out) is out
    check(out, a, b, [0, 1, 2], 7)
    new = gemm.grouped_mm_bf16(a, b, ints(*STARTS), out_dtype=dtype, backend="mma")
    assert new.dtype == dtype and torch.equal(new[3:30], out[3:30])
    check(gemm.grouped_mm_bf16_reference(a, b, ints(*STARTS), dtype), a, b, [0, 1, 2], 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("column_major", [True, False])
def test_segments(column_major: bool, dtype: torch.dtype) -> None:
    x, b = operands(F16)
    weights = b if column_major else b.mT.contiguous()
    starts = ints(*STARTS, dtype=dtype)
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=F32)
    got = gemm.segment_gemm(x, weights, starts, weight_column_major=column_major, out=out)
    assert got is out
    check(out, x, b, [0, 1, 2], 7)
    new = gemm.segment_gemm(x, weights, starts, ints(2, 1, 0, dtype=dtype), column_major)
    assert new.dtype == F16
    check(new, x, b, [2, 1, 0], 0)


def test_a_segment_of_no_weight_is_padding() -> None:
    x, b = operands()
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
    gemm.segment_gemm(x, b, ints(*STARTS), ints(-1, 0, 3), out=out)
    assert (out == 7).all()


def test_the_wrapper() -> None:
    x, b = operands()
    wrapper = gemm.SegmentGEMMWrapper(torch.empty(8), "sm90")
    wrapper.reset_workspace_buffer(torch.empty(4), torch.empty(4))
    lens = ints(10, 0, 22, dtype=torch.int64)
    want = gemm.segment_gemm(x, b, ints(0, 10, 10, 32, dtype=torch.int64))
    assert torch.equal(wrapper.run(x, b, 3, True, seg_lens=lens), want)
    out = torch.empty_like(want)
    indptr = ints(0, 10, 10, 32, dtype=torch.int64)
    assert wrapper.forward(x, b.mT, 3, False, out, seg_indptr=indptr) is out
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match=r"run: seg_lens or seg_indptr must be given, got neith"):
        wrapper.run(x, b, 3, True)
    with pytest.raises(ValueError, match=r"run: seg_indptr must have batch_size \+ 1 = 5"):
        wrapper.run(x, b, 4, True, seg_lens=lens)
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'sm80', 'sm90', got 'x'"):
        gemm.SegmentGEMMWrapper(torch.empty(0), "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.zeros(ROWS, DEPTH)}, "a must be bfloat16 or float16, got float32"),
        ({"b": torch.zeros(GROUPS, COLUMNS, DEPTH, dtype=F16)}, "b must be bfloat16"),
        ({"b": torch.zeros(GROUPS, DEPTH, COLUMNS, dtype=BF16).mT}, "b must have stride 1 in its"),
        ({"m_indptr": ints(0, 5, 9)}, r"m_indptr must have shape \[4\], got \[3\]"),
        ({"m_indptr": ints(0, 5, 9, 9, dtype=torch.int64)}, "m_indptr must be int32, got int64"),
        ({"m_indptr": ints(*range(8))[::2]}, "m_indptr must be contiguous, got strides"),
        ({"out": torch.zeros(ROWS, COLUMNS + 1)}, "out must have shape"),
        ({"backend": "cutlass"}, "backend must be one of 'cudnn', 'cake', 'mma', got 'cutlass'"),
        ({"tactic": -2}, "tactic must be -1 or a tile below 4, got -2"),
        ({"out_dtype": torch.int8}, "out_dtype must be one of bfloat16, float16, float32, got"),
    ],
)
def test_what_groups_refuse(change: dict[str, Any], words: str) -> None:
    a, b = operands()
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
    given = {"a": a, "b": b, "m_indptr": ints(*STARTS), "out": out, **change}
    with pytest.raises(ValueError, match=f"^grouped_mm_bf16: {words}"):
        gemm.grouped_mm_bf16(**given)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(ROWS, DEPTH)}, "x must be bfloat16 or float16, got float32"),
        ({"weight_column_major": False}, r"weights must have shape \[3, 64, 40\], got \[3, 40"),
        ({"weights": torch.zeros(3, 40, 72, dtype=BF16)}, r"weights must have shape \[3, 40, 64\]"),
        ({"seg_indptr": torch.zeros(4)}, "seg_indptr must be int32 or int64, got float32"),
        ({"weight_indices": ints(0, 1)}, r"weight_indices must have shape \[3\], got \[2\]"),
        ({"weight_indices": ints(0, 1, 2, dtype=torch.int64)}, "weight_indices must have the dty"),
    ],
)
def test_what_segments_refuse(change: dict[str, Any], words: str) -> None:
    x, weights = operands()
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
    given = {"x": x, "weights": weights, "seg_indptr": ints(*STARTS), "out": out, **change}
    with pytest.raises(ValueError, match=f"^segment_gemm: {words}"):
        gemm.segment_gemm(**given)
    assert (out == 7).all()


def test_torch_compile_without_a_graph_break() -> None:
    a, b = operands()
    starts = ints(*STARTS)
    out = torch.zeros(ROWS, COLUMNS, dtype=BF16)
    want = gemm.segment_gemm(a, b, starts)
    torch._dynamo.reset()

    def call() -> torch.Tensor:
        gemm.grouped_mm_bf16(a, b, starts, out)
        return gemm.segment_gemm(a, b, starts)

    got = torch.compile(call, fullgraph=True, backend="aot_eager")()
    assert torch.equal(got, want) and torch.equal(out, want)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_names_are_where_flashinfer_has_them(engine: str) -> None:
    for path in ("", "grouped_mm"):
        assert look_up(path, "grouped_mm_bf16", engine) is gemm.grouped_mm_bf16
    for path in ("", "gemm"):
        assert look_up(path, "SegmentGEMMWrapper", engine) is gemm.SegmentGEMMWrapper
