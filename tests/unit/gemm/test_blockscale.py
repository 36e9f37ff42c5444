# SPDX-License-Identifier: Apache-2.0
"""fp8_blockscale_gemm_sm90 in reference mode: what it quantises, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from precast import gemm, per_token_group_quant_8bit
from precast.quantization import per_block_cast_to_fp8
from precast.shim import look_up

pytestmark = pytest.mark.usefixtures("reference_mode")

BF16, F16 = torch.bfloat16, torch.float16
ROWS, COLUMNS, DEPTH = 5, 192, 256


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(n, DEPTH, generator=generator).to(BF16) for n in (ROWS, COLUMNS))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_pair_of_dtypes_is_the_same_product(dtype: torch.dtype) -> None:
    x, weight = operands()
    x_q, x_scale = per_token_group_quant_8bit(x, 128)
    w_q, w_scale = per_block_cast_to_fp8(weight, use_ue8m0=False)
    want = gemm.gemm_fp8_nt_groupwise(x_q, w_q, x_scale, w_scale, "K", out_dtype=dtype)
    call = gemm.fp8_blockscale_gemm_sm90
    assert torch.equal(call(x, weight, out_dtype=dtype), want)
    assert torch.equal(call(x, w_q, None, w_scale, out_dtype=dtype), want)
    out = torch.empty_like(want)
    assert call(x_q, w_q, x_scale, w_scale, out) is out and torch.equal(out, want)
    error = (want.float() - x.float() @ weight.float().T).abs()
    assert error.max() < 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.zeros(ROWS, DEPTH)}, "input must be float8_e4m3fn or bfloat16, got"),
        ({"input": torch.zeros(DEPTH, dtype=BF16)}, r"input must have 2 dimensions, got shape"),
        ({"input": torch.zeros(ROWS, 192, dtype=BF16)}, r"weight must have shape \[n, 192\], got"),
        ({"weight": torch.zeros(100, DEPTH, dtype=BF16)}, "N must be divisible by 64, got 100"),
        ({"input_scale": torch.ones(ROWS, 2)}, "input_scale must be None if input is bfloat16"),
        ({"weight_scale": torch.ones(2, 2)}, "weight_scale must be None if weight is bfloat16"),
        (
            {"weight": torch.zeros(COLUMNS, DEPTH).to(torch.float8_e4m3fn)},
            "weight_scale is required when weight is FP8",
        ),
        (
            {
                "weight": torch.zeros(COLUMNS, DEPTH).to(torch.float8_e4m3fn),
                "weight_scale": torch.ones(COLUMNS, 2),
            },
            r"weight_scale must have shape \[2, 2\], blocks of 128 x 128, got \[192, 2\]",
        ),
        (
            {
                "input": torch.zeros(ROWS, DEPTH).to(torch.float8_e4m3fn),
                "input_scale": torch.ones(ROWS, 2),
            },
            r"FP8 input \+ BF16 weight is not supported",
        ),
        ({"out": torch.zeros(ROWS, COLUMNS)}, "out must be bfloat16 or float16, got torch.float32"),
        ({"out_dtype": F16}, "out must be torch.float16, got torch.bfloat16"),
        ({"out": None, "out_dtype": torch.float32}, "out_dtype must be bfloat16 or float16, got"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    x, weight = operands()
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=BF16)
    given = {"input": x, "weight": weight, "out": out, **change}
    with pytest.raises(ValueError, match=f"^fp8_blockscale_gemm_sm90: {words}"):
        gemm.fp8_blockscale_gemm_sm90(**given)
    assert (out == 7).all()


def test_a_depth_of_parts_of_a_block() -> None:
    x, weight = (torch.zeros(n, 192, dtype=BF16) for n in (ROWS, COLUMNS))
    with pytest.raises(ValueError, match="K must be divisible by block size 128, got 192"):
        gemm.fp8_blockscale_gemm_sm90(x, weight)


def test_torch_compile_without_a_graph_break() -> None:
    x, weight = operands()
    want = gemm.fp8_blockscale_gemm_sm90(x, weight)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, weight: gemm.fp8_blockscale_gemm_sm90(x, weight) + 0,
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(x, weight), want)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_name_is_where_flashinfer_has_it(engine: str) -> None:
    found = look_up("gemm", "fp8_blockscale_gemm_sm90", engine)
    assert found is gemm.fp8_blockscale_gemm_sm90
