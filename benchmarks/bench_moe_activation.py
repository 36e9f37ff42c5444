# SPDX-License-Identifier: Apache-2.0
"""The function between the products of experts, in the kernels in CUDA and the one in CuTe DSL.

SwiGLU with scales of groups has both; half of the shapes have padding: a quarter of the rows
belongs to no expert and is not read. Other outputs and functions have the kernels in CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.fused_moe import moe_activation_reference
from precast.tllm_enums import ActivationType

DTYPES = ("bf16", "f16")
BACKENDS = ("cuda", "cute_dsl")
#: Rows of all experts, columns of a half: Qwen3-30B-A3B and DeepSeek-V3.
SHAPES = ((64, 768), (8192, 768), (65536, 768), (64, 2048), (4096, 2048), (32768, 2048))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, columns in SHAPES:
        for padded in (False, True):
            valid = rows - rows // 4 if padded else rows
            least = valid * (columns * (2 * dtype.itemsize + 1) + columns // 32)
            least += 4 * rows if padded else 0

            def make(
                rows: int = rows, columns: int = columns, padded: bool = padded
            ) -> tuple[Any, ...]:
                x = torch.randn(rows, 2 * columns, dtype=dtype, device="cuda")
                numbers = torch.arange(rows, device=x.device)
                indices = (numbers // 128).where(numbers % 128 < 96, -1).int() if padded else None
                # Equal whoever writes them: rows of no expert stay.
                codes = torch.zeros(rows, columns, dtype=torch.uint8, device=x.device)
                scales = torch.zeros(columns // 128, rows, device=x.device)
                return x, indices, codes.view(torch.float8_e4m3fn), scales

            for backend in BACKENDS:

                def bind(fn: Callable[..., Any], backend: str = backend) -> Callable[..., Any]:
                    return lambda x, indices, codes, scales: fn(
                        x, indices, out=codes, out_scale=scales, backend=backend
                    )

                label = f"[{rows}, 2x{columns}]{', 3/4 valid' if padded else ''}, {backend}"
                yield Case(
                    "moe_activation",
                    label,
                    least,
                    make,
                    bind,
                    eager=lambda x, indices, *outputs: moe_activation_reference(x, indices),
                )
    yield from _other_cases(dtype)


def _other_cases(dtype: torch.dtype) -> Iterator[Case]:
    """gpt-oss' function, 16-bit results, and codes by a given scale; rows of 8 experts."""
    bias = {"activation_type": ActivationType.SwigluBias}
    for rows, columns in SHAPES[:3]:
        for what, size, options in (
            ("numbers", dtype.itemsize, {"out_dtype": dtype}),
            ("codes", 1, {"quant_scale": True}),
            ("SwigluBias, numbers", dtype.itemsize, {"out_dtype": dtype, **bias}),
        ):

            def make(
                rows: int = rows, columns: int = columns, options: dict[str, Any] = options
            ) -> tuple[Any, ...]:
                x = torch.randn(rows, 2 * columns, dtype=dtype, device="cuda")
                experts = (torch.arange(rows, device=x.device) * 8 // rows).int()
                with_bias = "activation_type" in options
                added = torch.randn(8, 2 * columns, dtype=dtype, device="cuda")
                by = torch.full((1,), 16.0, device=x.device) if "quant_scale" in options else None
                return x, experts, added if with_bias else None, by

            def bind(
                fn: Callable[..., Any], options: dict[str, Any] = options
            ) -> Callable[..., Any]:
                rest = {key: value for key, value in options.items() if key != "quant_scale"}
                return lambda x, experts, added, by: fn(
                    x, experts, bias=added, quant_scale=by, **rest
                )

            yield Case(
                "moe_activation",
                f"[{rows}, 2x{columns}], {what}, cuda",
                rows * (columns * (2 * dtype.itemsize + size) + 4),
                make,
                bind,
                eager=bind(moe_activation_reference),
            )


if __name__ == "__main__":
    script(__file__)
