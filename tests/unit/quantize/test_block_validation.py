# SPDX-License-Identifier: Apache-2.0
"""Errors of packed bits and block-scaled formats for invalid arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import precast
from precast import SfLayout
from precast._op import mode as _mode
from precast.quantization import (
    fp4_quantize_reference,
    mxfp4_dequantize_reference,
    mxfp8_quantize_reference,
)

BF16 = torch.bfloat16
X = torch.ones(4, 64, dtype=BF16)
ONE = torch.ones(1)
Q, S = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8)
LINEAR = SfLayout.layout_linear

pytestmark = pytest.mark.usefixtures("reference_mode")


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: precast.nvfp4_quantize([1], ONE), TypeError, "nvfp4_quantize: a must be a torch"),
        (lambda: precast.nvfp4_quantize(X, 2.0), TypeError, "a_global_sf must be a torch.Tensor"),
        (lambda: precast.nvfp4_quantize(X[:, :40], ONE), ValueError, "multiple of 16, got 40"),
        (lambda: precast.nvfp4_quantize(X[0], ONE), ValueError, "at least 2 dimensions"),
        (lambda: precast.nvfp4_quantize(X.float(), ONE), ValueError, "float16 or bfloat16"),
        (
            lambda: precast.nvfp4_quantize(X, torch.ones(3)),
            ValueError,
            "1 element, or 4, one a row",
        ),
        (lambda: precast.nvfp4_quantize(X, ONE, 7), ValueError, "sfLayout must be 0"),
        (
            lambda: precast.nvfp4_quantize(X, ONE, do_shuffle=True),
            NotImplementedError,
            "do_shuffle",
        ),
        (
            lambda: precast.nvfp4_quantize(X, ONE, per_token_activation=True),
            NotImplementedError,
            "per_token_activation must be False, got bool. Fix: leave it out",
        ),
        (
            lambda: precast.nvfp4_quantize(X, ONE, expanded_idx_to_permuted_idx=ONE),
            NotImplementedError,
            "expanded_idx_to_permuted_idx must be None, got Tensor",
        ),
        (
            lambda: precast.nvfp4_quantize(X, ONE, out_scale=ONE),
            NotImplementedError,
            "out_scale must be None, got Tensor",
        ),
        (
            lambda: precast.nvfp4_quantize(X, ONE, nvfp4_4over6=object()),
            NotImplementedError,
            "nvfp4_quantize: nvfp4_4over6 must be None, got object",
        ),
        (
            lambda: precast.fp4_quantize(X, ONE, nvfp4_4over6=object()),
            NotImplementedError,
            "fp4_quantize: nvfp4_4over6 must be None, got object",
        ),
        (lambda: precast.nvfp4_kv_dequantize(Q, S, ONE, None), TypeError, "must be a torch.dtype"),
        (
            lambda: precast.nvfp4_kv_quantize([1], ONE),
            TypeError,
            "nvfp4_kv_quantize: input must be",
        ),
        (lambda: precast.nvfp4_kv_quantize(X, 2.0), TypeError, "global_scale must be a torch.Tens"),
        (lambda: precast.nvfp4_kv_quantize(X[:, :40], ONE), ValueError, "multiple of 16, got 40"),
        (lambda: precast.nvfp4_kv_quantize(X[0], ONE), ValueError, "at least 2 dimensions"),
        (lambda: precast.nvfp4_kv_quantize(X.float(), ONE), ValueError, "float16 or bfloat16"),
        (
            lambda: precast.nvfp4_kv_quantize(X, torch.ones(4)),
            ValueError,
            "global_scale must hold one number",
        ),
        (
            lambda: precast.nvfp4_kv_quantize(X, ONE.double()),
            ValueError,
            "global_scale must be float32, got float64",
        ),
        (lambda: precast.nvfp4_quantize(X, ONE, backend="cute-dsl"), ValueError, "must be 'cuda'"),
        (lambda: precast.fp4_quantize(X, ONE, 64), NotImplementedError, "only be 16 or 32"),
        (lambda: precast.fp4_quantize(X, ONE, 32), ValueError, "sf_vec_size must be 16"),
        (lambda: precast.fp4_quantize(X, ONE, 16, True), ValueError, "sf_vec_size must be 32"),
        (lambda: precast.fp4_quantize(X), ValueError, "global_scale must be a tensor unless"),
        (lambda: precast.fp4_quantize(X, [1.0]), TypeError, "global_scale must be a torch.Tensor"),
        (lambda: precast.mxfp4_quantize(X[:, :48]), ValueError, "multiple of 32, got 48"),
        (lambda: precast.mxfp4_quantize(None), TypeError, "mxfp4_quantize: a must be a torch"),
        (lambda: precast.mxfp8_quantize(X, alignment=48), ValueError, "multiple of 32, got 48"),
        (lambda: precast.mxfp8_quantize(X, alignment=0), ValueError, "multiple of 32, got 0"),
        (lambda: precast.mxfp8_quantize(1), TypeError, "mxfp8_quantize: input must be a torch"),
        (lambda: precast.mxfp4_dequantize(Q, S, LINEAR), ValueError, "must have 8 elements, for 4"),
        (lambda: precast.mxfp4_dequantize(X, S, LINEAR), ValueError, "a_fp4 must be uint8, got b"),
        (lambda: precast.mxfp4_dequantize(Q, X, LINEAR), ValueError, "a_sf must be uint8, got bf"),
        (lambda: precast.mxfp4_dequantize(Q[:, :9], S), ValueError, "whole blocks of 32 numbers"),
        (lambda: precast.mxfp8_dequantize(Q, S), ValueError, "must be float8_e4m3fn, got uint8"),
        (
            lambda: precast.nvfp4_kv_dequantize(Q, S, torch.ones(2)),
            ValueError,
            "must hold one number",
        ),
        (
            lambda: precast.e2m1_and_ufp8sf_scale_to_float(Q, S),
            ValueError,
            "global_scale_tensor must be a tensor with ufp8_type=1",
        ),
        (
            lambda: precast.e2m1_and_ufp8sf_scale_to_float(Q, S, ONE, 24),
            ValueError,
            "sf_vec_size must be 16 or 32, got 24",
        ),
        (
            lambda: precast.e2m1_and_ufp8sf_scale_to_float(Q, S, ONE, 16, 1, False, True),
            ValueError,
            "is_sf_8x4_layout must be False for a linear layout",
        ),
        (lambda: precast.block_scale_interleave(S.float()), ValueError, "uint8 or bfloat16"),
        (lambda: precast.block_scale_interleave(S[0]), ValueError, "2 to 3 dimensions"),
        (
            lambda: precast.block_scale_interleave(S.T),
            ValueError,
            "must be contiguous, got strides",
        ),
        (lambda: precast.packbits(Q), ValueError, "x must have 1 dimension, got shape"),
        (lambda: precast.packbits(S[0], "bit"), ValueError, "'big' or 'little', got 'bit'"),
        (lambda: precast.packbits([1]), TypeError, "packbits: x must be a torch.Tensor, got list"),
        (lambda: precast.segment_packbits(S[0], ONE), ValueError, "indptr must be int32 or int64"),
        (lambda: precast.segment_packbits(S[0], 3), TypeError, "indptr must be a torch.Tensor"),
        (
            lambda: precast.segment_packbits(
                torch.empty(2**34 + 1, dtype=torch.bool, device="meta"),
                torch.empty(3, dtype=torch.int64, device="meta"),
                out=torch.empty(2**31, dtype=torch.uint8, device="meta"),
            ),
            ValueError,
            r"at most 2\^31 - 1 bytes, got 17179869185 values in 2 segments",
        ),
        (
            lambda: fp4_quantize_reference(X, None),
            ValueError,
            "global_scale must be a tensor unless sf_use_ue8m0",
        ),
    ],
)
def test_invalid_arguments(call: Callable[[], object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_an_output_of_interleaved_scales() -> None:
    scales = torch.arange(12).view(3, 4).byte()
    want = precast.block_scale_interleave(scales)
    out = torch.full_like(want, 7)
    assert precast.block_scale_interleave(scales, out=out) is out
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.full((511,), 7).byte(), r"out must be contiguous with shape \[512\], got shape"),
        (torch.full((1, 512), 7).byte(), r"out must be contiguous with shape \[512\], got shape"),
        (torch.full((1024,), 7).byte()[::2], r"with shape \[512\], got .* strides \[2\]"),
        (torch.full((512,), 7.0).bfloat16(), "out must be uint8, got bfloat16"),
    ],
)
def test_a_wrong_output_of_interleaved_scales_is_untouched(out: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=f"block_scale_interleave: .*{words}|{words}"):
        precast.block_scale_interleave(torch.zeros(3, 4).byte(), out=out)
    assert (out == 7).all()


def test_interleaved_scales_do_not_overlap_their_source() -> None:
    memory = torch.zeros(1024).byte()
    with pytest.raises(ValueError, match="memory"):
        precast.block_scale_interleave(memory[:512].view(128, 4), out=memory[256:768])


@pytest.mark.parametrize(
    "call",
    [
        lambda: precast.nvfp4_quantize(X, ONE),
        lambda: precast.nvfp4_kv_quantize(X, ONE),
        lambda: precast.mxfp4_quantize(X),
        lambda: precast.mxfp8_quantize(X.to("meta")),
        lambda: precast.fp4_quantize(X, ONE),
        lambda: precast.nvfp4_kv_dequantize(Q, S, ONE),
        lambda: precast.mxfp4_dequantize(Q.to("meta"), S.to("meta")),
        lambda: precast.block_scale_interleave(S),
        lambda: precast.packbits(S[0]),
        lambda: precast.segment_packbits(S[0], torch.tensor([0, 4])),
    ],
)
def test_cpu_tensors_are_errors_outside_reference_mode(
    call: Callable[[], object], outside: None
) -> None:
    with pytest.raises(ValueError, match="must be a CUDA tensor, got one that is not on a GPU"):
        call()


@pytest.fixture
def outside() -> Iterator[None]:
    """Leave the reference mode of the other fixture."""
    _mode._shift(-1)
    yield
    _mode._shift(+1)


# -- what FlashInfer computes on the CPU ----------------------------------------------------------


@pytest.mark.parametrize("layout", SfLayout)
@pytest.mark.parametrize("alignment", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mxfp8_of_a_cpu_tensor(
    layout: SfLayout, alignment: int, dtype: torch.dtype, outside: None
) -> None:
    x = (torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * 16).to(dtype)
    got, scales = precast.mxfp8_quantize(x, alignment=alignment, sf_swizzle_layout=layout)
    want = mxfp8_quantize_reference(x, alignment=alignment, sf_swizzle_layout=layout)
    assert (got.dtype, scales.dtype) == (torch.uint8, torch.uint8)
    assert torch.equal(got.view(torch.float8_e4m3fn).float(), want[0].float())
    assert torch.equal(scales, want[1])
    back = precast.mxfp8_dequantize_host(got, scales, sf_swizzle_layout=layout)[:, :64]
    assert (back - x.float()).abs().max() <= x.float().abs().max() / 16


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(4, 32).double(), "must be float32 or float16 or bfloat16, got float64"),
        (torch.zeros(32), "must have at least 2 dimensions, got shape"),
        (torch.zeros(4, 40), "last dimension must be a multiple of 32, got 40"),
    ],
)
def test_cpu_tensors_that_mxfp8_does_not_take(x: torch.Tensor, words: str, outside: None) -> None:
    with pytest.raises(ValueError, match=f"mxfp8_quantize: input.* {words}"):
        precast.mxfp8_quantize(x)


def test_packed_e2m1_on_the_cpu(outside: None) -> None:
    packed = torch.arange(4 * 32).view(4, 32).byte()
    scales = torch.full((4, 2), 130).byte()
    got = precast.mxfp4_dequantize(packed, scales, SfLayout.layout_linear)
    assert torch.equal(got, mxfp4_dequantize_reference(packed, scales, 2))
    call = packed, scales, ONE, 32, 0, False
    assert torch.equal(precast.e2m1_and_ufp8sf_scale_to_float(*call), got)
    with pytest.raises(ValueError, match="a_sf must have 512 elements, for 4 x 2 blocks padded"):
        precast.mxfp4_dequantize(packed, scales)
