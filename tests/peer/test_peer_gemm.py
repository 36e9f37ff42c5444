# SPDX-License-Identifier: Apache-2.0
"""Products beside DeepGEMM's, PyTorch's and FlashInfer's.

Operands of FP8 are small integers and scales powers of two, so every sum is exact in float32 and
libraries must give the same bits. Random numbers of 16 bits are compared with tolerances.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled
from gemm_calls import in_columns

import precast
import precast.gemm
from precast.testing import assert_close

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
#: Rows, columns and depth: few and many tokens, parts of tiles, blocks of columns that end early.
SHAPES = [(1, 256, 512), (17, 2112, 896), (64, 4096, 7168), (300, 1160, 2048), (1024, 576, 1536)]
#: FlashInfer's functions, and how many of its arguments stand where ours do.
FUNCTIONS = {
    "bmm_bf16": 5,
    "bmm_fp8": 7,
    "gemm_fp8_nt_blockscaled": 8,
    "gemm_fp8_nt_groupwise": 10,
    "group_deepgemm_fp8_nt_groupwise": 8,
    "group_gemm_fp8_nt_groupwise": 10,
    "batch_deepgemm_fp8_nt_groupwise": 9,
    "mm_bf16": 7,
    "mm_fp8": 6,
}


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed")


def skip_but_hopper(whose: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{whose} need compute capability 9.0 here")


def whole(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=generator, device="cuda").float().to(E4M3)


def powers(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-2, 3, shape, generator=generator, device="cuda").float()


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device="cuda").to(BF16)


def scaled(
    generator: torch.Generator, rows: Sequence[int], columns: Sequence[int], depth: int
) -> tuple[torch.Tensor, ...]:
    """Operands and their scales: those of tokens in columns, as DeepGEMM wants them."""
    blocks = -(-depth // 128)
    of_columns = (*columns[:-1], -(-columns[-1] // 128))
    a, b = whole(generator, *rows, depth), whole(generator, *columns, depth)
    return (
        *(a, b, in_columns(powers(generator, *rows, blocks))),
        powers(generator, *of_columns, blocks),
    )


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert_close(got, want.to(got.dtype), rtol=0.0, atol=0.0)


# -- DeepGEMM --------------------------------------------------------------------------------------


@needs("deep_gemm")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_beside_deepgemm(shape: tuple[int, int, int], generator: torch.Generator) -> None:
    import deep_gemm

    skip_but_hopper("DeepGEMM's kernels")
    rows, columns, depth = shape
    a, b, a_scale, b_scale = scaled(generator, [rows], [columns], depth)
    theirs = torch.empty(rows, columns, dtype=BF16, device="cuda")
    deep_gemm.fp8_gemm_nt((a, a_scale), (b, b_scale), theirs)
    same(precast.gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K"), theirs)


@needs("deep_gemm")
@pytest.mark.parametrize("counts", [[128, 256], [1, 200, 0, 77], [384] * 8], ids=str)
def test_contiguous_groups_beside_deepgemm(counts: list[int], generator: torch.Generator) -> None:
    """Rows of padding have the group -1; what lies in their outputs is nobody's."""
    import deep_gemm

    skip_but_hopper("DeepGEMM's kernels")
    columns, depth = 4096, 1024
    room = [-(-count // 128) * 128 for count in counts]
    indices = torch.cat(
        [
            torch.tensor([group] * count + [-1] * (space - count), dtype=torch.int32)
            for group, (count, space) in enumerate(zip(counts, room, strict=True))
        ]
    ).cuda()
    a, b, a_scale, b_scale = scaled(generator, [sum(room)], [len(counts), columns], depth)
    theirs = torch.empty(sum(room), columns, dtype=BF16, device="cuda")
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), theirs, indices)
    mine = precast.gemm.group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, indices)
    same(mine[indices >= 0], theirs[indices >= 0])


@needs("deep_gemm")
@pytest.mark.parametrize("counts", [[64, 1], [0, 128, 77, 5], [40] * 8], ids=str)
def test_masked_groups_beside_deepgemm(counts: list[int], generator: torch.Generator) -> None:
    import deep_gemm

    skip_but_hopper("DeepGEMM's kernels")
    groups, most, columns, depth = len(counts), 128, 4096, 1024
    a, b, a_scale, b_scale = scaled(generator, [groups, most], [groups, columns], depth)
    masked = torch.tensor(counts, dtype=torch.int32, device="cuda")
    theirs = torch.empty(groups, most, columns, dtype=BF16, device="cuda")
    deep_gemm.fp8_m_grouped_gemm_nt_masked((a, a_scale), (b, b_scale), theirs, masked, max(counts))
    mine = precast.gemm.batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, masked, max(counts))
    for group, count in enumerate(counts):
        same(mine[group, :count], theirs[group, :count])


@needs("deep_gemm")
def test_numbers_as_quantisation_makes_them_beside_deepgemm(generator: torch.Generator) -> None:
    """Both add 128 products on the same tensor cores, then in float32 in the same order."""
    import deep_gemm

    skip_but_hopper("DeepGEMM's kernels")
    x, weight = randn(generator, 512, 4096), randn(generator, 2048, 4096)
    a, a_scale = precast.quantization.per_token_cast_to_fp8(x, use_ue8m0=False)
    b, b_scale = precast.quantization.per_block_cast_to_fp8(weight, use_ue8m0=False)
    theirs = torch.empty(512, 2048, dtype=BF16, device="cuda")
    deep_gemm.fp8_gemm_nt((a, in_columns(a_scale)), (b, b_scale), theirs)
    mine = precast.gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K")
    assert_close(mine, theirs.double(), rtol=2.0**-7, atol=2.0**-5)


# -- PyTorch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scaled_mm_of_torch(has_bias: bool, by_row: bool, generator: torch.Generator) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("torch._scaled_mm needs compute capability 8.9")
    for rows, columns, depth in ((16, 256, 512), (48, 2112, 896), (304, 1168, 2048)):
        a, b = whole(generator, rows, depth), whole(generator, columns, depth).T
        scale_a = powers(generator, *((rows, 1) if by_row else ()))
        scale_b = powers(generator, *((1, columns) if by_row else ()))
        bias = whole(generator, columns).to(BF16) if has_bias else None
        theirs = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=BF16)
        mine = precast.gemm.scaled_mm(a, b, scale_a, scale_b, bias, BF16)
        # torch may round before it adds the bias.
        if has_bias:
            assert_close(mine, theirs.double(), rtol=2.0**-7, atol=2.0**-4)
        else:
            same(mine, theirs)


@pytest.mark.parametrize("counts", [[64, 128], [1, 200, 0, 77], [40] * 16], ids=str)
def test_grouped_mm_of_torch(counts: list[int], generator: torch.Generator) -> None:
    if not hasattr(torch, "_grouped_mm") or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch._grouped_mm needs compute capability 9.0")
    columns, depth = 768, 512
    a, b = randn(generator, sum(counts), depth), randn(generator, len(counts), columns, depth)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).cuda()
    starts = torch.nn.functional.pad(ends, (1, 0))
    theirs = torch._grouped_mm(a, b.mT, offs=ends, out_dtype=BF16)
    mine = precast.gemm.grouped_mm_bf16(a, b, starts)
    assert_close(mine, theirs.double(), rtol=2.0**-7, atol=2.0**-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_16_bits_of_torch(
    shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    rows, columns, depth = shape
    a, b, bias = randn(generator, rows, depth), randn(generator, columns, depth).T, None
    bias = randn(generator, columns)
    theirs = torch.addmm(bias, a, b)
    assert_close(precast.mm_bf16(a, b, bias), theirs.double(), rtol=2.0**-7, atol=2.0**-2)
    many, weights = a.expand(3, -1, -1).contiguous(), b.expand(3, -1, -1)
    theirs = torch.bmm(many, weights)
    mine = precast.bmm_bf16(many, weights)
    assert_close(mine, theirs.double(), rtol=2.0**-7, atol=2.0**-2)


# -- FlashInfer ------------------------------------------------------------------------------------


@needs("flashinfer")
@pytest.mark.without_gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_stand_where_theirs_do(name: str) -> None:
    import flashinfer.gemm

    mine = [*inspect.signature(getattr(precast.gemm, name)).parameters.values()]
    theirs = [*inspect.signature(getattr(flashinfer.gemm, name)).parameters.values()]
    for own, other in list(zip(mine, theirs))[: FUNCTIONS[name]]:
        assert (own.name, own.default) == (other.name, other.default)


@needs("flashinfer")
@pytest.mark.parametrize("shape", [(1, 16, 256, 512), (4, 48, 576, 896)], ids=str)
def test_bmm_fp8_of_flashinfer(
    shape: tuple[int, int, int, int], generator: torch.Generator
) -> None:
    import flashinfer.gemm

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FlashInfer's bmm_fp8 needs compute capability 8.9")
    batch, rows, columns, depth = shape
    a, b = whole(generator, batch, rows, depth), whole(generator, batch, columns, depth).mT
    scales = powers(generator), powers(generator)
    with compiled():
        theirs = flashinfer.gemm.bmm_fp8(a, b, *scales, BF16)
    same(precast.bmm_fp8(a, b, *scales, BF16), theirs)


@needs("flashinfer")
@pytest.mark.parametrize("backend", ["cublaslt", "cudnn"])
def test_mm_bf16_of_flashinfer(backend: str, generator: torch.Generator) -> None:
    import flashinfer.gemm

    a, b = randn(generator, 48, 896), randn(generator, 576, 896).T
    try:
        with compiled():
            theirs = flashinfer.gemm.mm_bf16(a, b, backend=backend)
    except (ImportError, NotImplementedError, ValueError) as error:
        pytest.skip(f"FlashInfer has no {backend} here: {str(error)[:200]}")
    assert_close(precast.mm_bf16(a, b), theirs.double(), rtol=2.0**-7, atol=2.0**-4)


@needs("flashinfer")
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("column_major", [True, False])
def test_segments_of_flashinfer(
    column_major: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    import flashinfer.gemm

    lens = torch.tensor([5, 0, 64, 33], device="cuda")
    x = randn(generator, int(lens.sum()), 512).to(dtype)
    shape = (3, 256, 512) if column_major else (3, 512, 256)
    weights = randn(generator, *shape).to(dtype)
    chosen = torch.tensor([2, 0, 0, 1], device="cuda")
    results: list[Any] = []
    for library in (flashinfer.gemm, precast):
        # The kernels for Hopper take minutes to compile; those for sm80 run on every GPU.
        wrapper = library.SegmentGEMMWrapper(
            torch.empty(32 << 20, dtype=torch.int8, device="cuda"), backend="sm80"
        )
        with compiled():
            results.append(
                wrapper.run(x, weights, 4, column_major, seg_lens=lens, weight_indices=chosen)
            )
    theirs, mine = results
    assert_close(mine, theirs.double(), rtol=2.0**-7, atol=2.0**-4)
