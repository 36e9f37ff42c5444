# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 matrices with scales of blocks, beside DeepGEMM's and cuBLAS's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast._ops.quantize.per_block import per_block_cast_to_fp8_reference
from precast._ops.quantize.per_token_group import per_token_cast_to_fp8_reference
from precast.testing import Tolerance, poison

DTYPES = ("bf16",)
#: Columns and depth of the linear layers of DeepSeek-V3, whose weights are in this format.
LAYERS = ((7168, 2048), (4096, 7168), (2112, 7168), (24576, 1536), (7168, 16384))
ROWS = (1, 16, 64, 128, 512, 4096)
#: Those of its experts and of Qwen3-30B's, of which a GPU has some; and the tokens of each expert.
EXPERTS = ((4096, 7168), (7168, 2048), (1536, 2048))
GROUPS = 8
TOKENS = (8, 64, 128, 512)
#: Sums of random numbers cancel, and tensor cores add the products of a block with about 14 bits.
CLOSE = Tolerance(2.0**-7, 0.1)


def _tokens(rows: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised rows, with their scales in the layout that DeepGEMM takes as it is."""
    x = torch.randn(rows, depth, dtype=dtype, device="cuda")
    a, scales = per_token_cast_to_fp8_reference(x, use_ue8m0=False)
    room = scales.new_zeros(scales.shape[1], -(-rows // 4) * 4)
    return a, room[:, :rows].copy_(scales.T).T


def _weight(columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(columns, depth, dtype=dtype, device="cuda")
    return per_block_cast_to_fp8_reference(x, use_ue8m0=False)


def _weights(columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One for each group."""
    weights = [_weight(columns, depth, dtype) for _ in range(GROUPS)]
    b = torch.stack([weight.view(torch.uint8) for weight, _ in weights])
    return b.view(weights[0][0].dtype), torch.stack([scales for _, scales in weights])


def _dequantised(b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    each = b_scale.repeat_interleave(128, -2)[..., : b.shape[-2], :].repeat_interleave(128, -1)
    return b.float() * each


def _eager(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    return out.copy_(a.float() * a_scale.repeat_interleave(128, 1) @ _dequantised(b, b_scale).T)


def _eager_grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    numbers: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Groups of equal size, whatever the numbers say."""
    x = a.float() * a_scale.repeat_interleave(128, -1)
    weights = _dequantised(b, b_scale).mT
    return out.copy_((x.view(b.shape[0], -1, x.shape[-1]) @ weights).view(out.shape))


def _dense(dtype: torch.dtype) -> Iterator[Case]:
    for columns, depth in LAYERS:
        for rows in ROWS:

            def make(rows: int = rows, columns: int = columns, depth: int = depth) -> Any:
                (a, a_scale), (b, b_scale) = (
                    _tokens(rows, depth, dtype),
                    _weight(columns, depth, dtype),
                )
                out = poison(torch.empty(rows, columns, dtype=dtype, device="cuda"))
                return a, b, a_scale, b_scale, out

            yield Case(
                "gemm_fp8_nt_groupwise",
                f"[{rows}, {depth}] x [{depth}, {columns}]",
                depth * (rows + columns) + dtype.itemsize * rows * columns,
                make,
                bind=lambda gemm: (
                    lambda a, b, a_scale, b_scale, out: gemm(a, b, a_scale, b_scale, "K", out=out)
                ),
                eager=_eager,
                tolerances={4: CLOSE},
                close=CLOSE,
                flops=2 * rows * columns * depth,
            )


def _numbers(op: str, tokens: int, device: torch.device) -> torch.Tensor:
    """What says the groups, all of the same size."""
    if op == "batch_deepgemm_fp8_nt_groupwise":
        return torch.full((GROUPS,), tokens, dtype=torch.int32, device=device)
    if op == "group_gemm_fp8_nt_groupwise":
        return torch.arange(GROUPS + 1, dtype=torch.int32, device=device) * tokens
    return torch.arange(GROUPS * tokens, dtype=torch.int32, device=device) // tokens


def _bind(op: str, tokens: int, options: dict[str, Any]) -> Any:
    def bind(gemm: Any) -> Any:
        def call(a: Any, b: Any, a_scale: Any, b_scale: Any, numbers: Any, out: Any) -> Any:
            operands = a, b, a_scale, b_scale, numbers
            if op == "batch_deepgemm_fp8_nt_groupwise":
                return gemm(*operands, tokens, out=out)
            if op == "group_gemm_fp8_nt_groupwise":
                return gemm(*operands, scale_major_mode="K", out=out, **options)
            return gemm(*operands, out=out)

        return call

    return bind


def _grouped(op: str, dtype: torch.dtype, **options: Any) -> Iterator[Case]:
    batched = op == "batch_deepgemm_fp8_nt_groupwise"
    for columns, depth in EXPERTS:
        for tokens in TOKENS:
            if op == "group_deepgemm_fp8_nt_groupwise" and tokens % 128:
                continue  # Groups begin at multiples of 128.
            rows = GROUPS * tokens

            def make(tokens: int = tokens, columns: int = columns, depth: int = depth) -> Any:
                a, a_scale = _tokens(GROUPS * tokens, depth, dtype)
                b, b_scale = _weights(columns, depth, dtype)
                out = torch.empty(GROUPS * tokens, columns, dtype=dtype, device="cuda")
                if batched:
                    a = a.view(GROUPS, tokens, depth)
                    scales = a_scale.T.reshape(-1, GROUPS, tokens).transpose(0, 1).contiguous()
                    a_scale, out = scales.mT, out.view(GROUPS, tokens, columns)
                return a, b, a_scale, b_scale, _numbers(op, tokens, a.device), poison(out)

            yield Case(
                op,
                f"{GROUPS} x [{tokens}, {depth}] x [{depth}, {columns}]"
                + "".join(f", {value}" for value in options.values()),
                depth * (rows + GROUPS * columns) + dtype.itemsize * rows * columns,
                make,
                bind=_bind(op, tokens, options),
                eager=_eager_grouped,
                tolerances={5: CLOSE},
                close=CLOSE,
                flops=2 * rows * columns * depth,
            )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    yield from _dense(dtype)
    yield from _grouped("group_deepgemm_fp8_nt_groupwise", dtype)
    yield from _grouped("batch_deepgemm_fp8_nt_groupwise", dtype)
    yield from _grouped("group_gemm_fp8_nt_groupwise", dtype)
    yield from _grouped("group_gemm_fp8_nt_groupwise", dtype, backend="cute_dsl")


if __name__ == "__main__":
    script(__file__)
