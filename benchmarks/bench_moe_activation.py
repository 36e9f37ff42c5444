# SPDX-License-Identifier: Apache-2.0
"""SwiGLU of experts' rows with FP8 requantisation: the kernel in CUDA and the one in CuTe DSL.

Half of the shapes have padding: a quarter of the rows belongs to no expert and is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.fused_moe import moe_activation_reference

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


if __name__ == "__main__":
    script(__file__)
