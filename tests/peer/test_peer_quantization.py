# SPDX-License-Identifier: Apache-2.0
"""Packed bits and block-scaled formats beside FlashInfer, where its kernels are not empty."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch
from block_calls import LAYOUTS, QUANTIZE, Quantize, global_scale, numbers, same_bits
from paged_calls import Paged

import precast
from precast import SfLayout

FOUND = importlib.util.find_spec("flashinfer")
pytestmark = pytest.mark.skipif(FOUND is None, reason="flashinfer is not installed")
SOURCE = "data/csrc/nv_internal/tensorrt_llm/thop/fp4Quantize.cpp"
IS_COMPLETE = FOUND is not None and (Path(FOUND.origin or "").parent / SOURCE).exists()
BF16 = torch.bfloat16
HAS_E2M1 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


@pytest.mark.parametrize("order", ["big", "little"])
def test_packbits(order: str, generator: torch.Generator) -> None:
    import flashinfer

    for count in (1, 8, 1001, 1 << 20):
        x = torch.rand(count, device="cuda", generator=generator) < 0.5
        same_bits(precast.packbits(x, order), flashinfer.packbits(x, order))
    indptr = torch.tensor([0, 7, 7, 100, 1 << 20], dtype=torch.int32, device="cuda")
    mine = precast.segment_packbits(x, indptr, order)
    theirs = flashinfer.segment_packbits(x, indptr, order)
    for left, right in zip(mine, theirs, strict=True):
        same_bits(left, right)


@pytest.mark.skipif(not IS_COMPLETE, reason=f"this flashinfer has no {SOURCE} to compile")
@pytest.mark.parametrize("dtype", [torch.uint8, BF16])
def test_block_scale_interleave(dtype: torch.dtype, generator: torch.Generator) -> None:
    import flashinfer

    for shape in ((128, 4), (129, 5), (300, 64), (3, 130, 12)):
        scales = torch.randint(0, 255, shape, device="cuda", generator=generator).to(dtype)
        want = flashinfer.block_scale_interleave(scales)
        same_bits(precast.block_scale_interleave(scales), want)


def test_nvfp4_kv_dequantize(generator: torch.Generator) -> None:
    import flashinfer

    x = numbers(67, 256, dtype=BF16, generator=generator, spread=1.0)
    g = global_scale(x)
    q, scales = precast.nvfp4_quantize(x, g, SfLayout.layout_linear)
    for dtype in (BF16, torch.float16):
        want = flashinfer.nvfp4_kv_dequantize(q, scales, 1 / g, dtype)
        same_bits(precast.nvfp4_kv_dequantize(q, scales, 1 / g, dtype), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["pair", "packed", "joined"])
def test_nvfp4_kv_dequantize_paged(form: str, layout: str, generator: torch.Generator) -> None:
    import flashinfer

    for dtype in (BF16, torch.float16):
        dims = (64, 64) if form == "packed" else (64, 128)
        sizes = Paged(form=form, layout=layout, dtype=dtype, dims=dims, finite=True)
        call = sizes.make(generator)
        call.run(flashinfer.nvfp4_kv_dequantize_paged)
        want = [buffer.view.clone() for buffer in call.buffers]
        for buffer in call.buffers:
            buffer.bytes.fill_(0xA5)
        call.run()
        for buffer, theirs in zip(call.buffers, want, strict=True):
            same_bits(buffer.view, theirs)


@pytest.mark.parametrize("tile", [64, 128, 192, 256])
def test_shuffled_rows(tile: int) -> None:
    from flashinfer import utils as theirs

    from precast import utils

    scales = torch.zeros(384, 4, dtype=torch.uint8)
    for name in ("get_shuffle_matrix_a_row_indices", "get_shuffle_matrix_sf_a_row_indices"):
        got, want = getattr(utils, name)(scales, tile), getattr(theirs, name)(scales, tile)
        same_bits(got, want)


@pytest.mark.skipif(not HAS_E2M1, reason="FlashInfer's kernels are empty on this GPU")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("op", QUANTIZE, ids=lambda op: op.name)
def test_quantize(op: Quantize, layout: SfLayout, generator: torch.Generator) -> None:
    """Its reciprocals are approximations: of NVFP4 a few numbers on ties may differ by a step."""
    import flashinfer

    x = numbers(300, 1024, dtype=BF16, generator=generator, spread=1.0)
    g = global_scale(x)
    mine = op.call(x, g, layout)
    tiled, small = layout != SfLayout.layout_linear, layout == SfLayout.layout_8x4
    theirs = {
        "nvfp4_quantize": lambda: flashinfer.nvfp4_quantize(x, g, flashinfer.SfLayout(layout)),
        "fp4_quantize": lambda: flashinfer.fp4_quantize(x, g, 16, False, tiled, small),
        "mxfp4_quantize": lambda: flashinfer.mxfp4_quantize(
            x, sfLayout=flashinfer.SfLayout(layout)
        ),
        "mxfp8_quantize": lambda: flashinfer.mxfp8_quantize(
            x, sf_swizzle_layout=flashinfer.SfLayout(layout)
        ),
    }[op.name]()
    if not op.scaled:
        for left, right in zip(mine, theirs, strict=True):
            same_bits(left, right)
        return
    for left, right in zip(mine, theirs, strict=True):
        assert left.shape == right.shape
        assert (left != right).float().mean() < 1e-3


@pytest.mark.skipif(not HAS_E2M1, reason="FlashInfer's kernel needs the conversion instruction")
def test_nvfp4_kv_quantize(generator: torch.Generator) -> None:
    import flashinfer

    x = numbers(300, 1024, dtype=BF16, generator=generator, spread=1.0)
    g = 1 / global_scale(x)
    theirs = flashinfer.nvfp4_kv_quantize(x, g)
    for left, right in zip(precast.nvfp4_kv_quantize(x, g), theirs, strict=True):
        assert left.shape == right.shape
        assert (left != right).float().mean() < 1e-3


def _group_formula(
    x: torch.Tensor, group: int, eps: float, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What FlashInfer's kernel documents, in PyTorch."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=eps) / 448.0
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (groups / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scale.squeeze(-1)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
def test_per_token_group_quant_8bit(
    power_of_two: bool, column_major: bool, generator: torch.Generator
) -> None:
    """Against FlashInfer's kernel, or its formula where the backend of that one is missing."""
    import flashinfer

    theirs = getattr(flashinfer, "per_token_group_quant_8bit", None)
    if theirs is None and importlib.util.find_spec("flashinfer.quantization") is not None:
        module = importlib.import_module("flashinfer.quantization")
        theirs = getattr(module, "per_token_group_quant_8bit", None)
    x = torch.randn(67, 1024, device="cuda", generator=generator).to(BF16)
    options = {"column_major_scales": column_major, "scale_ue8m0": power_of_two}
    backend = "cutile"  # The default of FlashInfer.
    codes, scales = precast.per_token_group_quant_8bit(x, 128, backend=backend, **options)
    want_codes, want_scales = _group_formula(x, 128, 1e-10, power_of_two)
    if theirs is not None and (column_major or not power_of_two):  # They have no other layout.
        # Without cuTile or its compiler the formula stays.
        with contextlib.suppress(FileNotFoundError, ImportError, NotImplementedError, RuntimeError):
            want_codes, want_scales = theirs(x, 128, dst_dtype=torch.float8_e4m3fn, **options)
    torch.testing.assert_close(scales, want_scales, rtol=1e-6, atol=0)
    # Division rounds once where the product with a reciprocal rounds twice: a step on ties, which
    # numbers of 8 bits over the largest of them make one or two times in a thousand.
    left, right = (c.float() for c in (codes, want_codes))
    step = torch.maximum(left.abs(), right.abs()) / 8 + 2.0**-9
    assert ((left - right).abs() <= step).all()
    assert (left != right).float().mean() < 5e-3
