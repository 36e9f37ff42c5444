# SPDX-License-Identifier: Apache-2.0
"""Errors of 8-bit quantisation for invalid arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import precast
from precast.errors import OutputShapeError

E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("reference_mode")


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(shape, generator=generator)).bfloat16()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: precast.per_token_group_quant_8bit(x, 96), "group_size must be 16, 32, 64 or"),
        (lambda x: precast.per_token_group_quant_8bit(x[:, :200], 128), "multiple of group_size"),
        (
            lambda x: precast.per_token_group_quant_8bit(x, 128, scale_tma_aligned=True),
            "scale_tma_aligned needs column_major_scales=True",
        ),
        (
            lambda x: precast.per_token_group_quant_8bit(x, 128, use_packed_ue8m0=True),
            "use_packed_ue8m0 needs scale_ue8m0=True",
        ),
        (
            lambda x: precast.per_token_group_quant_8bit(x[0], 128, column_major_scales=True),
            "column_major_scales needs a tensor of two dimensions or more",
        ),
        (
            lambda x: precast.per_token_group_quant_8bit(
                x, 128, out_scale=torch.zeros(4, 1, dtype=torch.int32)
            ),
            "out_scale must be float32 unless scale_ue8m0 is true",
        ),
        (
            lambda x: precast.per_token_group_quant_8bit(x, 128, out_scale=torch.zeros(4, 3)),
            "out_scale must have x's shape with a last dimension of 2, got",
        ),
        (
            lambda x: precast.per_token_group_quant_8bit(x, 128, backend="triton"),
            "backend must be 'cuda', got 'triton'",
        ),
        (
            lambda x: precast.per_token_group_quant_8bit(
                x, 128, scale_ue8m0=True, use_packed_ue8m0=True, out_scale=torch.zeros(4, 2)
            ),
            "use_packed_ue8m0 needs an int32 out_scale, got float32",
        ),
        (
            lambda x: precast.per_token_group_quant_8bit(
                x, 128, column_major_scales=True, out_scale=torch.zeros(4, 2)
            ),
            "column_major_scales needs an out_scale with stride 1 along the tokens",
        ),
        (
            lambda x: precast.per_token_group_quant_8bit(
                x[:3],
                128,
                column_major_scales=True,
                scale_tma_aligned=True,
                out_scale=torch.zeros(2, 3).T,
            ),
            "scale_tma_aligned needs an out_scale whose columns are a multiple of 4",
        ),
        *(
            (call, "dst_dtype must be out's dtype float8_e4m3fn, got int8; give one of them")
            for call in (
                lambda x: precast.static_quant_fp8(
                    x, torch.ones(1), torch.int8, torch.empty(4, 256, dtype=E4M3)
                ),
                lambda x: precast.per_tensor_quant_fp8(
                    x, dst_dtype=torch.int8, out=torch.empty(4, 256, dtype=E4M3)
                ),
                lambda x: precast.per_token_quant_fp8(
                    x, dst_dtype=torch.int8, out=torch.empty(4, 256, dtype=E4M3)
                ),
                lambda x: precast.per_token_group_quant_8bit(
                    x, 128, dst_dtype=torch.int8, out=torch.empty(4, 256, dtype=E4M3)
                ),
                lambda x: precast.per_block_cast_to_fp8(
                    x, dst_dtype=torch.int8, out=torch.empty(4, 256, dtype=E4M3)
                ),
                lambda x: precast.silu_and_mul_quant(
                    x, torch.ones(1), torch.int8, out=torch.empty(4, 128, dtype=E4M3)
                ),
                lambda x: precast.silu_and_mul_per_token_quant(
                    x, dst_dtype=torch.int8, out=torch.empty(4, 128, dtype=E4M3)
                ),
                lambda x: precast.silu_and_mul_per_token_group_quant(
                    x, 64, dst_dtype=torch.int8, out=torch.empty(4, 128, dtype=E4M3)
                ),
            )
        ),
        (
            lambda x: precast.dequantize_fp8(
                x.to(E4M3), torch.ones(4, 1), out_dtype=torch.bfloat16, out=torch.empty(4, 256)
            ),
            "out_dtype must be out's dtype float32, got bfloat16; give one of them",
        ),
        (lambda x: precast.per_token_quant_fp8(x, eps=0.0), "eps must be a finite number of at"),
        (lambda x: precast.per_token_quant_fp8(x, eps=math.nan), "eps must be a finite number"),
        (
            lambda x: precast.per_token_quant_fp8(x, out=torch.empty(4, 255, dtype=E4M3)),
            r"out must have x's shape \[4, 256\], got \[4, 255\]",
        ),
        (
            lambda x: precast.per_token_quant_fp8(x, dst_dtype=torch.bfloat16),
            "out must be float8_e4m3fn or float8_e5m2 or int8, got bfloat16",
        ),
        (
            lambda x: precast.static_quant_fp8(x, torch.ones(2)),
            r"scale must hold one number, got shape \[2\]",
        ),
        (
            lambda x: precast.static_quant_fp8(x, torch.ones(1, dtype=torch.float16)),
            "scale must be float32, got float16",
        ),
        (
            lambda x: precast.static_quant_fp8(
                x, torch.ones(1), out=x.view(torch.uint8)[:, :256].view(E4M3)
            ),
            "out must not overlap x's memory",
        ),
        (
            lambda x: precast.per_tensor_quant_fp8(x, workspace=torch.empty(511)),
            "workspace must have at least 512 elements",
        ),
        (lambda x: precast.per_block_cast_to_fp8(x[0]), "x must have 2 to 3 dimensions"),
        (
            lambda x: precast.per_block_cast_to_fp8(x, out_scale=torch.zeros(1, 1)),
            "out_scale must hold a scale for each block of 128 x 128",
        ),
        (lambda x: precast.quantize_fp8(x, (4, 2), (2, 128)), "tile_shape must be"),
        (lambda x: precast.quantize_fp8(x, (4, 2), (1, 128), "N"), "scale_major_mode must be K or"),
        (lambda x: precast.quantize_fp8(x, (2, 4), (1, 128)), "scale_shape must be"),
        (
            lambda x: precast.dequantize_fp8(x.to(E4M3), torch.ones(4, 2), tile_columns=64),
            r"x_scale must hold \[4, 4\] scales a matrix for tiles of 1 x 64",
        ),
        (
            lambda x: precast.dequantize_fp8(x.to(E4M3), torch.ones(4, 2), "N"),
            "scale_major_mode must be K or MN",
        ),
        (lambda x: precast.silu_and_mul_quant(x[:, :255], torch.ones(1)), "dimension must be even"),
    ],
)
def test_invalid_arguments(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(draw(4, 256))


def test_classes_of_errors() -> None:
    x = draw(4, 256)
    with pytest.raises(OutputShapeError, match="half the last dimension"):
        precast.silu_and_mul_quant(x, torch.ones(1), out=torch.empty(4, 256, dtype=E4M3))
    with pytest.raises(
        TypeError, match=r"per_token_quant_fp8: x must be a torch\.Tensor, got list"
    ):
        precast.per_token_quant_fp8([1.0])  # type: ignore[arg-type]


VALID_SHAPES: dict[str, dict[str, Any]] = {
    "static_quant_fp8": {"x": (4, 256), "scale": (1,), "out": (4, 256)},
    "per_tensor_quant_fp8": {
        "x": (4, 256),
        "out": (4, 256),
        "out_scale": (1,),
        "workspace": (512,),
    },
    "per_token_quant_fp8": {"x": (4, 256), "out": (4, 256), "out_scale": (4, 1)},
    "per_token_group_quant_8bit": {"x": (4, 256), "out": (4, 256), "out_scale": (4, 2)},
    "per_block_cast_to_fp8": {"x": (4, 256), "out": (4, 256), "out_scale": (1, 2)},
    "silu_and_mul_quant": {"input": (4, 512), "scale": (1,), "out": (4, 256)},
    "silu_and_mul_per_token_quant": {"input": (4, 512), "out": (4, 256), "out_scale": (4, 1)},
    "silu_and_mul_per_token_group_quant": {
        "input": (4, 512),
        "out": (4, 256),
        "out_scale": (4, 2),
    },
}


@pytest.mark.parametrize("name", VALID_SHAPES)
def test_what_is_no_tensor_is_named(name: str) -> None:
    types = {"x": torch.bfloat16, "input": torch.bfloat16, "out": E4M3}
    call: dict[str, Any] = {
        arg: torch.ones(shape).to(types.get(arg, torch.float32))
        for arg, shape in VALID_SHAPES[name].items()
    }
    if "group" in name:
        call["group_size"] = 128
    function = getattr(precast, name)
    function(**call)
    for arg in VALID_SHAPES[name]:
        with pytest.raises(TypeError, match=rf"{name}: {arg} must be a torch\.Tensor, got list"):
            function(**{**call, arg: [1.0]})
